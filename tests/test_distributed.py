"""Workers that are ranks of torch.distributed: how they are met, asked, lost and ended.

What holds for all workers elsewhere is tested with ranks, too: see `collect_support.marked`.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from collect_support import (
    MULTI_ASYNC,
    MULTI_STACK,
    STEPS,
    FrameOracle,
    Way,
    bias_policy,
    collecting,
    elsewhere,
    is_gone,
    of_ranks,
    parity_policy,
)
from echo_envs import ENTRIES, PATIENCE, GateEnv, wait_until
from envs_for_tests import CountingEnv
from test_restarts import check_ledger, endless, kill

from pycollect import (
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    DistributedSyncDataCollector,
    WorkerError,
    submitit_delayed_launcher,
)
from pycollect.engines.distributed.address import Invitation
from pycollect.engines.distributed.group_link import GroupCarrier, GroupLink
from pycollect.engines.distributed.groups import DRIVER, WORKER, group_of_two
from pycollect.engines.distributed.rendezvous import LOOPBACK, Rendezvous

T = 5
STACKS, ASYNCS = of_ranks(MULTI_STACK), of_ranks(MULTI_ASYNC[2])
EACH = pytest.mark.parametrize("way", STACKS, ids=lambda way: way.name)


def transports(collector: Any) -> list[str]:
    return [worker["transport"] for worker in collector.stats()["workers"].values()]


# Messages


@pytest.fixture
def links() -> tuple[GroupLink, GroupLink]:
    """Both ends, in this process."""
    rendezvous = Rendezvous(LOOPBACK, 0, 30.0)
    address = rendezvous.invite("one", Invitation("", 0, None, GroupCarrier("gloo"))).address
    ends: dict[int, GroupLink] = {}

    def connect(rank: int) -> None:
        group = group_of_two("gloo", address.store(), rank, address.own_host())
        ends[rank] = GroupLink(group, DRIVER if rank == WORKER else WORKER)

    thread = threading.Thread(target=connect, args=(WORKER,))
    thread.start()
    connect(DRIVER)
    thread.join()
    return ends[DRIVER], ends[WORKER]


def test_values_of_every_size_arrive_in_order(links: tuple[GroupLink, GroupLink]) -> None:
    ours, theirs = links
    sizes = [0, 1, 900, 1008, 1009, 5000, 3_000_000]
    values = [("text", b"x" * size, np.arange(size, dtype=np.uint8)) for size in sizes]
    kept = [ours.send(value) for value in values]
    arrived = [theirs.receive() for _ in values]
    for sent in kept:
        sent.wait()
    for (name, data, array), (same, same_data, same_array) in zip(values, arrived, strict=True):
        assert (name, data) == (same, same_data)
        assert np.array_equal(array, same_array)


def test_what_arrived_lies_in_memory_of_its_own(links: tuple[GroupLink, GroupLink]) -> None:
    ours, theirs = links
    array = np.zeros(100_000, np.uint8)
    kept = []
    for number in range(3):
        array[:] = number
        kept.append(ours.send(array))
        got = theirs.receive()
        kept[-1].wait()
        array[:] = 77
        assert (got == number).all()
        kept.append(got)
    assert [int(own[0]) for own in kept[1::2]] == [0, 1, 2]


def test_what_does_not_pickle_is_an_error_and_the_next_value_arrives(
    links: tuple[GroupLink, GroupLink],
) -> None:
    ours, theirs = links
    with pytest.raises(TypeError, match="pickle"):
        ours.send(threading.Lock())
    sent = ours.send("next")
    assert theirs.receive() == "next"
    sent.wait()


# Who may say something


def test_only_what_a_process_of_this_collector_signed_is_believed() -> None:
    rendezvous = Rendezvous(LOOPBACK, 0, 5.0)
    meeting = rendezvous.invite("one", Invitation("", 0, None, GroupCarrier("gloo")))
    store = meeting.address.store()
    assert meeting.refusal is None
    store.set("refusal", bytes(32) + pickle.dumps("I am an intruder"))
    with pytest.raises(ValueError, match="not signed by a process of this collector"):
        _ = meeting.refusal
    meeting.address.tell(store, "refusal", "it is on another node")
    assert meeting.refusal == "it is on another node"


def listening(pid: int) -> set[Any]:
    """The addresses at which a process listens."""
    connections = psutil.Process(pid).net_connections("inet")
    return {own.laddr for own in connections if own.status == psutil.CONN_LISTEN}


@pytest.mark.processes
def test_nothing_listens_at_another_address() -> None:
    before = listening(os.getpid())  # of what other tests have started here
    with elsewhere(), DistributedDataCollector([CountingEnv], launcher="mp") as collector:
        collector.next()
        assert transports(collector) == ["messages"]
        rank = collector.stats()["workers"][0]["pid"]
        places = (listening(os.getpid()) - before) | listening(rank)
    assert {place.ip for place in places} == {LOOPBACK}


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"tcp_address, tcp_port: .*'127.0.0.1', port {port}"):
            DistributedDataCollector([CountingEnv], launcher="mp", tcp_port=port)


@pytest.mark.processes
@pytest.mark.parametrize("how", [nullcontext, elsewhere])
def test_a_port_is_free_again_after_a_shutdown(how: Any) -> None:
    """Also while the collector that was shut down is still referred to."""
    port = free_port()
    kept = []
    for _ in range(2):
        with how():
            kept.append(DistributedDataCollector([CountingEnv], launcher="mp", tcp_port=port))
        kept[-1].next()
        kept[-1].shutdown()


def free_port() -> int:
    with socket.socket() as own:
        own.bind((LOOPBACK, 0))
        return int(own.getsockname()[1])


# Arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"launcher": "ssh"}, "launcher: expected one of"),
        ({"backend": "smoke"}, "backend: expected one of"),
        ({"backend": "mpi"}, "backend: .*'mpi'.*use 'gloo'"),
        ({"tcp_port": 1 << 16}, "tcp_port: expected a number from 0 to 65535"),
        ({"slurm_kwargs": {}}, "slurm_kwargs: expected None with the launcher 'mp'"),
        ({"num_collectors": 3}, "num_collectors: expected 1"),
    ],
)
def test_what_is_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedDataCollector([CountingEnv], **{"launcher": "mp", **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"update_interval": 0}, ValueError, "update_interval: "),
        ({"sync": True}, ValueError, "sync: .*; it always is: use DistributedDataCollector"),
        (
            {"update_after_each_batch": True},
            ValueError,
            "update_after_each_batch: .*use update_int",
        ),
        ({"visible_devices": [0]}, TypeError, "'visible_devices', which is one of RPCDataColl"),
    ],
)
def test_what_ranks_in_step_do_not_take(arguments: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        DistributedSyncDataCollector([CountingEnv], launcher="mp", **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"update_interval": 3}, "'update_interval', which is one of DistributedSyncDataCollector"),
        (
            {"collector_kwargs": {"foo": 1}},
            "collector_kwargs: SyncDataCollector got an unexpected keyword argument 'foo'",
        ),
        (
            {"collector_kwargs": {"cat_resuts": 1}, "collector_class": "async"},
            "collector_kwargs: MultiaSyncDataCollector got .*; did you mean 'cat_results'",
        ),
        ({"tcp_port": True}, "tcp_port: expected an int, got True"),
        ({"tcp_port": "8o"}, "tcp_port: expected an int, got '8o'"),
    ],
)
def test_what_is_of_another_kind_or_class(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        DistributedDataCollector([CountingEnv], launcher="mp", **arguments)


def test_both_generations_of_names() -> None:
    assert DistributedCollector is DistributedDataCollector
    assert DistributedSyncCollector is DistributedSyncDataCollector


# Collecting


@pytest.mark.processes(usual=3)
@pytest.mark.parametrize("way", [*STACKS, *ASYNCS], ids=lambda way: way.name)
def test_every_frame_comes_once(way: Way) -> None:
    with collecting(way, ENTRIES["list"], parity_policy(), frames=3 * STEPS) as collector:
        oracle = FrameOracle()
        for _ in range(8):
            oracle.check(way.rows(collector.next(), 3, True))
        assert transports(collector) == [way.transport] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_batches_are_equal_whichever_way_they_come() -> None:
    batches = []
    for way in (MULTI_STACK, *STACKS):
        with collecting(way, ENTRIES["one"], parity_policy(), frames=STEPS) as collector:
            collector.set_seed(3)
            batches.append([collector.next().clone() for _ in range(3)])
    for others in batches[1:]:
        for ours, theirs in zip(batches[0], others, strict=True):
            assert (ours == theirs).all()


@pytest.mark.processes
@EACH
def test_a_rank_that_dies_is_replaced(way: Way) -> None:
    policy = bias_policy()
    with collecting(way, endless, policy, frames=T) as collector:
        collector.next()
        with torch.no_grad():
            policy.module.bias += 1.0
        collector.update_policy_weights_(wait=True)
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        assert (collector.next()["bias"] == 1.0).all()
        check_ledger(collector)


@pytest.mark.processes
@EACH
def test_past_the_limit_a_rank_is_named(way: Way) -> None:
    with collecting(way, endless, frames=T, max_worker_restarts=0) as collector:
        collector.next()
        kill(collector, 1)
        with pytest.raises(WorkerError, match=r"worker 1 died: its process .* ended by SIGKILL"):
            collector.next()


@pytest.mark.processes
@EACH
def test_a_rank_that_answers_nothing_is_replaced(way: Way) -> None:
    """Stopped, as if its node were gone: no connection breaks."""
    with collecting(way, endless, frames=T, worker_timeout=1.0) as collector:
        collector.next()
        os.kill(collector.stats()["workers"][0]["pid"], signal.SIGSTOP)
        while not collector.stats()["workers"][0]["restarts"]:
            collector.next()
        assert check_ledger(collector)["workers"][0]["reasons"].keys() == {"worker_timeout"}


@pytest.mark.processes
@EACH
def test_a_forgotten_collectors_ranks_end(way: Way) -> None:
    entries = [endless(0), endless(1)]
    collector = way.collector(entries, parity_policy(), frames_per_batch=2 * T)
    collector.next()
    pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
    del collector
    gc.collect()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.processes
@pytest.mark.slow
@EACH
def test_a_collector_that_is_shut_down_while_a_rank_hangs(way: Way, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    entry = partial(GateEnv, gate, T + 2)
    with collecting(way, lambda w: entry, frames=T, prefetch=1) as collector:
        collector.next()
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
        wait_until(gate.with_suffix(".reached").exists)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize("way", [MULTI_STACK, *STACKS], ids=lambda way: way.name)
def test_a_worker_that_hears_nothing_has_little_time_to_close(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped while nothing was asked of it; another one may take its time."""
    monkeypatch.setattr("pycollect.engines.waiting._HEAR_SECONDS", 0.5)
    monkeypatch.setattr("pycollect.engines.waiting._CLOSE_SECONDS", PATIENCE)
    with collecting(way, endless, frames=T) as collector:
        collector.next()
        pids = [worker["pid"] for worker in collector.stats()["workers"].values()]
        os.kill(pids[1], signal.SIGSTOP)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.processes
@pytest.mark.parametrize("interval", [1, 2])
def test_ranks_in_step_are_updated_after_so_many_batches(interval: int) -> None:
    policy = bias_policy()
    with DistributedSyncDataCollector(
        [endless(0), endless(1)],
        policy,
        frames_per_batch=2 * T,
        launcher="mp",
        update_interval=interval,
    ) as collector:
        seen = []
        for _ in range(6):
            seen.append(collector.next()["bias"].unique().item())
            with torch.no_grad():
                policy.module.bias += 1.0
    assert seen == [float(n // interval * interval) for n in range(6)]


@pytest.mark.processes
def test_the_programs_own_group_is_left_alone(tmp_path: Path) -> None:
    """A learner that trains with torch.distributed has its default group, before and after."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/own", rank=0, world_size=1)
    try:
        with elsewhere(), DistributedDataCollector([CountingEnv], launcher="mp") as collector:
            collector.next()
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == 1
            assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


# Jobs of a cluster, of which this machine is one


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
    """Without a word of those who run them."""
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
def test_jobs_of_the_cluster_debug_are_children(local_jobs: dict[str, Any]) -> None:
    """Each of which asks for its job's result; submitit alone would run it in this thread."""
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
    """Its program runs here, and its jobs are children, which end with it."""
    conf = {**local_jobs["slurm_kwargs"], "cluster": "debug"}
    launcher = submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    shape, error = launcher(collect_in_a_job)()
    assert shape == (T,)
    assert "worker 0 cannot be started: its launcher has no more processes" in error
    own = psutil.Process().children(recursive=True)
    assert not [child for child in own if child.name().startswith("pyc-job")]


@pytest.mark.processes
@EACH
def test_a_job_that_dies_is_told_without_contradiction(
    way: Way, local_jobs: dict[str, Any]
) -> None:
    """Its process is gone a little before the executor knows."""
    with collecting(way, endless, frames=T, max_worker_restarts=0, **local_jobs) as collector:
        collector.next()
        kill(collector, 1)
        with pytest.raises(WorkerError, match=r"worker 1 died: .* job .*") as error:
            collector.next()
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
def test_a_program_that_is_interrupted_goes_on_with_its_ranks(
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
def test_a_job_that_fails_says_why(local_jobs: dict[str, Any]) -> None:
    """Before it is a rank, where only its log tells."""
    local_jobs["slurm_kwargs"]["local_setup"] = ["echo out of order >&2", "exit 3"]
    with pytest.raises(WorkerError, match=r"worker 0 died: its job .* has ended"):
        DistributedDataCollector([CountingEnv], worker_init_timeout=60, **local_jobs)


def collect_in_a_job() -> tuple[Any, ...]:
    """A program: its only worker is killed once, the next job that waits takes its place."""
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
    """And take the place of those that die, as long as there are some."""
    conf = local_jobs["slurm_kwargs"]
    launcher = submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    shape, error = launcher(collect_in_a_job)()
    assert shape == (T,)
    assert "worker 0 cannot be started: its launcher has no more processes" in error


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
    """Ranks, and also those that nobody wanted."""
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
        assert err.count("Traceback") == 1, err  # the program's own


def of_session(leader: int) -> list[psutil.Process]:
    """The processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def test_a_delayed_launcher_outside_of_its_program() -> None:
    with pytest.raises(ValueError, match=r"launcher: .*submitit_delayed_launcher"):
        DistributedDataCollector([CountingEnv], launcher="submitit_delayed")


@pytest.mark.parametrize(
    ("odd", "error", "text"),
    [
        ({"cluster": "cloud"}, ValueError, "cloud; got {"),
        ({"timeout": 3}, ValueError, "got {.*'timeout': 3"),
        ({"timeout_min": "x"}, ValueError, "got {.*'timeout_min': 'x'"),
        ({"folder": 3}, TypeError, "expected a path as 'folder', got 3"),
        ({3: 4}, TypeError, "expected names of parameters, got 3"),
        (
            {"local_setup": "ls"},
            TypeError,
            "expected a list of commands as 'local_setup', got 'ls'",
        ),
        ({"tasks_per_node": 2}, ValueError, "expected 1 for 'tasks_per_node', .* got 2"),
    ],
)
def test_jobs_that_cannot_be_are_refused(
    local_jobs: dict[str, Any], odd: Any, error: Any, text: str
) -> None:
    conf = {**local_jobs["slurm_kwargs"], **odd}
    with pytest.raises(error, match=f"(?s)slurm_kwargs: .*{text}"):
        DistributedDataCollector([CountingEnv], launcher="submitit", slurm_kwargs=conf)
    with pytest.raises(error, match=f"(?s)submitit_main_conf: .*{text}"):
        submitit_delayed_launcher(1, submitit_main_conf=conf)(dict)()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"slurm_kwargs": 3}, "slurm_kwargs: expected a dict, got 3"),
        ({"slurm_kwargs": {}, "launcher": "mp"}, "slurm_kwargs: expected None .*, got {}"),
    ],
)
def test_what_is_told_of_jobs_is_a_dict(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        DistributedDataCollector([CountingEnv], **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tcpport": True}, "tcpport: expected an int, got True"),
        ({"tcpport": "abc"}, "tcpport: expected an int, got 'abc'"),
        ({"tcpport": 1 << 17}, "tcpport: expected a number from 0 to 65535"),
        ({"submitit_collection_conf": 3}, "submitit_collection_conf: expected a dict, got 3"),
    ],
)
def test_a_launcher_of_jobs_that_wait_refuses(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        submitit_delayed_launcher(1, **arguments)


DRIVER_PROGRAM = """
import sys, time
from collect_support import elsewhere
from contextlib import nullcontext
from envs_for_tests import CountingEnv
from pycollect import DistributedDataCollector

if __name__ == "__main__":
    with elsewhere() if sys.argv[1] == "messages" else nullcontext():
        collector = DistributedDataCollector([CountingEnv] * 2, launcher="mp", frames_per_batch=5)
    collector.next()
    print(*[worker["pid"] for worker in collector.stats()["workers"].values()], flush=True)
    time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["shared memory", "messages"])
def test_ranks_end_with_their_driver(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DRIVER_PROGRAM)
    driver = subprocess.Popen([sys.executable, program, how], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
