"""Errors of a policy that torch cannot call with the environment's observations."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from envs_for_tests import CountingEnv
from gymnasium import spaces
from raising import refused
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import SyncDataCollector


class Shows(gymnasium.Env[Any, Any]):
    """An environment that returns samples of a space as observations."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


def numbers(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(0, 1, shape, dtype)


def beside(shown: spaces.Space[Any]) -> spaces.Dict:
    """An additional observation that no policy here reads."""
    return spaces.Dict(
        {"observation": shown, "t": spaces.Discrete(5), "mask": spaces.MultiBinary(2)}
    )


def reading(function: Any) -> TensorDictModule:
    return TensorDictModule(function, ["observation"], ["action"])


def linear(inputs: int) -> TensorDictModule:
    return reading(nn.Linear(inputs, 1))


class Whole(nn.Module):
    """A policy that takes a TensorDict and declares no keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, td: Any) -> Any:
        return td.set("action", self.layer(td["observation"]))


class Cell(nn.Module):
    """A policy with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
        h = self.cell(observation, h)
        return self.head(h), h


class Placed(nn.Module):
    """A policy with an index as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 2), nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor, place: torch.Tensor) -> Any:
        self.table(place)
        return self.head(observation), place


def over_state(policy: Any, key: str) -> TensorDictModule:
    return TensorDictModule(policy, ["observation", key], ["action", ("next", key)])


DOUBLES = numbers(3, dtype=np.float64)
FLOAT32 = torch.float32
NAMED = {"observation": FLOAT32}
STATE = {"policy_state": {"h": (4,)}}
ENTRIES = {"one": lambda make: make, "list": lambda make: [make, make]}


def message(space: spaces.Space[Any], policy: Any, entry: str = "one", **arguments: Any) -> str:
    """Return the constructor's error message."""
    errors = (RuntimeError, ValueError)  # a ValueError of torch keeps its type
    with refused(errors, "policy") as raised:
        SyncDataCollector(
            ENTRIES[entry](lambda: Shows(space)), policy, frames_per_batch=4, **arguments
        )
    return str(raised.value)


@pytest.mark.parametrize("policy", [linear(3), nn.Linear(3, 1), Whole()])
def test_a_dtype_is_named_with_the_remedy(policy: Any) -> None:
    text = message(DOUBLES, policy)
    assert "observation_dtype=torch.float32" in text
    assert "'observation' float64 [3]" in text


def test_a_shape_is_named() -> None:
    text = message(DOUBLES, linear(4), observation_dtype=FLOAT32)
    assert "1x3 and 4x1" in text
    assert "'observation' float32 [3]" in text


TYPES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "MultiBinary": (spaces.MultiBinary(3), linear(3), {}, FLOAT32),
    "bool": (numbers(3, dtype=np.bool_), linear(3), {}, NAMED),
    "beside others": (beside(DOUBLES), linear(3), {}, NAMED),
    "beside others, without in_keys": (beside(DOUBLES), Whole(), {}, NAMED),
    "a state of given shape": (DOUBLES, over_state(Cell(), "h"), STATE, FLOAT32),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("case", TYPES)
def test_a_remedy_for_types_helps(case: str, entry: str) -> None:
    space, policy, arguments, remedy = TYPES[case]
    text = message(space, policy, entry, **arguments)
    assert f"observation_dtype={remedy}" in text
    explanation = text.partition(" raised: ")[2]
    assert "'mask'" not in explanation
    assert "'t'" not in explanation
    envs = ENTRIES[entry](lambda: Shows(space))
    with SyncDataCollector(
        envs, policy, frames_per_batch=4, observation_dtype=remedy, **arguments
    ) as collector:
        collector.next()


@pytest.mark.parametrize(
    ("space", "policy", "arguments"),
    [
        (beside(numbers(3)), linear(4), {}),
        (spaces.Discrete(5), reading(nn.Sequential(nn.Embedding(5, 4), nn.Linear(3, 1))), {}),
        (numbers(2), over_state(Cell(), "h"), STATE),
        (numbers(3), over_state(Cell(), "h"), {"policy_state": {"h": (7,)}}),
    ],
    ids=["beside others", "behind an embedding", "beside a state", "of a state"],
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_error_of_shapes_has_no_remedy_for_types(
    space: Any, policy: Any, arguments: Any, entry: str
) -> None:
    text = message(space, policy, entry, **arguments)
    assert "'observation' " in text
    for other in ("observation_dtype", "policy_state=", "'mask'", "'t'"):
        assert other not in text


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("arguments", [{}, {"observation_dtype": FLOAT32}], ids=["plain", "cast"])
def test_a_hint_for_one_integer_instead_of_a_vector(arguments: Any, entry: str) -> None:
    text = message(spaces.Discrete(16), linear(16), entry, **arguments)
    dtype, shape = "float32" if arguments else "int64", {"one": [], "list": [2]}[entry]
    assert f"'observation' {dtype} {shape}" in text
    assert "torch.nn.Embedding" in text
    assert "one-hot" in text
    assert "observation_dtype" not in text


def test_a_hint_for_one_float_instead_of_a_vector() -> None:
    assert "unsqueeze(-1)" in message(numbers(), linear(1))


def test_a_guessed_dtype_of_a_state_is_not_reported() -> None:
    text = message(numbers(3), over_state(Placed(), "place"), policy_state={"place": ()})
    assert "'place' int64" in text
    assert "x3 and 4x1" in text


def test_a_function_of_a_tensordict_that_is_given_a_tensor() -> None:
    with refused(RuntimeError, "policy") as caught:
        SyncDataCollector(CountingEnv, lambda given: given["observation"], frames_per_batch=4)
    assert "'observation' float32" in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("own words"), ValueError("this policy wants 2D observations")]
)
@pytest.mark.parametrize("arguments", [{}, STATE], ids=["plain", "with a state"])
def test_other_exceptions_of_a_policy_are_not_changed(error: Exception, arguments: Any) -> None:
    def broken(observation: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
        raise error

    policy = over_state(broken, "h") if arguments else broken
    with pytest.raises(type(error)) as caught:
        SyncDataCollector(lambda: Shows(DOUBLES), policy, frames_per_batch=4, **arguments)
    assert caught.value is error


def test_an_index_error_of_the_policy_is_not_changed() -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(np.zeros(3)[int(observation.sum()) + 3])

    with pytest.raises(IndexError, match="axis 0 with size 3"):
        SyncDataCollector(lambda: Shows(DOUBLES), broken, frames_per_batch=4)
