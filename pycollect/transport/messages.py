"""Requests to a worker, and its answers: reports of rollouts, and of exceptions."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt

from pycollect._core import Slab
from pycollect.data.compression import PackedBuffer
from pycollect.data.slabs import RowsAddress, SlabRows, leaf_sizes
from pycollect.errors import WorkerError
from pycollect.transport.spec import WorkerSpec
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds

Buffer = npt.NDArray[np.uint8]

_COMPRESS = "compress"  # name of the argument, for errors


class Build(NamedTuple):
    """Make the environments and call the policy once as a test. The answer is a WorkerInfo.

    Attributes:
        filters_warnings: Whether to hide import warnings; see `imports`.
        spec: Pickled WorkerSpec.
        policy: Pickled policy or policy factory, in the form of the channel.
    """

    filters_warnings: bool
    spec: bytes
    policy: Any


class Collect(NamedTuple):
    """Collect one rollout. The answer is its plain report, and its bytes if it has no rows.

    Attributes:
        number: Number of the request, which `Stop` refers to.
        random: Whether to take random actions instead of the policy's.
        min_steps: Minimum number of steps, even if the rollout is stopped.
        rows: Rows to write into. ``None``: the bytes are part of the answer, compressed if
            configured.
        weights: Newer weights, which a channel without published weights sends with the request.
    """

    number: int
    random: bool
    min_steps: int
    rows: RowsAddress | None = None
    serial: int = 0
    version: int = 0
    weights: Any = None


class Run(NamedTuple):
    """Call ``function(worker, *arguments)``. The answer is its pickled result.

    Attributes:
        call: Pickled tuple of the function and the arguments.
    """

    call: bytes


class Resize(NamedTuple):
    """Set the number of frames per rollout. The answer is the new WorkerInfo."""

    frames: int


class GetSteps(NamedTuple):
    """Answer with a number that grows while the worker makes progress."""


class Close(NamedTuple):
    """Close the environments. No request follows."""


class Stop(NamedTuple):
    """Stop the rollouts of all requests up to this number after their current step."""

    number: int


class SetWeights(NamedTuple):
    """Use these weights from the next rollout on, if they are the newest by their serial number."""

    serial: int
    version: int
    weights: Any


class SetHook(NamedTuple):
    """Use this pickled hook from the next rollout on."""

    name: str
    serial: int
    hook: Any


class End(NamedTuple):
    """Kill the worker's process at once."""


Queued: TypeAlias = Build | Collect | Run | Resize | GetSteps | Close
"""A request that is answered after all earlier ones."""

Request: TypeAlias = Queued | Stop | SetWeights | SetHook | End
"""A request to a worker. Only calls send the last four, which skip the queue, as `GetSteps` may."""


@dataclass(frozen=True)
class RolloutRequest:
    """A request for one rollout.

    Attributes:
        random: Whether to take random actions instead of the policy's.
        rows: Rows that the worker writes into. They stay in use until the rollout arrives, even if
            the request is dropped or the process ends. ``None``: the rollout arrives as bytes and
            gets its rows then.
        min_steps: Minimum number of steps, even if the rollout is stopped.
        version: Policy version at the time of the request. The worker does not receive it.
    """

    random: bool
    rows: SlabRows | None = None
    min_steps: int = 1
    version: int = 0


@dataclass(frozen=True)
class Rollout:
    """A rollout that has arrived: its report and its bytes.

    Attributes:
        buffer: Read-only bytes; ``None`` if the worker wrote into the rows of its request.
    """

    report: RolloutReport
    buffer: Buffer | None


def plain_report(report: RolloutReport) -> tuple[Any, ...]:
    """Return a report in the form in which it is sent: a plain tuple.

    Pickling classes, once per rollout, takes ten times as long.

    Raises:
        TypeError: An extra does not pickle; the error names it.
    """
    packed = (report.extras, report.generators)
    return (
        *report[:3],
        tuple(report.seconds),
        report.stepped,
        report.slow_paths,
        *(None if lazy is None else lazy.pickled for lazy in packed),
        report.sources,
        dict(report.lost),
        report.restarts,
    )


def unpacked_report(plain: tuple[Any, ...]) -> RolloutReport:
    """Return the report from the tuple of `plain_report`.

    The generator states stay pickled, because they are rarely read.
    """
    frames, version, episodes, seconds, stepped, slow_paths, extras, generators, *of_nest = plain
    return RolloutReport(
        frames,
        version,
        episodes,
        WorkerSeconds(*seconds),
        stepped,
        slow_paths,
        None if extras is None else Lazy(extras),
        None if generators is None else Lazy(generators),
        *of_nest,
    )


def packed_slab(slab: Slab) -> PackedBuffer:
    """Compress a slab's bytes, leaf by leaf."""
    return PackedBuffer.of(slab.array(), leaf_sizes(slab), _COMPRESS)


def opened_slab(buffer: Buffer | PackedBuffer) -> Buffer:
    """Return a rollout's bytes, decompressed if necessary."""
    return buffer.open(_COMPRESS) if isinstance(buffer, PackedBuffer) else buffer


@dataclass(frozen=True)
class ErrorReport:
    """An exception that is sent to the caller.

    Attributes:
        pickled: The pickled exception, or ``None`` if it does not survive pickling.
    """

    pickled: bytes | None
    text: str
    remote_traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Return the report of the exception that is being handled."""
        _explain_missing_name(error)
        text = f"{type(error).__name__}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:  # its __reduce__ or __init__ may raise anything
            pickled = None
        return cls(pickled, text, traceback.format_exc())

    @property
    def original(self) -> BaseException:
        """The raised exception, or a RuntimeError with its text if it cannot be unpickled."""
        error = self._loaded() or RuntimeError(self.text)
        error.__cause__ = RuntimeError(f"raised in another process:\n{self.remote_traceback}")
        return error

    def _loaded(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:  # its class exists only in the other process
            return None
        return error

    def rebuild(self, spec: WorkerSpec) -> BaseException:
        """Return the exception with a WorkerError as its cause, or that WorkerError itself."""
        failure = WorkerError(
            f"{spec.name} raised {self.text}\n{self.remote_traceback}",
            spec.index,
            spec.incarnation,
            self.remote_traceback,
        )
        error = self._loaded()
        if error is None:
            return failure
        error.__cause__ = failure
        return error


def _explain_missing_name(error: BaseException) -> None:
    """Explain a NameError that was raised in a function pickled without its module."""
    if type(error) is not NameError or error.__traceback__ is None:
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    if module is None or vars(module) is not frame.f_globals:
        error.args = (
            f"{error}: the class or function that uses this name is defined in the script or "
            "inside a function, so it was pickled without the name. Define it at the top level "
            "of a module that workers can import, or import the name inside the method",
        )
