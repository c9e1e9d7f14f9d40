"""Attacks by other users of this machine, and by processes that reach a port."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collect_support import MULTI_STACK, Way, collecting, elsewhere, of_ranks
from envs_for_tests import CountingEnv
from test_rank_messages import free_port, meetings
from test_restarts import check_ledger, endless, kill
from torch.distributed import TCPStore

from pycollect import DistributedDataCollector, RPCDataCollector, submitit_delayed_launcher
from pycollect.transport.distributed.links import GroupCarrier, GroupLink, LinkBrokenError
from pycollect.transport.distributed.meeting import DRIVER, WORKER, ForgedError, Meeting, Seal, meet
from pycollect.transport.distributed.rendezvous import LOOPBACK, Rendezvous
from pycollect.transport.distributed.rpc_link import Parts, RpcCarrier, parts_of, value_of

T = 5
STACKS = of_ranks(MULTI_STACK)
BY_MESSAGES = [way for way in STACKS if way.transport != "shared memory"]
NOBODY = 65534
KEY = bytes(32)

RUNS: list[int] = []


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()


def run() -> str:
    RUNS.append(1)
    return "ran"


class Code:
    """Run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return run, ()


# The files of jobs


@pytest.fixture(params=[0o755, 0o1777, 0o777], ids=oct)
def open_folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that other users can open, unlike the folders of pytest."""
    pytest.importorskip("submitit")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(request.param)
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def readable_by_others(folder: Path) -> list[str]:
    """Return the files below a folder that another user can read or replace."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a program as another user")
    find = ["find", str(folder), "-mindepth", "1", "(", "-type", "f", "-readable", ")"]
    find += ["-o", "(", "-type", "d", "-writable", ")"]
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    ran = subprocess.run(find, capture_output=True, text=True, check=False, **who)
    return ran.stdout.split()


def conf_in(folder: Path) -> dict[str, Any]:
    return {"cluster": "local", "folder": str(folder / "made" / "by us"), "timeout_min": 5}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:folder")
def test_other_users_cannot_open_the_files_of_jobs(open_folder: Path) -> None:
    conf = {**conf_in(open_folder), "folder": str(open_folder)}
    with DistributedDataCollector(
        [CountingEnv], launcher="submitit", slurm_kwargs=conf
    ) as collector:
        collector.next()
        assert list(open_folder.rglob("*_submitted.pkl"))
        assert readable_by_others(open_folder) == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:folder")
def test_other_users_cannot_open_the_files_of_delayed_jobs(open_folder: Path) -> None:
    conf = conf_in(open_folder)
    launcher = submitit_delayed_launcher(1, submitit_main_conf=conf, submitit_collection_conf=conf)
    assert launcher(collect_in_a_job)() == 1
    assert list(open_folder.rglob("*.claimed"))
    assert list(open_folder.rglob("*_result.pkl"))
    assert readable_by_others(open_folder) == []


def collect_in_a_job() -> int:
    with DistributedDataCollector([CountingEnv], launcher="submitit_delayed") as collector:
        collector.next()
        return len(collector.stats()["workers"])


def test_a_folder_that_others_can_write_to_causes_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    from pycollect.transport.distributed.launchers import private_folder

    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match=str(tmp_path)):
        made = private_folder(tmp_path / "jobs" / "%j")
    assert made.name == "%j"
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_an_address_does_not_show_its_token() -> None:
    rendezvous, ours, theirs = meetings()
    rendezvous.close()
    assert "token" not in repr(ours.address)
    assert ours.address.token == theirs.address.token
    for end in (ours, theirs):
        end.close()


# The driver's port


def knock(port: int, said: bytes) -> None:
    """Connect, send these bytes, and wait until the driver closes the connection."""
    place = LOOPBACK, port
    with contextlib.suppress(ConnectionError), socket.create_connection(place, 20) as stranger:
        stranger.sendall(said)
        while stranger.recv(1 << 16):
            pass


@contextlib.contextmanager
def besieged(port: int) -> Iterator[None]:
    """Let strangers connect to the port until this context ends."""
    over = threading.Event()

    def knock_on() -> None:
        while not over.wait(0.01):  # without a pause it would take a whole core
            knock(port, os.urandom(200))

    thread = threading.Thread(target=knock_on)
    thread.start()
    with contextlib.ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(socket.create_connection((LOOPBACK, port), 20))
        yield
        over.set()
        thread.join()


@pytest.mark.processes
@pytest.mark.parametrize("way", STACKS, ids=lambda way: way.name)
def test_strangers_at_the_port_change_nothing(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with (
        caplog.at_level(logging.WARNING, "pycollect"),
        collecting(way, endless, frames=T, tcp_port=port) as collector,
    ):
        collector.next()
        with besieged(port):
            with pytest.raises(RuntimeError):
                TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=1))
            kill(collector, 0)
            while not collector.stats()["workers"][0]["restarts"]:
                collector.next()
            assert collector.next().shape == (2, T)
            collector.shutdown()
        check_ledger(collector)
    assert len([own for own in caplog.records if "secret" in own.message]) == 1


def test_a_connection_that_sends_too_much_is_closed() -> None:
    rendezvous = Rendezvous(LOOPBACK, 0, 5.0)
    for said in (b"\0" * 128, b"GET / HTTP/1.1\r\n" * 100, bytes(10_000_000)):
        knock(rendezvous.port, said)
    rendezvous.close()


def test_a_rank_can_join_once_and_only_if_expected() -> None:
    rendezvous, ours, theirs = meetings(0.5)
    with pytest.raises(TimeoutError, match="one"):
        meet(ours.address)
    for end in (ours, theirs):
        end.close()
    rendezvous.close()


def test_only_signed_values_are_accepted() -> None:
    rendezvous, ours, theirs = meetings()
    theirs.publish("first", 1)
    assert ours.read("first") == 1
    theirs._outgoing.advance()  # as if a message had been dropped
    theirs.publish("second", Code())
    with pytest.raises(ForgedError):
        ours.read("second")
    assert not ours.check(["second"])
    assert RUNS == []
    for end in (ours, theirs):
        end.close()
    rendezvous.close()


def test_a_rank_does_not_trust_another_process_on_the_drivers_port() -> None:
    """A process that listens on the port instead of the driver cannot invite a rank."""
    rendezvous, ours, theirs = meetings(1.0)
    rendezvous.close()
    for end in (ours, theirs):
        end.close()
    with socket.create_server((LOOPBACK, rendezvous.port)) as impostor:

        def answer() -> None:
            with impostor.accept()[0] as connection:
                connection.sendall(bytes(32))
                connection.recv(1 << 16)
                connection.sendall(bytes(4096))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TimeoutError, match="one"):
            meet(ours.address)
        thread.join()


# Messages


class Wire:
    """A process group that keeps its messages, so that a test can change them."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def send(self, tensors: Any, peer: int, tag: int) -> Wire:
        self.parts.append(tensors[0].numpy().copy())
        return self

    def recv(self, tensors: Any, peer: int, tag: int) -> Wire:
        part = self.parts.pop(0)
        if part.nbytes != tensors[0].numpy().nbytes:
            raise RuntimeError("a message of another size")
        tensors[0].numpy()[:] = part
        return self

    def wait(self, limit: Any) -> None:
        """Do nothing: the message is already complete."""


def flipped(number: int) -> Callable[[list[Any]], list[Any]]:
    def flip(parts: list[Any]) -> list[Any]:
        parts[number][-1] ^= 1
        return parts

    return flip


@pytest.mark.parametrize(
    ("tamper", "good"),
    [
        pytest.param(lambda parts: parts, 2, id="nothing"),
        pytest.param(flipped(0), 0, id="head"),
        pytest.param(flipped(1), 0, id="rest"),
        pytest.param(flipped(2), 0, id="array"),
        pytest.param(flipped(5), 1, id="second"),
        pytest.param(lambda parts: parts[:3] * 2, 1, id="replayed"),
        pytest.param(lambda parts: parts[3:], 0, id="dropped"),
        pytest.param(lambda parts: parts[3:] + parts[:3], 0, id="reordered"),
        pytest.param(lambda parts: [*parts[:2], parts[5], *parts[3:]], 0, id="mixed"),
        pytest.param(lambda parts: [parts[0][:500], *parts[1:]], 0, id="truncated"),
    ],
)
def test_a_message_that_was_changed_is_not_unpickled(tamper: Any, good: int) -> None:
    wire = Wire()
    sender, receiver = GroupLink(wire, DRIVER, KEY), GroupLink(wire, WORKER, KEY)
    for number in range(2):
        sender.send((Code(), b"x" * 5000, np.full(100, number, np.uint8)))
    wire.parts = tamper(wire.parts)
    for _ in range(good):
        receiver.receive()
    if good < 2:
        with pytest.raises(LinkBrokenError):
            receiver.receive()
    assert len(RUNS) == good


@pytest.mark.parametrize(
    ("peer", "key"), [(WORKER, KEY), (DRIVER, b"1" * 32)], ids=["sent back", "another key"]
)
def test_a_message_of_another_process_is_not_unpickled(peer: int, key: bytes) -> None:
    wire = Wire()
    GroupLink(wire, peer, key).send(Code())
    with pytest.raises(LinkBrokenError):
        GroupLink(wire, WORKER, KEY).receive()
    assert RUNS == []


@pytest.mark.parametrize("change", ["data", "array", "number", "count", "end"])
def test_parts_of_rpc_that_were_changed_are_not_unpickled(change: str) -> None:
    array = np.zeros(100, np.uint8)
    data, tensors, signatures = parts_of((Code(), array), Seal(KEY, WORKER))
    receiving = Seal(KEY, DRIVER if change == "end" else WORKER)
    if change == "data":
        data = data[:-1] + b"!"
    elif change == "array":
        tensors[0][5] = 1
    elif change == "number":
        receiving.advance()
    elif change == "count":
        signatures.pop()
    parts: Parts = data, tensors, signatures
    with pytest.raises(LinkBrokenError):
        value_of(parts, receiving)
    assert RUNS == []


@pytest.mark.processes
@pytest.mark.parametrize("way", BY_MESSAGES, ids=lambda way: way.name)
def test_a_forged_message_costs_one_rank(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[Any] = []
    carrier: Any = RpcCarrier if way.transport == "rpc" else GroupCarrier
    connect = carrier.driver_end

    def connected(self: Any, meeting: Any) -> Any:
        links.append(connect(self, meeting))
        return links[-1]

    monkeypatch.setattr(carrier, "driver_end", connected)
    with collecting(way, endless, frames=T) as collector:
        collector.next()
        links[0]._incoming.advance()  # so its next message is out of order
        while not any(own["restarts"] for own in collector.stats()["workers"].values()):
            collector.next()
        assert collector.next().shape == (2, T)
        check_ledger(collector)


STRANGER = """
import os, sys
import torch
from torch.distributed import rpc
from pycollect.transport.distributed import rpc as rpc_agent

options = {"num_worker_threads": 4, "rpc_timeout": 20, "_transports": ["uv"]}
rpc_agent._start("stranger", "127.0.0.1", options)
rank = rpc_agent.RpcAgent().add_peer("rank", sys.argv[1].encode())
try:
    rpc.rpc_sync(rank, os.system, (f"touch {sys.argv[2]}",), timeout=20)
except RuntimeError as error:
    print("refused" if "not signed" in str(error) else error, flush=True)
os._exit(0)
"""


@pytest.mark.processes
def test_a_rank_runs_no_call_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[bytes] = []
    read = Meeting.read

    def reading(self: Meeting, key: str) -> Any:
        value = read(self, key)
        urls.append(value[1])
        return value

    monkeypatch.setattr(Meeting, "read", reading)
    with elsewhere(), RPCDataCollector([CountingEnv], launcher="mp") as collector:
        collector.next()
        program = [sys.executable, "-c", STRANGER, urls[0].decode(), str(tmp_path / "ran")]
        ran = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert "refused" in ran.stdout, ran.stdout + ran.stderr
        assert not (tmp_path / "ran").exists()
        collector.next()
        assert collector.stats()["workers"][0]["restarts"] == 0


# Ray


RAY = """
import psutil
from envs_for_tests import CountingEnv
from pycollect import RayCollector

if __name__ == "__main__":
    options = {"num_cpus": 1, "memory": 2**28}
    with RayCollector([CountingEnv], frames_per_batch=5, remote_configs=options) as collector:
        collector.next()
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            for place in process.net_connections("inet"):
                if place.status == psutil.CONN_LISTEN:
                    print("listens", place.laddr.ip)
"""


@pytest.mark.slow
def test_a_ray_that_a_collector_starts_listens_on_loopback(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    program = tmp_path / "program.py"
    program.write_text(RAY)
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    ran = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=200, env=environment
    )
    places = {line.split()[1] for line in ran.stdout.splitlines() if line.startswith("listens")}
    assert places, ran.stderr
    assert places <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
