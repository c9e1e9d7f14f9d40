"""Jobs that are submitted in advance, for clusters on which jobs cannot submit other jobs.

The jobs wait for a file in a shared folder. A collector in the main job writes the file when it
needs a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycollect import checks as check
from pycollect.transport.distributed.engine import Launcher
from pycollect.transport.distributed.launchers import (
    DEBUG,
    DEFAULT_SLURM_CONF,
    JobPoller,
    check_job_parameters,
    executor_of,
    is_of_this_machine,
    private_folder,
    run_in_child,
    submit,
)
from pycollect.transport.distributed.links import check_backend
from pycollect.transport.distributed.meeting import RankAddress
from pycollect.transport.distributed.rank import run_rank, unblock_sigint
from pycollect.transport.distributed.rendezvous import check_port
from pycollect.transport.process import ProcessEnd
from pycollect.transport.processes.child import ChildProcess

DEFAULT_SLURM_CONF_MAIN: dict[str, Any] = {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}
"""Default parameters of the main job, which runs the collector."""

_POLL_SECONDS = 0.2
_INTERRUPTED_SECONDS = 10.0  # grace period of the main job's program after an interrupt


@dataclass(frozen=True)
class JobFolder:
    """A shared folder with one numbered place for each waiting job."""

    folder: Path
    places: int  # number of waiting jobs
    one_machine: bool  # whether all jobs run on this machine
    port: int  # port on which the collector listens; 0 for any free port

    @classmethod
    def create(cls, executor: Any, places: int, port: int) -> JobFolder:
        """Create a folder next to the executor's files that only this user can read."""
        return cls(private_folder(executor.folder), places, is_of_this_machine(executor), port)

    def claim(self, address: RankAddress) -> int | None:
        """Send the address to a waiting job; return its place, or ``None`` if none is left."""
        for place in range(self.places):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"{place}.claimed").touch(exist_ok=False)
                self._write(f"{place}.address", pickle.dumps(address))
                return place
        return None

    def wait(self, place: int) -> RankAddress | None:
        """Wait for the address of the collector; return ``None`` when the main job ends."""
        while not ((self.folder / "over").exists() or self._is_abandoned):
            with contextlib.suppress(FileNotFoundError):
                address: RankAddress = pickle.loads((self.folder / f"{place}.address").read_bytes())
                return address
            time.sleep(_POLL_SECONDS)
        return None

    def left(self) -> int:
        """Return the number of unclaimed jobs."""
        return self.places - len(list(self.folder.glob("*.claimed")))

    def end(self, place: int) -> None:
        """Record that the job at that place has ended."""
        self._write(f"{place}.ended", b"")

    def has_ended(self, place: int) -> bool:
        """Return whether the job at that place has recorded its end."""
        return (self.folder / f"{place}.ended").exists()

    def close(self) -> None:
        """Release all waiting jobs."""
        self._write("over", b"")

    @contextlib.contextmanager
    def main_job(self) -> Iterator[None]:
        """Run the main job in the block; release the waiting jobs however this process ends."""
        new = self.folder / "main.new"
        with new.open("wb") as lock:  # the system frees the lock with this process
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.replace(new, self.folder / "main")
            try:
                yield
            finally:
                self.close()

    @property
    def _is_abandoned(self) -> bool:
        """Whether the main job ended without closing. Other machines may not see its lock."""
        if not self.one_machine:
            return False
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # not started, or running
            with (self.folder / "main").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False

    def _write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        new = self.folder / f"{name}.new"
        new.write_bytes(data)
        os.replace(new, self.folder / name)


_JOB_FOLDERS: list[JobFolder] = []
"""The job folder of this process, if it is a main job."""


def current_job_folder() -> JobFolder:
    """Return the job folder of this main job."""
    if not _JOB_FOLDERS:
        raise ValueError(
            "launcher: 'submitit_delayed' works only inside a function decorated with "
            "submitit_delayed_launcher; decorate the main function or pass another launcher"
        )
    return _JOB_FOLDERS[-1]


class WaitingJobLauncher(Launcher):
    """Turns waiting jobs into ranks."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def check_number(self, new: int) -> None:
        left = self._folder.left()
        if new > left:
            raise ValueError(
                f"num_jobs: {new} workers were requested, but only {left} of {self._folder.places} "
                "jobs are waiting; increase num_jobs or use fewer workers"
            )

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> WaitingJobMonitor | None:
        """Send the address to a waiting job; return ``None`` if none is left."""
        place = self._folder.claim(address)
        return None if place is None else WaitingJobMonitor(self._folder, place)


class WaitingJobMonitor(JobPoller):
    """Monitors a claimed job through the file that it writes at its end."""

    def __init__(self, folder: JobFolder, place: int) -> None:
        super().__init__(lambda: folder.has_ended(place), _POLL_SECONDS)
        self.native = place

    def end(self) -> ProcessEnd:
        """Return that the job has ended; the cause is unknown here."""
        end = f"its waiting job (number {self.native}) has ended"
        return ProcessEnd(end, end)

    def recent_log(self) -> str:
        """Return "", because the job's log belongs to the submitting process."""
        return ""

    def kill(self) -> None:
        """Kill the job if it runs on this machine; on other machines only messages can end it."""
        if self._process is not None:
            self._process.kill_all()


class submitit_delayed_launcher:  # TorchRL's name
    """Decorate a program so that its worker jobs are submitted before it runs.

    Use it on clusters that do not allow jobs to submit others. The decorated function submits a
    main job, which runs the program, and `num_jobs` further jobs, which wait. Collectors of the
    program with ``launcher="submitit_delayed"`` turn waiting jobs into workers. Unused jobs replace
    workers that die. The decorated function returns the program's return value. With the cluster
    "debug", the program runs in this process and the other jobs are its child processes.

    Args:
        num_jobs: Number of jobs in addition to the main job.
        framework: "distributed" or "rpc". Checked only; jobs learn it from the collector (default:
            "distributed").
        backend: Backend of torch.distributed. Checked only; jobs learn it from the collector
            (default: "gloo").
        tcpport: Port on which the collector listens unless it has its own `tcp_port`. ``None``
            means any free port (default: ``None``).
        submitit_main_conf: Parameters of the main job, like the collector's `slurm_kwargs`. Its
            "folder" and "cluster" apply to all jobs. By default 10 minutes, partition "train", 32
            CPUs and 1 GPU.
        submitit_collection_conf: Parameters of the other jobs. By default the same without a GPU.
    """

    def __init__(
        self,
        num_jobs: int,
        framework: str = "distributed",
        backend: str = "gloo",
        tcpport: int | str | None = None,
        submitit_main_conf: Mapping[str, Any] = DEFAULT_SLURM_CONF_MAIN,
        submitit_collection_conf: Mapping[str, Any] = DEFAULT_SLURM_CONF,
    ) -> None:
        self.num_jobs = check.check_positive("num_jobs", num_jobs)
        check.check_choice("framework", framework, ("distributed", "rpc"))
        check_backend(backend)
        self._port = check_port("tcpport", tcpport)
        self._main_conf = check_job_parameters("submitit_main_conf", submitit_main_conf)
        self._conf = check_job_parameters("submitit_collection_conf", submitit_collection_conf)

    def __call__(self, program: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that submits the jobs when it is called."""

        def submitted() -> Any:
            shared = {
                name: self._main_conf[name]
                for name in ("folder", "cluster")
                if name in self._main_conf
            }
            main = executor_of("submitit_main_conf", self._main_conf)
            others = executor_of("submitit_collection_conf", {**self._conf, **shared})
            folder = JobFolder.create(main, self.num_jobs, self._port)
            if main.cluster == DEBUG:
                return _run_here(main, others, folder, program)
            jobs = [submit(main, _run_main, folder, program)]
            try:
                jobs += [submit(others, _run_waiting, folder, n) for n in range(self.num_jobs)]
                return jobs[0].native.result()
            except BaseException:  # the caller no longer waits for the program
                folder.close()
                try:
                    jobs[0].await_end(_INTERRUPTED_SECONDS)
                finally:
                    for job in jobs:
                        job.kill()
                raise
            finally:
                folder.close()

        return submitted


def _run_here(main: Any, others: Any, folder: JobFolder, program: Callable[[], Any]) -> Any:
    """Run the program in this process and its jobs in children, for the cluster "debug"."""
    jobs: list[ChildProcess] = []
    try:
        for place in range(folder.places):
            jobs.append(run_in_child(others, f"pyc-job-{place}", _run_waiting, folder, place))
        return main.submit(_lead, folder, program).result()
    finally:
        folder.close()
        for job in jobs:
            job.kill()


def _run_main(folder: JobFolder, program: Callable[[], Any]) -> Any:
    """Run the program in the main job."""
    unblock_sigint()
    return _lead(folder, program)


def _lead(folder: JobFolder, program: Callable[[], Any]) -> Any:
    """Run the program in this process; its collectors can claim the waiting jobs."""
    _JOB_FOLDERS.append(folder)
    try:
        with folder.main_job():
            return program()
    finally:
        _JOB_FOLDERS.remove(folder)


def _run_waiting(folder: JobFolder, place: int) -> None:
    """Wait until a collector claims this job, then run a rank."""
    try:
        address = folder.wait(place)
        if address is not None:
            run_rank(address)
    finally:
        folder.end(place)
