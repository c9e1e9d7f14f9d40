"""Jobs that are submitted before there is a collector, where jobs cannot submit others.

They wait in front of a board, a folder that all jobs see, until the collector in the main job
writes there where a rank is wanted.
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
from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.children import ChildRank
from pycollect.engines.distributed.executors import (
    DEBUG,
    DEFAULT_SLURM_CONF,
    check_job_parameters,
    executor_of,
    is_of_this_machine,
    private_folder,
)
from pycollect.engines.distributed.groups import check_backend
from pycollect.engines.distributed.interrupts import heard_again
from pycollect.engines.distributed.jobs import JobWatch, run_beside, submit
from pycollect.engines.distributed.rank import run_rank
from pycollect.engines.distributed.rendezvous import check_port
from pycollect.engines.process_end import ProcessEnd

DEFAULT_SLURM_CONF_MAIN: dict[str, Any] = {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}
"""Of the job that has the collector."""

_LOOK_SECONDS = 0.2
_INTERRUPTED_SECONDS = 10.0  # in which a program that was interrupted, too, ends by itself


@dataclass(frozen=True)
class Board:
    """A folder in which each waiting job has a place, by number.

    Attributes:
        one_machine: all jobs are on this one.
        port: where the collector is to listen; 0: any that is free.
    """

    folder: Path
    places: int
    one_machine: bool
    port: int

    @classmethod
    def made(cls, executor: Any, places: int, port: int) -> Board:
        """A new one beside the executor's files, which only this user can read."""
        return cls(private_folder(executor.folder), places, is_of_this_machine(executor), port)

    def claim(self, address: RankAddress) -> int | None:
        """Tell a job that waits where it is wanted; its place, or None where none is left."""
        for place in range(self.places):
            with contextlib.suppress(FileExistsError):
                (self.folder / f"{place}.claimed").touch(exist_ok=False)
                self._write(f"{place}.address", pickle.dumps(address))
                return place
        return None

    def wait(self, place: int) -> RankAddress | None:
        """Where the job at that place is wanted; None: nowhere any more. Waits."""
        while not ((self.folder / "over").exists() or self._is_left):
            with contextlib.suppress(FileNotFoundError):
                address: RankAddress = pickle.loads((self.folder / f"{place}.address").read_bytes())
                return address
            time.sleep(_LOOK_SECONDS)
        return None

    def left(self) -> int:
        """How many jobs were not told anything yet."""
        return self.places - len(list(self.folder.glob("*.claimed")))

    def end(self, place: int) -> None:
        """The job at that place has ended."""
        self._write(f"{place}.ended", b"")

    def has_ended(self, place: int) -> bool:
        """Whether it said so."""
        return (self.folder / f"{place}.ended").exists()

    def close(self) -> None:
        """Nobody is wanted any more."""
        self._write("over", b"")

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """This process is the main job's; whoever waits is told when it has ended, however."""
        new = self.folder / "main.new"
        with new.open("wb") as lock:  # which ends with this process
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.replace(new, self.folder / "main")
            try:
                yield
            finally:
                self.close()

    @property
    def _is_left(self) -> bool:
        """Whether the main job has ended without a word. Other machines may not see its lock."""
        if not self.one_machine:
            return False
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # not begun; still there
            with (self.folder / "main").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        return False

    def _write(self, name: str, data: bytes) -> None:
        """A file that others see whole, or not yet."""
        new = self.folder / f"{name}.new"
        new.write_bytes(data)
        os.replace(new, self.folder / name)


_BOARDS: list[Board] = []
"""That of the main job which this process is, if it is one."""


def current_board() -> Board:
    """The board of this process's main job; ValueError where it is none."""
    if not _BOARDS:
        raise ValueError(
            "launcher: expected another one than 'submitit_delayed' outside of a function that "
            "was decorated with submitit_delayed_launcher"
        )
    return _BOARDS[-1]


class BoardLauncher:
    """Has jobs that wait become ranks."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def check_number(self, new: int) -> None:
        """Raise ValueError if fewer jobs wait."""
        left = self._board.left()
        if new > left:
            raise ValueError(
                f"num_jobs: {new} workers are asked for, of {self._board.places} jobs {left} wait"
            )

    def launch(
        self, address: RankAddress, name: str, options: Mapping[str, Any]
    ) -> WaitingJobMonitor | None:
        """Tell one where it is wanted; None: nobody waits any more."""
        place = self._board.claim(address)
        return None if place is None else WaitingJobMonitor(self._board, place)


class WaitingJobMonitor(JobWatch):
    """Watches a job that was told where it is wanted, by what it writes there."""

    def __init__(self, board: Board, place: int) -> None:
        super().__init__(lambda: board.has_ended(place), _LOOK_SECONDS)
        self.native = place

    def end(self) -> ProcessEnd:
        """That it ended: no more is known here."""
        end = f"job {self.native} of those that waited has ended"
        return ProcessEnd(end, end)

    def last_words(self) -> str:
        """Nothing: its log is with whoever submitted it."""
        return ""

    def kill(self) -> None:
        """End it, where it is on this machine; elsewhere a message is all that can be sent."""
        if self._process is not None:
            self._process.kill_all()


class submitit_delayed_launcher:  # TorchRL's name
    """Decorates a program: its jobs are submitted first, and wait for its collector.

    For clusters on which jobs cannot submit others. The decorated function submits a main job, in
    which the program runs, and `num_jobs` jobs beside it, which become the workers of the
    program's collectors with ``launcher="submitit_delayed"``; those that are left over take the
    place of workers that die. It returns what the program returns. With the cluster "debug" the
    program runs in this process, and a child of it is each of the others.

    Args:
        num_jobs: how many there are beside the main one.
        framework: "distributed" or "rpc". Jobs learn from the collector which it is.
        backend: of torch.distributed. Jobs learn the collector's own from it.
        tcpport: where the collector listens, unless it says so itself; None: any that is free.
        submitit_main_conf: of the main job, as `slurm_kwargs` of the collector; "folder" and
            "cluster" are those of all jobs.
        submitit_collection_conf: of the others.
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
        """The program, which is submitted when it is called."""

        def submitted() -> Any:
            shared = {
                name: self._main_conf[name]
                for name in ("folder", "cluster")
                if name in self._main_conf
            }
            main = executor_of("submitit_main_conf", self._main_conf)
            others = executor_of("submitit_collection_conf", {**self._conf, **shared})
            board = Board.made(main, self.num_jobs, self._port)
            if main.cluster == DEBUG:
                return _run_here(main, others, board, program)
            jobs = [submit(main, _run_main, board, program)]
            try:
                jobs += [submit(others, _run_waiting, board, n) for n in range(self.num_jobs)]
                return jobs[0].native.result()
            except BaseException:  # nobody waits for the program any more
                board.close()
                try:
                    jobs[0].await_end(_INTERRUPTED_SECONDS)
                finally:
                    for job in jobs:
                        job.kill()
                raise
            finally:
                board.close()

        return submitted


def _run_here(main: Any, others: Any, board: Board, program: Callable[[], Any]) -> Any:
    """Of the cluster "debug": the program in this process, and its jobs in children."""
    jobs: list[ChildRank] = []
    try:
        for place in range(board.places):
            jobs.append(run_beside(others, f"pyc-job-{place}", _run_waiting, board, place))
        return main.submit(_lead, board, program).result()
    finally:
        board.close()
        for job in jobs:
            job.kill()


def _run_main(board: Board, program: Callable[[], Any]) -> Any:
    """The program, in its job."""
    heard_again()
    return _lead(board, program)


def _lead(board: Board, program: Callable[[], Any]) -> Any:
    """The program, in the process for whose collectors the others wait."""
    _BOARDS.append(board)
    try:
        with board.led():
            return program()
    finally:
        _BOARDS.remove(board)


def _run_waiting(board: Board, place: int) -> None:
    """A job that waits until it is wanted."""
    try:
        address = board.wait(place)
        if address is not None:
            run_rank(address)
    finally:
        board.end(place)
