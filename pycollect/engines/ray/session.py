"""Ray itself: imported, joined or started, and shut down by the last collector that uses it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from pycollect.engines.unguarded import check_not_importing


def import_ray() -> Any:
    """Ray, or an ImportError that says how to get it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "workers in Ray actors need Ray: pip install ray; SyncDataCollector, and a CWorkerSet "
            "of one worker, collect in this process without it"
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
                    ray.init(**config)
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


SESSION = Session()
"""This process's."""
