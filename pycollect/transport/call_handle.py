"""The driver's end of a worker without shared memory: requests are remote method calls."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any, ClassVar, Protocol

from pycollect.errors import WorkerDied, result_of
from pycollect.transport.import_warnings import filters_import_warnings
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
    """Calls methods of the `WorkerHost` in another process over some transport."""

    @property
    def native(self) -> Any:
        """The process as its library represents it, for example a Ray actor handle."""

    @property
    def transport(self) -> str:
        """Name of the transport that carries calls and results."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method after all queued calls."""

    def call_unqueued(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method at once, also during a rollout; it skips the queue."""

    def process_end(self, error: Exception) -> ProcessEnd | None:
        """Return how the process ended if that caused the error of a call, else ``None``."""

    def log_of(self, pid: int | None) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to send no more results. Does not wait."""

    def kill(self) -> None:
        """End the process. Idempotent."""


class CallHandle:
    """The driver's end of a worker that is reached by remote method calls."""

    in_place: ClassVar[bool] = False
    cpu_delay: ClassVar[float] = 0.0  # unknown: the worker may be on another machine

    def __init__(self, spec: WorkerSpec, policy: SharedValue, caller: Caller) -> None:
        self.spec = spec
        self._caller = caller
        self._assigned: tuple[int, int, Any] = (0, 0, None)
        self._sent_serial = 0
        self._steps_call: Any = None
        self._alive_call: Any = None  # answered once the worker has reached the close request
        self._close_call: Any = None
        self._pid: int | None = None
        build = self.request(
            "build", filters_import_warnings(), pickled_spec(spec), policy.reference
        )
        self._calls: deque[Any] = deque([build])
        self._submitted = 0  # rollouts requested so far
        self._stopped = 0  # rollouts up to this number were asked to stop

    @property
    def native(self) -> Any:
        """The process as its library represents it, for example a Ray actor handle."""
        return self._caller.native

    @property
    def transport(self) -> str:
        """Name of the transport that carries the rollouts."""
        return self._caller.transport

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer or can no longer get one. Does not wait."""
        return bool(self._calls) and self._calls[0].done()

    @property
    def is_dead(self) -> bool:
        """Whether the worker has closed on request or its process is gone. Does not wait."""
        return self._caller.is_gone or (self._close_call is not None and self._close_call.done())

    def read_info(self) -> WorkerInfo:
        """Wait until the worker is built, and return its description."""
        info: WorkerInfo = self.answer(self._calls[0])
        self.pop()
        self._pid = info.pid
        return info

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout, together with weights that were assigned since the previous one."""
        serial, version, weights = self._assigned
        sent = serial <= self._sent_serial
        self._sent_serial = serial
        self._submitted += 1
        request_arguments = (self._submitted, request.random, request.min_steps)
        weights = None if sent else weights
        self._calls.append(self.request("collect", *request_arguments, serial, version, weights))

    def stop(self) -> None:
        """Stop the oldest rollout after its current step, by one message that skips the queue."""
        self._stop_up_to(self._submitted - len(self._calls) + 1)

    def _stop_up_to(self, number: int) -> None:
        if self._stopped < number <= self._submitted:
            self._stopped = number
            self._caller.call_unqueued("stop", number)

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Send the worker weights that apply from the next rollout it starts.

        They travel with the next queued rollout. If rollouts are queued already, or `acknowledge`
        is true, they are also sent at once.

        Returns:
            A call that completes when the worker has the weights, or ``None`` if nothing was sent
            now.
        """
        self._assigned = (serial, version, weights.reference)
        if not (self._calls or acknowledge):
            return None
        return self._caller.call_unqueued("set_weights", *self._assigned)

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Send hooks that apply from the next rollout the worker starts. They skip the queue."""
        for name, (serial, hook) in hooks.items():
            self._caller.call_unqueued("set_hook", name, serial, hook.reference)

    def rollout(self) -> Rollout:
        """Wait for the oldest rollout and return it. It stays the oldest until `pop`.

        An interrupt between the two calls loses nothing: the next call returns the same rollout.
        """
        report, buffer = self.answer(self._calls[0])
        return Rollout(unpacked_report(report), opened_slab(buffer))

    def pop(self) -> None:
        """Discard the oldest call."""
        self._calls.popleft()

    def drop_rollouts(self) -> None:
        """Discard all unread rollouts; running ones stop after their current step."""
        if self._calls:
            self._stop_up_to(self._submitted)
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of a method of `WorkerHost`."""
        return self._caller.call(method, *arguments)

    def await_answer(self, call: Any, seconds: float) -> bool:
        """Wait for the answer to a call of `request`, at most for the given seconds.

        Returns:
            Whether the call has an answer or can no longer get one.
        """
        done, _ = wait_futures([call], seconds)
        return bool(done)

    def answer(self, call: Any) -> Any:
        """Wait for a call and return its result; raise the worker's exception if it failed."""
        try:
            answer = result_of(call)
        except Exception as error:
            process_end = self._caller.process_end(error)
            if process_end is None:
                raise
            raise process_end.death_of(self.spec) from error
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.spec)
        return answer

    def steps(self) -> int | None:
        """Return the number of steps the worker has made, or ``None`` if unknown. Does not wait."""
        if self._steps_call is None:
            self._steps_call = self._caller.call_unqueued("steps")
        if not self._steps_call.done():
            return None
        call, self._steps_call = self._steps_call, None
        with contextlib.suppress(WorkerDied):  # reading the rollout raises it
            return int(self.answer(call))
        return None

    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""
        return self._caller.log_of(self._pid)

    def ask_close(self) -> bool:
        """Ask the worker to close its environments after all queued calls. Returns true."""
        self._alive_call = self.request("steps")  # its answer shows that the worker responds
        self._close_call = self.request("close")
        return True

    @property
    def is_closing(self) -> bool:
        """Whether the worker has reached the close request. Does not wait."""
        return self._alive_call is not None and self._alive_call.done()

    def kill(self) -> None:
        """End the worker's process."""
        self._calls.clear()
        self._caller.kill()
