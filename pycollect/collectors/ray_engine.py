"""All that is asked of Ray: joining or starting it, resources, actors, waiting for them."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pycollect.collectors.engine import Order, Rollout
from pycollect.collectors.pickling import pickled_spec
from pycollect.collectors.remote_worker import (
    ErrorReport,
    RemoteWorker,
    WorkerInfo,
    WorkerSpec,
)
from pycollect.errors import WorkerDied
from pycollect.worker_devices import Devices

DEFAULT_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}

_GIB = 1024**3
_CLOSE_SECONDS = 5.0
_LOG_CHARACTERS = 2000
_PART_OF_A_GPU = 0.2
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def import_ray() -> Any:
    """Ray, or an ImportError that says how to get it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "RayCollector needs Ray: pip install 'pycollect[ray]'; "
            "SyncDataCollector collects in this process without it"
        ) from error
    return ray


class _Session:
    """How many collectors of this process use Ray, and whether one of them started it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._started = False

    def enter(self, init_config: Mapping[str, Any] | None) -> None:
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
        ray = import_ray()
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._started:
                self._started = False
                ray.shutdown()


_session = _Session()


class RayEngine:
    """Ray, joined or started for one collector.

    Args:
        init_config: arguments of ``ray.init``; None: join the running cluster, else start one.
    """

    def __init__(self, init_config: Mapping[str, Any] | None) -> None:
        _session.enter(init_config)
        self._ray = import_ray()
        # Also for a collector that is dropped without shutdown(). At exit Ray ends by itself.
        self._leave = weakref.finalize(self, _session.leave)
        self._leave.atexit = False

    def leave(self) -> None:
        """Shut Ray down if a collector started it and this was the last one. Idempotent."""
        self._leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError that names a resource of which the cluster has too little in total."""
        total = self._ray.cluster_resources()
        wanted: dict[str, float] = {}
        for actor in options:
            for name, amount in _resources(actor).items():
                wanted[name] = wanted.get(name, 0.0) + amount
        for name, amount in wanted.items():
            if amount > total.get(name, 0.0):
                raise ValueError(
                    f"remote_configs: {len(options)} actors ask for {_amount(name, amount)} of "
                    f"{name} in all, the cluster has {_amount(name, total.get(name, 0.0))}"
                )

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if the object store cannot hold that many bytes of rollouts."""
        capacity = int(self._ray.cluster_resources().get("object_store_memory", 0))
        if needed > capacity:
            raise ValueError(
                f"frames_per_batch, prefetch: rollouts in flight take up to {needed} bytes, "
                f"the object store has {capacity}"
            )

    def put(self, value: Any) -> Any:
        """A reference to a value in the object store."""
        return self._ray.put(value)

    def start(self, spec: WorkerSpec, policy: Any, options: Mapping[str, Any]) -> RayHandle:
        """Start the actor of one worker, which builds its environments at once.

        Args:
            policy: a reference to the pickled policy.
            options: the actor's options.
        """
        actor = _actor_class().options(**options).remote()
        building = actor.build.remote(pickled_spec(spec), policy)
        return RayHandle(self._ray, spec.index, spec.incarnation, actor, building)

    def wait_any(self, handles: Sequence[RayHandle], timeout: float) -> RayHandle | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        by_ref = {handle.oldest: handle for handle in handles}
        ready, _ = self._ray.wait(list(by_ref), num_returns=1, timeout=timeout, fetch_local=True)
        return by_ref[ready[0]] if ready else None

    def wait_closed(self, handles: Sequence[RayHandle]) -> None:
        """Let workers close their environments, for a few seconds at most, then end them."""
        if sys.is_finalizing():  # Ray ends its processes by itself, and nothing can be imported
            return
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # dead actors have nothing to close
            closing = [handle.request("close") for handle in handles]
            self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for handle in handles:
            handle.kill()


class RayHandle:
    """The driver's end of one actor: what was asked of it and not read yet, oldest first."""

    in_place: ClassVar[bool] = False

    def __init__(self, ray: Any, index: int, incarnation: int, actor: Any, building: Any) -> None:
        self._ray = ray
        self.actor = actor
        self._calls: deque[Any] = deque([building])
        self._assigned: tuple[int, int, Any] = (0, 0, None)
        self._sent_edition = 0
        self._steps_call: Any = None
        self.index = index
        self.incarnation = incarnation
        self._pid: int | None = None

    @property
    def oldest(self) -> Any:
        """The reference of the oldest unread call."""
        return self._calls[0]

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        info: WorkerInfo = self.answer(self._calls[0])
        self.pop()
        self._pid = info.pid
        return info

    def submit(self, order: Order) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""
        edition, version, weights = self._assigned
        sent = edition <= self._sent_edition
        self._sent_edition = edition
        weights = None if sent else weights
        self._calls.append(self.actor.collect.remote(order.random, edition, version, weights))

    def assign(self, edition: int, version: int, weights: Any, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts.

        They travel with the next rollout that is queued here. If some are queued already, or with
        `acknowledge`, they are also sent past these.

        Returns:
            What to wait for until the worker has them, or None if nothing was sent now.
        """
        self._assigned = (edition, version, weights)
        if not (self._calls or acknowledge):
            return None
        return self._past_the_queue("set_weights", edition, version, weights)

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits.

        An interrupt between the two loses nothing: the same rollout is given again.
        """
        note, buffer = self.answer(self._calls[0])
        return Rollout(self.index, self.incarnation, note, buffer)

    def pop(self) -> None:
        """The oldest call is done with."""
        self._calls.popleft()

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read."""
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""
        return getattr(self.actor, method).remote(*arguments)

    def _past_the_queue(self, method: str, *arguments: Any) -> Any:
        """Call a method that may run beside a rollout."""
        call = getattr(self.actor, method).options(concurrency_group="control")
        return call.remote(*arguments)

    def answer(self, call: Any) -> Any:
        """What a call returned; what went wrong in the worker is raised. Waits."""
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(
                f"worker {self.index} died: {_end_of(error)}",
                self.index,
                self.incarnation,
                str(error),
            ) from error
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.index, self.incarnation)
        return answer

    def steps(self) -> int | None:
        """Steps of the worker's life so far, None if no answer came yet. Does not wait."""
        if self._steps_call is None:
            self._steps_call = self._past_the_queue("steps")
        ready, _ = self._ray.wait([self._steps_call], timeout=0)
        if not ready:
            return None
        call, self._steps_call = self._steps_call, None
        with contextlib.suppress(WorkerDied):  # who waits for its rollout will hear of it
            return int(self.answer(call))
        return None

    def last_words(self) -> str:
        """The end of what the actor's process logged, if it ran on this machine; else nothing."""
        with contextlib.suppress(Exception):  # the place of the logs is not part of Ray's API
            folder = Path(self._ray._private.worker._global_node.get_logs_dir_path())
            files = sorted(folder.glob(f"worker-*-{self._pid}.err"))
            return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """End the actor's process."""
        self._calls.clear()
        with contextlib.suppress(Exception):  # it is gone already, or Ray is
            self._ray.kill(self.actor)


def _actor_class() -> Any:
    return import_ray().remote(concurrency_groups={"control": 1})(RemoteWorker)


def check_actor_options(configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for actor options that Ray does not know, or of a wrong kind."""
    for config in configs:
        try:
            _actor_class().options(**actor_options(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"remote_configs: {error}") from error


def actor_options(
    config: Mapping[str, Any] | None, devices: Devices | None = None
) -> dict[str, Any]:
    """The options of one actor: the defaults, overridden by what the caller gave.

    Args:
        devices: of its worker; one that uses a GPU asks for a part of it.
    """
    uses_gpu = devices is not None and "cuda" in devices.of_worker
    gpus = _PART_OF_A_GPU if uses_gpu else 0
    return {**DEFAULT_ACTOR_OPTIONS, "num_gpus": gpus, **(config or {})}


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    resources = {name: float(options.get(key) or 0) for name, key in named.items()}
    for name, amount in (options.get("resources") or {}).items():
        resources[name] = float(amount)
    return {name: amount for name, amount in resources.items() if amount > 0}


def _amount(resource: str, amount: float) -> str:
    return f"{amount / _GIB:.1f} GiB" if resource == "memory" else f"{amount:g}"


def _end_of(error: BaseException) -> str:
    """The line of Ray's text that says how a process ended: its exit, or an exception. The last."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
