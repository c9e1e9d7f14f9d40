"""Worker processes on this machine: started, asked through mailboxes, awaited, ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any, ClassVar

from pycollect._core import (
    Bell,
    Mailbox,
    Memory,
    SharedMemoryError,
    available_memory,
    shared_memory_why_not,
)
from pycollect.batch import Target
from pycollect.collectors.engine import Order, Rollout
from pycollect.collectors.parcel import pack, share, unpack
from pycollect.collectors.pickling import pickled_spec
from pycollect.collectors.process_worker import QUESTIONS, Lease, serve
from pycollect.collectors.remote_worker import ErrorReport, RolloutNote, WorkerInfo, WorkerSpec
from pycollect.errors import WorkerDied

_LOOK_SECONDS = 0.02  # how often a driver that waits looks whether its workers live
_CLOSE_SECONDS = 5.0


def _lease(target: Target) -> Lease:
    """The rows of a slab in shared memory, as another process is told of them."""
    slab = target.slab
    address = slab.memory.address
    assert address is not None, "slab: expected one in shared memory"
    return Lease(address, slab.generation, slab.placement.workers, target.order, target.row)


class ProcessEngine:
    """Starts worker processes and waits for them. They end with this process, whatever ends it.

    Raises:
        SharedMemoryError: processes cannot share memory here.
    """

    in_place: ClassVar[bool] = True

    def __init__(self) -> None:
        if why_not := shared_memory_why_not():
            raise SharedMemoryError(why_not)
        self._context = multiprocessing.get_context("spawn")
        self._bell = Bell()
        self._looked = 0.0
        self._handles: list[ProcessHandle] = []
        # Before multiprocessing, at exit, waits for processes that nobody has ended.
        self._leave = util.Finalize(self, _kill_all, (self._handles,), exitpriority=100)

    def leave(self) -> None:
        """End all processes that are left. Idempotent."""
        self._leave()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Processes share what there is."""

    def check_memory(self, needed: int) -> None:
        """Raise ValueError if that many bytes of rollouts in flight cannot be held."""
        limit, source = available_memory()
        if needed > limit:
            raise ValueError(
                f"frames_per_batch, prefetch: rollouts in flight take up to {needed} bytes, "
                f"{limit} can still be taken ({source})"
            )

    def put(self, value: Any) -> Memory:
        """Bytes, or an array of them, in shared memory."""
        return share(value)

    def start(self, spec: WorkerSpec, policy: Memory, options: Mapping[str, Any]) -> ProcessHandle:
        """Start the process of one worker, which builds its environments at once.

        Args:
            policy: the pickled policy or its factory, as `put` returned it.
            options: none are known.
        """
        mailbox = Mailbox(QUESTIONS)
        process = self._context.Process(
            target=serve,
            args=(mailbox.address, self._bell.address, os.getpid()),
            name=f"pycollect-worker-{spec.index}",
            daemon=False,  # a daemon may not have processes of its own, but environments do
        )
        process.start()
        handle = ProcessHandle(spec, policy, process, mailbox, self._bell)
        self._handles[:] = [*(other for other in self._handles if not other.ended), handle]
        return handle

    def wait_any(self, handles: Sequence[ProcessHandle], timeout: float) -> ProcessHandle | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        deadline = time.monotonic() + timeout
        while True:
            seen = self._bell.count
            dead = self._one_that_died(handles)
            if dead is not None:
                return dead
            for handle in handles:
                if handle.has_answer:
                    return handle
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._bell.wait_ring(seen, min(left, _LOOK_SECONDS))

    def _one_that_died(self, handles: Sequence[ProcessHandle]) -> ProcessHandle | None:
        """Looks every now and then, also while others ring all the time."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        return next((handle for handle in handles if handle.is_dead), None)

    def wait_closed(self, handles: Sequence[ProcessHandle]) -> None:
        """Let workers close their environments, for a few seconds at most, then end them."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        waiting = [handle for handle in handles if handle.ask_close()]
        while waiting and time.monotonic() < deadline:
            seen = self._bell.count
            waiting = [handle for handle in waiting if not handle.is_dead]
            self._bell.wait_ring(seen, _LOOK_SECONDS)
        for handle in handles:
            handle.kill()


class ProcessHandle:
    """The driver's end of one process: what was asked of it and not read yet, oldest first."""

    def __init__(
        self,
        spec: WorkerSpec,
        policy: Memory,
        process: Any,
        mailbox: Mailbox,
        bell: Bell,
    ) -> None:
        self.index = spec.index
        self.incarnation = spec.incarnation
        self.ended = False
        self._process = process
        self._mailbox = mailbox
        self._bell = bell
        self._weights: Memory | None = None
        self._taken = 0
        self._kept: dict[int, tuple[Any, ...]] = {}  # what a question needs until it is answered
        self._answers: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        question = ("build", (pickled_spec(spec), policy.address))
        self._calls: deque[int] = deque([self._ask(question, policy)])

    # What the collector asks

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        info: WorkerInfo = self._read(self._calls[0])
        self.pop()
        return info

    def submit(self, order: Order) -> None:
        """Queue one rollout."""
        assert order.target is not None, "every order names rows where workers write in place"
        question = ("write", (order.random, _lease(order.target)))
        self._calls.append(self._ask(question, order.target.slab))

    def stop(self) -> None:
        """The oldest rollout is to end after its current step. Does not wait."""
        if self._calls:
            self._mailbox.stop(self._calls[0])

    def assign(self, edition: int, version: int, weights: Memory, acknowledge: bool) -> None:
        """Give the worker weights for the next rollout that it starts, also one that is queued.

        It has them when this returns, so that there is nothing to wait for.
        """
        self._mailbox.publish(pickle.dumps((edition, version, weights.address)))
        self._weights = weights

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits.

        An interrupt between the two loses nothing: the same rollout is given again.
        """
        note: RolloutNote = self._read(self._calls[0])
        return Rollout(self.index, self.incarnation, note, None)

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
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""
        return self._ask((method, arguments))

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

    def last_words(self) -> str:
        """Nothing: what a process writes is seen where this one's output is."""
        return ""

    def ask_close(self) -> bool:
        """Ask it to close its environments and to end; return whether it can still do so."""
        if self.ended or self.is_dead:
            return False
        self._mailbox.stop(self._mailbox.asked)
        with contextlib.suppress(Exception):  # it has died, or does not answer any more
            self._ask(("close", ()), wait=False)
            return True
        return False

    def kill(self) -> None:
        """End the process and all that its environments started. Idempotent."""
        if self.ended:
            return
        self.ended = True
        _kill_group(self._process.pid)
        self._process.join()
        self._process.close()
        self._calls.clear()
        self._kept.clear()
        self._answers.clear()
        self._weights = None

    # What it has answered

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""
        self._take_answers()
        return bool(self._calls) and self._calls[0] in self._answers

    @property
    def is_dead(self) -> bool:
        """Whether the process is gone; it stays there for `kill` to be sure of its group."""
        if self.ended:
            return True
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # somebody else has taken note of its end
            return True

    def _ask(self, question: tuple[str, tuple[Any, ...]], *kept: Any, wait: bool = True) -> int:
        message, memory = pack(question, Mailbox.ASK_BYTES)
        self._take_answers()
        while wait and self._mailbox.asked - self._taken >= QUESTIONS:  # dropped ones, for the most
            self._wait_more()
        number = self._mailbox.ask(message)
        self._kept[number] = (*kept, memory)
        return number

    def _read(self, number: int) -> Any:
        while number not in self._answers:
            self._wait_more()
        answer = self._answers[number]
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.index, self.incarnation)
        if isinstance(answer, WorkerDied):
            raise answer
        return answer

    def _wait_more(self) -> None:
        """Wait until there is one more answer; WorkerDied if none can come any more."""
        while True:
            seen = self._bell.count
            if self._take_answers():
                return
            if not self._bell.wait_ring(seen, _LOOK_SECONDS) and self.is_dead:
                if self._take_answers():  # its last, in between
                    return
                raise self._death()

    def _take_answers(self) -> bool:
        """Take what was answered; return whether there was anything."""
        before = self._taken
        while not self.ended and self._mailbox.has_answer:
            message = self._mailbox.take_answer()
            self._taken += 1
            self._kept.pop(self._taken, None)
            if self._taken in self._unwanted:
                self._unwanted.remove(self._taken)
                continue
            try:
                self._answers[self._taken] = unpack(message)
            except SharedMemoryError:  # it died just now, its memory with it
                self._answers[self._taken] = self._death()
        return self._taken > before

    def _forget(self, number: int) -> None:
        self._answers.pop(number, None)

    def _death(self) -> WorkerDied:
        text = f"worker {self.index} died: {_end_of(self._process.pid)}"
        return WorkerDied(text, self.index, self.incarnation, text)


def _end_of(pid: int | None) -> str:
    """How a process that was not waited for yet has ended."""
    with contextlib.suppress(ChildProcessError):
        assert pid is not None
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None and end.si_code == os.CLD_EXITED:
            return f"its process {pid} ended with exit code {end.si_status}"
        if end is not None:
            return f"its process {pid} was ended by {signal.Signals(end.si_status).name}"
    return f"its process {pid} is gone"


def _kill_group(pid: int) -> None:
    """Kill a child that was not waited for yet, and the group that it leads."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the number may be another process's by now
        return
    with contextlib.suppress(ProcessLookupError):  # it does not lead one yet
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_all(handles: Sequence[ProcessHandle]) -> None:
    for handle in handles:
        handle.kill()
