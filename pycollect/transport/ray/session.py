"""Join or start Ray, check its resources, and shut it down after its last user."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from pycollect.transport.process import ProcessEnd
from pycollect.transport.worker_process import check_not_importing

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_PID = re.compile(r"\bpid[:=] ?(\d+)")
_NODE = re.compile(r"\bip[:=] ?([\w.:]*\w)", re.IGNORECASE)
_NEVER_RAN = "The actor never ran"  # begins a line that Ray adds after the cause
_EXIT_CODE = re.compile(r"\bexit code (\d+)")
_FINALIZERS: SimpleQueue[Callable[[], Any]] = SimpleQueue()
_FINALIZER_LOCK = threading.Lock()


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
    """Counts the collectors of this process that use Ray, and whether one of them started it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._started = False

    def enter(self, init_config: Mapping[str, Any] | None) -> None:
        """Count one more user; join or start Ray for the first one."""
        check_not_importing()
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                # A dashboard takes seconds to start and part of a core.
                config = {"include_dashboard": False} if init_config is None else init_config
                try:
                    _join_or_start(ray, config)
                except BaseException:  # an interrupted start would leave half a node running
                    ray.shutdown()
                    raise
                self._started = True
            self._users += 1

    def leave(self) -> None:
        """Count one user less; the last one shuts down a Ray that a collector started."""
        ray = import_ray()
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._started:
                self._started = False
                ray.shutdown()


def _join_or_start(ray: Any, config: Mapping[str, Any]) -> None:
    """Call `ray.init`, and make a new cluster listen on loopback only.

    With "_node_ip_address" in the config, a new cluster listens on all addresses, as by Ray's
    default.
    """
    if "_node_ip_address" in config or not _is_to_start(config):
        ray.init(**config)
        return
    with _on_loopback():
        ray.init(**{**config, "address": "local"})


def _is_to_start(config: Mapping[str, Any]) -> bool:
    """Return whether `ray.init` would start a cluster instead of joining one."""
    from ray._private import services

    address = config.get("address") or os.environ.get("RAY_ADDRESS")
    address = address or services.find_bootstrap_address(config.get("_temp_dir"))
    return address in (None, "local")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray listen on loopback, as it does on Windows and macOS.

    Ray has no argument for this: on Linux it replaces a loopback address with an external one.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


SESSION = Session()
"""The session of this process."""


def call_when_freed(
    owner: Any, function: Callable[..., Any], *arguments: Any
) -> weakref.finalize[Any, Any]:
    """Call a function when the owner is garbage-collected, but not at exit: Ray ends itself then.

    The garbage collector may run in one of Ray's threads. A call of Ray from that thread would
    deadlock, so another thread makes it.

    Returns:
        The finalizer; detach it to call the function earlier.
    """
    final = weakref.finalize(owner, _call, os.getpid(), partial(function, *arguments))
    final.atexit = False
    return final


def _call(process: int, function: Callable[[], Any]) -> None:
    if os.getpid() != process:  # a fork does not own the actors of its parent
        return
    if threading.get_ident() == threading.main_thread().ident:
        function()
        return
    _FINALIZERS.put(function)
    threading.Thread(target=_next_call, name="pycollect-finalizer", daemon=True).start()


def _next_call() -> None:
    with _FINALIZER_LOCK:  # keeps the order: actors end before Ray
        _FINALIZERS.get()()


def end_of(error: BaseException) -> ProcessEnd:
    """Return how an actor's process ended, with its pid and node, from Ray's exception."""
    text = _COLORS.sub("", str(error))
    pid, node = _PID.search(text), _NODE.search(text)
    places = [pid and f"process {pid[1]}", node and f"on node {node[1]}"]
    place = " ".join(filter(None, places))
    cause = _cause(type(error).__name__, text)
    return ProcessEnd(f"{cause} ({place})" if place else cause, text)


def _cause(kind: str, text: str) -> str:
    """Extract the cause from Ray's text, which also contains paragraphs of advice."""
    if kind == "OutOfMemoryError":
        return "Ray killed it because its node was low on memory"
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith(_NEVER_RAN)]
    last = lines[-1] if lines else kind
    _, of_process, detail = last.partition("Worker exit detail: ")
    exit_code = _EXIT_CODE.search(detail)
    if exit_code:
        return f"it ended with exit code {exit_code[1]}"
    if "connection error" in detail:  # Ray does not know the cause
        return "it was killed, or it crashed"
    return (detail.partition(". ")[0] if of_process else last).removesuffix(".")


_GIB = 1024**3


def check_amounts(argument: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless all amounts that an actor reserves are numbers >= 0."""
    custom = options.get("resources")
    if not isinstance(custom, Mapping | None):
        raise ValueError(f"{argument}: expected a dict for 'resources', got {custom!r}")
    amounts = {name: options.get(name) for name in ("num_cpus", "num_gpus", "memory")}
    for name, amount in {**amounts, **(custom or {})}.items():
        if amount is not None and (
            isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0
        ):
            raise ValueError(f"{argument}: expected a number >= 0 for {name!r}, got {amount!r}")


def check_resources(argument: str, options: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the cluster has too little of a resource in total."""
    total = import_ray().cluster_resources()
    wanted: dict[str, float] = {}
    for actor in options:
        for name, amount in _resources(actor).items():
            wanted[name] = wanted.get(name, 0.0) + amount
    for name, amount in wanted.items():
        if amount > total.get(name, 0.0):
            raise ValueError(
                f"{argument}: all actors ({len(options)}) together need {name}: "
                f"{_amount(name, amount)}, but the cluster has "
                f"{_amount(name, total.get(name, 0.0))}; reserve less or use fewer workers"
            )


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    resources = {name: float(options.get(key) or 0) for name, key in named.items()}
    for name, amount in (options.get("resources") or {}).items():
        resources[name] = float(amount)
    return {name: amount for name, amount in resources.items() if amount > 0}


def _amount(resource: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if resource == "memory" else f"{amount:g}"
