"""Start ranks of torch.distributed through a launcher, send them requests, and end them."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import util
from typing import Any

from pycollect._core import Bell, Mailbox, Uninterrupted, shared_memory_why_not
from pycollect.errors import WorkerError, without_frames
from pycollect.transport.channel import MAX_REQUESTS, POLL_SECONDS, AnyBell, ThreadBell, wait_for
from pycollect.transport.distributed.links import Carrier, Link, LinkBrokenError, Sent
from pycollect.transport.distributed.meeting import (
    REFUSAL,
    Invitation,
    Meeting,
    RankAddress,
    this_node,
)
from pycollect.transport.distributed.rank import Call
from pycollect.transport.distributed.rendezvous import Rendezvous
from pycollect.transport.engine import Engine
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import Close, End, Request, WorkerSpec
from pycollect.transport.pickling import Shareable, SharedValue, pickled_spec
from pycollect.transport.process import ProcessEnd, WorkerProcess

_REPORT_SECONDS = 2.0  # for a launcher to report that a process is gone
_CLOSED_SECONDS = 0.5  # for a rank that has closed to end the connection itself
_END_SECONDS = 5.0  # for a thread to notice that the other process is gone


class RankLostError(Exception):
    """The connection to a rank is broken, so no result can arrive."""


class RankCaller:
    """Sends requests to the `WorkerHost` of a rank. Before the connection, they are queued here.

    Callers do not wait for the network: a thread receives results. In it, `connect` waits for the
    rank and returns the link to it. A sent message is kept in memory until a later or the same call
    is answered. The bell rings when a call is answered or can no longer be answered.
    """

    def __init__(
        self, transport: str, connect: Callable[[], Link], process: WorkerProcess, bell: AnyBell
    ) -> None:
        self.transport = transport
        self._connect = connect
        self._process = process
        self._bell = bell
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._lost: str | None = None
        self._call_count = 0
        self._unsent: list[Call] = []
        self._sent: deque[tuple[int, Sent]] = deque()
        self._futures: dict[int, Future[Any]] = {}
        self._closing: Future[Any] | None = None
        self._over, self._killed = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="pycollect-rank-receiver", daemon=True
        )
        self._thread.start()

    def call(self, request: Request, unqueued: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(request, Close):
            self._closing = future
        with Uninterrupted(), self._lock:
            if self._lost is not None:
                future.set_exception(RankLostError(self._lost))
                return future
            self._call_count += 1
            call = Call(self._call_count, unqueued, request)
            if self._link is None:
                self._unsent.append(call)
            else:
                self._post(call)
            self._futures[self._call_count] = future  # not reached if pickling failed
        return future

    def _post(self, call: Call) -> None:
        assert self._link is not None
        try:
            self._sent.append((call.number, self._link.send(call)))
        except LinkBrokenError:  # the receiving thread notices it too
            return

    def _run(self) -> None:
        """Connect, and receive results until the connection is broken."""
        link = None
        try:
            link = self._connect()
            self._begin(link)
            while True:
                self._receive(link)
        except Exception as error:  # torch raises several kinds of RuntimeError
            self._lose(str(error))
        if link is not None:
            # A rank that still runs would log a broken connection.
            self._killed.wait(_REPORT_SECONDS)
            link.close()

    def _begin(self, link: Link) -> None:
        """Send the queued calls."""
        with self._lock:
            if self._lost is not None:
                raise LinkBrokenError(self._lost)
            self._link = link
            for call in self._unsent:
                self._post(call)
            self._unsent.clear()

    def _receive(self, link: Link) -> None:
        number, answer = link.receive()
        with self._lock:
            future = self._futures.pop(number, None)
            while self._sent and self._sent[0][0] <= number:
                self._sent.popleft()
        if future is not None:  # the call may have been given up
            future.set_result(answer)
        self._bell.ring()

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = why
            futures = list(self._futures.values())
            self._futures.clear()
            self._unsent.clear()
            self._sent.clear()
        self._over.set()
        for future in futures:
            future.set_exception(RankLostError(why))
        self._bell.ring()

    @property
    def is_gone(self) -> bool:
        """Whether the process is gone or the connection is broken. Does not wait."""
        if self._lost is None and self._link is None and self._process.is_over:
            self._lose("it never connected")
        return self._lost is not None

    def process_end(self, error: BaseException) -> ProcessEnd | None:
        if not isinstance(error, RankLostError):
            return None
        cause = without_frames(error)
        # The connection may break slightly before the process ends.
        if not wait_for(self._bell, lambda: self._process.is_over, _REPORT_SECONDS):
            return ProcessEnd(f"the connection to it is broken: {error}", str(error), cause)
        end = self._process.end()
        return ProcessEnd(end.summary, f"{end.details}; {error}", cause)

    def ask_end(self) -> None:
        """Let a rank that has closed end the connection; ask another one to end its process."""
        if self._closing is not None and self._closing.done():
            self._over.wait(_CLOSED_SECONDS)
        else:
            self.call(End(), unqueued=True)

    def close(self) -> None:
        """End the connection to a process that was ended. Idempotent."""
        self._lose("it was ended")
        self._killed.set()
        link, self._link = self._link, None
        if link is not None:  # without a link, the thread may wait in vain and is not joined
            link.close()
            self._thread.join(_END_SECONDS)


class RankProcess(WorkerProcess):
    """The process of a rank; see `WorkerProcess`.

    Its launcher reports its exit. Its meeting, which is closed once the rank serves a mailbox or is
    ended, reports that it cannot share memory; then the carrier carries messages. The bell rings
    when a call is answered or can no longer be answered.
    """

    def __init__(
        self, process: WorkerProcess, meeting: Meeting, carrier: Carrier, bell: AnyBell
    ) -> None:
        self._process, self._meeting = process, meeting
        self.native = process.native
        self._carrier, self._bell = carrier, bell
        self._caller: RankCaller | None = None
        self._polled = 0.0
        self._end: ProcessEnd | None = None  # set by `kill`

    @property
    def refused(self) -> bool:
        """See `WorkerProcess`. Polls at intervals."""
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return False
        self._polled = now
        with Uninterrupted():  # otherwise a part of a message could be lost
            return self._meeting.check([REFUSAL])

    def by_calls(self) -> RankCaller:
        with Uninterrupted():  # otherwise two callers could connect to the rank
            if self._caller is None:
                carrier, meeting = self._carrier, self._meeting
                connect = partial(carrier.driver_end, meeting)  # holds no reference to the engine
                self._caller = RankCaller(carrier.name, connect, self._process, self._bell)
            return self._caller

    def watch(self, pid: int, shares_memory: bool) -> None:
        """See `WorkerProcess`. A rank that serves a mailbox needs no meeting."""
        if shares_memory:
            self._meeting.close()
            self._bell.ring_when_gone(pid)
        self._process.watch(pid, shares_memory)

    @property
    def was_ended(self) -> bool:
        """Whether `kill` was called."""
        return self._end is not None

    @property
    def is_over(self) -> bool:
        """Whether the process is gone or, if it is called, the connection to it is broken."""
        if self._end is not None:
            return True
        return self._process.is_over if self._caller is None else self._caller.is_gone

    @property
    def cpu_delay(self) -> float:
        return self._process.cpu_delay if self._caller is None else 0.0

    def end(self) -> ProcessEnd:
        return self._end or self._process.end()

    def recent_log(self) -> str:
        return self._process.recent_log()

    def kill(self) -> None:
        if self._end is None and self._caller is not None:
            self._caller.ask_end()  # its launcher may be unable to kill it directly
        self.kill_launched()
        if self._caller is not None:
            self._caller.close()

    def kill_launched(self) -> None:
        """End the process through its launcher only. Any thread may call it, even a receiver."""
        if self._end is None:
            is_over = self._process.is_over
            self._end = self._process.end() if is_over else ProcessEnd("it was ended", "")
            self._process.kill()
            self._meeting.close()


class Launcher(ABC):
    """Starts the processes of ranks."""

    def check_number(self, new: int) -> None:  # noqa: B027 (most can start any number)
        """Raise ValueError if the launcher cannot start that many more ranks."""

    @abstractmethod
    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> WorkerProcess | None:
        """Start a rank; return its process, or ``None`` if the launcher can start no more."""


class DistributedEngine(Engine):
    """Starts ranks. Each has a connection of its own to this process."""

    def __init__(
        self, launcher: Launcher, host: str, port: int, carrier: Carrier, init_timeout: float
    ) -> None:
        self._launcher = launcher
        self._carrier = carrier
        self._rendezvous = Rendezvous(host, port, init_timeout)
        self._node = this_node()
        self.bell = ThreadBell() if shared_memory_why_not() else Bell()
        self._processes: list[RankProcess] = []
        # At exit, runs before multiprocessing joins the remaining processes.
        self._leave = util.Finalize(self, _kill_all, (self._processes,), exitpriority=100)

    def leave(self) -> None:
        self._leave()
        self._rendezvous.close()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        living = sum(not process.was_ended for process in self._processes)
        self._launcher.check_number(len(options) - living)

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share; messages contain the value itself."""
        return SharedValue(value, lambda stored: stored)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start the rank of one worker; see `Engine`. The launcher gets the options."""
        pickled, bell = pickled_spec(spec), self.bell
        mailbox = addresses = None
        if bell.address is not None:
            mailbox = Mailbox(MAX_REQUESTS)
            addresses = mailbox.address, bell.address
        invitation = Invitation(self._node, os.getpid(), addresses, self._carrier)
        rank = f"{spec.index}.{spec.incarnation}"
        meeting = self._rendezvous.invite(rank, invitation)
        process = self._launcher.launch(meeting.address, f"pycollect-worker-{spec.index}", options)
        if process is None:
            text = (
                f"worker {spec.index} cannot be started: its launcher has no waiting job left; "
                "increase num_jobs"
            )
            raise WorkerError(text, spec.index, spec.incarnation, "")
        rank_process = RankProcess(process, meeting, self._carrier, bell)
        others = [other for other in self._processes if not other.was_ended]
        self._processes[:] = [*others, rank_process]
        return WorkerHandle(spec, pickled, policy, mailbox, rank_process, bell)


def _kill_all(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.kill_launched()
