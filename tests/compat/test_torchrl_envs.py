"""TorchRL environments of every kind give the frames of TorchRL's own collector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl_support import ENVS, MAX_STEPS, WITHOUT_A_LIMIT, collect, compare, counting_policy

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, ParallelEnv, StepCounter, TransformedEnv


@pytest.mark.parametrize("name", ENVS)
def test_frames(name: str) -> None:
    compare(ENVS[name])


@pytest.mark.sample(usual=20)
@pytest.mark.parametrize("name", [name for name in ENVS if name not in WITHOUT_A_LIMIT])
def test_frames_with_a_limit(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS)


@pytest.mark.parametrize(
    "name",
    [
        *("CountingEnvWithString", "EnvWithDynamicSpec", "EnvWithMetadata"),
        *("HeterogeneousCountingEnv", "SerialEnv heterogeneous", "NestedCountingEnv"),
    ],
)
def test_compact_frames(name: str) -> None:
    compare(ENVS[name], compact_obs=True)


def test_a_compact_batch_has_no_empty_tensorclass() -> None:
    for td in collect(pycollect.Collector, ENVS["EnvWithTensorClass"], compact_obs=True):
        assert set(td["next"].keys()) == {"reward", "done", "terminated"}


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_flagged_at_the_end(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, set_truncated=True)
    if name != "SerialEnv":
        compare(lambda: ENVS[name]().add_truncated_keys(), set_truncated=True)


class GroupEnv(EnvBase):
    """An environment with a truncated group, below a root that only has "terminated"."""

    def __init__(self) -> None:
        super().__init__(batch_size=torch.Size([2]))
        flag = {"shape": (2, 1), "dtype": torch.bool}
        group = {name: Categorical(2, **flag) for name in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(count=Unbounded((2, 1)), shape=(2,))
        self.action_spec = Categorical(2, shape=(2, 1))
        self.reward_spec = Unbounded((2, 1))
        self.done_spec = Composite(
            group=Composite(group, shape=(2,)),
            done=Categorical(2, **flag),
            terminated=Categorical(2, **flag),
            shape=(2,),
        )

    def seen(self) -> TensorDict:
        ended, never = self.count >= 5, torch.zeros(2, 1, dtype=torch.bool)
        group = {"done": ended, "terminated": ended.clone(), "truncated": never}
        flags = {"done": ended.clone(), "terminated": ended.clone()}
        return TensorDict({"count": self.count.clone(), "group": group, **flags}, [2])

    def _reset(self, td: Any = None, **kwargs: Any) -> TensorDict:
        again = torch.ones(2, 1, dtype=torch.bool)
        if td is not None and td.get("_reset", None) is not None:
            again = td["_reset"].view(2, 1)
        self.count = torch.where(again, 0.0, getattr(self, "count", torch.zeros(2, 1)))
        return self.seen()

    def _step(self, td: Any) -> TensorDict:
        self.count = self.count + 1
        return self.seen().set("reward", td["action"].float())

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def test_only_truncated_flags_are_set_at_the_end() -> None:
    for td in compare(GroupEnv, set_truncated=True):
        assert td["next", "group", "done"][:, -1].all()
        assert torch.equal(td["next", "done"], td["next", "terminated"])


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_reset_at_each_iter(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, reset_at_each_iter=True)


@pytest.mark.slow
@pytest.mark.parametrize("transformed", [False, True])
def test_parallel_env(transformed: bool) -> None:
    def make() -> Any:
        env = ParallelEnv(2, [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)])
        return TransformedEnv(env, StepCounter()) if transformed else env

    compare(make, batches=2)


@pytest.mark.parametrize("kwargs", [{}, MAX_STEPS])
@pytest.mark.parametrize("name", ["CountingEnv", "CountingEnv [3]", "SerialEnv", "RewardSum [2]"])
def test_policy(name: str, kwargs: dict[str, Any]) -> None:
    compare(ENVS[name], counting_policy, **kwargs)


def test_policy_of_several_agents() -> None:
    def make_policy() -> Any:
        act = mock.MultiKeyCountingEnvPolicy(
            full_action_spec=mock.MultiKeyCountingEnv().full_action_spec
        )
        return TensorDictSequential(act)

    compare(ENVS["MultiKeyCountingEnv"], make_policy)
