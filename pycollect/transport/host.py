"""The worker's end of a connection: builds the worker, runs rollouts and answers requests."""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import cloudpickle
import torch

from pycollect._core import (
    Mailbox,
    Memory,
    RolloutControl,
    SharedMemoryError,
    SlabPool,
    WorkerMailbox,
    merge_freed_memory,
)
from pycollect.checks import built_policy
from pycollect.data.compression import PackedBuffer
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.layout import Key
from pycollect.data.slabs import MappedSlabs, MemoryAddress, SlabRows, make_pool, to_tensordict
from pycollect.envs.gymnasium_support import register
from pycollect.errors import filter_import_warnings, kept_warnings
from pycollect.transport.channel import MAX_REQUESTS, CallEnd, MailboxEnd, WorkerEnd
from pycollect.transport.messages import (
    Buffer,
    Build,
    Close,
    Collect,
    GetSteps,
    Hosted,
    Request,
    Resize,
    Run,
    SetHook,
    SetWeights,
    Stop,
    WorkerInfo,
    WorkerSpec,
    plain_report,
)
from pycollect.transport.pickling import ErrorReport, WeightSlab, pack, unpack, unpickle
from pycollect.transport.worker_process import (
    become_worker,
    begin_worker,
    building,
    end_fork_of,
    end_worker,
    log_to,
)
from pycollect.worker.options import PRE
from pycollect.worker.report import Lazy
from pycollect.worker.worker import Worker

T = TypeVar("T")


class SingleWorker(Worker):
    """A Worker that runs in a process of its own."""

    version = 0  # version of the worker's weights; set before the driver calls a function with it
    serve = None  # no inference server

    def __init__(self, spec: WorkerSpec, policy: bytes) -> None:
        policy_or_factory = cloudpickle.loads(policy)
        self.post_collect_hook: Callable[[Any], Any] | None = spec.options.post_collect_hook
        super().__init__(
            spec.index,
            spec.entry,
            spec.env_kwargs,
            built_policy(policy_or_factory) if spec.builds_policy else policy_or_factory,
            spec.options,
            spec.incarnation,
        )

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            self.leaves,
            self.num_envs,
            self.num_seeds,
            self.batch_size,
            self.steps,
            bounded=self.bounded,
            weights=self.weights,
            device=self.device,
        )

    def set_hook(self, name: str, hook: Any) -> None:
        if name == PRE:
            self.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def close(self) -> None:
        """Close the post-collect hook, if it can be closed, and the environments."""
        close = getattr(self.post_collect_hook, "close", None)
        try:
            if close is not None:
                close()
        finally:
            super().close()


class WorkerHost:
    """Builds a worker in its process, and answers requests about it.

    One thread must pass all queued requests, so that environments see only that thread. Requests
    that skip the queue may come from any thread, also during a rollout.

    Args:
        inherited: Objects that the worker's spec refers to; see `pickling`.
    """

    def __init__(self, end: WorkerEnd, inherited: tuple[Any, ...] = ()) -> None:
        become_worker()
        self._end, self._inherited = end, inherited
        self._worker: Hosted | None = None
        self._compresses = False
        self._warnings: list[str] = []
        self._slabs = MappedSlabs()
        self._pool: SlabPool | None = None  # for rollouts that are sent as messages
        self._weight_slab: WeightSlab | None = None
        self._serial = self._version = 0  # of the weights
        self._hook_serials: dict[str, int] = {}

    def answer(self, request: Request) -> Any:
        """Return the answer to a request, or a report of its exception."""
        return answer_of(lambda: self._answer(request))

    def _answer(self, request: Request) -> Any:
        match request:
            case Collect():
                return self._collect(request)
            case Build():
                return self._build(request)
            case Run(call):
                return self._run(call)
            case Resize(frames):
                return self._resize(frames)
            case GetSteps():
                return self.steps()
            case Close():
                return self.close()
            case Stop() | SetWeights() | SetHook():
                return self._receive(request)
        raise TypeError(f"request: expected one to a worker, got {request!r}")

    def _receive(self, request: Stop | SetWeights | SetHook) -> None:
        assert isinstance(self._end, CallEnd)  # a mailbox has other ways for these
        self._end.receive(request)

    def _build(self, request: Build) -> WorkerInfo:
        """Make the environments and call the policy once as a test."""
        filter_import_warnings(request.filters_warnings)
        with building():
            # torch seeds a new process with a constant, so all workers would draw the same numbers.
            torch.seed()
            merge_freed_memory()
            spec: WorkerSpec = unpickle(request.spec, self._inherited)
            register(spec.registered)
            if spec.hides_gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch reads it on first use of CUDA
            if spec.options.num_threads is not None:
                torch.set_num_threads(spec.options.num_threads)
            self._compresses = spec.options.compress and not self._end.in_place
            make_worker: Callable[[WorkerSpec, bytes], Hosted] = spec.maker or SingleWorker
            with kept_warnings() as self._warnings:
                worker = make_worker(spec, self._end.bytes_of(request.policy))
            self._worker = worker
            info = self._info()
            self._weight_slab = WeightSlab(info.weights) if info.weights else None
            return info

    def _info(self) -> WorkerInfo:
        return replace(
            self._built.info(),
            pid=os.getpid(),
            node=socket.gethostname(),
            warnings=tuple(self._warnings),
        )

    def _collect(self, request: Collect) -> tuple[tuple[Any, ...], Buffer | PackedBuffer | None]:
        """Collect one rollout; return its plain report and, without rows, its bytes."""
        if request.weights is not None:
            self._receive(SetWeights(request.serial, request.weights_version, request.weights))
        control = self._end.control(request.number, request.min_steps)
        if request.rows is not None:
            rows = self._slabs.rows(request.rows, self._built.placement)
            return self._collect_into(rows, request, control), None
        if self._pool is None:
            self._pool = make_pool(self._built.placement, 2)
        slab = self._pool.acquire()
        report = self._collect_into(SlabRows(slab), request, control)
        return report, PackedBuffer.of(slab) if self._compresses else slab.array()

    def _collect_into(
        self, rows: SlabRows, request: Collect, control: RolloutControl
    ) -> tuple[Any, ...]:
        worker = self._built
        self._take_published(worker)
        version = self._version
        if request.random:  # a policy that is called elsewhere tells its version only with actions
            version = max(version, request.version)
        report = worker.collect(rows.slab, rows.row, version, request.random, control)
        _copy_to_slab(report.on_device, worker, rows)
        rows.header()
        if (hook := worker.post_collect_hook) is not None:  # its changes are delivered
            tensors = rows.tensors(worker.batch_size, worker.leaves.keys)
            hook(to_tensordict(tensors, [*worker.batch_size, tensors[TRAJ_IDS].shape[-1]]))
        generators = worker.generator_state()
        if generators is not None:
            report = report._replace(generators=Lazy(generators, pickle.dumps))
        return plain_report(report)

    def _take_published(self, worker: Hosted) -> None:
        """Load the newest weights and install the newest hooks, unless the worker has them."""
        new = self._end.published(self._serial, self._hook_serials)
        if new is None:
            return
        if new.weights is not None:
            if self._weight_slab is not None:
                worker.load_weights(self._weight_slab.unpack(new.weights))
            self._serial, self._version = new.serial, new.version
        for name, (serial, hook) in new.hooks.items():
            worker.set_hook(name, cloudpickle.loads(hook))
            self._hook_serials[name] = serial

    def serve_clients(self) -> bool:
        """Serve the clients of an inference server once; return False for another worker."""
        serve = None if self._worker is None else self._worker.serve
        if serve is None:
            return False
        serve(self._newest_version)
        return True

    def _newest_version(self) -> int:
        self._take_published(self._built)
        return self._version

    def _resize(self, frames: int) -> WorkerInfo:
        self._built.set_share(frames)
        self._pool = None
        return self._info()

    def _run(self, call: bytes) -> bytes:
        function, arguments = cloudpickle.loads(call)
        self._take_published(self._built)  # the function sees the newest weights
        self._built.version = self._version
        data: bytes = cloudpickle.dumps(function(self._built, *arguments))
        return data

    def steps(self) -> int:
        """Return a number that grows while the worker makes progress. May be called at any time."""
        return 0 if self._worker is None else self._worker.stepped + self._end.moves

    @property
    def _built(self) -> Hosted:
        assert self._worker is not None
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _copy_to_slab(on_device: Mapping[Key, torch.Tensor], worker: Hosted, rows: SlabRows) -> None:
    """Copy tensors of a rollout into the slab, and clear the cells after its end."""
    if not on_device:
        return
    lead = worker.batch_size
    tensors = rows.tensors(lead, worker.leaves.keys, whole=True)
    for key, recorded in on_device.items():
        steps = recorded.shape[len(lead)]
        filled, rest = tensors[key].tensor_split([steps], len(lead))
        filled.copy_(recorded)
        rest.fill_(-1 if key == TRAJ_IDS else 0)


def answer_of(function: Callable[[], T]) -> T | ErrorReport:
    """Return the function's result, or a report of its exception for the caller to raise.

    An environment or a policy may fork. If the child returns or raises there, it ends here: only
    the parent may answer and write rows.
    """
    process = os.getpid()
    try:
        return function()
    except Exception as error:
        end_fork_of(process)
        return ErrorReport.of(error)
    finally:
        end_fork_of(process)


_WAIT_SECONDS = 10.0  # for a request, before a worker looks again


def serve(
    mailbox: MemoryAddress, bell: MemoryAddress, driver: int, inherited: tuple[Any, ...], log: int
) -> None:
    """Answer requests from a mailbox until `Close`; the main function of a worker process.

    Args:
        driver: Pid of the driver. When it ends, this process and its descendants are killed.
        inherited: Objects that the worker's spec refers to; see `pickling`.
        log: Descriptor of the file that becomes this process's standard error.
    """
    begin_worker(driver)
    log_to(log)
    answer_all(WorkerMailbox(mailbox, bell), inherited)
    end_worker()


def shared_mailbox(mailbox: MemoryAddress, bell: MemoryAddress, driver: int) -> WorkerMailbox | str:
    """Open the driver's mailbox, and end with the driver; return why that is not possible.

    For the arguments see `serve`.
    """
    try:
        end = WorkerMailbox(mailbox, bell)
        begin_worker(driver)
    except (SharedMemoryError, ValueError, RuntimeError) as error:
        return str(error)  # for example in another container, or as another user
    return end


def answer_all(mailbox: WorkerMailbox, inherited: tuple[Any, ...] = ()) -> None:
    """Answer all requests to a worker, from `Build` until `Close`."""
    process = os.getpid()
    try:
        _answer_until_closed(mailbox, inherited)
    finally:
        end_fork_of(process)


def _answer_until_closed(mailbox: WorkerMailbox, inherited: tuple[Any, ...]) -> None:
    host = WorkerHost(MailboxEnd(mailbox), inherited)
    # A driver that sends a request this far ahead has read all earlier answers.
    long_answers: deque[Memory] = deque(maxlen=MAX_REQUESTS)
    request: Request | None = None
    while not isinstance(request, Close):
        while not _wait_ask(mailbox, host):
            pass
        request = unpack(mailbox.question())
        message, memory = pack(host.answer(request), Mailbox.ANSWER_BYTES)
        if memory is not None:
            long_answers.append(memory)
        mailbox.answer(message)


def _wait_ask(mailbox: WorkerMailbox, host: WorkerHost) -> bool:
    """Wait for a request, and serve inference clients meanwhile; return whether one came."""
    if not host.serve_clients():
        return mailbox.wait_ask(_WAIT_SECONDS)
    mailbox.steps.value += 1
    return mailbox.wait_ask(0.0)
