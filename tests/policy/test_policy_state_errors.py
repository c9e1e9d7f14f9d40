"""Invalid policy states, and their errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from echo_envs import EchoEnv
from policy_support import box, make
from raising import refused
from state_support import boxes, plain
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector


@pytest.mark.parametrize("num_envs", [None, 5])
def test_a_state_of_unknown_shape_is_named(num_envs: int | None) -> None:
    with refused(ValueError, "policy") as caught:
        make(plain("memory"), boxes(num_envs))
    assert "'memory'" in str(caught.value)


def test_a_callable_without_declared_inputs() -> None:
    def policy(td: TensorDict) -> TensorDict:
        h = td.get("h", torch.zeros(()))
        td["action"] = td["observation"][..., :2]
        return td.set(("next", "h"), h + 1)

    with refused(ValueError, "policy") as caught:
        make(policy, boxes())
    assert "'h'" in str(caught.value)


def test_a_callable_that_does_not_read_its_next_entry() -> None:
    def policy(td: TensorDict) -> TensorDict:
        td["action"] = td["observation"][..., :2] + torch.rand(2)
        return td.set(("next", "expected"), td["observation"] + 1)

    runner, _ = make(policy, boxes())
    assert [leaf.key for leaf in runner.outputs] == [("action",), ("next", "expected")]


@pytest.mark.parametrize(
    ("state", "error", "key"),
    [
        ({"other": (1,)}, ValueError, "'other'"),
        ({"memory": "3"}, ValueError, "'memory'"),
        ({"memory": (-1,)}, ValueError, "'memory'"),
        ({"memory": True}, ValueError, "'memory'"),
        ([("memory", (1,))], TypeError, "list"),
    ],
)
def test_bad_policy_state(state: Any, error: type[Exception], key: str) -> None:
    policy = plain("memory")
    with refused(error, "policy_state") as caught:
        SyncDataCollector(EchoEnv, policy, frames_per_batch=4, policy_state=state)
    assert key in str(caught.value)


def test_policy_state_without_a_policy() -> None:
    with refused(ValueError, "policy_state"):
        SyncDataCollector(EchoEnv, frames_per_batch=4, policy_state={"h": (1,)})


def test_a_state_returned_in_another_shape() -> None:
    policy = TensorDictModule(
        lambda x, h: (x[..., :2], h[..., :1]), ["observation", "h"], ["action", ("next", "h")]
    )
    with refused(ValueError, "policy") as caught:
        SyncDataCollector(
            partial(make_boxes_env), policy, frames_per_batch=4, policy_state={"h": torch.zeros(2)}
        )
    assert "'h'" in str(caught.value)


def make_boxes_env() -> Any:
    env = EchoEnv()
    env.action_space = box(2)
    return env


def test_a_state_that_changes_its_dtype_later_is_named() -> None:
    calls = []

    def policy(x: torch.Tensor, h: torch.Tensor) -> Any:
        calls.append(0)
        return x[..., 0].long(), h + 1 if len(calls) < 4 else h.double()

    wrapped = TensorDictModule(policy, ["observation", "h"], ["action", ("next", "h")])
    with (
        SyncDataCollector(
            EchoEnv, wrapped, frames_per_batch=4, policy_state={"h": torch.zeros(2)}
        ) as collector,
        refused(ValueError, "next.h"),
    ):
        collector.next()


@pytest.mark.parametrize("key", ["observation", "reward", "done", ("collector", "x")])
def test_a_state_may_not_have_a_key_of_the_batch(key: Any) -> None:
    inner = (key,) if isinstance(key, str) else key
    policy = TensorDictModule(
        lambda x: (x[..., :2], x), ["observation"], ["action", ("next", *inner)]
    )
    with refused(ValueError, "policy"):
        make(policy, boxes(5))
