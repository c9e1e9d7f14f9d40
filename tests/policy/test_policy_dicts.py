"""Policies over tensors that return a dict: each entry is recorded under its own key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import CENTRAL, EVERYWHERE, IN_PROCESS, Way, collecting, marks_of, parity
from echo_envs import EchoEnv
from envs_for_tests import NestedEnv
from gymnasium.vector import SyncVectorEnv
from raising import refused
from tensordict import TensorDict
from torch import nn

from pycollect import SyncDataCollector

T = 5


def value_of(observation: torch.Tensor) -> torch.Tensor:
    return observation.sum(-1, keepdim=True)


def with_value(observation: torch.Tensor) -> dict[Any, Any]:
    action, seen = parity(observation)
    return {
        "value": value_of(observation),
        "action": action,
        "aux": {"seen": seen, "deep": {"er": seen * 2}},
        ("by", "path"): seen * 3,
        "pair": (seen * 4, seen * 5),
        "nothing": None,
        "_private": object(),
    }


class WithValue(nn.Module):
    """The same policy as a module."""

    def forward(self, observation: torch.Tensor) -> dict[Any, Any]:
        return with_value(observation)


class Frozen(Mapping[Any, Any]):
    """A mapping that is not a dict."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        self._entries = entries

    def __getitem__(self, key: Any) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def assert_recorded(td: Any) -> None:
    seen = td["observation"]
    assert torch.equal(td["action"], parity(seen)[0])
    assert torch.equal(td["value"], value_of(seen))
    assert torch.equal(td["aux", "seen"], seen)
    assert torch.equal(td["aux", "deep", "er"], seen * 2)
    assert torch.equal(td["by", "path"], seen * 3)
    assert torch.equal(td["pair", "0"], seen * 4)
    assert torch.equal(td["pair", "1"], seen * 5)
    assert not {"nothing", "_private"} & set(td.keys())


@pytest.mark.parametrize("way", EVERYWHERE)
def test_every_entry_is_recorded(way: Way) -> None:
    def entry(worker: int) -> Any:
        one = partial(EchoEnv, worker)
        return [one, one] if "env_groups" in way.arguments else one

    with collecting(way, entry, with_value, frames=T * 2) as collector:
        assert_recorded(collector.next())


@pytest.mark.parametrize("batched", [None, "list", "vector"])
@pytest.mark.parametrize(
    "policy",
    [
        WithValue(),
        lambda observation: OrderedDict(with_value(observation)),
        lambda observation: Frozen(with_value(observation)),
    ],
    ids=["module", "ordered", "mapping"],
)
def test_every_kind_of_dict(policy: Any, batched: str | None) -> None:
    fns = [partial(EchoEnv, 0), partial(EchoEnv, 1)]
    entry: Any = {None: fns[0], "list": fns, "vector": partial(SyncVectorEnv, fns)}[batched]
    with SyncDataCollector(entry, policy, frames_per_batch=8) as collector:
        assert_recorded(collector.next())


def collected(policy: Any, env: Any = EchoEnv, **arguments: Any) -> Any:
    with SyncDataCollector(env, policy, frames_per_batch=8, **arguments) as collector:
        return collector.next()


def test_a_tensordict_that_is_made_by_the_policy() -> None:
    def act(observation: torch.Tensor) -> TensorDict:
        return TensorDict({"action": parity(observation)[0], "aux": {"seen": observation}})

    td = collected(act)
    assert torch.equal(td["aux", "seen"], td["observation"])


def test_a_dict_in_a_tuple() -> None:
    td = collected(lambda observation: (parity(observation)[0], {"seen": observation}))
    assert torch.equal(td["output1", "seen"], td["observation"])


def test_nested_actions() -> None:
    def act(count: torch.Tensor) -> dict[str, Any]:
        press = (torch.tensor(1), torch.ones(2, dtype=torch.int8))
        return {"action": {"move": count[:2], "press": press}, "seen": count}

    td = collected(act, NestedEnv)
    assert torch.equal(td["action", "move"], td["count"][:, :2])
    assert td["action", "press", "1"].all()
    assert torch.equal(td["seen"], td["count"])


def test_an_observation_may_be_among_them() -> None:
    """A returned observation is recorded, as for a policy with a TensorDict."""
    td = collected(lambda observation: {"action": torch.tensor(0), "observation": observation + 7})
    assert td["observation"][:, 2].tolist() == [7 + step for step in (0, 1, 2, 3, 4, 0, 1, 2)]
    assert td["next", "observation"][:, 2].tolist() == [1, 2, 3, 4, 5, 1, 2, 3]


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=way.name, marks=marks_of(way)) for way in (IN_PROCESS, CENTRAL)]
)
@pytest.mark.parametrize("nested", [False, True])
def test_states(way: Way, nested: bool) -> None:
    """A parameter named after a state receives it; its next value is returned under "next"."""

    def act(observation: torch.Tensor, count: torch.Tensor) -> dict[Any, Any]:
        action = parity(observation)[0]
        if nested:
            return {"action": action, "next": {"count": count + 1}}
        return {"action": action, ("next", "count"): count + 1}

    with collecting(
        way, lambda w: partial(EchoEnv, w), act, frames=T, policy_state={"count": (1,)}
    ) as collector:
        td = collector.next()
    assert torch.equal(td["count"], td["observation"][..., 2:])
    assert torch.equal(td["next", "count"], td["count"] + 1)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({}, "'action'"),
        ({"action": 0, "done": 1.0}, "'done'"),
        ({"action": 0, "collector": {"traj_ids": 1}}, "'collector'"),
        ({"action": 0, "step_count": 1}, "'step_count'"),
        ({"action": 0, "next": {"reward": 1.0}}, "'next', 'reward'"),
        ({"action": 0, ("next", "observation"): torch.zeros(3)}, "'next', 'observation'"),
        ({"action": 0, "observation": {"x": 1.0}}, "'observation', 'x'"),
        ({"action": 0, "note": "text"}, "'note'"),
        ({"action": 0, 3: 1.0}, "3"),
    ],
    ids=str,
)
def test_refused_arguments(entries: Any, named: str) -> None:
    with refused(ValueError, "policy") as caught:
        collected(lambda observation: {"value": torch.zeros(1), **entries})
    assert named in str(caught.value)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda own: {**own, "value": torch.zeros(2)},
    "dtype": lambda own: {**own, "value": torch.zeros(1, dtype=torch.float64)},
    "missing": lambda own: {"action": own["action"]},
    "none": lambda own: {**own, "value": None},
    "another": lambda own: {"action": own["action"], "other": own["value"]},
    "in addition": lambda own: {**own, "other": own["value"]},
    "a tuple": lambda own: (own["action"], own["value"]),
    "a tensor": lambda own: own["action"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_entries_that_change_later(change: str) -> None:
    def act(observation: torch.Tensor) -> Any:
        own = {"action": torch.tensor(0), "value": torch.zeros(1)}
        return CHANGES[change](own) if observation[2] == 2 else own

    with pytest.raises(ValueError, match="other" if change == "in addition" else "value"):
        collected(act)


def test_another_order_later() -> None:
    """Entries are found by key, not by position."""

    def act(observation: torch.Tensor) -> dict[str, torch.Tensor]:
        own = {"action": torch.tensor(0), "seen": observation, "three": torch.full((3,), 3.0)}
        return dict(reversed(own.items())) if observation[2] % 2 else own

    td = collected(act)
    assert torch.equal(td["seen"], td["observation"])
    assert (td["three"] == 3).all()


def test_other_outputs_are_zero_with_random_actions() -> None:
    td = collected(with_value, init_random_frames=8)
    assert not td["value"].any()
    assert not td["aux", "seen"].any()
