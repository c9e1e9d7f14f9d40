"""A policy that torch cannot call on what the environment shows: what the error says."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from envs_for_tests import CountingEnv
from gymnasium import spaces
from raising import refused
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from pycollect import SyncDataCollector


class Doubles(CountingEnv):
    """As MuJoCo's: float64."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0].astype(np.float64), {}

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(0)
        return (observation.astype(np.float64), *rest)


def linear(inputs: int) -> TensorDictModule:
    return TensorDictModule(nn.Linear(inputs, 1), ["observation"], ["action"])


class Whole(nn.Module):
    """Takes a TensorDict, and does not say what it reads."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 1)

    def forward(self, td: Any) -> Any:
        return td.set("action", self.layer(td["observation"]))


@pytest.mark.parametrize("policy", [linear(3), nn.Linear(3, 1), Whole()])
def test_a_dtype_is_named_with_the_remedy(policy: Any) -> None:
    with refused(RuntimeError, "policy") as caught:
        SyncDataCollector(Doubles, policy, frames_per_batch=4)
    assert "observation_dtype=torch.float32" in str(caught.value)
    assert "'observation' float64 [3]" in str(caught.value)
    with SyncDataCollector(
        Doubles, policy, frames_per_batch=4, observation_dtype=torch.float32
    ) as collector:
        assert collector.next()["observation"].dtype == torch.float32


def test_a_shape_is_named() -> None:
    with refused(RuntimeError, "policy") as raised:
        SyncDataCollector(Doubles, linear(4), frames_per_batch=4, observation_dtype=torch.float32)
    assert "1x3 and 4x1" in str(raised.value)
    assert "'observation' float32 [3]" in str(raised.value)
    assert "observation_dtype" not in str(raised.value)


def test_what_a_policy_itself_raises_is_left_alone() -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("own words")

    with pytest.raises(RuntimeError, match=r"^own words$"):
        SyncDataCollector(Doubles, broken, frames_per_batch=4)


def test_an_index_error_of_its_own_is_left_alone() -> None:
    def broken(observation: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(np.zeros(3)[int(observation.sum()) + 3])

    with pytest.raises(IndexError, match="axis 0 with size 3"):
        SyncDataCollector(Doubles, broken, frames_per_batch=4)


def test_a_function_of_a_tensordict_that_is_given_a_tensor() -> None:
    with refused(RuntimeError, "policy") as caught:
        SyncDataCollector(CountingEnv, lambda given: given["observation"], frames_per_batch=4)
    assert "'observation' float32" in str(caught.value)


class Shows(gymnasium.Env[Any, Any]):
    """Shows samples of a space."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


def numbers(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(0, 4, shape, dtype)


def beside(shown: spaces.Space[Any]) -> spaces.Dict:
    """An observation among others that no policy here reads."""
    return spaces.Dict(
        {"observation": shown, "t": spaces.Discrete(5), "mask": spaces.MultiBinary(2)}
    )


def reading(function: Any) -> TensorDictModule:
    return TensorDictModule(function, ["observation"], ["action"])


BOOLS = spaces.Box(0, 1, (3,), np.bool_)
DOUBLES = numbers(3, dtype=np.float64)
FLOAT32 = torch.float32
ENTRIES = {"one": lambda make: make, "list": lambda make: [make, make]}


def message(space: spaces.Space[Any], policy: Any, entry: str = "one", **arguments: Any) -> str:
    """What the collector says when it is built."""
    # A ValueError of torch's stays one.
    errors = (RuntimeError, ValueError)
    with refused(errors, "policy") as raised:
        SyncDataCollector(
            ENTRIES[entry](lambda: Shows(space)), policy, frames_per_batch=4, **arguments
        )
    return str(raised.value)


def lstm(inputs: int) -> TensorDictSequential:
    recurrent = pytest.importorskip("torchrl.modules").LSTMModule(
        input_size=inputs, hidden_size=4, in_key="observation", out_key="hidden"
    )
    return TensorDictSequential(
        recurrent, TensorDictModule(nn.Linear(4, 1), ["hidden"], ["action"])
    )


class Layers(nn.Module):
    """An LSTM over the environments as if they were time."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 4), nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(observation)[0])


class Cell(nn.Module):
    """A policy over a state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
        h = self.cell(observation, h)
        return self.head(h), h


class Placed(nn.Module):
    """A policy over a state that is an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 2), nn.Linear(4, 1)

    def forward(self, observation: torch.Tensor, place: torch.Tensor) -> Any:
        self.table(place)
        return self.head(observation), place


def cell() -> TensorDictModule:
    return TensorDictModule(Cell(), ["observation", "h"], ["action", ("next", "h")])


NAMED = {"observation": FLOAT32}
STATE = {"policy_state": {"h": (4,)}}
TYPES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "MultiBinary": (spaces.MultiBinary(3), lambda: linear(3), {}, FLOAT32),
    "bool": (BOOLS, lambda: linear(3), {}, NAMED),
    "bool to a module": (BOOLS, lambda: nn.Linear(3, 1), {}, NAMED),
    "float64 beside others": (beside(DOUBLES), lambda: linear(3), {}, NAMED),
    "float64 beside others, without in_keys": (beside(DOUBLES), Whole, {}, NAMED),
    "float64 to a norm": (
        DOUBLES,
        lambda: reading(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1))),
        {},
        FLOAT32,
    ),
    "uint8 to a convolution": (
        numbers(3, 4, 4, dtype=np.uint8),
        lambda: reading(nn.Sequential(nn.Conv2d(3, 1, 4), nn.Flatten(-3))),
        {},
        FLOAT32,
    ),
    "float32 as indices": (
        numbers(1),
        lambda: reading(nn.Sequential(nn.Embedding(5, 1), nn.Flatten(-2))),
        {},
        torch.int64,
    ),
    "TorchRL's LSTMModule": (DOUBLES, lambda: lstm(3), {}, FLOAT32),
    "a state of given shape": (DOUBLES, cell, STATE, FLOAT32),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("case", TYPES)
def test_a_remedy_for_types_helps(case: str, entry: str) -> None:
    space, make_policy, arguments, remedy = TYPES[case]
    policy = make_policy()
    text = message(space, policy, entry, **arguments)
    assert f"observation_dtype={remedy}" in text
    explanation = text.partition(" raised: ")[2]
    assert "'mask'" not in explanation
    assert "'t'" not in explanation
    with SyncDataCollector(
        ENTRIES[entry](lambda: Shows(space)),
        policy,
        frames_per_batch=4,
        observation_dtype=remedy,
        **arguments,
    ) as collector:
        collector.next()


def test_an_lstm_of_torchs_is_told_the_remedy() -> None:
    assert "observation_dtype=torch.float32" in message(DOUBLES, reading(Layers()), "list")


def test_a_bool_that_was_not_named_is_told_why() -> None:
    text = message(BOOLS, linear(3), observation_dtype=FLOAT32)
    assert f"observation_dtype={NAMED}" in text
    assert "bools" in text


@pytest.mark.parametrize(
    ("space", "policy", "arguments"),
    [
        (beside(numbers(3)), linear(4), {}),
        (spaces.Discrete(5), reading(nn.Sequential(nn.Embedding(5, 4), nn.Linear(3, 1))), {}),
        (numbers(2), cell(), STATE),
        (numbers(3), cell(), {"policy_state": {"h": (7,)}}),
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
def test_one_integer_is_no_vector(arguments: Any, entry: str) -> None:
    text = message(spaces.Discrete(16), linear(16), entry, **arguments)
    dtype, shape = "float32" if arguments else "int64", {"one": [], "list": [2]}[entry]
    assert f"'observation' {dtype} {shape}" in text
    assert "torch.nn.Embedding" in text
    assert "one-hot" in text
    assert "observation_dtype" not in text


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_float_is_no_vector(entry: str) -> None:
    text = message(numbers(), linear(1), entry)
    assert "unsqueeze(-1)" in text


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_guess_of_a_states_dtype_is_not_told(entry: str) -> None:
    policy = TensorDictModule(Placed(), ["observation", "place"], ["action", ("next", "place")])
    text = message(numbers(3), policy, entry, policy_state={"place": ()})
    assert "'place' int64" in text
    assert "x3 and 4x1" in text


def test_what_a_policy_with_a_state_of_given_shape_raises_is_left_alone() -> None:
    def broken(observation: torch.Tensor, h: torch.Tensor) -> Any:
        raise RuntimeError("own words")

    policy = TensorDictModule(broken, ["observation", "h"], ["action", ("next", "h")])
    with pytest.raises(RuntimeError, match=r"^own words$"):
        SyncDataCollector(Doubles, policy, frames_per_batch=4, policy_state={"h": (4,)})


def test_a_policys_own_words_stay_its_own() -> None:
    class Refuses(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            raise ValueError("this policy wants 2D observations")

    with pytest.raises(ValueError, match=r"^this policy wants 2D observations$"):
        SyncDataCollector(lambda: Shows(numbers(3)), Refuses(), frames_per_batch=4)
