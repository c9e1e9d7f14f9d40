"""What vector environments of tensors may return, and what is refused."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from raising import refused
from tensor_envs import (
    ENVS,
    STEPS,
    CountingArrays,
    CountingTensors,
    assert_same,
    collected,
    doubling,
    record_as_on_a_device,
)
from tensordict.nn import TensorDictModule

import pycollect


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


class Several(CountingTensors):
    """Return last observations as a list of one tensor or None per row."""

    def step(self, actions: Any) -> Any:
        *values, info = super().step(actions)
        done = values[2] | values[3]
        rows = zip(info["final_obs"], done.tolist(), strict=True)
        return *values, {"final_obs": [own if ended else None for own, ended in rows]}


@pytest.mark.parametrize("kind", [Keeping, Listing, Several])
def test_last_observations_belong_to_ended_rows(kind: Any) -> None:
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


def test_a_reward_without_a_dimension_belongs_to_one_environment() -> None:
    with pycollect.SyncDataCollector(Alone, None, frames_per_batch=20) as collector:
        batch = collector.next()
    assert batch is not None
    steps = torch.arange(20) % 5
    assert batch["observation"].flatten().tolist() == steps.tolist()
    assert batch["next", "observation"].flatten().tolist() == (steps + 1).tolist()
    assert batch["next", "reward"].flatten().tolist() == (steps + 1).tolist()


def test_last_observations_of_only_ended_rows_are_refused() -> None:
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


def test_columns_of_a_declared_reward() -> None:
    class Columns(CountingTensors):
        single_reward_space = Box(-np.inf, np.inf, (1,), np.float32)

        def step(self, actions: Any) -> Any:
            observation, reward, *rest = super().step(actions)
            return observation, reward[:, None], *rest

    assert_same(collected(Columns, doubling), collected(CountingArrays, doubling))


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


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        (lambda info: None, TypeError, "step"),
        (lambda info: {**info, "_final_obs": torch.ones(9)}, ValueError, "final_observation"),
    ],
)
def test_infos_of_another_form_are_refused(
    change: Any, error: Any, name: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changing(CountingTensors):
        def step(self, actions: Any) -> Any:
            *values, info = super().step(actions)
            return *values, change(info)

    if on_device:
        record_as_on_a_device(monkeypatch)
    with refused(error, name):
        collected(Changing, doubling)
