"""The driver's end of a worker: sends requests, and reads their answers in order."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import cloudpickle

from pycollect._core import Mailbox, SharedMemoryError, Uninterrupted
from pycollect.data.compression import PackedBuffer
from pycollect.errors import (
    LimitError,
    filters_import_warnings,
    is_interrupt,
    limits_named,
    without_frames,
)
from pycollect.transport.channel import (
    AnyBell,
    CallChannel,
    Channel,
    MailboxChannel,
    SentWeights,
    wait_for,
)
from pycollect.transport.messages import (
    Build,
    Close,
    Collect,
    GetSteps,
    Request,
    Resize,
    Rollout,
    RolloutRequest,
    Run,
    WorkerInfo,
    WorkerSpec,
    unpacked_report,
)
from pycollect.transport.pickling import ErrorReport, SharedValue, pickled_spec
from pycollect.transport.process import ProcessEnd, WorkerProcess


class WorkerHandle:
    """The driver's end of one worker, from the start of its process to its end.

    If the worker turns out not to share memory with this process, it is asked again to build,
    through calls. Rollouts are a queue, whose oldest one is read first. The rows of a dropped
    request stay in use until the worker has answered it.

    Methods that wait raise WorkerDied if the process is gone. An exception in the worker is raised
    unchanged.

    Args:
        mailbox: Unused mailbox, whose address the worker has. ``None`` if this process cannot share
            memory.
        process: The worker's process. It is killed if this raises.
        bell: Bell that rings when there may be an answer.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        pickled: bytes,
        policy: SharedValue,
        mailbox: Mailbox | None,
        process: WorkerProcess,
        bell: AnyBell,
    ) -> None:
        self.spec = spec
        self.process = process
        self.ended = False
        self._policy = policy
        self._bell = bell
        self._is_to_close = False
        self._failure: Exception | None = None
        self._publishing = threading.Lock()  # any thread may send weights
        self._weights: SentWeights | None = None
        self._hooks: dict[str, tuple[int, SharedValue]] = {}
        self._channel: Channel
        try:
            if mailbox is None:
                self._use_calls()
            else:
                self._use(MailboxChannel(mailbox), pickled)
        except BaseException:
            process.kill()
            raise

    def _use(self, channel: Channel, spec: bytes) -> None:
        """Ask the worker to build through a channel, which is used from now on."""
        build = Build(filters_import_warnings(), spec, channel.form_of(self._policy))
        with Uninterrupted():  # if it fails, the caller may try again
            memory = channel.send(build)
            self._channel = channel
            self._asked, self._taken = 1, 0
            self._calls: deque[int] = deque([1])
            self._kept: dict[int, Any] = {1: (self._policy, memory)}  # of unanswered requests
            self._answers: dict[int, Any] = {}
            self._unwanted: set[int] = set()

    def _use_calls(self) -> None:
        own = self.spec if self._policy.elsewhere is None else self.spec.with_own_policy
        self._use(CallChannel(self.process.by_calls()), pickled_spec(own))

    def _settle(self) -> None:
        """Use calls from now on if the worker has reported that it cannot share memory."""
        if not self._is_refused or self._failure is not None:
            return
        try:
            with limits_named(f"the connection to {self.spec.name}"):
                self._use_calls()
        except Exception as error:
            if isinstance(error, LimitError) or is_interrupt(error):  # the caller may try again
                raise
            self._failure = without_frames(error)  # `built` raises it

    @property
    def _is_refused(self) -> bool:
        """Whether the worker has refused the mailbox, and was not asked through calls yet."""
        unbuilt = self._taken == 0 and not (self.ended or self._is_to_close)
        return unbuilt and self.in_place and self.process.refused

    @property
    def in_place(self) -> bool:
        """Whether the worker shares memory with this process and writes into its requests' rows."""
        return self._channel.in_place

    @property
    def transport(self) -> str:
        return self._channel.transport

    @property
    def native(self) -> Any:
        return self.process.native

    @property
    def cpu_delay(self) -> float:
        return self.process.cpu_delay

    def built(self) -> WorkerInfo:
        """Wait until the worker is built; return its description, or raise its exception."""
        wait_for(self._bell, lambda: self.has_answer or self.is_dead)
        if self._failure is not None:
            raise without_frames(self._failure)
        info: WorkerInfo = self._read(self._calls[0])
        self.pop()
        self.process.watch(info.pid, self.in_place)
        return info

    # Rollouts

    def submit(self, request: RolloutRequest) -> None:
        """Queue one rollout."""
        rows = request.rows if self.in_place else None
        address = None if rows is None else rows.address
        collect = Collect(
            self._asked + 1, request.random, request.min_steps, request.version, address
        )
        self._calls.append(self._ask(collect, rows))

    def stop(self) -> None:
        """Stop the oldest rollout after its current step. Does not wait. May be repeated."""
        if self._calls:
            self._channel.stop(self._calls[0])

    def rollout(self) -> Rollout:
        """Wait for the oldest rollout and return it. It stays the oldest until `pop`.

        An interrupt between the two calls loses nothing: the next call returns the same rollout.
        """
        report, buffer = self._read(self._calls[0])
        opened = buffer.open() if isinstance(buffer, PackedBuffer) else buffer
        return Rollout(unpacked_report(report), opened)

    def pop(self) -> None:
        """Discard the oldest rollout."""
        self._answers.pop(self._calls.popleft(), None)

    def drop_rollouts(self) -> None:
        """Discard all unread rollouts; running ones stop after their current step."""
        if self._calls:
            self._channel.stop(self._calls[-1])
        for number in self._calls:
            if number not in self._answers:
                self._unwanted.add(number)
            self._answers.pop(number, None)
        self._calls.clear()

    # Weights and hooks

    def assign(self, serial: int, version: int, weights: SharedValue, acknowledge: bool) -> Any:
        """Send packed weights that apply from the worker's next rollout, even a queued one.

        Of all serial numbers, which grow with every call, the highest one received counts. Rollouts
        with these weights carry `version`. If `acknowledge`, the weights are sent now in any case.
        Return a call to wait for with `answer`, or ``None`` if there is nothing to wait for.
        """
        with self._publishing:
            if self._weights is not None and serial <= self._weights[0]:
                return None  # another thread has sent newer weights
            self._weights = serial, version, weights
            return self._channel.publish(self._weights, self._hooks, acknowledge)

    def set_hooks(self, hooks: Mapping[str, tuple[int, SharedValue]]) -> None:
        """Send hooks that apply from the next rollout the worker starts, even a queued one."""
        with self._publishing:
            self._hooks = {**self._hooks, **hooks}
            self._channel.publish(self._weights, self._hooks)

    # Other requests

    def run(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Queue ``function(worker, *arguments)``; return its number, for `answer`."""
        return self.run_pickled(cloudpickle.dumps((function, arguments)))

    def run_pickled(self, call: bytes) -> int:
        """Queue a function and its further arguments, which cloudpickle has pickled as a tuple."""
        return self._ask(Run(call))

    def resize(self, frames: int) -> int:
        """Queue a change of the number of frames per rollout. The answer is a WorkerInfo."""
        return self._ask(Resize(frames))

    def ping(self) -> int:
        """Queue a request whose answer shows that the worker is alive."""
        return self._ask(GetSteps())

    def await_answer(self, number: int, seconds: float) -> bool:
        """Wait for the answer to a request; return whether it has come or can no longer come."""

        def is_settled() -> bool:
            self._take_answers()
            return number in self._answers or self.is_dead

        return wait_for(self._bell, is_settled, seconds)

    def answer(self, call: int | Future[Any] | None) -> Any:
        """Wait for a request, or for a call of `assign`, and return its result."""
        if call is None:
            return None
        if isinstance(call, Future):
            return self._checked(call.exception() or call.result())
        answer = self._read(call)
        del self._answers[call]
        return answer

    def steps(self) -> int | None:
        """Return the number of steps the worker has made, or ``None`` if unknown. Does not wait."""
        return self._channel.steps()

    def recent_log(self) -> str:
        return self.process.recent_log()

    # The end

    def ask_close(self) -> bool:
        """Ask the worker to close its environments and end; return whether it can still do so."""
        if self._is_refused or self._failure is not None or self.is_dead:
            return False
        self._is_to_close = True
        with contextlib.suppress(Exception):  # the worker has died or no longer answers
            self._channel.stop(self._asked)
            self._ask(GetSteps(), wait=False)  # its answer shows that the worker responds
            self._ask(Close(), wait=False)
            return True
        return False

    @property
    def is_closing(self) -> bool:
        """Whether the worker has reached the close request. Does not wait."""
        self._take_answers()
        return self._is_to_close and self._taken >= self._asked - 1

    def kill(self) -> None:
        """End the process and all processes that its environments started. Idempotent."""
        if self.ended:
            return
        with Uninterrupted():  # otherwise the process could be left behind
            self.ended = True
            self.process.kill()
            self._calls.clear()
            self._kept.clear()
            self._answers.clear()
            self._weights = None
            self._hooks.clear()

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from the worker. Does not wait."""
        if self.ended or self.process.is_over:
            return True
        if self.in_place or not self._is_to_close:
            return False
        self._take_answers()  # a process that is reached by calls may stay after the last answer
        return self._taken == self._asked

    # Answers

    @property
    def has_answer(self) -> bool:
        """Whether the oldest rollout, or the start, has an answer. Does not wait."""
        self._settle()
        self._take_answers()
        return self._failure is not None or (bool(self._calls) and self._calls[0] in self._answers)

    @property
    def has_pending_requests(self) -> bool:
        """Whether a worker that shares memory is built and has unanswered requests.

        Takes no answer.
        """
        is_built = self._taken > 0 and not (self.ended or self._is_to_close)
        return is_built and self._channel.is_pending

    def _ask(self, request: Request, *kept: Any, wait: bool = True) -> int:
        self._take_answers()
        most = self._channel.max_requests
        while wait and self._asked - self._taken >= most:  # mostly dropped requests
            self._wait_more()
        with Uninterrupted():
            memory = self._channel.send(request)
            self._asked += 1
            self._kept[self._asked] = (*kept, memory)
            return self._asked

    def _read(self, number: int) -> Any:
        while number not in self._answers:
            self._wait_more()
        return self._checked(self._answers[number])

    def _checked(self, answer: Any) -> Any:
        """Return an answer, or raise the exception that it stands for."""
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.spec)
        if isinstance(answer, BaseException):
            end = self.process.by_calls().process_end(answer)
            raise without_frames(answer) if end is None else end.death_of(self.spec)
        if isinstance(answer, ProcessEnd):
            raise answer.death_of(self.spec)
        return answer

    def _wait_more(self) -> None:
        """Wait for one more answer; raise WorkerDied if none can come."""
        wait_for(self._bell, lambda: self._channel.has_answer or self.is_dead)
        if not self._take_answers():
            raise self._end().death_of(self.spec)

    def _take_answers(self) -> bool:
        """Take all answers that have arrived; return whether there was one."""
        if self.ended or not self._channel.has_answer:
            return False
        with Uninterrupted():  # an answer can be taken only once, so an interrupt must not lose it
            while self._channel.has_answer:
                self._take_answer()
        return True

    def _take_answer(self) -> None:
        self._taken += 1
        self._kept.pop(self._taken, None)
        if self._taken in self._unwanted:
            self._unwanted.remove(self._taken)
            self._channel.drop_answer()
            return
        try:
            self._answers[self._taken] = self._channel.take_answer()
        except SharedMemoryError:  # the worker has just died and its memory is gone
            self._answers[self._taken] = self._end()

    def _end(self) -> ProcessEnd:
        end = self.process.end()
        return end if self._taken else end.before_build(self.process.recent_log())
