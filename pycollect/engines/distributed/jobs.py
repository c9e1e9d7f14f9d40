"""Ranks that are jobs of a cluster: the launcher "submitit"."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.rank import run_rank
from pycollect.engines.other_process import OtherProcess

DEFAULT_SLURM_CONF: dict[str, Any] = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
"""Of the jobs that collect."""

DEFAULT_FOLDER = "log_test"
"""Where jobs and the driver find each other's files, which both must see."""

_LOG_CHARACTERS = 2000
_END_SECONDS = 2.0  # in which a cancelled job on this machine ends by itself
_LOOK_SECONDS = 0.5


def import_submitit() -> Any:
    """The package submitit, or an ImportError that says how to get it."""
    try:
        import submitit
    except ImportError as error:
        raise ImportError(
            "launcher: 'submitit' needs the package submitit: pip install submitit; "
            "'mp' starts processes of this machine without it"
        ) from error
    return submitit


def executor_of(slurm_kwargs: Mapping[str, Any] | None) -> Any:
    """The executor that submits jobs.

    Args:
        slurm_kwargs: its parameters; None: DEFAULT_SLURM_CONF. Two of them are ours: "folder", of
            its files, and "cluster", None for what is found here, "slurm" or "local".

    Raises:
        ImportError: submitit is not installed.
        ValueError: a parameter that it does not know, or a cluster that cannot be used.
    """
    submitit = import_submitit()
    parameters = dict(DEFAULT_SLURM_CONF if slurm_kwargs is None else slurm_kwargs)
    folder = Path(parameters.pop("folder", DEFAULT_FOLDER)).absolute()
    cluster = parameters.pop("cluster", None)
    if cluster == "debug":
        raise ValueError(
            "slurm_kwargs: expected another cluster than 'debug', which runs jobs in this process "
            "when they are asked for their results: SyncDataCollector collects in this process"
        )
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**parameters)
    except (ValueError, NameError, TypeError, AssertionError, RuntimeError) as error:
        raise ValueError(f"slurm_kwargs: {error}") from error
    return executor


class JobLauncher:
    """Submits each rank as a job of its own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def check_number(self, new: int) -> None:
        """There is no end of them."""

    def launch(self, address: RankAddress, name: str, options: Mapping[str, Any]) -> JobMonitor:
        """Submit one.

        Args:
            options: none are known.
        """
        return JobMonitor(self._executor.submit(run_rank, address))


class JobWatch:
    """Tells whether a job has ended: by its process, where that is on this machine, else by asking.

    Args:
        has_ended: asks whoever knows of the job.
        seconds: from one such question to the next.
    """

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
        super().__init__(lambda: bool(job.done()), _LOOK_SECONDS)
        self.native = job

    def end(self) -> tuple[str, str]:
        """How it ended: its state, as the executor knows it by now."""
        end = f"its job {self.native.job_id} has ended ({self.native.state})"
        return end, end

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
            self._process.kill_group()
            self._process.wait_gone(None)
