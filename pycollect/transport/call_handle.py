"""The driver's end of a worker that shares no memory with it: asked by calls of its methods."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any, ClassVar, Protocol

from pycollect.errors import WorkerDied, result_of
from pycollect.transport.import_warnings import are_filtered
from pycollect.transport.messages import (
    ErrorReport,
    Rollout,
    RolloutRequest,
    WorkerInfo,
    WorkerSpec,
    opened_slab,
    pickled_spec,
    unpacked_report,
)
from pycollect.transport.process import ProcessEnd
from pycollect.transport.shared_value import SharedValue


class Caller(Protocol):
    """Calls methods of the RemoteWorker in another process, whatever carries them there."""

    @property
    def native(self) -> Any:
        """The process as its library knows it."""

    @property
    def transport(self) -> str:
        """What carries calls and answers, in words."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call one of its methods, behind those that are queued."""

    def call_beside(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method that may run beside a rollout: past the queue."""

    def loss(self, error: Exception) -> ProcessEnd | None:
        """How its process ended, where that is why a call raised this; None: it is not."""

    def log_of(self, pid: int | None) -> str:
        """The last lines that its process logged, as far as they can be had."""

    @property
    def is_gone(self) -> bool:
        """Whether no answer can come any more, as far as is known. Does not wait."""

    def kill(self) -> None:
        """End its process. Idempotent."""


class CallHandle:
    """The driver's end of a worker that is asked by calls, and answers the same way."""

    in_place: ClassVar[bool] = False
    cpu_delay: ClassVar[float] = 0.0  # it may be on another machine

    def __init__(self, spec: WorkerSpec, policy: SharedValue, caller: Caller) -> None:
        self.spec = spec
        self._caller = caller
        self._assigned: tuple[int, int, Any] = (0, 0, None)
        self._sent_serial = 0
        self._steps_call: Any = None
        self._hearing: Any = None
        self._closing: Any = None
        self._pid: int | None = None
        build = self.request("build", are_filtered(), pickled_spec(spec), policy.reference)
        self._calls: deque[Any] = deque([build])
        self._asked = 0  # rollouts
        self._stopped = 0  # up to which

    @property
    def native(self) -> Any:
        """The process as its library knows it."""
        return self._caller.native

    @property
    def transport(self) -> str:
        """What carries its rollouts, in words."""
        return self._caller.transport

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer, or can have none any more. Does not wait."""
        return bool(self._calls) and self._calls[0].done()

    @property
    def is_dead(self) -> bool:
        """Whether it was asked to close, and has, or cannot any more. Does not wait."""
        return self._caller.is_gone or (self._closing is not None and self._closing.done())

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        info: WorkerInfo = self.answer(self._calls[0])
        self.pop()
        self._pid = info.pid
        return info

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""
        serial, version, weights = self._assigned
        sent = serial <= self._sent_serial
        self._sent_serial = serial
        self._asked += 1
        asked = (self._asked, request.random, request.min_steps)
        weights = None if sent else weights
        self._calls.append(self.request("collect", *asked, serial, version, weights))

    def stop(self) -> None:
        """The oldest rollout is to end after its current step: one message, past the queue."""
        self._stop_up_to(self._asked - len(self._calls) + 1)

    def _stop_up_to(self, number: int) -> None:
        if self._stopped < number <= self._asked:
            self._stopped = number
            self._caller.call_beside("stop", number)

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts.

        They travel with the next rollout that is queued here. If some are queued already, or with
        `acknowledge`, they are also sent past these.

        Returns:
            What to wait for until the worker has them, or None if nothing was sent now.
        """
        self._assigned = (serial, version, weights.reference)
        if not (self._calls or acknowledge):
            return None
        return self._caller.call_beside("set_weights", *self._assigned)

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Give the worker hooks for the next rollout that it starts: past its queue."""
        for name, (serial, hook) in hooks.items():
            self._caller.call_beside("set_hook", name, serial, hook.reference)

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits.

        An interrupt between the two loses nothing: the same rollout is given again.
        """
        report, buffer = self.answer(self._calls[0])
        return Rollout(unpacked_report(report), opened_slab(buffer))

    def pop(self) -> None:
        """The oldest call is done with."""
        self._calls.popleft()

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read; those that run end after their current step."""
        if self._calls:
            self._stop_up_to(self._asked)
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""
        return self._caller.call(method, *arguments)

    def await_answer(self, call: Any, seconds: float) -> bool:
        """Sleep until a call of `request` has an answer, or can have none; return whether it is so.

        It ends after that time.
        """
        done, _ = wait_futures([call], seconds)
        return bool(done)

    def answer(self, call: Any) -> Any:
        """What a call returned; what went wrong in the worker is raised. Waits."""
        try:
            answer = result_of(call)
        except Exception as error:
            loss = self._caller.loss(error)
            if loss is None:
                raise
            raise loss.death_of(self.spec) from error
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.spec)
        return answer

    def steps(self) -> int | None:
        """Steps of the worker's life so far, None if no answer came yet. Does not wait."""
        if self._steps_call is None:
            self._steps_call = self._caller.call_beside("steps")
        if not self._steps_call.done():
            return None
        call, self._steps_call = self._steps_call, None
        with contextlib.suppress(WorkerDied):  # who waits for its rollout will hear of it
            return int(self.answer(call))
        return None

    def recent_log(self) -> str:
        """The last lines that its process logged, as far as they can be had."""
        return self._caller.log_of(self._pid)

    def ask_close(self) -> bool:
        """Ask it to close its environments, behind what is queued."""
        self._hearing = self.request("steps")  # whose answer says that it hears
        self._closing = self.request("close")
        return True

    @property
    def is_closing(self) -> bool:
        """Whether it has heard that it is to close. Does not wait."""
        return self._hearing is not None and self._hearing.done()

    def kill(self) -> None:
        """End its process."""
        self._calls.clear()
        self._caller.kill()
