"""The worker's end of a connection: builds the worker, runs rollouts and answers requests."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import cloudpickle
import torch

from pycollect._core import RolloutControl, SlabPool, merge_freed_memory
from pycollect.data.compression import PackedBuffer
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.layout import Key
from pycollect.data.slabs import MappedSlabs, SlabRows, make_pool, to_tensordict
from pycollect.data.weights import WeightSlab
from pycollect.envs.registrations import register
from pycollect.errors import kept_warnings
from pycollect.transport.channel import CallEnd, WorkerEnd
from pycollect.transport.hosted import HostedServer, SingleWorker
from pycollect.transport.import_warnings import filter_import_warnings
from pycollect.transport.messages import (
    Buffer,
    Build,
    Close,
    Collect,
    ErrorReport,
    GetSteps,
    Request,
    Resize,
    Run,
    SetHook,
    SetWeights,
    Stop,
    packed_slab,
    plain_report,
)
from pycollect.transport.pickling import unpickle
from pycollect.transport.spec import Hosted, WorkerInfo, WorkerSpec
from pycollect.transport.unguarded import become_worker, building
from pycollect.worker.report import Lazy

T = TypeVar("T")


class WorkerHost:
    """Builds a worker in its process, and answers requests about it.

    One thread must call all methods but `steps`, so that environments see only that thread.

    Args:
        end: The worker's end of the channel.
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
        raise TypeError(f"request: expected one that is queued, got {request!r}")

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
            self._weight_slab = WeightSlab(worker.weights) if worker.weights else None
            return self._info()

    def _info(self) -> WorkerInfo:
        worker = self._built
        return WorkerInfo(
            leaves=worker.leaves,
            num_envs=worker.num_envs,
            num_seeds=worker.num_seeds,
            batch_size=worker.batch_size,
            steps=worker.steps,
            pid=os.getpid(),
            node=socket.gethostname(),
            bounded=worker.bounded,
            weights=worker.weights,
            device=worker.device,
            processes=worker.processes,
            stacked=worker.stacked,
            warnings=tuple(self._warnings),
        )

    def _collect(self, request: Collect) -> tuple[tuple[Any, ...], Buffer | PackedBuffer | None]:
        """Collect one rollout; return its plain report and, without rows, its bytes."""
        control = self._end.control(request.number, request.min_steps)
        if request.rows is not None:
            rows = self._slabs.rows(request.rows, self._built.placement)
            return self._collect_into(rows, request.random, control), None
        if self._pool is None:
            self._pool = make_pool(self._built.placement, 2)
        slab = self._pool.acquire()
        report = self._collect_into(SlabRows(slab), request.random, control)
        return report, packed_slab(slab) if self._compresses else slab.array()

    def _collect_into(
        self, rows: SlabRows, random: bool, control: RolloutControl
    ) -> tuple[Any, ...]:
        worker = self._built
        self._take_published(worker)
        report = worker.collect(rows.slab, rows.row, self._version, random, control)
        _copy_to_slab(report.on_device, worker, rows)
        rows.header()
        self._call_post_hook(worker, rows)
        generators = worker.generator_state()
        if generators is not None:
            report = report._replace(generators=Lazy(generators, pickle.dumps))
        return plain_report(report)

    def _call_post_hook(self, worker: Hosted, rows: SlabRows) -> None:
        """Call the post-collect hook with views of the slab, so that its changes are delivered."""
        hook = worker.post_collect_hook
        if hook is not None:
            tensors = rows.tensors(worker.batch_size, worker.leaves.keys)
            shape = [*worker.batch_size, tensors[TRAJ_IDS].shape[-1]]
            hook(to_tensordict(tensors, shape))

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
        worker = self._worker
        if not isinstance(worker, HostedServer):
            return False
        worker.wait()
        worker.serve(self._newest_version)
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
        """Close the environments."""
        if self._worker is not None:
            self._worker.close()


class CalledHost:
    """Answers the requests of a CallChannel, some of which arrive during a rollout.

    One thread must pass all queued requests. Requests that skip the queue may come from any thread.
    """

    def __init__(self) -> None:
        self._end = CallEnd()
        self._host = WorkerHost(self._end)

    def answer(self, request: Request) -> Any:
        """Return the answer to a request, or a report of its exception."""
        if isinstance(request, (Stop, SetWeights, SetHook)):
            return self._end.receive(request)
        if isinstance(request, Collect) and request.weights is not None:
            self._end.receive(SetWeights(request.serial, request.version, request.weights))
        return self._host.answer(request)


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


def end_fork_of(process: int) -> None:
    """End this process if it is a fork of `process`, with the current exception's exit code."""
    if os.getpid() != process:
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else error and 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
