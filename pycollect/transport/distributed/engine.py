"""Start ranks of torch.distributed through a launcher, wait for them, and end them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, Protocol

from pycollect._core import Bell, Mailbox, shared_memory_why_not
from pycollect.errors import WorkerError
from pycollect.transport.bells import POLL_SECONDS, AnyBell, ThreadBell
from pycollect.transport.channel import MAX_REQUESTS
from pycollect.transport.distributed.address import Invitation, RankAddress, this_node
from pycollect.transport.distributed.caller import RankCaller
from pycollect.transport.distributed.links import Carrier
from pycollect.transport.distributed.meeting import REFUSAL, Meeting
from pycollect.transport.distributed.rendezvous import Rendezvous
from pycollect.transport.engine import check_available
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.pickling import pickled_spec
from pycollect.transport.process import LaunchedProcess, ProcessEnd
from pycollect.transport.shared_value import Shareable, SharedValue
from pycollect.transport.spec import WorkerSpec


class RankProcess:
    """The process of a rank; see `WorkerProcess`.

    Its launcher reports its exit, and its meeting that it cannot share memory.

    Args:
        process: The process, as its launcher sees it.
        meeting: Meeting with the rank. It is closed once the rank serves a mailbox or is ended.
        carrier: Carrier of messages to a rank that shares no memory with this process.
        bell: Bell to ring when a call is answered or can no longer be answered.
    """

    def __init__(
        self, process: LaunchedProcess, meeting: Meeting, carrier: Carrier, bell: AnyBell
    ) -> None:
        self._process, self._meeting = process, meeting
        self._carrier, self._bell = carrier, bell
        self._caller: RankCaller | None = None
        self._polled = 0.0
        self._end: ProcessEnd | None = None  # set by `kill`

    @property
    def native(self) -> Any:
        """The process as its launcher represents it."""
        return self._process.native

    @property
    def refused(self) -> bool:
        """See `WorkerProcess`. Polls at intervals."""
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return False
        self._polled = now
        return self._meeting.check([REFUSAL])

    def by_calls(self) -> RankCaller:
        """See `WorkerProcess`."""
        if self._caller is None:
            carrier, meeting = self._carrier, self._meeting
            connect = partial(carrier.driver_end, meeting)  # holds no reference to the engine
            self._caller = RankCaller(carrier.name, connect, self._process, self._bell)
        return self._caller

    def watch(self, pid: int, shares_memory: bool) -> None:
        """See `WorkerProcess`. A rank that serves a mailbox needs no meeting."""
        if shares_memory:
            self._meeting.close()
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
        """Seconds for which the process was ready to run but had no CPU; 0.0 if unknown."""
        return self._process.cpu_delay if self._caller is None else 0.0

    def end(self) -> ProcessEnd:
        """Return how the process ended."""
        return self._end or self._process.end()

    def recent_log(self) -> str:
        """Return the last lines that the process logged."""
        return self._process.recent_log()

    def kill(self) -> None:
        """End the process and its environments' processes, and wait for the end. Idempotent."""
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


class Launcher(Protocol):
    """Starts the processes of ranks."""

    def check_number(self, new: int) -> None:
        """Raise ValueError if the launcher cannot start that many more ranks."""

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> LaunchedProcess | None:
        """Start a rank; return its process, or ``None`` if the launcher can start no more."""


class DistributedEngine:
    """Starts ranks. Each has a connection of its own to this process.

    Args:
        launcher: Launcher of the ranks.
        host: Interface of the :class:`Rendezvous`.
        port: Port of the rendezvous.
        carrier: Carrier of messages to ranks that share no memory with this process.
        init_timeout: Seconds within which a rank must have connected.

    Raises:
        ValueError: The rendezvous cannot listen at that address.
    """

    def __init__(
        self, launcher: Launcher, host: str, port: int, carrier: Carrier, init_timeout: float
    ) -> None:
        self._launcher = launcher
        self._carrier = carrier
        self._rendezvous = Rendezvous(host, port, init_timeout)
        self._node = this_node()
        self.bell: AnyBell = ThreadBell() if shared_memory_why_not() else Bell()
        self._processes: list[RankProcess] = []
        # At exit, runs before multiprocessing joins the remaining processes.
        self._leave = util.Finalize(self, _kill_all, (self._processes,), exitpriority=100)

    def leave(self) -> None:
        """End all remaining processes, and free the port. Idempotent."""
        self._leave()
        self._rendezvous.close()

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the launcher cannot start the additional ranks."""
        living = sum(not process.was_ended for process in self._processes)
        self._launcher.check_number(len(options) - living)

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if rollouts in flight of that many bytes do not fit into memory."""
        check_available(needed)

    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share; messages contain the value itself."""
        return SharedValue(value, lambda stored: stored)

    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start the rank of one worker, which builds its environments at once.

        Args:
            spec: Specification of the worker.
            policy: Pickled policy or policy factory.
            options: Options of the launcher.
        """
        bell = self.bell
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
        try:
            return WorkerHandle(spec, pickled_spec(spec), policy, mailbox, rank_process, bell)
        except BaseException:
            rank_process.kill()
            raise


def _kill_all(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.kill_launched()
