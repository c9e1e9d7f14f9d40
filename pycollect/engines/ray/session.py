"""Ray itself: imported, joined or started, and shut down by the last collector that uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pycollect.engines.unguarded import check_not_importing


def import_ray() -> Any:
    """Import Ray; raise ImportError with the install command if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "workers in Ray actors need the package ray; run `pip install ray`. Without it, use "
            "SyncDataCollector, MultiSyncDataCollector or a CWorkerSet of one worker"
        ) from error
    return ray


class Session:
    """How many collectors of this process use Ray, and whether one of them started it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._started = False

    def enter(self, init_config: Mapping[str, Any] | None) -> None:
        """One more uses it; None: join the running cluster, else start one.

        Raises:
            RuntimeError: this process is a worker that imports a module.
        """
        check_not_importing()
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                # A dashboard takes seconds to start and a part of a core; a cluster keeps its own.
                config = {"include_dashboard": False} if init_config is None else init_config
                try:
                    _join_or_start(ray, config)
                except BaseException:  # an interrupt too: Ray would leave half a node behind
                    ray.shutdown()
                    raise
                self._started = True
            self._users += 1

    def leave(self) -> None:
        """One has done with it; the last one shuts down what a collector has started."""
        ray = import_ray()
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._started:
                self._started = False
                ray.shutdown()


def _join_or_start(ray: Any, config: Mapping[str, Any]) -> None:
    """Call `ray.init`, and let a new cluster listen on loopback only.

    With "_node_ip_address" in the config, a new cluster listens at all addresses, as is Ray's
    default.
    """
    if "_node_ip_address" in config or not _is_to_start(config):
        ray.init(**config)
        return
    with _on_loopback():
        ray.init(**{**config, "address": "local"})


def _is_to_start(config: Mapping[str, Any]) -> bool:
    """Return whether `ray.init` would start a cluster, and not join one."""
    from ray._private import services

    address = config.get("address") or os.environ.get("RAY_ADDRESS")
    address = address or services.find_bootstrap_address(config.get("_temp_dir"))
    return address in (None, "local")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on loopback, as it does on Windows and macOS.

    Ray has no argument for this: on Linux it replaces a loopback address by an outside one.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


SESSION = Session()
"""This process's."""
