"""Vector environments of tensors: the same batches as from environments of numpy arrays."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import case_name
from gpu_support import DEVICE, needs_gpu
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from raising import refused, warned
from tensor_envs import ENVS, CountingArrays, CountingTensors
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pycollect

STEPS = 7
MODES = ("SAME_STEP", "NEXT_STEP", "SKIPPING", "DISABLED")
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"set_truncated": True},
    {"compact_obs": True, "track_policy_version": True},
    {"max_frames_per_traj": 4},
    {"reset_at_each_iter": True},
    {"split_trajs": True},
    {"drop_uncollected": True},
    {"postproc": pycollect.MultiStep(0.5, 2)},
    {"observation_dtype": torch.float16},
    {"init_random_frames": 20},
    {"trajs_per_batch": 3, "max_frames_per_traj": 6},
]

Result = tuple[list[TensorDictBase], dict[str, Any], dict[str, Any]]


def record_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record tensors on the CPU as those on another device are recorded."""
    monkeypatch.setattr("pycollect.envs.make_vector.CPU", None)


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=pytest.mark.cuda, id="gpu")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the environment's tensors. Without a GPU, the second one only acts like it."""
    if request.param_index == 1 and DEVICE == "cpu":
        record_as_on_a_device(monkeypatch)
    return str(request.param)


def doubling(observation: torch.Tensor) -> torch.Tensor:
    return (observation[:, 1:] % 3) * 2


def collected(make: Callable[[], Any], policy: Any, count: int = 4, **arguments: Any) -> Result:
    given = {"frames_per_batch": STEPS * ENVS, "total_frames": count * STEPS * ENVS, **arguments}
    with pycollect.SyncDataCollector(make, policy, **given) as collector:
        collector.set_seed(3)
        batches = [batch.cpu().clone() for batch in collector]
        return batches, collector.stats(), collector.ledger()


def assert_same(ours: Result, theirs: Result) -> None:
    (batches, stats, ledger), (expected, their_stats, their_ledger) = ours, theirs
    assert ledger == their_ledger
    for key in ("frames", "episodes", "episode_return", "episode_length"):
        assert stats.get(key) == pytest.approx(their_stats.get(key)), key
    for batch, other in zip(batches, expected, strict=True):
        assert batch.shape == other.shape
        assert batch.names == other.names
        assert set(batch.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            assert batch[key].dtype is other[key].dtype, key
            torch.testing.assert_close(batch[key], other[key], rtol=0, atol=0, msg=str(key))


def assert_as_arrays(device: str, policy: Callable[[], Any], *env: Any, **arguments: Any) -> None:
    """Compare with the environment of arrays; other tests check its batches."""
    own = policy()
    own = own.to(device) if isinstance(own, nn.Module) else own
    tensors = collected(partial(CountingTensors, *env, device=device), own, **arguments)
    assert_same(tensors, collected(partial(CountingArrays, *env), policy(), **arguments))


@pytest.mark.filterwarnings("ignore:trajs_per_batch")
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=case_name)
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_arrays(device: str, mode: str, arguments: dict[str, Any]) -> None:
    if mode == "SKIPPING" and "max_frames_per_traj" in arguments:
        pytest.skip("it cannot reset single rows")
    assert_as_arrays(device, lambda: doubling, mode, **arguments)


def stepping() -> TensorDictModule:
    """A policy that reads the collector's own entries."""

    def act(observation: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return first * 4 + count + observation[..., 1:] / 8

    return TensorDictModule(act, ["observation", "is_init", "step_count"], ["action"])


class Counter(nn.Module):
    in_keys = ("observation", "count", "is_init")
    out_keys = ("action", ("next", "count"))

    def forward(
        self, observation: torch.Tensor, count: torch.Tensor, is_init: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.where(is_init, 1.0, count + 1)
        return count * 0.5 + observation[..., :1] * 0, count


def recurrent() -> TensorDictModule:
    return TensorDictModule(Counter(), list(Counter.in_keys), list(Counter.out_keys))


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_reads_counts_and_first_steps(device: str, mode: str) -> None:
    if mode in ("SAME_STEP", "DISABLED"):
        arguments = {"max_frames_per_traj": 5}
        assert_as_arrays(device, stepping, mode, **arguments)
    assert_as_arrays(device, recurrent, mode, policy_state={"count": torch.zeros(1)})


def test_an_output_may_be_a_view_of_an_input(device: str) -> None:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return doubling(observation), observation[:, :1]

    assert_as_arrays(device, lambda: TensorDictModule(act, ["observation"], ["action", "episode"]))


def test_random_actions(device: str) -> None:
    assert_as_arrays(device, lambda: None)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
def test_single_rows_are_reset_between_batches(device: str, mode: str) -> None:
    def batches(make: Callable[[], Any]) -> list[TensorDictBase]:
        with pycollect.SyncDataCollector(
            make, doubling, frames_per_batch=STEPS * ENVS, total_frames=-1
        ) as collector:
            collector.set_seed(3)
            collector.reset([0, 3])
            first = next(collector).cpu().clone()
            collector.reset([1, 3])
            return [first, next(collector).cpu().clone(), next(collector).cpu().clone()]

    ours = batches(partial(CountingTensors, mode, device=device))
    for own, other in zip(ours, batches(partial(CountingArrays, mode)), strict=True):
        assert (own == other).all()


@pytest.mark.parametrize(("steps", "envs"), [(1, ENVS), (STEPS, 1), (1, 1)])
def test_batches_of_one_step_or_environment_stay_as_they_are(
    steps: int, envs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensor_envs.ENVS", envs)
    with pycollect.SyncDataCollector(
        partial(CountingTensors, device=device),
        doubling,
        frames_per_batch=steps * envs,
        total_frames=6 * steps * envs,
    ) as collector:
        pairs = [(batch, batch.cpu().clone()) for batch in collector]
    for kept, copied in pairs:
        assert (kept.cpu() == copied).all()


def test_last_observations_may_come_row_by_row(device: str) -> None:
    assert_as_arrays(device, lambda: doubling, "SAME_STEP", "each")


class Keeping(CountingTensors):
    """Reuse one array of final observations, which keeps values of earlier episodes."""

    def __init__(self) -> None:
        super().__init__("SAME_STEP", "each")
        self._kept = np.full(ENVS, None, object)

    def step(self, actions: Any) -> Any:
        *values, info = super().step(actions)
        for row, own in enumerate(info.get("final_obs", ())):
            self._kept[row] = self._kept[row] if own is None else own
        return *values, {"final_obs": self._kept}


class Listing(CountingTensors):
    """Return info as a list of one dict per row."""

    def step(self, actions: Any) -> Any:
        *values, info = super().step(actions)
        done = values[2] | values[3]
        rows = zip(info["final_obs"], done.tolist(), strict=True)
        return *values, [{"final_obs": own} if ended else {} for own, ended in rows]


@pytest.mark.parametrize("kind", [Keeping, Listing])
def test_last_observations_are_those_of_rows_that_ended(kind: Any) -> None:
    assert_same(collected(kind, doubling), collected(CountingArrays, doubling))


class Raising(CountingTensors):
    """The reward of step 20 is read by Python code, in which a signal arrives."""

    steps = 0

    def step(self, actions: Any) -> Any:
        observation, reward, *rest = super().step(actions)
        self.steps += 1
        return observation, Interrupting(reward) if self.steps == 20 else reward, *rest


class Interrupting:
    """Offers a tensor by DLPack; a signal arrives when it is read for the first time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._has_read = tensor, False
        self.shape, self.dtype, self.ndim = tensor.shape, tensor.dtype, tensor.ndim

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self._has_read:
            self._has_read = True
            signal.raise_signal(signal.SIGINT)
        return self._tensor.__dlpack__(**options)


def test_an_interrupt_while_values_are_read_is_raised() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        pycollect.SyncDataCollector(Raising, doubling, frames_per_batch=200) as collector,
    ):
        collector.next()


class Alone(VectorEnv[Any, Any, Any]):
    """One environment, whose reward has no dimension; episodes have 5 steps."""

    def __init__(self) -> None:
        self.num_envs = 1
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = Box(-1e9, 1e9, (1,), np.float32)
        self.single_action_space = Box(-9.0, 9.0, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, 1)
        self.action_space = batch_space(self.single_action_space, 1)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.steps = 0
        return torch.zeros(1, 1), {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        last, ended = torch.full((1, 1), float(self.steps)), torch.tensor([self.steps == 5])
        reward = last.squeeze()
        self.steps %= 5
        shown = torch.full((1, 1), float(self.steps))
        return shown, reward, ended, torch.zeros_like(ended), {"final_obs": last}


def test_a_reward_without_a_dimension_is_that_of_one_environment() -> None:
    with pycollect.SyncDataCollector(Alone, None, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch is not None
    steps = torch.arange(20) % 5
    assert batch["observation"].flatten().tolist() == steps.tolist()
    assert batch["next", "observation"].flatten().tolist() == (steps + 1).tolist()
    assert batch["next", "reward"].flatten().tolist() == (steps + 1).tolist()


def test_last_observations_of_ended_rows_alone_are_refused() -> None:
    class Partial(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            return *values, {"final_obs": info["final_obs"][values[2] | values[3]]}

    with refused(ValueError, "final_observation"):
        collected(Partial, doubling)


def test_an_ended_row_without_a_last_observation_is_refused() -> None:
    class Lacking(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, _ = super().step(actions)
            return *values, {"final_obs": np.full(ENVS, None, object)}

    with refused(ValueError, "final_observation"):
        collected(Lacking, doubling)


class Other(CountingArrays):
    """The environment of arrays for another kind of tensors."""

    def __init__(self, kind: Callable[[], CountingTensors]) -> None:
        self._env = kind()


class Pending(CountingTensors):
    """Keep pending resets over a reset, like AsyncVectorEnv without shared memory."""

    def __init__(self) -> None:
        super().__init__("SKIPPING")

    def reset(self, **arguments: Any) -> Any:
        pending = self._ended.clone()
        result = super().reset(**arguments)
        self._ended.copy_(pending)
        return result


def test_pending_resets_are_done_before_a_reset() -> None:
    ours = collected(Pending, doubling, reset_at_each_iter=True)
    assert_same(ours, collected(partial(Other, Pending), doubling, reset_at_each_iter=True))


class Stating(CountingTensors):
    """Declare NEXT_STEP, but reset in the same step."""

    def __init__(self, final: bool = True) -> None:
        super().__init__("SAME_STEP", final)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._masks = False


class EndingAgain(CountingTensors):
    """End rows in the step that resets them."""

    def __init__(self) -> None:
        super().__init__("SKIPPING")

    def step(self, actions: Any) -> Any:
        ended = self._ended.clone()
        shown, reward, terminated, truncated, info = super().step(actions)
        return shown, reward, terminated | ended, truncated, info


@pytest.mark.parametrize("kind", [Stating, EndingAgain])
def test_an_environment_that_contradicts_its_mode_is_refused(kind: Any) -> None:
    for make in (kind, partial(Other, kind)):
        with refused(ValueError, "autoreset_mode"):
            collected(make, doubling)


def test_a_reward_in_a_step_that_only_resets_is_told() -> None:
    with warned("autoreset_mode"):
        collected(partial(Stating, False), doubling)


def test_a_last_observation_that_is_overwritten_is_told() -> None:
    class Overwritten(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, _ = super().step(actions)
            return *values, {"final_obs": values[0]}

    for make in (Overwritten, partial(Other, Overwritten)):
        with warned("create_env_fn"):
            collected(make, doubling)


def test_frames_of_an_interrupted_rollout_count_as_stepped() -> None:
    class Interrupted(CountingTensors):
        left = 4

        def step(self, actions: Any) -> Any:
            Interrupted.left -= 1
            if not Interrupted.left:
                raise KeyboardInterrupt
            return super().step(actions)

    def stepped(make: Callable[[], Any]) -> int:
        Interrupted.left = 1_000
        with pycollect.SyncDataCollector(
            make, doubling, frames_per_batch=STEPS * ENVS, total_frames=-1
        ) as collector:
            next(collector)
            Interrupted.left = 4
            with pytest.raises(KeyboardInterrupt):
                next(collector)
            next(collector)
            return int(collector.stats()["frames_stepped"])

    assert stepped(Interrupted) == stepped(partial(Other, Interrupted))


def test_observations_may_have_gradients() -> None:
    class Differentiable(CountingTensors):
        def reset(self, **arguments: Any) -> Any:
            shown, info = super().reset(**arguments)
            return shown.requires_grad_() * 1, info

    with pycollect.SyncDataCollector(
        Differentiable, doubling, frames_per_batch=STEPS * ENVS, total_frames=-1
    ) as collector:
        for index in (None, [1, 3]):
            next(collector)
            collector.reset(index)
        assert not any(own.requires_grad for own in next(collector).values(True, True))


@pytest.mark.filterwarnings("ignore:final_observation")
def test_last_observations_may_be_unknown(device: str) -> None:
    arguments = {"final_observation": "unknown"}
    assert_as_arrays(device, lambda: doubling, "SAME_STEP", False, **arguments)
    known = collected(partial(CountingTensors, "SAME_STEP", device=device), doubling)[0]
    unknown = collected(
        partial(CountingTensors, "SAME_STEP", False, device=device), doubling, **arguments
    )[0]
    for batch, other in zip(unknown, known, strict=True):
        valid = batch["next", "observation_valid"]
        assert (valid == ~batch["next", "done"]).all()
        seen = valid.squeeze(-1)
        assert (batch["next", "observation"][seen] == other["next", "observation"][seen]).all()


def test_unknown_last_observations_must_be_asked_for(device: str) -> None:
    with refused(ValueError, "final_observation"):
        collected(partial(CountingTensors, "SAME_STEP", False, device=device), doubling)


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
def test_captured_rollouts_of_tensors_that_are_written_again(
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


def test_tensors_must_not_be_written_again_only_in_captured_rollouts(
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
def test_episodes_of_a_captured_rollout_are_counted_when_asked_for(
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


def test_unknown_last_observations_need_a_reset_in_the_same_step() -> None:
    for make in (partial(CountingTensors, "NEXT_STEP"), partial(CountingArrays, "DISABLED")):
        with refused(ValueError, "final_observation"):
            collected(make, doubling, final_observation="unknown")
    with refused(ValueError, "final_observation"):
        collected(CountingTensors, doubling, final_observation="none")


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("arguments", CAPTURED, ids=case_name)
def test_graphs_are_the_same(arguments: dict[str, Any]) -> None:
    make = partial(CountingTensors, device="cuda")
    module = linear().cuda()
    captured = collected(make, module, 6, cudagraph_policy=True, **arguments)
    assert_same(captured, collected(make, module, 6, **arguments))


def in_processes(kind: Any, make: Callable[[], Any], **arguments: Any) -> list[TensorDictBase]:
    frames = 2 * STEPS * ENVS
    given = {"frames_per_batch": frames, "total_frames": 3 * frames, **arguments}
    with kind([make] * 2, doubling, **given) as collector:
        collector.set_seed(3)
        return [batch.clone() for batch in collector]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [{}, {"inference": "central"}], ids=case_name)
def test_processes_bring_the_batches_of_arrays(mode: str, arguments: dict[str, Any]) -> None:
    kind = pycollect.MultiSyncDataCollector
    ours = in_processes(kind, partial(CountingTensors, mode), **arguments)
    theirs = in_processes(kind, partial(CountingArrays, mode), **arguments)
    for batch, other in zip(ours, theirs, strict=True):
        assert (batch == other).all()


class SlowTensors(CountingTensors):
    """A slow environment, to have its rollouts preempted."""

    def step(self, actions: Any) -> Any:
        time.sleep(0.005)
        return super().step(actions)


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_that_end_early_leave_cells_without_frames(mode: str) -> None:
    with pycollect.MultiSyncDataCollector(
        [partial(CountingTensors, mode), partial(SlowTensors, mode)],
        doubling,
        frames_per_batch=2 * 40 * ENVS,
        total_frames=-1,
        preemptive_threshold=0.5,
    ) as collector:
        lacking = 0
        for _ in range(3):
            batch = next(collector)
            mask = batch["collector", "mask"]
            lacking += int((~mask).sum())
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            for key in batch.exclude(("collector", "traj_ids")).keys(True, True):
                assert not batch[key][~mask].any(), key
            before, after = batch["observation"][mask], batch["next", "observation"][mask]
            assert (after - before == torch.tensor([0.0, 1.0])).all()
            reward = 100 * after[:, :1] + after[:, 1:] + batch["action"][mask]
            assert (batch["next", "reward"][mask] == reward).all()
        assert lacking
        total = collector.ledger()["total"]
        assert total["issued"] == total["delivered"] + total["lost"] + total["in_flight"]


@pytest.mark.slow  # four actors; an actor's worker differs from a process's only in its start
@pytest.mark.ray
def test_so_do_actors() -> None:
    ours, theirs = (
        in_processes(pycollect.RayCollector, make, sync=True)
        for make in (CountingTensors, CountingArrays)
    )
    for batch, other in zip(ours, theirs, strict=True):
        assert (batch == other).all()


class Nested(CountingTensors):
    """The same with nested observations and actions, in arrays that only support DLPack."""

    def __init__(self) -> None:
        super().__init__()
        half = Box(-1e9, 1e9, (), np.float32)
        self.single_observation_space = Dict({"episode": half, "more": Tuple([half])})
        self.single_action_space = Dict({"a": Box(-9.0, 9.0, (1,), np.float32)})

    def reset(self, **arguments: Any) -> Any:
        shown, info = super().reset(**arguments)
        return self._nest(shown), info

    def step(self, actions: Any) -> Any:
        shown, *rest, info = super().step(torch.from_dlpack(actions["a"]))
        info["final_obs"] = self._nest(info["final_obs"])
        values = (Speaking(value.contiguous()) for value in rest)
        return self._nest(shown), *values, info

    def _nest(self, shown: torch.Tensor) -> Any:
        episode, step = (Speaking(own.contiguous()) for own in shown.unbind(1))
        return {"episode": episode, "more": (step,)}


class Speaking:
    """An array that only supports DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda tensor: Speaking(torch.from_dlpack(tensor)))


def test_arrays_of_other_libraries_and_nests() -> None:
    policy = TensorDictModule(
        lambda step: (step.unsqueeze(-1) % 3) * 2, [("more", "0")], [("action", "a")]
    )
    ours, stats, _ = collected(Nested, policy)
    theirs, their_stats, _ = collected(CountingArrays, doubling)
    assert stats["episode_return"] == their_stats["episode_return"]
    for batch, other in zip(ours, theirs, strict=True):
        for root in ((), ("next",)):
            parts = [batch[(*root, "episode")], batch[(*root, "more", "0")]]
            assert (torch.stack(parts, -1) == other[(*root, "observation")]).all()
        assert (batch["action", "a"] == other["action"]).all()
        assert (batch["collector"] == other["collector"]).all()


def test_observations_may_have_names_of_the_collectors_own_entries() -> None:
    class Named(CountingTensors):
        def __init__(self) -> None:
            super().__init__()
            box = self.single_observation_space
            self.single_observation_space = Dict({"step_count": box, "is_init": box})

        def reset(self, **arguments: Any) -> Any:
            shown, info = super().reset(**arguments)
            return {"step_count": shown, "is_init": shown + 1}, info

        def step(self, actions: Any) -> Any:
            shown, *rest, info = super().step(actions)
            final = info["final_obs"]
            info["final_obs"] = {"step_count": final, "is_init": final + 1}
            return {"step_count": shown, "is_init": shown + 1}, *rest, info

    policy = TensorDictModule(doubling, ["step_count"], ["action"])
    ours, _, _ = collected(Named, policy)
    theirs, _, _ = collected(CountingArrays, doubling)
    for batch, other in zip(ours, theirs, strict=True):
        for root in ((), ("next",)):
            assert (batch[(*root, "step_count")] == other[(*root, "observation")]).all()
            assert (batch[(*root, "is_init")] == other[(*root, "observation")] + 1).all()


def test_columns_gradients_and_other_dtypes_are_accepted() -> None:
    class Odd(CountingTensors):
        weight = torch.ones(2, requires_grad=True)

        def reset(self, **arguments: Any) -> Any:
            shown, info = super().reset(**arguments)
            return shown * self.weight, info

        @torch.enable_grad()
        def step(self, actions: Any) -> Any:
            shown, reward, terminated, truncated, info = super().step(actions)
            flags = terminated.int(), truncated.to(torch.uint8).unsqueeze(1)
            info = {"final_observation": info["final_obs"], "log": {"height": torch.ones(3)}}
            return shown * self.weight, reward.double().unsqueeze(1), *flags, info

    assert_same(collected(Odd, doubling), collected(CountingArrays, doubling))


def test_buffers_may_be_used_again() -> None:
    class Reusing(CountingTensors):
        def __init__(self) -> None:
            super().__init__()
            self.shown, self.final = torch.zeros(ENVS, 2), torch.zeros(ENVS, 2)
            self.reward = torch.zeros(ENVS)

        def reset(self, **arguments: Any) -> Any:
            shown, info = super().reset(**arguments)
            return self.shown.copy_(shown), info

        def step(self, actions: Any) -> Any:
            shown, reward, *flags, info = super().step(actions)
            info["final_obs"] = self.final.copy_(info["final_obs"])
            return self.shown.copy_(shown), self.reward.copy_(reward), *flags, info

    assert_same(collected(Reusing, doubling), collected(CountingArrays, doubling))


def test_observations_of_tuple_spaces_may_be_lists() -> None:
    class Lists(CountingTensors):
        def __init__(self) -> None:
            super().__init__()
            self.single_observation_space = Tuple([Box(-1e9, 1e9, (2,), np.float32)] * 2)

        def reset(self, **arguments: Any) -> Any:
            shown, info = super().reset(**arguments)
            return [shown, shown + 1], info

        def step(self, actions: Any) -> Any:
            shown, *rest, info = super().step(actions)
            info["final_obs"] = [info["final_obs"], info["final_obs"] + 1]
            return [shown, shown + 1], *rest, info

    policy = TensorDictModule(doubling, ["0"], ["action"])
    expected = collected(CountingTensors, doubling)[0]
    for batch, other in zip(collected(Lists, policy)[0], expected, strict=True):
        for root in ((), ("next",)):
            shown = other[(*root, "observation")]
            assert (batch[(*root, "0")] == shown).all()
            assert (batch[(*root, "1")] == shown + 1).all()


class Rebuilding(VectorWrapper):
    """Pass a copy of the options to the environment, as Gymnasium's `NumpyToTorch` does."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed, options=options and type(options)(**options))


def test_wrappers_may_rebuild_options() -> None:
    def batches(wrap: Callable[[Any], Any]) -> list[TensorDictBase]:
        def make() -> Any:
            return wrap(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, **mode))

        mode = {"autoreset_mode": AutoresetMode.DISABLED}
        with pycollect.SyncDataCollector(
            make, None, frames_per_batch=100, total_frames=200
        ) as collector:
            collector.set_seed(3)
            return [batch.clone() for batch in collector]

    for batch, other in zip(batches(Rebuilding), batches(lambda env: env), strict=True):
        assert (batch == other).all()


def test_other_information_is_copied_to_the_host() -> None:
    """`info_keys` needs numpy arrays, so the environment is stepped with numpy arrays."""

    class Telling(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            return *values, {**info, "height": values[1] / 2}

    batches, _, _ = collected(Telling, doubling, info_keys=["height"])
    for batch in batches:
        assert (batch["next", "height"] == batch["next", "reward"].squeeze(-1) / 2).all()


@pytest.mark.parametrize("change", [lambda shown: shown[:-1], lambda shown: shown[:, :1]])
def test_other_observations_than_the_spaces_are_refused(change: Any) -> None:
    class Changing(CountingTensors):
        steps = 0

        def step(self, actions: Any) -> Any:
            shown, *rest = super().step(actions)
            self.steps += 1
            return (change(shown) if self.steps > 60 else shown), *rest

    with refused(ValueError, "observation"):
        collected(Changing, doubling, 20)
