"""Actions of another dtype than the action space's: cast or refused, never wrapped around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collect_support import EVERYWHERE, Way, collecting
from compiled_env_support import LoggedEnvs
from envs_for_tests import ActedEnv
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from raising import refused
from tensordict.nn import TensorDictModule

from pycollect import MultiSyncDataCollector, SyncDataCollector


def box(dtype: str, *shape: int) -> spaces.Box:
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, np.dtype(dtype))


def constant(value: Any, dtype: str = "float32") -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a policy with this constant action, of another dtype than the action space's."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        action = torch.tensor(value, dtype=getattr(torch, dtype))
        return action.broadcast_to((*observation.shape[:-1], *action.shape)).clone()

    return act


def late(value: Any, dtype: str = "float32") -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a policy with action 1 for two steps, and this action afterwards."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        action = constant(value, dtype)(observation)
        is_late = observation[..., 2:] >= 2
        return torch.where(is_late, action, torch.ones_like(action))

    return act


@pytest.mark.parametrize("way", EVERYWHERE)
def test_an_action_that_would_wrap_around(way: Way) -> None:
    """Every collector delivers the frames before it and then refuses it."""
    entry = partial(ActedEnv, box("uint8", 1))
    entries: Any = [entry] * 2 if "env_groups" in way.arguments else entry
    with collecting(way, lambda w: entries, late([-1.0]), frames=2, total_frames=100) as collector:
        assert (collector.next()["action"] == 1).all()
        with refused(ValueError, "policy") as caught:
            list(collector)
        assert "uint8" in str(caught.value)
        assert "-1.0" in str(caught.value)


REFUSED = [
    (box("uint8", 1), [-1.0], "float32"),
    (box("uint8", 1), [256.0], "float32"),
    (box("uint8", 1), [float("nan")], "float32"),
    (box("uint8", 1), [float("inf")], "float64"),
    (box("uint8", 1), [300], "int64"),
    (box("uint8", 1), [-1], "int8"),
    (box("uint8", 20), [0.0] * 19 + [-1.0], "float32"),
    (box("uint8", 20), [0.0] * 19 + [float("nan")], "float32"),
    (box("uint8", 1), [256.0], "bfloat16"),
    (box("int8", 2), [0, 128], "uint8"),
    (box("int16", 1), [32768.0], "float16"),
    (box("int32", 1), [2.0**31], "float64"),
    (box("int32", 1), [2**31], "int64"),
    (box("uint32", 1), [-1], "int32"),
    (box("int64", 1), [2.0**63], "float32"),
    (box("uint64", 1), [-1], "int64"),
    (spaces.Discrete(3), 1e20, "float32"),
    (spaces.MultiDiscrete([3, 4]), [0.0, float("nan")], "float32"),
    (spaces.MultiBinary(2), [0, 256], "int64"),
    (spaces.Box(0, 1, (1,), np.bool_), [2], "int64"),
    (spaces.Box(-1, 1, (1,), np.float32), [1e300], "float64"),
    (spaces.Box(-1, 1, (20,), np.float16), [1e6] * 20, "float32"),
]


@pytest.mark.parametrize(("space", "value", "dtype"), REFUSED, ids=str)
@pytest.mark.parametrize("kind", ["one", "list", "vector", "tensordict"])
def test_a_value_outside_the_range_of_the_dtype(
    space: Any, value: Any, dtype: str, kind: str
) -> None:
    make = partial(ActedEnv, space)
    entry: Any = {"list": [make] * 2, "vector": partial(SyncVectorEnv, [make] * 2)}.get(kind, make)
    policy: Any = constant(value, dtype)
    if kind == "tensordict":
        policy = TensorDictModule(policy, ["observation"], ["action"])
    with (
        SyncDataCollector(entry, policy, frames_per_batch=2) as collector,
        refused(ValueError, "policy") as caught,
    ):
        collector.next()
    assert str(space.dtype) in str(caught.value)


KEPT = [
    (box("uint8", 2), [2.0, 255.0], "float32", [2, 255]),
    (box("uint8", 2), [1.5, -0.5], "float32", [1, 0]),
    (box("uint8", 2), [255.9, 3.0], "float64", [255, 3]),
    (box("uint8", 1), [7.0], "bfloat16", [7]),
    (box("int8", 2), [-128.0, 127.0], "float16", [-128, 127]),
    (box("int64", 1), [-(2.0**63)], "float32", [-(2**63)]),
    (box("int32", 2), [-(2**31), 2**31 - 1], "int64", [-(2**31), 2**31 - 1]),
    (box("int64", 1), [True], "bool", [1]),
    (spaces.Discrete(3), 2.0, "float32", 2),
    (spaces.MultiBinary(2), [True, False], "bool", [1, 0]),
    (spaces.Box(-9, 9, (2,), np.float32), [float("inf"), 0.5], "float64", [float("inf"), 0.5]),
    (spaces.Box(-9, 9, (20,), np.float32), [float("inf")] * 20, "float64", [float("inf")] * 20),
    (spaces.Box(-9, 9, (1,), np.float32), [3], "int64", [3.0]),
]


@pytest.mark.parametrize(("space", "value", "dtype", "expected"), KEPT, ids=str)
def test_a_value_within_the_range_of_the_dtype(
    space: Any, value: Any, dtype: str, expected: Any
) -> None:
    """A float is truncated in an integer space."""
    env = ActedEnv(space)
    with SyncDataCollector(env, constant(value, dtype), frames_per_batch=2) as collector:
        action = collector.next()["action"]
    assert action.numpy().dtype == space.dtype
    assert action[0].tolist() == expected
    assert np.asarray(env.actions[0]).tolist() == expected


@pytest.mark.parametrize("key", ["deep", "pair"])
def test_the_entry_of_a_nested_action_is_named(key: str) -> None:
    space = spaces.Dict({"deep": box("uint8", 1), "pair": spaces.Tuple((box("int8", 1),))})
    values = {"deep": torch.zeros(1), "pair": torch.zeros(1)}
    values[key] = torch.tensor([1000.0])

    def act(observation: torch.Tensor) -> Any:
        return values["deep"], values["pair"]

    with (
        SyncDataCollector(partial(ActedEnv, space), act, frames_per_batch=2) as collector,
        refused(ValueError, "policy") as caught,
    ):
        collector.next()
    assert repr(key) in str(caught.value)
    assert "1000.0" in str(caught.value)


class IntegerEnvs(LoggedEnvs):
    action: Sequence[tuple[Any, str, Any]] = ((("action",), "int8", ()),)


def test_compiled_environments() -> None:
    with (
        SyncDataCollector(IntegerEnvs(3), constant(200.0), frames_per_batch=6) as collector,
        refused(ValueError, "policy") as caught,
    ):
        collector.next()
    assert "int8" in str(caught.value)


def test_a_cast_action_of_a_plan_is_not_overwritten() -> None:
    """A plan overwrites its output memory in each step; a cast action has separate memory."""
    policy = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(policy.weight, 1.0)
    torch.nn.init.constant_(policy.bias, 0.0)
    env = partial(ActedEnv, box("uint8", 1))
    with SyncDataCollector(env, policy, frames_per_batch=5) as collector:
        td = collector.next()
    assert td["action"][:, 0].tolist() == td["observation"].sum(-1).int().tolist()


@pytest.mark.processes
def test_random_actions_are_never_refused() -> None:
    entry = partial(ActedEnv, box("uint8", 1))
    with MultiSyncDataCollector([entry] * 2, None, frames_per_batch=20) as collector:
        assert collector.next()["action"].dtype == torch.uint8
