"""Ranks that receive requests through torch.distributed.rpc, with one agent per process.

Tests for all kinds of ranks include these too: see `test_distributed` and
`collect_support.marked`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from collect_support import MULTI_STACK, collecting, elsewhere, of_ranks
from envs_for_tests import CountingEnv
from raising import refused, warned
from test_distributed import T, transports
from test_rank_messages import listening, meetings
from test_restarts import check_ledger, endless, kill
from torch.distributed import rpc

from pycollect import RPCDataCollector
from pycollect.transport.distributed.links import LinkBrokenError
from pycollect.transport.distributed.meeting import DRIVER, WORKER, Meeting, Seal
from pycollect.transport.distributed.rendezvous import LOOPBACK
from pycollect.transport.distributed.rpc_link import RankLink, parts_of, value_of

WAY = next(way for way in of_ranks(MULTI_STACK) if way.transport == "rpc")


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[Any]:
    """The program's own agent, in a static group."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/own")
    rpc.init_rpc("own", rank=0, world_size=1, rpc_backend_options=options)
    yield rpc.api._get_current_rpc_agent()
    rpc.shutdown()


# The agent


@pytest.mark.processes
def test_the_programs_own_agent_calls_ranks_and_stays(own_agent: Any) -> None:
    with collecting(WAY, endless, frames=T) as collector:
        collector.next()
        assert transports(collector) == ["rpc"] * 2
        kill(collector, 1)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        assert rpc.rpc_sync("own", len, ("four",)) == 4
        assert len(own_agent.get_worker_infos()) == 3
    assert rpc.rpc_sync("own", len, ("four",)) == 4
    assert [info.name for info in own_agent.get_worker_infos()] == ["own"]


@pytest.mark.processes
def test_an_agent_ends_with_the_last_collector(tmp_path: Path) -> None:
    """The program can then start its own agent."""
    with collecting(WAY, endless, frames=T) as collector:
        with collecting(WAY, endless, frames=T) as other:
            other.next()
            assert rpc._is_current_rpc_agent_set()
        assert collector.next().shape == (2, T)
    assert not rpc._is_current_rpc_agent_set()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/own")
    rpc.init_rpc("own", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()


@pytest.mark.processes
@pytest.mark.slow
def test_an_agent_ended_by_the_program_is_an_error_or_recreated() -> None:
    with collecting(WAY, endless, frames=T) as collector:
        collector.next()
        rpc.shutdown(graceful=False)
        while not all(own["restarts"] for own in collector.stats()["workers"].values()):
            collector.next()
        assert collector.next().shape == (2, T)
        check_ledger(collector)
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.processes
def test_on_this_node_ranks_need_no_agent() -> None:
    with RPCDataCollector([CountingEnv], launcher="mp") as collector:
        collector.next()
        assert transports(collector) == ["shared memory"]
        assert not rpc._is_current_rpc_agent_set()


@pytest.mark.processes
def test_agents_listen_at_the_address_that_was_chosen() -> None:
    before = listening(os.getpid())  # ports of other tests in this process
    with elsewhere(), RPCDataCollector([CountingEnv], launcher="mp") as collector:
        collector.next()
        rank = collector.stats()["workers"][0]["pid"]
        places = (listening(os.getpid()) - before) | listening(rank)
    assert {place.ip for place in places} == {LOOPBACK}


def import_remote_module() -> None:
    """Execute the module again if it was imported before."""
    importlib.reload(importlib.import_module("torch.distributed.nn.api.remote_module"))


@pytest.mark.processes
def test_a_rank_may_import_torchs_compiler() -> None:
    """The compiler imports this module, which registers with the pickler of torch's RPC."""
    arguments = {"frames": T, "pre_collect_hook": import_remote_module}
    with collecting(WAY, endless, **arguments) as collector:
        assert collector.next().shape == (2, T)


PROGRAM = """
from collect_support import elsewhere
from envs_for_tests import CountingEnv
from pycollect import RPCDataCollector

if __name__ == "__main__":
    with elsewhere():
        collector = RPCDataCollector([CountingEnv] * 2, launcher="mp", frames_per_batch=5)
    collector.next()
    {end}
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["collector.shutdown()", "pass"])
def test_a_program_ends_without_output(end: str, tmp_path: Path) -> None:
    """The program exits without output, even if it forgets its collector."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    if end != "pass":  # otherwise torch logs the connections
        assert "tensorpipe" not in ran.stderr, ran.stderr


# The rank's end


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankLink, Meeting]]:
    """The rank's end, which is called here directly, and the driver's meeting."""
    monkeypatch.setattr(
        "pycollect.transport.distributed.rpc_link.AGENT", MagicMock(url=lambda: b"")
    )
    _, ours, theirs = meetings()
    yield RankLink(theirs, "one", {}), ours
    ours.close()


def test_values_are_received_in_the_order_in_which_they_were_sent(
    ends: tuple[RankLink, Meeting],
) -> None:
    link, meeting = ends
    seal = Seal(meeting.key, DRIVER)
    for order in itertools.permutations([1, 2, 3, 4]):
        base = link._next - 1
        values = [(number, np.full(3, number, np.uint8)) for number in range(1, 5)]
        parts = [parts_of(value, seal) for value in values]
        for number in order:
            link.push(base + number, parts[number - 1])
        for number in range(1, 5):
            name, array = link.receive()
            assert name == number
            assert (array == number).all()


def test_send_and_receive_may_come_in_any_order(ends: tuple[RankLink, Meeting]) -> None:
    link, meeting = ends
    seal = Seal(meeting.key, WORKER)
    early = link.send("one")
    assert value_of(link.pull(1).wait(), seal) == "one"
    asked = link.pull(2)
    early()  # the second pull acknowledges it
    assert not asked.done()
    link.send("two")
    assert value_of(asked.wait(), seal) == "two"


def test_a_rank_learns_that_its_driver_is_gone(ends: tuple[RankLink, Meeting]) -> None:
    link, meeting = ends
    sent = link.send("one")
    caught: list[str] = []

    def expect(call: Any) -> None:
        with pytest.raises(LinkBrokenError) as error:
            call()
        caught.append(str(error.value))

    waiting = [threading.Thread(target=expect, args=(call,)) for call in (link.receive, sent)]
    for thread in waiting:
        thread.start()
    meeting.close()
    for thread in waiting:
        thread.join(10)
    assert len(caught) == 2


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"tensorpipe_options": 3}, TypeError, "tensorpipe_options"),
        ({"tensorpipe_options": {"threads": 3}}, ValueError, "tensorpipe_options"),
        ({"tensorpipe_options": {"_transports": ["post"]}}, ValueError, "tensorpipe_options"),
        ({"tensorpipe_options": {"num_worker_threads": 0}}, ValueError, "tensorpipe_options"),
        ({"tensorpipe_options": {"num_worker_threads": True}}, ValueError, "tensorpipe_options"),
        ({"visible_devices": "cuda:0"}, TypeError, "visible_devices"),
        ({"visible_devices": ["cpu"] * 3}, ValueError, "visible_devices"),
        ({"visible_devices": ["tpu?"]}, ValueError, "visible_devices"),
        ({"backend": "smoke"}, ValueError, "backend"),
    ],
)
def test_arguments_refused_before_anything_starts(arguments: Any, error: Any, name: str) -> None:
    with refused(error, name):
        RPCDataCollector([CountingEnv], launcher="mp", **arguments)


@pytest.mark.processes
def test_visible_devices_cause_a_warning_that_they_have_no_effect() -> None:
    arguments: dict[str, Any] = {"launcher": "mp", "tensorpipe_options": {"num_worker_threads": 2}}
    with (
        warned("visible_devices"),
        RPCDataCollector([CountingEnv], visible_devices=[0], **arguments) as collector,
    ):
        assert collector.next().device is None
