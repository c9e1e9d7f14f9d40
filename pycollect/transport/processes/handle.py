"""The driver's end of workers that share memory with it: asked through mailboxes, awaited."""

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
    """Watches the process that has a mailbox's other end, and ends it."""

    @property
    def native(self) -> Any:
        """The process as its library knows it."""

    @property
    def is_over(self) -> bool:
        """Whether it is gone, or answers nothing more. Does not wait."""

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it was ready to run and had no CPU; 0.0 where that is not known."""

    def end(self) -> ProcessEnd:
        """How it ended, once it is over."""

    def recent_log(self) -> str:
        """The last lines that it logged, as far as they can be had."""

    def kill(self) -> None:
        """End it, and all that its environments started; it is gone then. Idempotent."""


class MailboxHandle:
    """The driver's end of one worker: what was asked of it and not read yet, oldest first.

    It is the worker's handle from its start to its end.

    Args:
        pickled: the spec, as `MailboxHost.attach` takes it.
        policy: the pickled policy or its factory.
        mailbox: the one that the worker was told of, not used yet.
        bell: that the worker rings.
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
        self._publishing = threading.Lock()  # weights may come from any thread
        self._weights: tuple[int, int, Memory | None] = (0, 0, None)
        self._hooks: dict[str, tuple[int, Memory]] = {}
        self._taken = 0
        self._kept: dict[int, tuple[Any, ...]] = {}  # what a question needs until it is answered
        self._answers: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        question = ("attach", (filters_import_warnings(), pickled, policy.memory.address))
        self._calls: deque[int] = deque([self._ask(question, policy.memory)])

    # What the collector asks

    @property
    def native(self) -> Any:
        """The process as its library knows it."""
        return self.monitor.native

    @property
    def cpu_delay(self) -> float:
        """Seconds for which it was ready to run and had no CPU. Does not wait."""
        return self.monitor.cpu_delay

    def built(self) -> tuple[WorkerInfo, MailboxHandle]:
        """What the worker is, and its handle from now on: this one. Waits."""
        return self.read_info(), self

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        info: WorkerInfo = self._read(self._calls[0])
        self.pop()
        return info

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout."""
        address = request.rows and request.rows.address
        question = ("write", (request.random, request.min_steps, address))
        self._calls.append(self._ask(question, request.rows))

    def stop(self) -> None:
        """The oldest rollout is to end after its current step. Does not wait; may come again."""
        if self._calls:
            self._mailbox.stop(self._calls[0])

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> None:
        """Give the worker weights for the next rollout that it starts, also one that is queued.

        It has them when this returns, so that there is nothing to wait for.
        """
        with self._publishing:
            if serial > self._weights[0]:  # another thread may have been faster
                self._publish((serial, version, weights.memory), self._hooks)

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Give the worker hooks for the next rollout that it starts, also one that is queued.

        Args:
            hooks: by name, a serial number that grows, and the hook, pickled.
        """
        new = {name: (serial, hook.memory) for name, (serial, hook) in hooks.items()}
        with self._publishing:
            self._publish(self._weights, {**self._hooks, **new})

    def _publish(
        self, weights: tuple[int, int, Memory | None], hooks: dict[str, tuple[int, Memory]]
    ) -> None:
        """One message tells all that is new; what it names stays until the next one is there."""
        serial, version, packed = weights
        places = [(name, (number, hook.address)) for name, (number, hook) in hooks.items()]
        told = (serial, version, None if packed is None else packed.address, places)
        self._mailbox.publish(pickle.dumps(told))
        self._weights, self._hooks = weights, hooks

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits.

        An interrupt between the two loses nothing: the same rollout is given again.
        """
        report, buffer = self._read(self._calls[0])
        return Rollout(unpacked_report(report), buffer)

    def pop(self) -> None:
        """The oldest rollout is done with."""
        self._forget(self._calls.popleft())

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read; those that run end after their current step."""
        if self._calls:
            self._mailbox.stop(self._calls[-1])
        for number in self._calls:
            if number not in self._answers:
                self._unwanted.add(number)
            self._forget(number)
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> int:
        """Queue a call of one of WorkerHost's methods behind what is queued already."""
        return self._ask((method, arguments))

    def await_answer(self, call: int, seconds: float) -> bool:
        """Sleep until a call of `request` has an answer, or can have none; return whether it is so.

        It ends after that time.
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
        """What a call of `request` returned. Waits."""
        if call is None:
            return None
        answer = self._read(call)
        self._forget(call)
        return answer

    def steps(self) -> int:
        """Steps of its environments so far. Does not wait."""
        return self._mailbox.steps

    def recent_log(self) -> str:
        """The last lines that its process logged, as far as they can be had."""
        return self.monitor.recent_log()

    def ask_close(self) -> bool:
        """Ask it to close its environments and to end; return whether it can still do so."""
        if self.is_dead:
            return False
        self._is_to_close = True
        self._mailbox.stop(self._mailbox.asked)
        with contextlib.suppress(Exception):  # it has died, or does not answer any more
            self._ask(("steps", ()), wait=False)  # whose answer says that it hears
            self._ask(("close", ()), wait=False)
            return True
        return False

    @property
    def is_closing(self) -> bool:
        """Whether it has heard that it is to close. Does not wait."""
        self._take_answers()
        return self._is_to_close and self._taken == self._mailbox.asked - 1

    def kill(self) -> None:
        """End the process and all that its environments started. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.monitor.kill()
        self._calls.clear()
        self._kept.clear()
        self._answers.clear()
        self._weights = (0, 0, None)
        self._hooks.clear()

    # What it has answered

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""
        self._take_answers()
        return bool(self._calls) and self._calls[0] in self._answers

    @property
    def has_pending_requests(self) -> bool:
        """Whether it is built, is not to end, and was asked for what it has not answered yet."""
        if self._taken == 0 or self.ended or self._is_to_close:
            return False
        return self._mailbox.answered < self._mailbox.asked

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from it. Does not wait."""
        return self.ended or self.monitor.is_over

    def _ask(self, question: tuple[str, tuple[Any, ...]], *kept: Any, wait: bool = True) -> int:
        message, memory = pack(question, Mailbox.ASK_BYTES)
        self._take_answers()
        while (
            wait and self._mailbox.asked - self._taken >= MAX_REQUESTS
        ):  # dropped ones, for the most
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
        """Wait until there is one more answer; WorkerDied if none can come any more."""
        while True:
            seen = self._bell.count
            if self._take_answers():
                return
            if not self._bell.wait_ring(seen, POLL_SECONDS) and self.is_dead:
                if self._take_answers():  # its last, in between
                    return
                raise self._end().death_of(self.spec)

    def _take_answers(self) -> bool:
        """Take all answers that are there; return whether there was one."""
        if self.ended or not self._mailbox.has_answer:
            return False
        with Uninterrupted():  # an answer is taken once, and must not be lost then
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
        except SharedMemoryError:  # it died just now, its memory with it
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
