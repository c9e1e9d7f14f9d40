"""The stream of a policy that shares its process with a learner, on fake streams.

A fake stream keeps the names of the work that happens before its next operation: its own work,
and the work of streams that it has waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from echo_envs import wait_until
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import MultiSyncDataCollector, SyncDataCollector
from pycollect.policy.device import PolicyStream

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream of the fake device."""

    def __init__(self, device: torch.device = DEVICE, priority: int = 0) -> None:
        self.before: set[str] = set()

    def give(self, work: str) -> None:
        self.before.add(work)

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Streams(threading.local):
    """The default stream and the current stream of the calling thread."""

    default = Stream()

    def __init__(self) -> None:
        self.current = self.default

    @contextmanager
    def made_current(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Put policies of this process on a device with fake streams; return the default stream."""
    Streams.default = Stream()
    streams = Streams()
    for name, value in {
        "Stream": Stream,
        "stream": streams.made_current,
        "current_stream": lambda device=None: streams.current,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in ("driver.in_process", "driver.policy_place"):
        monkeypatch.setattr(f"pycollect.{module}.PolicyStream", lambda _: PolicyStream(DEVICE))
    return Streams.default


class Noting(nn.Module):
    """Push the cart to the left, and record the streams of calls and of weight updates."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Stream, set[str]]] = []
        self.loads: list[tuple[Stream, set[str]]] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self._note(self.calls, "step")
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    def _note(self, notes: list[tuple[Stream, set[str]]], work: str) -> None:
        stream: Any = torch.cuda.current_stream()
        notes.append((stream, set(stream.before)))
        stream.give(work)

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        self._note(self.loads, "load")


class Buffer(list[Any]):
    """A buffer that keeps whole batches."""

    def extend(self, td: Any) -> None:
        self.append(td)


def make(kind: str, module: Noting, **arguments: Any) -> Any:
    policy = TensorDictModule(module, ["observation"], ["action"])
    if kind == "central":
        envs = ["CartPole-v1"] * 2
        arguments["inference"] = "central"
        return MultiSyncDataCollector(envs, policy, frames_per_batch=6, **arguments)
    return SyncDataCollector("CartPole-v1", policy, frames_per_batch=3, **arguments)


KINDS = pytest.mark.parametrize("kind", ["in process", "central"])


@KINDS
def test_a_batch_is_ordered_with_the_callers_queued_work(kind: str, default: Stream) -> None:
    """The policy acts after an optimizer's step; the next step waits until its weights are read."""
    module = Noting()
    with make(kind, module) as collector:
        for step in ("first", "second"):
            default.give(step)
            default.before.discard("step")
            module.calls.clear()
            collector.next()
            assert len(module.calls) >= 3
            assert all(own is not default and step in before for own, before in module.calls)
            assert "step" in default.before
        assert len({id(own) for own, _ in module.calls}) == 1
        module.calls.clear()
        default.give("before the seed")
        collector.set_seed(0)
        collector.next()
        assert all("before the seed" in before for _, before in module.calls)


@KINDS
def test_a_policy_waits_for_the_learner_only_at_an_update(kind: str, default: Stream) -> None:
    module, buffer = Noting(), Buffer()

    def next_calls() -> list[tuple[Stream, set[str]]]:
        """Return the policy's calls for a batch that starts after this call."""
        for _ in range(2):
            batches, first = len(buffer), len(module.calls)
            wait_until(lambda before=batches: len(buffer) > before)
        return module.calls[first:]

    with make(kind, module, replay_buffer=buffer) as collector:
        default.give("before the start")
        collector.start()
        assert all("before the start" in before for _, before in next_calls())
        default.give("learner")
        assert all("learner" not in before for _, before in next_calls())
        assert "step" in default.before  # the batch is converted after the learner's step
        collector.update_policy_weights_()
        assert all("learner" in before for _, before in next_calls())
        with collector.pause():
            default.give("in the pause")
        assert all("in the pause" in before for _, before in next_calls())


@KINDS
def test_weights_are_written_on_the_policys_stream(kind: str, default: Stream) -> None:
    """No call reads half-written weights, and the caller continues after the write."""
    module = Noting()
    with make(kind, module) as collector:
        collector.next()
        weights = {"module._extra_state": 0}
        default.give("new weights")
        collector.update_policy_weights_(weights)
        ((stream, before),) = module.loads[-1:]
        assert stream is module.calls[-1][0]
        assert {"new weights", "step"} <= before
        assert "load" in default.before


def test_tensors_of_its_stream_are_handed_over(default: Stream) -> None:
    stream = PolicyStream(DEVICE)
    used: list[Any] = []
    own: Any = SimpleNamespace(device=DEVICE, record_stream=used.append)
    on_host = torch.zeros(1)  # record_stream would raise
    with stream.on_stream():
        torch.cuda.current_stream().give("made")  # type: ignore[attr-defined]
    stream.hand_over([own, on_host])
    assert used == [default]
    assert "made" in default.before


def test_on_the_cpu_no_stream_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "current_stream")
    stream = PolicyStream(torch.device("cpu"))
    with stream.collecting(), stream.ordered(), stream.on_stream():
        stream.hand_over([torch.zeros(1)])
