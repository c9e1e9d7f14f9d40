"""Ranks that are jobs of a cluster: the launcher "submitit"."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pycollect.engines.descendants import end_worker, kill_tree
from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.children import ChildRank
from pycollect.engines.distributed.executors import DEBUG
from pycollect.engines.distributed.interrupts import unheard_by_children
from pycollect.engines.distributed.rank import run_rank
from pycollect.engines.other_process import OtherProcess
from pycollect.engines.process_end import ProcessEnd
from pycollect.engines.processes.log import log_to
from pycollect.engines.processes.start import start_child
from pycollect.engines.unguarded import check_not_importing
from pycollect.engines.waiting import LOOK_SECONDS

_LOG_CHARACTERS = 2000
_END_SECONDS = 2.0  # in which a cancelled job on this machine ends by itself
_ASK_SECONDS = 0.5


class JobLauncher:
    """Submits each rank as a job of its own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def check_number(self, new: int) -> None:
        """There is no end of them."""

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> JobMonitor | ChildRank:
        """Submit one.

        Args:
            options: none are known.
        """
        if self._executor.cluster == DEBUG:
            return run_beside(self._executor, name, run_rank, address)
        return submit(self._executor, run_rank, address)


def run_beside(
    executor: Any, name: str, function: Callable[..., Any], *arguments: Any
) -> ChildRank:
    """Submit a job of the cluster "debug", and have a child ask for its result; what watches it.

    Args:
        name: of the child.
    """
    job = executor.submit(function, *arguments)
    return ChildRank(*start_child(_ask_for_result, (job,), name, "forkserver"))


def _ask_for_result(job: Any, log: int) -> None:
    """The main function of such a child.

    Args:
        log: the descriptor of what is to be its standard error.
    """
    log_to(log)
    job.result()
    end_worker()


def submit(executor: Any, function: Callable[..., Any], *arguments: Any) -> JobMonitor:
    """Submit a job of another cluster; what watches it."""
    check_not_importing()
    if executor.cluster != "local":
        return JobMonitor(executor.submit(function, *arguments))
    with unheard_by_children():
        return LocalJobMonitor(executor.submit(function, *arguments))


class JobWatch:
    """Tells whether a job has ended: by its process, where that is on this machine, else by asking.

    Args:
        has_ended: asks whoever knows of the job.
        seconds: from one such question to the next.
    """

    cpu_delay: ClassVar[float] = 0.0  # its process is not known before it is built

    def __init__(self, has_ended: Callable[[], bool], seconds: float) -> None:
        self._has_ended, self._seconds = has_ended, seconds
        self._process: OtherProcess | None = None
        self._looked = 0.0
        self._over = False

    def watch(self, pid: int) -> None:
        """Its process is on this machine, and has that number."""
        self._process = OtherProcess(pid)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended. Looks now and then; does not wait."""
        if self._process is not None and self._process.is_gone:
            return True
        now = time.monotonic()
        if not self._over and now - self._looked >= self._seconds:
            self._looked = now
            self._over = self._has_ended()
        return self._over


class JobMonitor(JobWatch):
    """Watches a job that its executor knows."""

    def __init__(self, job: Any) -> None:
        super().__init__(lambda: bool(job.done()), _ASK_SECONDS)
        self.native = job

    def end(self) -> ProcessEnd:
        """How it ended, as far as its executor knows by now."""
        job = self.native
        if job.done():
            end = f"its job {job.job_id} has ended ({job.state})"
        else:  # it has not heard yet
            pid = self._process and self._process.pid
            end = f"the process {pid} of its job {job.job_id} is gone"
        return ProcessEnd(end, end)

    def await_end(self, seconds: float) -> None:
        """Give it that time to end by itself."""
        deadline = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        with contextlib.suppress(OSError):
            return str(self.native.stderr() or "")[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """Cancel the job. On this machine its process, and what that started, is gone then."""
        with contextlib.suppress(OSError):  # it is gone already
            self.native.cancel(check=False)
        if self._process is not None:
            self._process.wait_gone(_END_SECONDS)
            self._process.kill_all()


class LocalJobMonitor(JobMonitor):
    """Watches a job of this machine: a process that runs it, and its controller, a child of ours.

    To cancel it is to interrupt the controller, which it tells the terminal of.
    """

    def kill(self) -> None:
        """End both, and what they started; they are gone then."""
        if self._process is not None:
            self._process.kill_all()
        if not self.native.done():  # while it is not, the number is its own
            kill_tree(int(self.native.job_id))
        while not self.native.done():
            time.sleep(LOOK_SECONDS)
