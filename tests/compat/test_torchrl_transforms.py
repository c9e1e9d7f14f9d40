"""Transforms that remove or rename keys, or add them only at the root or under "next"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from raising import refused
from torchrl_support import MAX_STEPS, Make, batched, collect, compare, seeded

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.envs import (
    ActionDiscretizer,
    ActionMask,
    Compose,
    ConditionalPolicySwitch,
    ConditionalSkip,
    ExcludeTransform,
    FlattenAction,
    GymEnv,
    Hash,
    NextObservationDelta,
    RenameTransform,
    SelectTransform,
    SerialEnv,
    Stack,
    StepCounter,
    TerminateTransform,
    TicTacToeEnv,
    Transform,
    TransformedEnv,
    UnaryTransform,
    UnsqueezeTransform,
    VecNorm,
)


def pendulum(seed: int = 3) -> Any:
    return seeded(partial(GymEnv, "Pendulum-v1"), seed)


def pendulums() -> Any:
    return SerialEnv(2, [partial(pendulum, seed) for seed in (3, 4)])


ENVS: dict[str, Make] = {
    "one": pendulum,
    "SerialEnv": pendulums,
    "[2, 3]": batched(mock.CountingBatchedEnv, 2, 3, max_steps=torch.arange(3, 9).view(2, 3)),
}
TAKING: dict[str, Callable[[], Any]] = {
    "NextObservationDelta": NextObservationDelta,
    "NextObservationDelta, a key": lambda: NextObservationDelta(
        ["observation"], delta_dtype=torch.bfloat16
    ),
    "NextObservationDelta, VecNorm": lambda: Compose(
        VecNorm(in_keys=["observation"]), NextObservationDelta()
    ),
    "ExcludeTransform": lambda: ExcludeTransform("observation"),
    "ExcludeTransform, reward": lambda: ExcludeTransform("reward"),
    "SelectTransform": lambda: SelectTransform("observation"),
    "SelectTransform, none": lambda: SelectTransform("done"),
    "SelectTransform, no rewards": lambda: SelectTransform("observation", keep_rewards=False),
    "RenameTransform": lambda: RenameTransform(["observation"], ["seen"]),
    "RenameTransform, nested": lambda: RenameTransform(["observation"], [("deep", "er")]),
    "RenameTransform, reward": lambda: RenameTransform(["reward"], [("deep", "gain")]),
    "RenameTransform, flag": lambda: RenameTransform(["done"], ["over"], create_copy=True),
    "RenameTransform, action": lambda: RenameTransform(
        ["observation"], ["seen"], ["action"], ["act"]
    ),
}


@pytest.mark.parametrize("transform", TAKING)
@pytest.mark.parametrize("env", ENVS)
def test_removed_keys(env: str, transform: str) -> None:
    if env == "[2, 3]" and transform in (
        "NextObservationDelta, a key",
        "NextObservationDelta, VecNorm",
    ):
        pytest.skip("integers have no mean, and no difference in bfloat16")
    compare(lambda: TransformedEnv(ENVS[env](), TAKING[transform]()))


ARGUMENTS: list[dict[str, Any]] = [
    MAX_STEPS,
    {"compact_obs": True},
    {"set_truncated": True},
    {"init_random_frames": 30},
]


@pytest.mark.parametrize("kwargs", ARGUMENTS, ids=str)
def test_only_the_difference_under_next(kwargs: dict[str, Any]) -> None:
    compare(lambda: TransformedEnv(pendulum(), NextObservationDelta()), **kwargs)


@pytest.mark.parametrize("key", ["truncated", "cut"])
def test_compact_batches_keep_flags_of_every_name(key: str) -> None:
    make = lambda: TransformedEnv(pendulum(), StepCounter(3, truncated_key=key))  # noqa: E731
    assert all(key in td["next"] for td in compare(make, compact_obs=True))


class Halving(Transform):
    """Halve the policy's observation after the step is recorded."""

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_.set("observation", tensordict_["observation"] * 0.5)


class Narrow(Transform):
    """Record one key in half precision, and act on it in full precision."""

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        following = tensordict["next"]
        following["observation"] = following["observation"].half()
        return tensordict, tensordict_

    def transform_fake_tensordict(self, fake_tensordict: Any) -> Any:
        following = fake_tensordict["next"]
        following["observation"] = following["observation"].half()
        return fake_tensordict


class Telling(Transform):
    """Add an entry under "next" in a hook, without a spec."""

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        tensordict["next", "told"] = tensordict["next", "observation"].sum(-1)
        return tensordict, tensordict_

    def transform_fake_tensordict(self, fake_tensordict: Any) -> Any:
        fake_tensordict["next", "told"] = fake_tensordict["next", "observation"].sum(-1)
        return fake_tensordict


@pytest.mark.parametrize("kwargs", [{}, MAX_STEPS, {"compact_obs": True}], ids=str)
@pytest.mark.parametrize("transform", [Halving, Narrow, Telling])
def test_changes_by_hooks(transform: Any, kwargs: dict[str, Any]) -> None:
    for make in (pendulum, pendulums):
        compare(lambda make=make: TransformedEnv(make(), transform()), **kwargs)


def test_statistics_count_only_rewards() -> None:
    env = TransformedEnv(pendulum(), Compose(Telling(), StepCounter(4)))
    collector = pycollect.Collector(env, None, frames_per_batch=8, total_frames=8)
    (td,) = collector
    mean = td["next", "reward"].view(2, 4).sum(-1).mean().item()
    assert collector.stats()["episode_return"] == pytest.approx(mean, rel=1e-5)
    collector.shutdown()


def test_a_key_removed_without_a_spec_change_is_named() -> None:
    class Forgetful(Transform):
        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            return next_tensordict.exclude("observation")

    make = lambda: TransformedEnv(pendulum(), Forgetful())  # noqa: E731
    with refused(ValueError, "create_env_fn") as caught:
        collect(pycollect.Collector, make)
    assert "'observation'" in str(caught.value)


OTHERS: dict[str, Make] = {
    "ActionDiscretizer": lambda: TransformedEnv(
        pendulum(), ActionDiscretizer(num_intervals=5, categorical=False)
    ),
    "FlattenAction": lambda: TransformedEnv(
        mock.ContinuousActionVecMockEnv(), FlattenAction(-1, -1)
    ),
    "UnsqueezeTransform of the action": lambda: TransformedEnv(
        pendulum(), UnsqueezeTransform(-1, in_keys=["observation"], in_keys_inv=["action"])
    ),
    "Hash": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4), Hash(in_keys=["observation"], out_keys=["hash"])
    ),
    "Stack": lambda: TransformedEnv(
        mock.MultiKeyCountingEnv(), Stack(in_keys=["observation"], out_key="stack", dim=-1)
    ),
    "TerminateTransform": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4), TerminateTransform(stop=lambda td: td["observation"] > 2)
    ),
    "UnaryTransform": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4),
        UnaryTransform(["observation"], ["twice"], fn=lambda x: x * 2),
    ),
    "ConditionalSkip": lambda: TransformedEnv(
        TransformedEnv(mock.CountingEnv(max_steps=4), StepCounter()),
        ConditionalSkip(lambda td: (td["step_count"] % 2 == 1).all()),
    ),
    "ConditionalPolicySwitch": lambda: TransformedEnv(
        TransformedEnv(mock.CountingEnv(max_steps=10), StepCounter()),
        ConditionalPolicySwitch(
            lambda td: td.set("action", torch.ones(*td.shape, 1, dtype=torch.int32)),
            lambda td: (td["step_count"] % 3 == 1).all(),
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    compare(OTHERS[name])


def test_random_moves_of_an_env_whose_actions_a_transform_masks() -> None:
    def make() -> Any:
        return TransformedEnv(TicTacToeEnv(), ActionMask(action_key="action", mask_key="mask"))

    for td in collect(pycollect.Collector, make, frames=30, batches=2):
        assert td["mask"].gather(-1, td["action"].unsqueeze(-1)).all()
