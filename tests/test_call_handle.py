"""The driver's handle of a remote actor, tested with an actor that only records its calls."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pycollect.transport.call_handle import CallHandle
from pycollect.transport.messages import RolloutRequest, WorkerSpec
from pycollect.transport.ray.actor import Actor
from pycollect.transport.shared_value import SharedValue
from pycollect.transport.waiting import ThreadBell
from pycollect.worker.options import WorkerOptions


class Method:
    """Stand-in for `RayWorker.call` that records calls; `past` marks calls outside the queue."""

    def __init__(self, notes: list[Any], past: bool = False) -> None:
        self.notes, self.past = notes, past

    def options(self, concurrency_group: str) -> Method:
        assert concurrency_group == "control"
        return Method(self.notes, past=True)

    def remote(self, name: str, *arguments: Any) -> Any:
        self.notes.append((name, self.past, arguments))
        return Reference()


class Reference:
    """A reference to a result that never arrives."""

    def future(self) -> Future[Any]:
        return Future()


class NotingActor:
    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.call = Method(self.notes)


@pytest.fixture
def actor() -> NotingActor:
    return NotingActor()


@pytest.fixture
def handle(actor: NotingActor) -> CallHandle:
    """Return the handle of a worker that is already built."""
    spec = WorkerSpec(0, None, None, WorkerOptions(5))
    policy = SharedValue(b"", lambda value: value)
    handle = CallHandle(spec, policy, Actor(None, actor, ThreadBell()))
    handle.pop()
    actor.notes.clear()
    return handle


def test_a_rollout_is_stopped_by_one_message_past_the_queue(
    handle: CallHandle, actor: NotingActor
) -> None:
    for _ in range(3):
        handle.submit(RolloutRequest(False, None))
    asked = [arguments[0] for name, past, arguments in actor.notes if not past]
    assert asked == [1, 2, 3]
    actor.notes.clear()
    for _ in range(3):  # the collector repeats this while it waits
        handle.stop()
    assert actor.notes == [("stop", True, (1,))]
    handle.pop()
    assert len(actor.notes) == 1  # the queued rollouts continue
    handle.stop()
    handle.stop()
    assert actor.notes[1:] == [("stop", True, (2,))]


def test_what_is_dropped_is_stopped(handle: CallHandle, actor: NotingActor) -> None:
    handle.drop_rollouts()
    assert actor.notes == []
    handle.submit(RolloutRequest(False, None))
    handle.submit(RolloutRequest(False, None))
    handle.stop()
    actor.notes.clear()
    handle.drop_rollouts()
    assert actor.notes == [("stop", True, (2,))]
    handle.stop()
    assert len(actor.notes) == 1
    handle.submit(RolloutRequest(False, None))
    handle.stop()
    assert actor.notes[-1] == ("stop", True, (3,))
