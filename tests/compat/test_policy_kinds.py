"""Policies in many forms: the same batches with TorchRL's collector and with ours."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from library_policies import LIBRARY
from policy_kinds import TAKES_TENSORDICTS, TAKES_TENSORS, WRITES_WHAT_IT_READS, Make
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RewardSum,
    SerialEnv,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.modules import RandomPolicy
from torchrl_support import assert_alike, assert_same_entries, seeded

FRAMES = 12


def pendulum() -> Any:
    return GymEnv("Pendulum-v1")


ENVS = {
    "one": pendulum,
    "transformed": lambda: TransformedEnv(pendulum(), RewardSum()),
    "two": lambda: SerialEnv(2, pendulum),
}


def batches(
    collector_class: Any, make_env: Any, make_policy: Make, **kwargs: Any
) -> list[TensorDictBase]:
    """Return two batches, with torch's global generator seeded alike."""
    env = seeded(make_env)
    torch.manual_seed(1)
    policy = make_policy(env)
    kwargs = {"max_frames_per_traj": 5, **kwargs}
    collector = collector_class(
        env, policy, frames_per_batch=FRAMES, total_frames=2 * FRAMES, **kwargs
    )
    torch.manual_seed(2)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def compare(make_env: Any, make_policy: Make, **kwargs: Any) -> None:
    theirs = batches(Collector, make_env, make_policy, **kwargs)
    assert_alike(batches(pycollect.Collector, make_env, make_policy, **kwargs), theirs)


@pytest.mark.parametrize("env", list(ENVS))
@pytest.mark.parametrize("kind", list(TAKES_TENSORDICTS))
def test_policies_that_take_a_tensordict(kind: str, env: str) -> None:
    compare(ENVS[env], TAKES_TENSORDICTS[kind], trust_policy=kind == "trusted" or None)


@pytest.mark.parametrize("env", ["one", "two"])
@pytest.mark.parametrize("kind", list(TAKES_TENSORS))
def test_policies_that_take_tensors(kind: str, env: str) -> None:
    compare(ENVS[env], TAKES_TENSORS[kind])


@pytest.mark.parametrize("env", list(ENVS))
@pytest.mark.parametrize("kind", list(WRITES_WHAT_IT_READS))
def test_policies_that_overwrite_their_input(kind: str, env: str) -> None:
    compare(ENVS[env], WRITES_WHAT_IT_READS[kind])


@pytest.mark.parametrize("kind", ["counts", "observation", "observation, by function"])
def test_random_actions_before_them(kind: str) -> None:
    """Random frames come from the environment alone; the policy's counts begin after them."""
    compare(ENVS["transformed"], WRITES_WHAT_IT_READS[kind], init_random_frames=FRAMES)


@pytest.mark.parametrize("kind", ["observation", "observation, by function", "state at the root"])
def test_compact_batches(kind: str) -> None:
    compare(pendulum, WRITES_WHAT_IT_READS[kind], compact_obs=True, max_frames_per_traj=0)


@pytest.mark.parametrize("kind", ["LSTM", *(k for k in WRITES_WHAT_IT_READS if "next" in k)])
def test_states_that_the_environment_primes(kind: str) -> None:
    """In TorchRL, the policy reads the entries that its previous call wrote under "next"."""
    specs = {name: Unbounded((1, 12)) for name in ("hidden1", "hidden2")} | {"hidden": Unbounded(1)}
    compare(
        lambda: TransformedEnv(
            pendulum(), Compose(InitTracker(), TensorDictPrimer(specs, expand_specs=True))
        ),
        WRITES_WHAT_IT_READS[kind],
    )


@pytest.mark.parametrize("kind", ["RandomPolicy without a spec", "noise without a spec"])
def test_specs_of_a_gymnasium_env(kind: str) -> None:
    """A Gymnasium env has no TorchRL specs; its space provides the same information."""
    env = gymnasium.make("Pendulum-v1")
    policy = TAKES_TENSORDICTS[kind](env)
    with pycollect.Collector(env, policy, frames_per_batch=50, total_frames=50) as collector:
        action = next(collector)["action"]
    assert action.shape == (50, 1)
    assert action.abs().max() <= 2
    assert action.unique().numel() > 25


@pytest.mark.processes(usual=1)
@pytest.mark.parametrize(
    "kind", ["observation", "counts", "keys not told", "RandomPolicy without a spec", "a tuple"]
)
def test_processes_collect_the_same_frames(kind: str) -> None:
    make_policy = (WRITES_WHAT_IT_READS | TAKES_TENSORDICTS | TAKES_TENSORS)[kind]
    make_env = ENVS["transformed"]
    torch.manual_seed(1)
    policy = make_policy(make_env())
    arguments: dict[str, Any] = {"frames_per_batch": FRAMES, "max_frames_per_traj": 5}
    with (
        pycollect.MultiSyncCollector([make_env], policy, **arguments) as elsewhere,
        pycollect.Collector(make_env, policy, **arguments) as here,
    ):
        for collector in (elsewhere, here):
            collector.set_seed(7)
        for _ in range(2):
            assert_same_entries(next(elsewhere)[0], next(here), ())


@pytest.mark.parametrize("kind", list(LIBRARY))
def test_modules_of_the_library(kind: str) -> None:
    compare(lambda: TransformedEnv(SerialEnv(2, pendulum), InitTracker()), LIBRARY[kind])


class OfSpec(TensorDictModuleBase):
    """Update nested TensorDicts of agents with different keys and shapes."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.spec = env.full_action_spec

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.update(self.spec.zero())


class OfSpecByCall(OfSpec):
    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return self.forward(td)


NESTED = {
    "heterogeneous": lambda: mock.HeterogeneousCountingEnv(max_steps=3),
    "heterogeneous [2]": lambda: mock.HeterogeneousCountingEnv(
        max_steps=3, batch_size=torch.Size([2])
    ),
    "SerialEnv heterogeneous": lambda: SerialEnv(2, mock.HeterogeneousCountingEnv),
    "multi-key": lambda: mock.MultiKeyCountingEnv(max_steps=3),
    "multi-agent": lambda: mock.MultiAgentCountingEnv(3),
    "nested": lambda: mock.NestedCountingEnv(max_steps=3),
}


@pytest.mark.sample(usual=12)
@pytest.mark.parametrize("env", list(NESTED))
@pytest.mark.parametrize(
    "make_policy",
    [OfSpec, OfSpecByCall, lambda env: env.rand_action, lambda env: RandomPolicy()],
    ids=["of the spec", "by its own call", "rand_action", "RandomPolicy"],
)
def test_nested_environments(make_policy: Make, env: str) -> None:
    compare(NESTED[env], make_policy, max_frames_per_traj=0)
