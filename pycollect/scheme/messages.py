"""Messages by key to all processes of a Ray cluster, and a listener for "stop"."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from pycollect.transport.ray.session import import_ray

STOP = b"stop"
CONTINUE = b"start-continue"

_NAMESPACE = "pycollect.scheme"
_SHARE = 20  # a check may take 1/20 of the time


def broadcast_message(key: str, message: bytes | str) -> None:
    """Send a message to all processes of this Ray cluster.

    It replaces the previous message with the same key.

    Args:
        key: Key for :func:`check_message`.
        message: Bytes, or a string, which is sent as UTF-8.

    Raises:
        RuntimeError: This process is not connected to a Ray cluster.
        TypeError: The key is not a string, or the message is neither bytes nor a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"key: expected a string, got {key!r}")
    if not isinstance(message, bytes | str):
        raise TypeError(f"message: expected bytes or a string, got {message!r}")
    store = _store()
    if store is None:
        raise RuntimeError(
            f"broadcast_message({key!r}): this process is not connected to a Ray cluster; call "
            "ray.init() first, or make a CWorkerSet of several workers"
        )
    value = message.encode() if isinstance(message, str) else message
    store._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def check_message(key: str) -> bytes | None:
    """Return the latest message with a key.

    This queries Ray's control store, which takes about as long as an actor call.

    Args:
        key: Key of the message.

    Returns:
        The message, or ``None`` if there is none or no Ray cluster.
    """
    store = _store()
    return None if store is None else store._internal_kv_get(key, namespace=_NAMESPACE)


def withdraw_message(key: str) -> None:
    """Delete the message with a key."""
    store = _store()
    if store is not None:
        store._internal_kv_del(key, namespace=_NAMESPACE)


def _store() -> Any:
    """Return Ray's key-value store, which outlives its writers, or ``None`` without Ray."""
    if "ray" not in sys.modules or not import_ray().is_initialized():
        return None
    from ray.experimental import internal_kv

    return internal_kv


class StopListener:
    """Checks after each step whether a stop message was sent to one of its keys.

    It limits its queries so that they take one twentieth of the time, however slow the cluster.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise TypeError(f"listen_to: expected a list of strings, got {keys!r}")
        self._keys = tuple(keys)
        self._next = 0.0

    @property
    def heard(self) -> bool:
        """Whether the latest query found a stop message."""
        if not self._keys:
            return False
        start = time.perf_counter()
        if start < self._next:
            return False
        stop = any(check_message(key) == STOP for key in self._keys)
        end = time.perf_counter()
        self._next = end + _SHARE * (end - start)
        return stop
