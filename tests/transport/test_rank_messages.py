"""Messages and ports of the driver and the ranks of torch.distributed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import pytest
from collect_support import elsewhere
from envs_for_tests import CountingEnv
from raising import refused

from pycollect import DistributedDataCollector
from pycollect.transport.distributed.links import GroupCarrier, GroupLink
from pycollect.transport.distributed.meeting import (
    DRIVER,
    WORKER,
    Invitation,
    Meeting,
    RankAddress,
    meet,
)
from pycollect.transport.distributed.rendezvous import LOOPBACK, Rendezvous


def meetings(timeout: float = 30.0) -> tuple[Rendezvous, Meeting, Meeting]:
    """A rendezvous, and the driver's and the rank's end of a meeting there."""
    rendezvous = Rendezvous(LOOPBACK, 0, timeout)
    ours = rendezvous.invite("one", Invitation("", 0, None, GroupCarrier("gloo")))
    theirs, _ = meet(ours.address)
    return rendezvous, ours, theirs


@pytest.fixture
def links() -> tuple[GroupLink, GroupLink]:
    """Both ends of a link, in this process."""
    _, ours, theirs = meetings()
    ends: dict[int, GroupLink] = {}

    def connect() -> None:
        ends[WORKER] = GroupCarrier("gloo").rank_end(theirs)

    thread = threading.Thread(target=connect)
    thread.start()
    ends[DRIVER] = GroupCarrier("gloo").driver_end(ours)
    thread.join()
    return ends[DRIVER], ends[WORKER]


def test_values_of_every_size_arrive_in_order(links: tuple[GroupLink, GroupLink]) -> None:
    ours, theirs = links
    sizes = [0, 1, 900, 1008, 1009, 5000, 3_000_000]
    values = [("text", b"x" * size, np.arange(size, dtype=np.uint8)) for size in sizes]
    kept = [ours.send(value) for value in values]
    arrived = [theirs.receive() for _ in values]
    for sent in kept:
        sent()
    for (name, data, array), (same, same_data, same_array) in zip(values, arrived, strict=True):
        assert (name, data) == (same, same_data)
        assert np.array_equal(array, same_array)


def test_the_invitation_is_sent_before_any_other_message() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    meeting = Meeting(RankAddress(LOOPBACK, 0, b"", "one", 30.0), b"invitation")
    sent_before = []

    class Joined(threading.Event):
        def set(self) -> None:
            sent_before.append(there.recv(1000))  # fails if nothing has been sent
            super().set()

    with here, there:
        meeting._joined = Joined()
        meeting.join(here, b"key", DRIVER)
    assert sent_before[0].endswith(b"invitation")


def test_received_values_have_their_own_memory(links: tuple[GroupLink, GroupLink]) -> None:
    ours, theirs = links
    array = np.zeros(100_000, np.uint8)
    kept = []
    for number in range(3):
        array[:] = number
        kept.append(ours.send(array))
        got = theirs.receive()
        kept[-1]()
        array[:] = 77
        assert (got == number).all()
        kept.append(got)
    assert [int(own[0]) for own in kept[1::2]] == [0, 1, 2]


def test_an_unpicklable_value_is_an_error_and_the_next_value_arrives(
    links: tuple[GroupLink, GroupLink],
) -> None:
    ours, theirs = links
    with pytest.raises(TypeError, match="pickle"):
        ours.send(threading.Lock())
    sent = ours.send("next")
    assert theirs.receive() == "next"
    sent()


# Ports


def listening(pid: int) -> set[Any]:
    """Return the addresses at which a process listens."""
    connections = psutil.Process(pid).net_connections("inet")
    return {own.laddr for own in connections if own.status == psutil.CONN_LISTEN}


@pytest.mark.processes
def test_nothing_listens_at_another_address() -> None:
    before = listening(os.getpid())  # ports of other tests in this process
    with elsewhere(), DistributedDataCollector([CountingEnv], launcher="mp") as collector:
        collector.next()
        (worker,) = collector.stats()["workers"].values()
        assert worker["transport"] == "messages"
        rank = worker["pid"]
        places = (listening(os.getpid()) - before) | listening(rank)
    assert {place.ip for place in places} == {LOOPBACK}


def test_the_error_for_a_used_port_names_it() -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refused(ValueError, "tcp_address", "tcp_port") as caught:
            DistributedDataCollector([CountingEnv], launcher="mp", tcp_port=port)
        assert str(port) in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("how", [nullcontext, elsewhere])
def test_a_port_is_free_again_after_a_shutdown(how: Any) -> None:
    """The port is free even if the collector is still referenced after its shutdown."""
    port = free_port()
    kept = []
    for _ in range(2):
        with how():
            kept.append(DistributedDataCollector([CountingEnv], launcher="mp", tcp_port=port))
        kept[-1].next()
        kept[-1].shutdown()


def test_a_fork_of_the_driver_does_not_affect_its_port() -> None:
    """A fork that exits does not close the port, and one that lives on does not keep it open."""
    rendezvous = Rendezvous(LOOPBACK, 0, 30.0)
    assert os.waitpid(forked(rendezvous.close), 0)[1] == 0
    ours = rendezvous.invite("one", Invitation("", 0, None, GroupCarrier("gloo")))
    theirs, _ = meet(ours.address)
    reading, writing = os.pipe()
    living = forked(lambda: (os.close(writing), os.read(reading, 1)))
    rendezvous.close()
    Rendezvous(LOOPBACK, rendezvous.port, 30.0).close()
    os.close(writing)
    assert os.waitpid(living, 0)[1] == 0
    os.close(reading)
    for end in (ours, theirs):
        end.close()


def forked(call: Callable[[], Any]) -> int:
    """Call this function in a fork of this process; return the fork's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def free_port() -> int:
    with socket.socket() as own:
        own.bind((LOOPBACK, 0))
        return int(own.getsockname()[1])
