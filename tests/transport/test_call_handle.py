"""The driver's handle of a remote actor, tested with an actor that only records its calls."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pycollect.transport.channel import ThreadBell
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import Collect, RolloutRequest, SetWeights, Stop, WorkerSpec
from pycollect.transport.pickling import SharedValue
from pycollect.transport.ray.engine import ActorProcess
from pycollect.worker.options import WorkerOptions


class Method:
    """Stand-in for `RayWorker.call` that records calls; `past` marks calls outside the queue."""

    def __init__(self, notes: list[Any], past: bool = False) -> None:
        self.notes, self.past = notes, past

    def options(self, concurrency_group: str) -> Method:
        assert concurrency_group == "control"
        return Method(self.notes, past=True)

    def remote(self, kind: Any, *fields: Any) -> Any:
        self.notes.append((kind(*fields), self.past))
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
def handle(actor: NotingActor) -> WorkerHandle:
    """Return the handle of a worker that is already built."""
    spec = WorkerSpec(0, None, None, WorkerOptions(5))
    policy = SharedValue(b"", lambda value: value)
    bell = ThreadBell()
    handle = WorkerHandle(spec, b"", policy, None, ActorProcess(None, actor, bell), bell)
    handle.pop()
    actor.notes.clear()
    return handle


def test_a_rollout_is_stopped_by_one_message_past_the_queue(
    handle: WorkerHandle, actor: NotingActor
) -> None:
    for _ in range(3):
        handle.submit(RolloutRequest(False, None))
    first, second, _ = [request.number for request, past in actor.notes if not past]
    actor.notes.clear()
    for _ in range(3):  # the collector repeats this while it waits
        handle.stop()
    assert actor.notes == [(Stop(first), True)]
    handle.pop()
    assert len(actor.notes) == 1  # the queued rollouts continue
    handle.stop()
    handle.stop()
    assert actor.notes[1:] == [(Stop(second), True)]


def test_dropped_rollouts_are_stopped(handle: WorkerHandle, actor: NotingActor) -> None:
    handle.drop_rollouts()
    assert actor.notes == []
    handle.submit(RolloutRequest(False, None))
    handle.submit(RolloutRequest(False, None))
    last = actor.notes[-1][0].number
    handle.stop()
    actor.notes.clear()
    handle.drop_rollouts()
    assert actor.notes == [(Stop(last), True)]
    handle.stop()
    assert len(actor.notes) == 1
    handle.submit(RolloutRequest(False, None))
    handle.stop()
    assert actor.notes[-1] == (Stop(last + 1), True)


def test_weights_travel_with_the_next_rollout(handle: WorkerHandle, actor: NotingActor) -> None:
    """The build request of this handle never gets an answer, so something is always queued."""
    weights = SharedValue(b"1", lambda value: value)
    handle.assign(1, 10, weights, False)
    handle.submit(RolloutRequest(False, None))
    handle.submit(RolloutRequest(False, None))
    sent, carrying, later = [request for request, _ in actor.notes]
    assert sent == SetWeights(1, 10, b"1")
    assert isinstance(carrying, Collect)
    assert (carrying.serial, carrying.weights_version, carrying.weights) == sent
    assert later.weights is None
    assert handle.assign(1, 11, weights, False) is None
    assert len(actor.notes) == 3  # older weights than those that were sent


def test_calls_have_no_limit(
    handle: WorkerHandle, actor: NotingActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a mailbox does, which has a size."""

    def wait(self: WorkerHandle) -> None:
        raise AssertionError("waited for an answer")

    monkeypatch.setattr(WorkerHandle, "_wait_more", wait)
    for _ in range(100):
        handle.submit(RolloutRequest(False, None))
    assert len(actor.notes) == 100
