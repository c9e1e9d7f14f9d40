"""The driver's end of a worker that shares memory: sends requests through a mailbox."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from pycollect._core import Mailbox, Memory, SharedMemoryError, Uninterrupted
from pycollect.transport.import_warnings import filters_import_warnings
from pycollect.transport.messages import (
    ErrorReport,
    Rollout,
    RolloutRequest,
    WorkerInfo,
    WorkerSpec,
    unpacked_report,
)
from pycollect.transport.process import ProcessEnd
from pycollect.transport.processes.serve import MAX_REQUESTS
from pycollect.transport.shared_value import SharedValue, pack, unpack
from pycollect.transport.waiting import POLL_SECONDS, AnyBell


class ProcessMonitor(Protocol):
    """Monitors the process at the other end of a mailbox, and ends it."""

    @property
    def native(self) -> Any:
        """The process as its library represents it."""

    @property
    def is_over(self) -> bool:
        """Whether the process is gone or sends no more answers. Does not wait."""

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU; 0.0 if unknown."""

    def end(self) -> ProcessEnd:
        """Return how the process ended, once it is over."""

    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""

    def kill(self) -> None:
        """End the process and its environments' processes, and wait for the end. Idempotent."""


class MailboxHandle:
    """The driver's end of one worker: a queue of requests that are not read yet, oldest first.

    It is the worker's handle from its start to its end.

    Args:
        spec: Specification of the worker.
        pickled: The pickled specification, for `MailboxHost.attach`.
        policy: Pickled policy or policy factory.
        mailbox: Unused mailbox, whose address the worker has.
        bell: Bell that the worker rings.
        monitor: Monitor of the worker's process.
    """

    in_place: ClassVar[bool] = True
    transport: ClassVar[str] = "shared memory"

    def __init__(
        self,
        spec: WorkerSpec,
        pickled: bytes,
        policy: SharedValue,
        mailbox: Mailbox,
        bell: AnyBell,
        monitor: ProcessMonitor,
    ) -> None:
        self.spec = spec
        self.ended = False
        self._is_to_close = False
        self.monitor = monitor
        self._mailbox = mailbox
        self._bell = bell
        self._publishing = threading.Lock()  # any thread may send weights
        self._weights: tuple[int, int, Memory | None] = (0, 0, None)
        self._hooks: dict[str, tuple[int, Memory]] = {}
        self._taken = 0
        self._kept: dict[int, tuple[Any, ...]] = {}  # memory of unanswered requests
        self._answers: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        request = ("attach", (filters_import_warnings(), pickled, policy.memory.address))
        self._calls: deque[int] = deque([self._ask(request, policy.memory)])

    @property
    def native(self) -> Any:
        """The process as its library represents it."""
        return self.monitor.native

    @property
    def cpu_delay(self) -> float:
        """Seconds for which the process was ready to run but had no CPU. Does not wait."""
        return self.monitor.cpu_delay

    def built(self) -> tuple[WorkerInfo, MailboxHandle]:
        """Wait until the worker is built; return its description and this handle."""
        return self.read_info(), self

    def read_info(self) -> WorkerInfo:
        """Wait until the worker is built, and return its description."""
        info: WorkerInfo = self._read(self._calls[0])
        self.pop()
        return info

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout."""
        address = request.rows and request.rows.address
        message = ("write", (request.random, request.min_steps, address))
        self._calls.append(self._ask(message, request.rows))

    def stop(self) -> None:
        """Stop the oldest rollout after its current step. Does not wait. May be repeated."""
        if self._calls:
            self._mailbox.stop(self._calls[0])

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> None:
        """Publish weights that apply from the next rollout the worker starts, even a queued one.

        The worker has them when this returns, so there is nothing to wait for.
        """
        with self._publishing:
            if serial > self._weights[0]:  # another thread may have published newer weights
                self._publish((serial, version, weights.memory), self._hooks)

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Publish hooks that apply from the next rollout the worker starts, even a queued one.

        Args:
            hooks: A growing serial number and a pickled hook for each name.
        """
        new = {name: (serial, hook.memory) for name, (serial, hook) in hooks.items()}
        with self._publishing:
            self._publish(self._weights, {**self._hooks, **new})

    def _publish(
        self, weights: tuple[int, int, Memory | None], hooks: dict[str, tuple[int, Memory]]
    ) -> None:
        """Publish all weights and hooks in one message; keep their memory until the next one."""
        serial, version, packed = weights
        places = [(name, (number, hook.address)) for name, (number, hook) in hooks.items()]
        message = (serial, version, None if packed is None else packed.address, places)
        self._mailbox.publish(pickle.dumps(message))
        self._weights, self._hooks = weights, hooks

    def rollout(self) -> Rollout:
        """Wait for the oldest rollout and return it. It stays the oldest until `pop`.

        An interrupt between the two calls loses nothing: the next call returns the same rollout.
        """
        report, buffer = self._read(self._calls[0])
        return Rollout(unpacked_report(report), buffer)

    def pop(self) -> None:
        """Discard the oldest rollout."""
        self._forget(self._calls.popleft())

    def drop_rollouts(self) -> None:
        """Discard all unread rollouts; running ones stop after their current step."""
        if self._calls:
            self._mailbox.stop(self._calls[-1])
        for number in self._calls:
            if number not in self._answers:
                self._unwanted.add(number)
            self._forget(number)
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> int:
        """Queue a call of a method of `WorkerHost`."""
        return self._ask((method, arguments))

    def await_answer(self, call: int, seconds: float) -> bool:
        """Wait for the answer to a call of `request`, at most for the given seconds.

        Returns:
            Whether the call has an answer or can no longer get one.
        """
        deadline = time.monotonic() + seconds
        while True:
            seen = self._bell.count
            self._take_answers()
            if call in self._answers or self.is_dead:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._bell.wait_ring(seen, min(left, POLL_SECONDS))

    def answer(self, call: int | None) -> Any:
        """Wait for a call of `request` and return its result."""
        if call is None:
            return None
        answer = self._read(call)
        self._forget(call)
        return answer

    def steps(self) -> int:
        """Return the number of steps the worker has made. Does not wait."""
        return self._mailbox.steps

    def recent_log(self) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""
        return self.monitor.recent_log()

    def ask_close(self) -> bool:
        """Ask the worker to close its environments and end; return whether it can still do so."""
        if self.is_dead:
            return False
        self._is_to_close = True
        self._mailbox.stop(self._mailbox.asked)
        with contextlib.suppress(Exception):  # the worker has died or no longer answers
            self._ask(("steps", ()), wait=False)  # its answer shows that the worker responds
            self._ask(("close", ()), wait=False)
            return True
        return False

    @property
    def is_closing(self) -> bool:
        """Whether the worker has reached the close request. Does not wait."""
        self._take_answers()
        return self._is_to_close and self._taken == self._mailbox.asked - 1

    def kill(self) -> None:
        """End the process and all processes that its environments started. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.monitor.kill()
        self._calls.clear()
        self._kept.clear()
        self._answers.clear()
        self._weights = (0, 0, None)
        self._hooks.clear()

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""
        self._take_answers()
        return bool(self._calls) and self._calls[0] in self._answers

    @property
    def has_pending_requests(self) -> bool:
        """Whether the worker is built, is not ending, and has unanswered requests."""
        if self._taken == 0 or self.ended or self._is_to_close:
            return False
        return self._mailbox.answered < self._mailbox.asked

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from the worker. Does not wait."""
        return self.ended or self.monitor.is_over

    def _ask(self, request: tuple[str, tuple[Any, ...]], *kept: Any, wait: bool = True) -> int:
        message, memory = pack(request, Mailbox.ASK_BYTES)
        self._take_answers()
        while wait and self._mailbox.asked - self._taken >= MAX_REQUESTS:  # mostly dropped requests
            self._wait_more()
        with Uninterrupted():
            number = self._mailbox.ask(message)
            self._kept[number] = (*kept, memory)
        return number

    def _read(self, number: int) -> Any:
        while number not in self._answers:
            self._wait_more()
        answer = self._answers[number]
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.spec)
        if isinstance(answer, ProcessEnd):
            raise answer.death_of(self.spec)
        return answer

    def _wait_more(self) -> None:
        """Wait for one more answer; raise WorkerDied if none can come."""
        while True:
            seen = self._bell.count
            if self._take_answers():
                return
            if not self._bell.wait_ring(seen, POLL_SECONDS) and self.is_dead:
                if self._take_answers():  # the last answer may have come meanwhile
                    return
                raise self._end().death_of(self.spec)

    def _take_answers(self) -> bool:
        """Take all answers from the mailbox; return whether there was one."""
        if self.ended or not self._mailbox.has_answer:
            return False
        with Uninterrupted():  # an answer can be taken only once, so an interrupt must not lose it
            while self._mailbox.has_answer:
                self._take_answer()
        return True

    def _take_answer(self) -> None:
        message = self._mailbox.take_answer()
        self._taken += 1
        self._kept.pop(self._taken, None)
        if self._taken in self._unwanted:
            self._unwanted.remove(self._taken)
            return
        try:
            self._answers[self._taken] = unpack(message)
        except SharedMemoryError:  # the worker has just died and its memory is gone
            self._answers[self._taken] = self._end()

    def _forget(self, number: int) -> None:
        self._answers.pop(number, None)

    def _end(self) -> ProcessEnd:
        """Return how the process ended, with a hint if the worker was never built."""
        end = self.monitor.end()
        if (
            self._taken == 0
            and end.summary.endswith("exit code 1")
            and not self.monitor.recent_log()
        ):
            summary = (
                f"{end.summary} before it was built. Workers import the program's script, so "
                'create the collector under if __name__ == "__main__":'
            )
            end = replace(end, summary=summary)
        return end
