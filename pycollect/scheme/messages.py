"""Messages to all processes of a Ray cluster, by key; and listening for the one that says stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycollect.engines.ray.session import import_ray

STOP = b"stop"
CONTINUE = b"start-continue"

_NAMESPACE = "pycollect.scheme"
_SHARE = 20  # of the time, one part in so many is spent on looking


def broadcast_message(key: str, message: bytes | str) -> None:
    """Show a message to all processes of this Ray cluster, in place of the last one of that key.

    Args:
        key: what :func:`check_message` is asked for.
        message: bytes, or a text that is read as its UTF-8.

    Raises:
        RuntimeError: this process is not part of a Ray cluster.
        TypeError: the key is no string, or the message neither bytes nor a string.
    """
    if not isinstance(key, str):
        raise TypeError(f"key: expected a string, got {key!r}")
    if not isinstance(message, bytes | str):
        raise TypeError(f"message: expected bytes or a string, got {message!r}")
    store = _store()
    if store is None:
        raise RuntimeError(
            f"broadcast_message({key!r}): expected a process of a Ray cluster; call ray.init() "
            "first, or make a CWorkerSet of several workers"
        )
    value = message.encode() if isinstance(message, str) else message
    store._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def check_message(key: str) -> bytes | None:
    """The last message of that key; None: there is none, or no Ray cluster.

    It asks Ray's control store, which takes about as long as a call of an actor.
    """
    store = _store()
    return None if store is None else store._internal_kv_get(key, namespace=_NAMESPACE)


def withdraw_message(key: str) -> None:
    """There is no message of that key any more."""
    store = _store()
    if store is not None:
        store._internal_kv_del(key, namespace=_NAMESPACE)


def _store() -> Any:
    """Ray's key-value store, which outlives the processes that write into it; None: no Ray."""
    if "ray" not in sys.modules or not import_ray().is_initialized():
        return None
    from ray.experimental import internal_kv

    return internal_kv


def _checked_keys(keys: Any) -> tuple[str, ...]:
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"listen_to: expected a list of keys, got {keys!r}")
    return tuple(keys)


class StopListener:
    """Whether one of some keys says stop, as it is asked after every step.

    It looks so seldom that looking takes a twentieth of the time, however slow the cluster is.
    """

    def __init__(
        self, keys: Sequence[str], check: Callable[[str], bytes | None] = check_message
    ) -> None:
        self._keys = _checked_keys(keys)
        self._check = check
        self._next = 0.0

    @property
    def heard(self) -> bool:
        """Whether one says so now, as far as it has looked."""
        if not self._keys:
            return False
        start = time.perf_counter()
        if start < self._next:
            return False
        stop = any(self._check(key) == STOP for key in self._keys)
        end = time.perf_counter()
        self._next = end + _SHARE * (end - start)
        return stop
