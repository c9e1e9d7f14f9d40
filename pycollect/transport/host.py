"""The worker's end of a connection: builds the worker, runs rollouts and answers calls."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import cloudpickle
import torch

from pycollect._core import RolloutControl, SharedNumber, Slab, SlabPool, merge_freed_memory
from pycollect.data.compression import PackedBuffer
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.layout import Key
from pycollect.data.slabs import SlabRows, make_pool, to_tensordict
from pycollect.data.weights import WeightSlab
from pycollect.envs.registrations import register
from pycollect.errors import kept_warnings
from pycollect.transport.hosted import SingleWorker
from pycollect.transport.import_warnings import filter_import_warnings
from pycollect.transport.messages import (
    Buffer,
    ErrorReport,
    Hosted,
    WorkerInfo,
    WorkerSpec,
    packed_slab,
    plain_report,
    unpickle,
)
from pycollect.transport.unguarded import become_worker, building
from pycollect.worker.report import Lazy

T = TypeVar("T")


class WorkerHost:
    """Serves a worker to calls from another process.

    One thread must call all methods, so that environments see only that thread. Any thread may call
    `set_weights`, `set_hook`, `steps` and `stop` at any time.
    """

    def __init__(self, inherited: tuple[Any, ...] = ()) -> None:
        become_worker()
        self._inherited = inherited
        self._worker: Hosted | None = None
        self._compresses = False
        self._warnings: list[str] = []
        self._pool: SlabPool | None = None  # for rollouts that are sent as messages
        self._weight_slab: WeightSlab | None = None
        self._lock = threading.Lock()
        self._new_weights: tuple[int, int, Buffer | None] = (0, 0, None)
        self._weights_serial = 0
        self._version = 0
        self._new_hooks: dict[str, tuple[int, Buffer]] = {}
        self._hooks_taken: dict[str, int] = {}
        self._stop = SharedNumber()  # rollouts up to this number end after their current step
        self._moves = SharedNumber()  # grows with each step, and while waiting for a remote policy

    def build(self, filters_warnings: bool, spec: bytes, policy: bytes) -> WorkerInfo | ErrorReport:
        """Make the environments and call the policy once as a test.

        Args:
            filters_warnings: Whether to hide import warnings; see `import_warnings`.
            spec: Pickled WorkerSpec.
            policy: Pickled policy or policy factory.
        """
        filter_import_warnings(filters_warnings)
        with building():
            return answer_of(lambda: self._build(spec, policy))

    def _build(self, spec_bytes: bytes, policy_bytes: bytes) -> WorkerInfo:
        # torch seeds a new process with a constant, so all workers would draw the same numbers.
        torch.seed()
        merge_freed_memory()
        spec: WorkerSpec = unpickle(spec_bytes, self._inherited)
        register(spec.registered)
        if spec.hides_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch reads it on first use of CUDA
        if spec.options.num_threads is not None:
            torch.set_num_threads(spec.options.num_threads)
        self._compresses = spec.options.compress
        make_worker: Callable[[WorkerSpec, bytes], Hosted] = spec.team or SingleWorker
        with kept_warnings() as self._warnings:
            worker = make_worker(spec, policy_bytes)
        self._worker = worker
        self._weight_slab = WeightSlab(worker.weights) if worker.weights else None
        return self._info()

    def _info(self) -> WorkerInfo:
        worker = self._built
        return WorkerInfo(
            leaves=worker.leaves,
            num_envs=worker.env.num_envs,
            num_seeds=worker.env.num_seeds,
            batch_size=worker.env.batch_size,
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

    def collect(
        self,
        number: int,
        random: bool,
        min_steps: int,
        serial: int,
        version: int,
        weights: Buffer | None,
    ) -> tuple[tuple[Any, ...], Buffer | PackedBuffer] | ErrorReport:
        """Collect one rollout; return its plain report and its bytes, compressed if configured.

        Args:
            number: Number of the requested rollout, counted from 1; see `stop`.
            random: Take random actions instead of the policy's.
            min_steps: Minimum number of steps, even if the rollout is stopped.
            serial: Serial number of the newest weights that the caller knows.
            version: Policy version of these weights.
            weights: The newest weights; ``None`` if they were sent before or never changed.
        """
        self.set_weights(serial, version, weights)
        control = RolloutControl(self._stop, number, min_steps, self._moves)
        return answer_of(lambda: self._sendable(*self._collect(random, control)))

    def _sendable(
        self, report: tuple[Any, ...], slab: Slab
    ) -> tuple[tuple[Any, ...], Buffer | PackedBuffer]:
        """Return a rollout in the form in which it is sent."""
        return report, packed_slab(slab) if self._compresses else slab.array()

    def _collect(self, random: bool, control: RolloutControl) -> tuple[tuple[Any, ...], Slab]:
        """Collect a rollout into a slab of its own."""
        if self._pool is None:
            self._pool = make_pool(self._built.placement, 2)
        slab = self._pool.acquire()
        report = self._collect_into(SlabRows(slab), random, control)
        return report, slab

    def stop(self, number: int) -> None:
        """Stop rollouts of `collect` up to this number after their current step."""
        with self._lock:
            self._stop.value = max(self._stop.value, number)

    def _collect_into(
        self, rows: SlabRows, random: bool, control: RolloutControl
    ) -> tuple[Any, ...]:
        worker = self._built
        self._take_weights(worker)
        self._take_hooks(worker, self._new_hooks)
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
            tensors = rows.tensors(worker.env.batch_size, worker.leaves.keys)
            shape = [*worker.env.batch_size, tensors[TRAJ_IDS].shape[-1]]
            hook(to_tensordict(tensors, shape))

    def set_weights(self, serial: int, version: int, weights: Buffer | None) -> None:
        """Store weights for the next rollout if they are newer than the stored ones."""
        with self._lock:
            if weights is not None and serial > self._new_weights[0]:
                self._new_weights = (serial, version, weights)

    def _take_weights(self, worker: Hosted) -> None:
        with self._lock:
            serial, version, buffer = self._new_weights
        if buffer is not None and serial > self._weights_serial:
            if self._weight_slab is not None:
                worker.load_weights(self._weight_slab.unpack(buffer))
            self._weights_serial, self._version = serial, version

    def set_hook(self, name: str, serial: int, pickled: Buffer) -> None:
        """Store a hook for the next rollout."""
        with self._lock:
            self._new_hooks = {**self._new_hooks, name: (serial, pickled)}

    def _take_hooks(self, worker: Hosted, hooks: Mapping[str, tuple[int, Buffer]]) -> None:
        """Install the hooks that are newer than the installed ones."""
        for name, (serial, pickled) in hooks.items():
            if serial > self._hooks_taken.get(name, 0):
                worker.set_hook(name, cloudpickle.loads(pickled))
                self._hooks_taken[name] = serial

    def set_seed(self, seeds: Sequence[int], root: int) -> ErrorReport | None:
        """Seed and reset all environments and generators."""
        return answer_of(lambda: self._built.set_seed(seeds, root))

    def resume(self, state: Any, seeds: Sequence[int]) -> ErrorReport | None:
        """Reset all environments and restore the state of the random generators."""
        return answer_of(lambda: self._built.resume(state, seeds))

    def resize(self, frames: int) -> WorkerInfo | ErrorReport:
        """Set the number of frames per rollout."""
        return answer_of(lambda: self._resize(frames))

    def _resize(self, frames: int) -> WorkerInfo:
        self._built.set_share(frames)
        self._pool = None
        return self._info()

    def reset(self) -> ErrorReport | None:
        """Reset all environments."""
        return answer_of(lambda: self._built.reset())

    def run(self, call: bytes) -> bytes | ErrorReport:
        """Call a function with the worker; return its pickled result.

        Args:
            call: Pickled function and its further arguments.
        """
        return answer_of(lambda: self._run(call))

    def _run(self, call: bytes) -> bytes:
        function, arguments = cloudpickle.loads(call)
        self._built.version = self._version
        data: bytes = cloudpickle.dumps(function(self._built, *arguments))
        return data

    def steps(self) -> int:
        """Return a number that grows while the worker makes progress. May be called at any time."""
        return 0 if self._worker is None else self._worker.stepped + self._moves.value

    @property
    def _built(self) -> Hosted:
        assert self._worker is not None
        return self._worker

    def close(self) -> None:
        """Close the environments."""
        if self._worker is not None:
            self._worker.close()


def _copy_to_slab(on_device: Mapping[Key, torch.Tensor], worker: Hosted, rows: SlabRows) -> None:
    """Copy tensors of a rollout into the slab, and clear the cells after its end."""
    if not on_device:
        return
    lead = worker.env.batch_size
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


def answer_by(worker: WorkerHost, method: str, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a host's method, or a report of its exception."""
    return answer_of(lambda: getattr(worker, method)(*arguments))


def end_fork_of(process: int) -> None:
    """End this process if it is a fork of `process`, with the current exception's exit code."""
    if os.getpid() != process:
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else error and 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
