"""Launchers of ranks: processes of this machine, submitit jobs, executors."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pycollect.errors import warn_user
from pycollect.transport.descendants import end_worker, kill_tree
from pycollect.transport.distributed.address import RankAddress
from pycollect.transport.distributed.rank import block_sigint_in_children, run_child, run_rank
from pycollect.transport.process import OtherProcess, ProcessEnd
from pycollect.transport.processes.child import ChildMonitor, log_to
from pycollect.transport.processes.engine import start_child
from pycollect.transport.unguarded import check_not_importing
from pycollect.transport.waiting import POLL_SECONDS


class ChildRank(ChildMonitor):
    """Watches a child that is a rank."""

    def watch(self, pid: int) -> None:
        """Its number is known from its start."""


class ChildLauncher:
    """Starts ranks as children of this process.

    Args:
        start_method: see :func:`start_child`.
    """

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method

    def check_number(self, new: int) -> None:
        """There is no end of them."""

    def launch(self, address: RankAddress, name: str, options: Mapping[str, Any]) -> ChildRank:
        """Start one.

        Args:
            options: none are known.
        """
        return ChildRank(*start_child(run_child, (address,), name, self._start_method))


DEFAULT_SLURM_CONF: dict[str, Any] = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
"""Of the jobs that collect."""

DEBUG = "debug"
"""submitit's cluster that runs a job where, and only when, it is asked for its result."""

DEFAULT_FOLDER = "log_test"
"""Where jobs and the driver find each other's files, which both must see."""


def import_submitit() -> Any:
    """Import submitit; raise ImportError with the install command if it is missing."""
    try:
        import submitit
    except ImportError as error:
        raise ImportError(
            "launcher: 'submitit' needs the package submitit; run `pip install submitit`, or pass "
            "launcher='mp' to start processes on this machine"
        ) from error
    return submitit


def check_job_parameters(name: str, value: Any) -> Mapping[str, Any]:
    """Check the parameters of jobs, as far as possible without submitit.

    Raises:
        TypeError: The value is not a dict with string keys, or a parameter has a wrong type.
        ValueError: A job would have several nodes or tasks.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict, got {value!r}")
    folder = value.get("folder", DEFAULT_FOLDER)
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{name}: expected a path for 'folder', got {folder!r}")
    for key, own in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{name}: expected strings as parameter names, got {key!r}")
        if key.endswith("setup") and (isinstance(own, str) or not isinstance(own, Sequence)):
            raise TypeError(f"{name}: expected a list of commands for {key!r}, got {own!r}")
        if key.endswith(("nodes", "tasks_per_node")) and own not in (None, 1):
            raise ValueError(
                f"{name}: expected 1 for {key!r}, because each job is one rank, got {own!r}"
            )
    return value


def executor_of(name: str, parameters: Mapping[str, Any] | None) -> Any:
    """The executor that submits jobs.

    Args:
        name: of the argument.
        parameters: the executor's, checked; None: DEFAULT_SLURM_CONF. Two of them are ours:
            "folder", of its files, and "cluster", None for what is found here, "slurm", "local" or
        "debug".

    Raises:
        ImportError: submitit is not installed.
        ValueError: a parameter that it does not know, or a cluster that cannot be used.
    """
    submitit = import_submitit()
    own = dict(DEFAULT_SLURM_CONF if parameters is None else parameters)
    folder = Path(own.pop("folder", DEFAULT_FOLDER)).absolute()
    cluster = own.pop("cluster", None)
    try:
        if cluster != DEBUG:  # which writes no file
            folder = private_folder(folder)
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**own)
    except (ValueError, NameError, TypeError, AssertionError, RuntimeError, OSError) as error:
        raise ValueError(f"{name}: {error}; got {dict(parameters or own)}") from error
    return executor


def private_folder(folder: Path) -> Path:
    """Create a subfolder that only this user can open.

    Job files hold the secret of a run, and run as code when they are unpickled. Submitit creates
    them with modes that follow the umask. Submitit's placeholders, such as "%j", stay the last
    parts of the path.
    """
    fixed = import_submitit().core.utils.JobPaths.get_first_id_independent_folder(folder)
    for part in reversed([fixed, *fixed.parents]):
        part.mkdir(mode=0o700, exist_ok=True)
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            warn_user(
                f"folder: every user can replace job files in {str(part)!r}, and these files run "
                "as code; choose a folder that only you can write to"
            )
    return Path(tempfile.mkdtemp(prefix="pycollect-", dir=fixed)) / folder.relative_to(fixed)


def is_of_this_machine(executor: Any) -> bool:
    """Whether its jobs are processes of this machine."""
    return executor.cluster in ("local", DEBUG)


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
    with block_sigint_in_children():
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
            time.sleep(POLL_SECONDS)

    def recent_log(self) -> str:
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
            time.sleep(POLL_SECONDS)
