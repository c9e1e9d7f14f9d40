"""Rollouts of tensors that a CUDA graph captures; here, a stand-in replays their operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import case_name
from gpu_support import needs_gpu
from raising import refused
from tensor_envs import (
    ARGUMENTS,
    ENVS,
    STEPS,
    CountingTensors,
    assert_same,
    collected,
    doubling,
    record_as_on_a_device,
)
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pycollect


class FakeGraph:
    """Stands for `CapturedWork`: records torch's operations once and replays them on each call."""

    captured = 0

    def __init__(self, work: Callable[[], Any], device: torch.device, warmup: int) -> None:
        self._work, self._left = work, warmup
        self.is_captured = False
        self._calls: list[tuple[Any, ...]] = []

    def __call__(self) -> Any:
        if self._left:
            result = self._work()
            self._left -= 1
            return result
        self.is_captured = True
        if not self._calls:
            type(self).captured += 1
            with _Noting(self._calls):
                self._result = self._work()
            return self._result
        for function, args, kwargs, outs in self._calls:
            result = function(*args, **kwargs)
            for own, value in zip(tree_leaves(outs), tree_leaves(result), strict=True):
                if isinstance(own, torch.Tensor) and own.data_ptr() != value.data_ptr():
                    own.copy_(value)
        return self._result


class _Noting(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outs = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, outs))
        return outs


CAPTURED = [
    given
    for given in ARGUMENTS
    if "observation_dtype" not in given and "max_frames_per_traj" not in given
]


def linear() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(2, 1), ["observation"], ["action"])


def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycollect.policy.calling.CallOptions.for_device", lambda own, device: own)
    monkeypatch.setattr("pycollect.worker.captured.CapturedWork", FakeGraph)
    # On the CPU, inputs of a policy are copied by numpy, which `FakeGraph` does not see.
    monkeypatch.setattr("pycollect.policy.program.compile._copier", lambda source: source.clone)
    record_as_on_a_device(monkeypatch)


@pytest.mark.parametrize("arguments", CAPTURED, ids=case_name)
def test_captured_rollouts_are_the_same(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = collected(CountingTensors, linear(), 6, **arguments)
    as_on_a_device(monkeypatch)
    monkeypatch.setattr(FakeGraph, "captured", 0)
    captured = collected(CountingTensors, linear(), 6, cudagraph_policy=True, **arguments)
    assert_same(captured, expected)
    assert FakeGraph.captured == 1


class Rewriting(CountingTensors):
    """Returns the same tensors in every `period`-th step; `hides` that they were written again."""

    def __init__(self, period: int, hides: bool, device: str = "cpu") -> None:
        super().__init__(device=device)
        self._period, self._hides = period, hides
        self._buffers: list[list[torch.Tensor]] = []
        self._steps = 0

    def step(self, actions: Any) -> Any:
        *values, info = super().step(actions)
        values.append(info["final_obs"])
        self._steps += 1
        if len(self._buffers) < self._period:
            self._buffers.append([value.clone() for value in values])
        buffers = self._buffers[self._steps % len(self._buffers)]
        for buffer, value in zip(buffers, values, strict=True):
            # As another library writes, which torch does not notice.
            (buffer.data if self._hides else buffer).copy_(value)
        *values, final = buffers
        return *values, {"final_obs": final}


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("period", [1, 2])
def test_captured_rollouts_with_reused_tensors(
    period: int, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = collected(CountingTensors, linear(), 6)
    as_on_a_device(monkeypatch)
    make = partial(Rewriting, period, hides)
    assert_same(collected(make, linear(), 6, cudagraph_policy=True), expected)


class RewritingLater(CountingTensors):
    """Writes into earlier observations, but not in the first rollout (nor before it)."""

    _steps = 0
    _shown_before: torch.Tensor | None = None

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        self._steps += 1
        if self._shown_before is not None and self._steps > STEPS + 5:
            self._shown_before.zero_()
        self._shown_before = result[0]
        return result


def test_tensors_reused_only_in_captured_rollouts_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on_a_device(monkeypatch)
    with refused(RuntimeError, "cudagraph_policy"):
        collected(RewritingLater, linear(), cudagraph_policy=True)


class Interrupted(CountingTensors):
    """Raises an interrupt in its second rollout."""

    _steps = 0

    def step(self, actions: Any) -> Any:
        self._steps += 1
        if self._steps == STEPS + 5:  # three steps are made before the first rollout
            raise KeyboardInterrupt
        return super().step(actions)


def test_a_captured_rollout_after_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[TensorDictBase]:
        given: dict[str, Any] = {"frames_per_batch": STEPS * ENVS, "total_frames": -1}
        given["cudagraph_policy"] = {"warmup": 2}
        with pycollect.SyncDataCollector(Interrupted, linear(), **given) as collector:
            next(collector)
            with pytest.raises(KeyboardInterrupt):
                next(collector)
            return [next(collector).clone() for _ in range(4)]

    expected = batches()
    as_on_a_device(monkeypatch)
    for batch, other in zip(batches(), expected, strict=True):
        assert (batch == other).all()


class ReusingInEvaluation(nn.Module):
    """A policy that writes its actions into the same tensor in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self._actions = torch.zeros(ENVS, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        actions = doubling(observation)
        return actions if self.training else self._actions.copy_(actions)


def test_another_policy_may_write_again_into_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(**arguments: Any) -> list[TensorDictBase]:
        policy = ReusingInEvaluation()
        with pycollect.SyncDataCollector(
            CountingTensors, policy, frames_per_batch=STEPS * ENVS, total_frames=-1, **arguments
        ) as collector:
            collector.set_seed(3)
            result = [next(collector).clone() for _ in range(3)]
            policy.eval()
            return result + [next(collector).clone() for _ in range(3)]

    expected = batches()
    as_on_a_device(monkeypatch)
    for batch, other in zip(batches(cudagraph_policy=True), expected, strict=True):
        assert (batch == other).all()


@pytest.mark.parametrize("reads", ["stats", "state_dict"])
def test_episodes_of_a_captured_rollout_are_counted_on_request(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts() -> list[Any]:
        found: list[Any] = []
        given: dict[str, Any] = {"frames_per_batch": STEPS * ENVS, "total_frames": -1}
        with pycollect.SyncDataCollector(
            CountingTensors, linear(), cudagraph_policy=True, **given
        ) as collector:
            collector.set_seed(3)
            for _ in range(5):
                ids = next(collector)["collector", "traj_ids"]
                if reads == "stats":
                    stats = collector.stats()
                    found.append((stats["episodes"], stats["episode_return"], stats["frames"]))
                else:
                    state = collector.state_dict()
                    found.append((state["episodes"], state["trajectories"], int(ids.max())))
                    assert state["trajectories"] == int(ids.max()) + 1
        return found

    expected = counts()
    as_on_a_device(monkeypatch)
    assert counts() == expected


def test_rollouts_between_captured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """More episodes end in the random rollouts than fit into one fetch."""

    def batches() -> tuple[list[TensorDictBase], Any]:
        with pycollect.SyncDataCollector(
            Short,
            linear(),
            frames_per_batch=STEPS * ENVS,
            total_frames=-1,
            init_random_frames=STEPS * ENVS,
            cudagraph_policy=True,
        ) as collector:
            collector.set_seed(3)
            start = collector.state_dict()
            result = [next(collector).clone() for _ in range(4)]
            collector.load_state_dict(start)
            result += [next(collector).clone() for _ in range(4)]
            return result, [collector.stats()[key] for key in ("frames", "episodes")]

    expected = batches()
    as_on_a_device(monkeypatch)
    monkeypatch.setattr("pycollect.worker.device_trajectories._FEW_EPISODES", 0)
    monkeypatch.setattr("pycollect.worker.device_trajectories._EPISODES_PER_ENV", 1)
    captured = batches()
    assert captured[1] == expected[1]
    for batch, other in zip(captured[0], expected[0], strict=True):
        assert (batch == other).all()


class Short(CountingTensors):
    """Episodes of one to three steps."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = 1 + torch.arange(ENVS) % 3


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("arguments", CAPTURED, ids=case_name)
def test_graphs_are_the_same(arguments: dict[str, Any]) -> None:
    make = partial(CountingTensors, device="cuda")
    module = linear().cuda()
    captured = collected(make, module, 6, cudagraph_policy=True, **arguments)
    assert_same(captured, collected(make, module, 6, **arguments))
