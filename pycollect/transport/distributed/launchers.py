"""Launchers of ranks: child processes, submitit jobs and other executors."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycollect.errors import LimitError, warn_user
from pycollect.transport.channel import POLL_SECONDS
from pycollect.transport.distributed.engine import Launcher
from pycollect.transport.distributed.meeting import RankAddress
from pycollect.transport.distributed.rank import block_sigint_in_children, run_child, run_rank
from pycollect.transport.process import OtherProcess, ProcessEnd, WorkerProcess
from pycollect.transport.processes.child import ChildProcess
from pycollect.transport.processes.engine import start_child
from pycollect.transport.worker_process import check_not_importing, end_worker, kill_tree, log_to


class ChildLauncher(Launcher):
    """Starts ranks as children of this process."""

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method

    def launch(self, address: RankAddress, name: str, options: Mapping[str, Any]) -> ChildProcess:
        """Start a rank; see `Launcher`. Children have no options."""
        return start_child(run_child, (address,), name, self._start_method)


DEFAULT_SLURM_CONF: dict[str, Any] = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
"""Default parameters of the jobs that collect."""

DEBUG = "debug"
"""Cluster of submitit that runs a job in the process that asks for its result."""

DEFAULT_FOLDER = "log_test"
"""Default folder of job files, which the jobs and the driver must both see."""


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
    """Check the parameters of jobs, as far as possible without submitit."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict, got {value!r}")
    folder = value.get("folder", DEFAULT_FOLDER)
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{name}: expected a path for 'folder', got {folder!r}")
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{name}: expected strings as parameter names, got {key!r}")
        if key.endswith("setup") and (isinstance(item, str) or not isinstance(item, Sequence)):
            raise TypeError(f"{name}: expected a list of commands for {key!r}, got {item!r}")
        if key.endswith(("nodes", "tasks_per_node")) and item not in (None, 1):
            raise ValueError(
                f"{name}: expected 1 for {key!r}, because each job is one rank, got {item!r}"
            )
    return value


def executor_of(name: str, parameters: Mapping[str, Any] | None) -> Any:
    """Return the executor that submits jobs.

    Args:
        parameters: Checked parameters of the executor; ``None`` means DEFAULT_SLURM_CONF. Two of
            them are pycollect's: "folder", for the executor's files, and "cluster", which is
            "slurm", "local", "debug" or ``None`` for the cluster that submitit finds.
    """
    submitit = import_submitit()
    remaining = dict(DEFAULT_SLURM_CONF if parameters is None else parameters)
    folder = Path(remaining.pop("folder", DEFAULT_FOLDER)).absolute()
    cluster = remaining.pop("cluster", None)
    try:
        if cluster != DEBUG:  # "debug" writes no files
            folder = private_folder(folder)
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**remaining)
    except (ValueError, NameError, TypeError, AssertionError, RuntimeError, OSError) as error:
        raise ValueError(f"{name}: {error}; got {dict(parameters or remaining)}") from error
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
    """Return whether the executor's jobs are processes of this machine."""
    return executor.cluster in ("local", DEBUG)


_LOG_CHARACTERS = 2000
_END_SECONDS = 2.0  # for a cancelled job on this machine to end itself
_JOB_POLL_SECONDS = 0.5


class JobLauncher(Launcher):
    """Submits each rank as a job of its own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> JobMonitor | ChildProcess:
        """Submit a rank; see `Launcher`. All jobs have the executor's parameters."""
        if self._executor.cluster == DEBUG:
            return run_in_child(self._executor, name, run_rank, address)
        utils = import_submitit().core.utils
        try:
            return submit(self._executor, run_rank, address)
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            text = f"the job {name!r} could not be submitted: {error}"
            raise LimitError(text) from error


def run_in_child(
    executor: Any, name: str, function: Callable[..., Any], *arguments: Any
) -> ChildProcess:
    """Submit a job of the cluster "debug" and run it in a child; return the child's monitor."""
    job = executor.submit(function, *arguments)
    return start_child(_run_job, (job,), name, "forkserver")


def _run_job(job: Any, log: int) -> None:
    """Run a job by asking for its result; the main function of such a child."""
    log_to(log)
    job.result()
    end_worker()


def submit(executor: Any, function: Callable[..., Any], *arguments: Any) -> JobMonitor:
    """Submit a job of another cluster; return its monitor."""
    check_not_importing()
    if executor.cluster != "local":
        return JobMonitor(executor.submit(function, *arguments))
    with block_sigint_in_children():
        return LocalJobMonitor(executor.submit(function, *arguments))


class JobPoller(WorkerProcess):
    """Detects the end of a job: by its process if that is on this machine, else by polling."""

    def __init__(self, has_ended: Callable[[], bool], seconds: float) -> None:
        self._has_ended, self._seconds = has_ended, seconds
        self._process: OtherProcess | None = None
        self._polled = 0.0
        self._over = False

    def watch(self, pid: int, shares_memory: bool) -> None:
        """Watch the job's process by its pid, if it is on this machine."""
        if shares_memory:
            self._process = OtherProcess(pid)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended. Polls at intervals; does not wait."""
        if self._process is not None and self._process.is_gone:
            return True
        now = time.monotonic()
        if not self._over and now - self._polled >= self._seconds:
            self._polled = now
            self._over = self._has_ended()
        return self._over


class JobMonitor(JobPoller):
    """Monitors a job through its executor."""

    def __init__(self, job: Any) -> None:
        super().__init__(lambda: bool(job.done()), _JOB_POLL_SECONDS)
        self.native = job

    def end(self) -> ProcessEnd:
        """Return how the job ended, as far as its executor knows."""
        job = self.native
        if job.done():
            end = f"its job {job.job_id} has ended ({job.state})"
        else:  # the executor does not know yet
            pid = self._process and self._process.pid
            end = f"the process {pid} of its job {job.job_id} is gone"
        return ProcessEnd(end, end)

    def await_end(self, seconds: float) -> None:
        """Wait for the job to end, for that time at most."""
        deadline = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def recent_log(self) -> str:
        with contextlib.suppress(OSError):
            return str(self.native.stderr() or "")[-_LOG_CHARACTERS:]
        return ""

    def kill(self) -> None:
        """Cancel the job. On this machine, also kill its process and descendants, and wait."""
        with contextlib.suppress(OSError):  # the job is gone already
            self.native.cancel(check=False)
        if self._process is not None:
            self._process.wait_gone(_END_SECONDS)
            self._process.kill_all()


class LocalJobMonitor(JobMonitor):
    """Monitors a job of this machine: a controller, which is our child, and the process it runs.

    The job is killed rather than cancelled, because the controller prints a message if it is
    cancelled.
    """

    def kill(self) -> None:
        """Kill the controller, the process and their descendants, and wait for their end."""
        if self._process is not None:
            self._process.kill_all()
        if not self.native.done():  # until then the pid is not reused
            kill_tree(int(self.native.job_id))
        while not self.native.done():
            time.sleep(POLL_SECONDS)
