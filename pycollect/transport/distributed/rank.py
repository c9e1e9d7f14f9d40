"""The process of a rank: its start, its handling of Ctrl-C, and the calls that it serves."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from pycollect._core import WorkerMailbox, adopt_orphans, kill_descendants
from pycollect.transport.channel import CallEnd
from pycollect.transport.distributed.links import Link, LinkBrokenError, Sent
from pycollect.transport.distributed.meeting import (
    REFUSAL,
    Invitation,
    RankAddress,
    meet,
    this_node,
)
from pycollect.transport.host import WorkerHost, answer_all, shared_mailbox
from pycollect.transport.messages import Close, End, Request
from pycollect.transport.pickling import ErrorReport
from pycollect.transport.worker_process import end_worker, log_to

_SIGINT = [signal.SIGINT]


@contextmanager
def block_sigint_in_children() -> Iterator[None]:
    """Block SIGINT in processes that this thread starts in the block, and in their descendants."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGINT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_sigint() -> None:
    """Unblock SIGINT in the main thread of such a process, and discard a pending one."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT)
    signal.signal(signal.SIGINT, usual)


class Call(NamedTuple):
    """One call that is sent to a rank."""

    number: int  # number of the call, which its answer repeats
    unqueued: bool  # whether the call may run during a rollout and skips the queue
    request: Request


def answer_calls(link: Link) -> None:
    """Answer all calls to a worker, from `Build` until `Close`.

    If the driver is gone, this process and all that its environments started are killed.
    """
    host = WorkerHost(CallEnd())
    answers = _Answers(link)
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    closed = threading.Event()
    arguments = (link, host, answers, calls, closed)
    threading.Thread(target=_receive, args=arguments, daemon=True).start()
    while not closed.is_set():
        number, _, request = calls.get()
        answer = host.answer(request)
        if isinstance(request, Close):
            closed.set()
        answers.send(number, answer)
    answers.wait()


def _receive(
    link: Link,
    host: WorkerHost,
    answers: _Answers,
    calls: queue.SimpleQueue[Call],
    closed: threading.Event,
) -> None:
    """Receive calls; run unqueued ones at once and queue the others."""
    while True:
        try:
            call: Call = link.receive()
        except LinkBrokenError:  # the driver is gone
            if closed.is_set():
                return
            _end()
        if isinstance(call.request, End):
            _end()
        if call.unqueued:
            answers.send(call.number, host.answer(call.request))
        else:
            calls.put(call)


def _end() -> None:
    """Kill this process, its group and its descendants."""
    kill_descendants()
    os.killpg(0, signal.SIGKILL)


class _Answers:
    """Sends answers. A rollout is collected while the previous one is being sent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._last: Sent | None = None

    def send(self, number: int, answer: Any) -> None:
        """Send an answer, once the driver has the previous one."""
        with self._lock:
            self._wait()
            try:
                self._last = self._link.send((number, answer))
            except LinkBrokenError:
                raise
            except Exception as error:  # the answer does not pickle
                self._last = self._link.send((number, ErrorReport.of(error)))

    def wait(self) -> None:
        """Wait until the driver has all answers."""
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        if self._last is not None:
            self._last()
            self._last = None


def run_child(address: RankAddress, log: int) -> None:
    """Run a rank that the driver started itself; the main function of the process."""
    log_to(log)
    run_rank(address)
    end_worker()


def run_rank(address: RankAddress) -> None:
    """Serve the driver until it closes the rank. If the driver ends, this process is killed.

    The process leads a group of its own from now on, with all that its environments start.
    """
    adopt_orphans()
    with contextlib.suppress(OSError):  # the process leads a group or a session already
        os.setpgid(0, 0)
    unblock_sigint()
    meeting, invitation = meet(address)
    served = _mailbox(invitation)
    if isinstance(served, WorkerMailbox):
        meeting.close()
        answer_all(served)
        return
    meeting.publish(REFUSAL, served)
    with closing(invitation.carrier.rank_end(meeting)) as link:
        answer_calls(link)


def _mailbox(invitation: Invitation) -> WorkerMailbox | str:
    """Return the rank's end of the driver's mailbox, or why memory cannot be shared."""
    if invitation.mailbox is None:
        return "the driver shares memory with no other process"
    if this_node() != invitation.node:
        return "it is on another node"
    return shared_mailbox(*invitation.mailbox, invitation.driver)
