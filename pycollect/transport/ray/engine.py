"""Workers in Ray actors: the actor, the driver's view of it, and the engine that starts them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pycollect._core import Bell, Mailbox, SharedMemoryError, shared_memory_why_not
from pycollect.data.devices import Devices
from pycollect.data.slabs import MemoryAddress
from pycollect.errors import without_frames
from pycollect.transport.channel import MAX_REQUESTS, AnyBell, CallEnd, ThreadBell
from pycollect.transport.engine import Engine, too_many_bytes
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.host import WorkerHost, answer_all, shared_mailbox
from pycollect.transport.messages import Request, WorkerSpec
from pycollect.transport.pickling import Shareable, SharedValue, pickled_spec
from pycollect.transport.process import OtherProcess, ProcessEnd, WorkerProcess, has_pidfd
from pycollect.transport.ray.session import (
    SESSION,
    call_when_freed,
    check_resources,
    end_of,
    import_ray,
)
from pycollect.transport.worker_process import children_of, kill_tree

_LOG_CHARACTERS = 2000
_REPORT_SECONDS = 2.0  # for Ray to report how an actor's process ended
_KILL_SECONDS = 2.0  # for Ray to end an actor


class ActorProcess(WorkerProcess):
    """An actor that runs a worker, for the driver; see `WorkerProcess` and `Caller`.

    The actor ends when this object is garbage-collected. Ray alone would keep a serving actor
    forever. On this node, the process itself shows whether it has ended; Ray reports the cause.
    """

    transport: ClassVar[str] = "object store"

    def __init__(self, ray: Any, handle: Any, bell: AnyBell) -> None:
        self._ray = ray
        self.native = handle
        self._bell = bell
        self._serving: Future[str] | None = None  # None if it was not asked to serve
        self._pid: int | None = None
        self._process: OtherProcess | None = None
        call_when_freed(self, _kill, ray, handle)

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress) -> None:
        """Ask the actor to serve a mailbox of this process, which runs on `node`."""
        self._serving = self._ringing(self.native.serve.remote(node, mailbox, bell, os.getpid()))

    @property
    def refused(self) -> bool:
        serving = self._serving
        if serving is None or not serving.done() or serving.exception() is not None:
            return False
        return serving.result() != ""

    def by_calls(self) -> ActorProcess:
        return self

    def call(self, request: Request, unqueued: bool = False) -> Future[Any]:
        method = self.native.call
        if unqueued:
            method = method.options(concurrency_group="control")
        return self._ringing(method.remote(type(request), *request))

    def _ringing(self, reference: Any) -> Future[Any]:
        """Return the future of a call; ring the bell when the call is done or the actor died."""
        future: Future[Any] = reference.future()
        bell = self._bell
        future.add_done_callback(lambda _: bell.ring())
        return future

    def process_end(self, error: BaseException) -> ProcessEnd | None:
        if not isinstance(error, self._ray.exceptions.RayError):
            return None
        return replace(end_of(error), error=without_frames(error))

    def watch(self, pid: int, shares_memory: bool) -> None:
        self._pid = pid
        if shares_memory:
            self._process = OtherProcess(pid)
            self._bell.ring_when_gone(pid)

    @property
    def is_over(self) -> bool:
        """Whether the process is gone or serves no more. Calls of a dead actor fail themselves."""
        if sys.is_finalizing() or not self._ray.is_initialized():  # Ray has ended all actors
            return True
        if self._serving is None or self.refused:
            return False
        return self._serving.done() or (self._process is not None and self._process.is_gone)

    def end(self) -> ProcessEnd:
        """Return how an actor that serves a mailbox ended. Waits a little for Ray's report."""
        error = None
        if self._serving is not None:
            wait_futures([self._serving], _REPORT_SECONDS)
            error = self._serving.exception() if self._serving.done() else None
        if error is not None:
            return replace(end_of(error), error=error)
        number = "" if self._pid is None else f" {self._pid}"
        end = f"its process{number} on this node is gone"
        return ProcessEnd(end, end)

    def recent_log(self) -> str:
        """Return the end of the process's log, or "" if the process ran on another machine."""
        with contextlib.suppress(Exception):  # the folder of the logs is not part of Ray's API
            folder = Path(self._ray._private.worker._global_node.get_logs_dir_path())
            files = sorted(folder.glob(f"worker-*-{self._pid}.err"))
            return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """End the actor; on this node also its process and those that its environments started."""
        if sys.is_finalizing():  # Ray ends its processes itself, and imports no longer work
            return
        process = self._process
        if process is not None and not process.is_gone:
            for child in children_of(process.pid):
                kill_tree(child)
        _kill(self._ray, self.native)
        if process is not None:  # an actor without a pid was never built and shares no memory
            process.wait_gone(_KILL_SECONDS)
            process.kill_all()


def _kill(ray: Any, handle: Any) -> None:
    with contextlib.suppress(Exception):  # the actor or Ray is gone already
        if ray.is_initialized():
            ray.kill(handle)


class RayWorker:
    """Hosts one worker in an actor; serves a mailbox if memory can be shared, else `call`.

    The class is plain on purpose. If ``__len__``, ``__bool__``, ``__repr__`` or ``__getattr__``
    raised, Ray would report a dead actor and lose the error.
    """

    def __init__(self) -> None:
        self._host = WorkerHost(CallEnd())  # unused if a mailbox is served

    def serve(self, node: str, mailbox: MemoryAddress, bell: MemoryAddress, driver: int) -> str:
        """Answer requests from a mailbox until `Close`, or until the process `driver` ends.

        Returns:
            "" after the end of service. If memory cannot be shared, the reason, at once; the driver
            then uses `call`.
        """
        if import_ray().get_runtime_context().get_node_id() != node:
            return "it is on another node"
        end = shared_mailbox(mailbox, bell, driver)
        if isinstance(end, str):
            return end
        answer_all(end)
        return ""

    def call(self, kind: Callable[..., Request], *fields: Any) -> Any:
        """Answer a request, whose fields are arguments so that Ray replaces its references."""
        return self._host.answer(kind(*fields))


def driver_address(ray: Any, bell: AnyBell | None) -> tuple[str, AnyBell]:
    """Return Ray's id of this node, and the bell that rings when there may be an answer.

    It is a ThreadBell if this process cannot share memory.
    """
    why_not = shared_memory_why_not()
    if not why_not and not has_pidfd():
        why_not = "this system does not support process file descriptors (pidfd)"
    if why_not and bell is not None:
        raise SharedMemoryError(why_not)
    bell_or_new = bell or (ThreadBell() if why_not else Bell())
    return ray.get_runtime_context().get_node_id(), bell_or_new


DEFAULT_ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}

PART_OF_A_GPU = 0.2
"""Number of GPUs that an actor reserves if it uses a GPU."""


class RayEngine(Engine):
    """Starts workers as actors of Ray, which it joins or starts for one collector.

    Args:
        init_config: Arguments of ``ray.init``. ``None`` joins the running cluster or starts one.
        bell: Bell that actors of this node ring. ``None`` creates one (default: ``None``).

    Raises:
        SharedMemoryError: Actors cannot ring the bell.
    """

    def __init__(self, init_config: Mapping[str, Any] | None, bell: AnyBell | None = None) -> None:
        SESSION.enter(init_config)
        self._ray = import_ray()
        # This also covers a collector that is dropped without shutdown().
        self._session = call_when_freed(self, SESSION.leave)
        self._node, self.bell = driver_address(self._ray, bell)

    def leave(self) -> None:
        """Shut Ray down if a collector started it and this was the last one. Idempotent."""
        if self._session.detach():
            SESSION.leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        check_resources("remote_configs", options)

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if memory, or the object store, cannot hold that many bytes."""
        if in_place:
            super().check_memory(needed, in_place)
            return
        capacity = int(self._ray.cluster_resources().get("object_store_memory", 0))
        if needed > capacity:
            raise too_many_bytes(needed, f"the object store has {capacity}")

    def put(self, value: Shareable) -> SharedValue:
        return SharedValue(value, self._ray.put)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start the actor of one worker, and let it serve a mailbox if this process can have one.

        For the arguments see `Engine`.
        """
        pickled = pickled_spec(spec)
        actor = _actor_class().options(**options).remote()
        process = ActorProcess(self._ray, actor, self.bell)
        mailbox = None
        try:
            if self.bell.address is not None:
                mailbox = Mailbox(MAX_REQUESTS)
                process.serve(self._node, mailbox.address, self.bell.address)
            return WorkerHandle(spec, pickled, policy, mailbox, process, self.bell)
        except BaseException:
            process.kill()
            raise


def _actor_class() -> Any:
    return import_ray().remote(concurrency_groups={"control": 1})(RayWorker)


def check_actor_options(configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if Ray does not accept the options of an actor."""
    for config in configs:
        try:
            _actor_class().options(**actor_options(config))
        except (TypeError, ValueError) as error:
            raise ValueError(f"remote_configs: {error}") from error


def actor_options(
    config: Mapping[str, Any] | None, devices: Devices | None = None
) -> dict[str, Any]:
    """Return the options of one actor: the defaults, overridden by the caller's.

    Args:
        devices: Devices of the worker; an actor whose worker uses a GPU reserves a part of one.
    """
    uses_gpu = devices is not None and "cuda" in devices.worker_types
    gpus = PART_OF_A_GPU if uses_gpu else 0
    return {**DEFAULT_ACTOR_OPTIONS, "num_gpus": gpus, **(config or {})}
