"""Ranks that are jobs of a cluster, which here is this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from collect_support import MULTI_STACK, Way, collecting, is_gone, of_ranks, parity_policy
from echo_envs import PATIENCE, wait_until
from envs_for_tests import CountingEnv
from raising import raised, refused
from test_restarts import check_ledger, endless, kill

from pycollect import DistributedDataCollector, WorkerError, submitit_delayed_launcher

T = 5
STACKS = of_ranks(MULTI_STACK)
EACH = pytest.mark.parametrize("way", STACKS, ids=lambda way: way.name)


@pytest.fixture
def local_jobs(tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("submitit")
    jobs = {"cluster": "local", "folder": str(tmp_path / "jobs"), "timeout_min": 5}
    return {"launcher": "submitit", "slurm_kwargs": jobs}


@pytest.mark.processes
@EACH
def test_jobs_collect_and_are_replaced(
    way: Way, local_jobs: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Job processes write no errors of their own."""
    with collecting(way, endless, parity_policy(), frames=T, **local_jobs) as collector:
        before = collector.next()
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        assert collector.next().shape == before.shape == (2, T)
        check_ledger(collector)
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
    wait_until(lambda: all(is_gone(pid) for pid in pids))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.processes
def test_a_replacement_that_cannot_be_submitted_is_submitted_later(
    local_jobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = pytest.importorskip("submitit")

    def fail(*arguments: Any) -> None:
        raise submitit.core.utils.FailedJobError("no controller")

    with collecting(STACKS[0], endless, parity_policy(), frames=T, **local_jobs) as collector:
        collector.next()
        kill(collector, 1)
        with monkeypatch.context() as patch:
            patch.setattr(submitit.AutoExecutor, "submit", fail)
            for _ in range(2):
                with pytest.raises(OSError, match="no controller"):
                    list(collector)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        assert collector.next().shape == (2, T)
        check_ledger(collector)


@pytest.mark.processes
def test_jobs_of_the_cluster_debug_are_children(local_jobs: dict[str, Any]) -> None:
    """Each child waits for its job's result; submitit alone would run it in this thread."""
    local_jobs["slurm_kwargs"]["cluster"] = "debug"
    with collecting(STACKS[0], endless, parity_policy(), frames=T, **local_jobs) as collector:
        collector.next()
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        check_ledger(collector)
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
        assert {psutil.Process(pid).name() for pid in pids} == {"pyc-worker-0", "pyc-worker-1"}
    wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.processes
def test_a_delayed_launcher_of_the_cluster_debug(local_jobs: dict[str, Any]) -> None:
    """The program runs in this process; its jobs are child processes that end with it."""
    conf = {**local_jobs["slurm_kwargs"], "cluster": "debug"}
    launcher = submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    shape, error = launcher(collect_in_a_job)()
    assert shape == (T,)
    assert "worker 0" in error
    assert "launcher" in error
    own = psutil.Process().children(recursive=True)
    assert not [child for child in own if child.name().startswith("pyc-job")]


@pytest.mark.processes
@EACH
def test_the_report_of_a_dead_job_is_consistent(way: Way, local_jobs: dict[str, Any]) -> None:
    """The process exits slightly before the executor notices."""
    one = replace(way, workers=1)
    with collecting(one, endless, frames=T, max_worker_restarts=0, **local_jobs) as collector:
        collector.next()
        kill(collector, 0)
        with raised(WorkerError, worker=0) as error:
            collector.next()
        assert "job" in str(error.value)
    assert "RUNNING" not in str(error.value)


INTERRUPTED = """
import sys
from contextlib import nullcontext
from collect_support import elsewhere
from envs_for_tests import CountingEnv
from pycollect import DistributedDataCollector, RPCDataCollector

if __name__ == "__main__":
    launcher, folder, by = sys.argv[1:]
    conf = {"cluster": "local", "folder": folder} if launcher == "submitit" else None
    cls = RPCDataCollector if by == "rpc" else DistributedDataCollector
    arguments = {"frames_per_batch": 6, "sync": True, "launcher": launcher, "slurm_kwargs": conf}
    with nullcontext() if by == "shared memory" else elsewhere():
        collector = cls([CountingEnv] * 2, **arguments)
    workers = collector.stats()["workers"].values()
    try:
        print(*[worker["pid"] for worker in workers], flush=True)
        while True:
            collector.next()
    except KeyboardInterrupt:
        for _ in range(3):
            collector.next()
    print(*[worker["restarts"] for worker in collector.stats()["workers"].values()])
    collector.shutdown()
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mp", "submitit"])
@pytest.mark.parametrize("by", ["shared memory", "messages", "rpc"])
def test_an_interrupted_program_continues_with_its_ranks(
    launcher: str, by: str, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to all of its processes."""
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    driver = subprocess.Popen(
        [sys.executable, program, launcher, tmp_path / "jobs", by],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    os.killpg(driver.pid, signal.SIGINT)
    out, err = driver.communicate(timeout=PATIENCE)
    assert out.split() == ["0", "0"], err
    assert "Traceback" not in err
    wait_until(lambda: len(pids) == 2 and all(is_gone(pid) for pid in pids))


@pytest.mark.processes
@pytest.mark.slow
def test_the_error_of_a_failed_job_has_the_reason(local_jobs: dict[str, Any]) -> None:
    """The job fails before it becomes a rank, so only its log has the reason."""
    local_jobs["slurm_kwargs"]["local_setup"] = ["echo out of order >&2", "exit 3"]
    with raised(WorkerError, worker=0) as caught:
        DistributedDataCollector([CountingEnv], worker_init_timeout=60, **local_jobs)
    assert "job" in str(caught.value)


def collect_in_a_job() -> tuple[Any, ...]:
    """Run a program and kill its only worker once; the next waiting job replaces the worker."""
    with DistributedDataCollector(
        [endless(0)], frames_per_batch=T, launcher="submitit_delayed"
    ) as collector:
        first = collector.next()
        kill(collector, 0)
        while not collector.stats()["workers"][0]["restarts"]:
            collector.next()
        kill(collector, 0)
        try:
            for _ in range(9):
                collector.next()
        except WorkerError as error:
            return tuple(first.shape), str(error)
    return ()


@pytest.mark.processes
@pytest.mark.slow
def test_jobs_that_wait_become_ranks(local_jobs: dict[str, Any]) -> None:
    """Waiting jobs replace dead ranks, as long as there are any."""
    conf = local_jobs["slurm_kwargs"]
    launcher = submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    shape, error = launcher(collect_in_a_job)()
    assert shape == (T,)
    assert "worker 0" in error
    assert "launcher" in error


ENDED = """
import os, sys, time
from functools import partial
from pathlib import Path
from envs_for_tests import CountingEnv
from pycollect import DistributedDataCollector, submitit_delayed_launcher

def program(told):
    with DistributedDataCollector([CountingEnv], launcher="submitit_delayed") as collector:
        pids = [os.getpid(), collector.stats()["workers"][0]["pid"]]
        new = told.with_suffix(".new")
        new.write_text(" ".join(map(str, pids)))
        new.rename(told)
        while True:
            collector.next()

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    conf = {"cluster": "local", "folder": str(folder / "jobs"), "timeout_min": 30}
    jobs = submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    jobs(partial(program, folder / "told"))()
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("how", ["main is killed", "both are killed", "interrupted"])
def test_jobs_that_wait_end_with_their_program(how: str, tmp_path: Path) -> None:
    """Ranks and unused waiting jobs both end with the program."""
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(ENDED)
    submitter = subprocess.Popen(
        [sys.executable, program, tmp_path],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(told.exists)
    main, rank = map(int, told.read_text().split())
    members = of_session(submitter.pid)
    assert {main, rank} < {member.pid for member in members}
    if how == "interrupted":
        os.killpg(submitter.pid, signal.SIGINT)
    else:
        os.kill(main, signal.SIGKILL)
    if how == "both are killed":
        submitter.kill()
    _, err = submitter.communicate(timeout=PATIENCE)
    wait_until(lambda: all(is_gone(member.pid) for member in members))
    if how == "interrupted":
        assert err.count("Traceback") == 1, err  # the program's own traceback


def of_session(leader: int) -> list[psutil.Process]:
    """Return the processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def test_a_delayed_launcher_outside_of_its_program() -> None:
    with refused(ValueError, "launcher") as caught:
        DistributedDataCollector([CountingEnv], launcher="submitit_delayed")
    assert "submitit_delayed_launcher" in str(caught.value)


@pytest.mark.parametrize(
    ("odd", "error", "given"),
    [
        ({"cluster": "cloud"}, ValueError, "cloud"),
        ({"timeout": 3}, ValueError, "'timeout': 3"),
        ({"timeout_min": "x"}, ValueError, "'timeout_min': 'x'"),
        ({"folder": 3}, TypeError, "'folder'"),
        ({3: 4}, TypeError, "3"),
        ({"local_setup": "ls"}, TypeError, "'local_setup'"),
        ({"tasks_per_node": 2}, ValueError, "'tasks_per_node'"),
    ],
)
def test_jobs_that_cannot_be_are_refused(
    local_jobs: dict[str, Any], odd: Any, error: Any, given: str
) -> None:
    conf = {**local_jobs["slurm_kwargs"], **odd}
    with refused(error, "slurm_kwargs") as caught:
        DistributedDataCollector([CountingEnv], launcher="submitit", slurm_kwargs=conf)
    assert given in str(caught.value)
    with refused(error, "submitit_main_conf") as caught:
        submitit_delayed_launcher(1, submitit_main_conf=conf)(dict)()
    assert given in str(caught.value)


@pytest.mark.parametrize("arguments", [{"slurm_kwargs": 3}, {"slurm_kwargs": {}, "launcher": "mp"}])
def test_slurm_kwargs_must_be_a_dict(arguments: dict[str, Any]) -> None:
    with refused((TypeError, ValueError), "slurm_kwargs"):
        DistributedDataCollector([CountingEnv], **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tcpport", True), ("tcpport", "abc"), ("tcpport", 1 << 17), ("submitit_collection_conf", 3)],
)
def test_a_launcher_of_jobs_that_wait_refuses(name: str, value: Any) -> None:
    with refused((TypeError, ValueError), name):
        submitit_delayed_launcher(1, **{name: value})
