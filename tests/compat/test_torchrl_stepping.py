"""Skipped parts of a TorchRL environment's step do not change its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.testing.mocking_classes as mock
from raising import refused
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.custom.pendulum import PendulumEnv
from torchrl_support import compare

from pycollect import SyncDataCollector
from pycollect.envs.torchrl.stepping import make_advance, make_complete, make_following, make_put

Make = Callable[[], Any]


class DoneOnlyEnv(EnvBase):
    """Return only "done", not "terminated"; the reward has no dimensions of its own."""

    def __init__(self, flags: tuple[str, ...] = ("done",), reward: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))
        self._flags, self._reward, self._count = flags, reward, 0

    def _reset(self, td: Any) -> TensorDict:
        self._count = 0
        return TensorDict({"observation": torch.zeros(3)})

    def _step(self, td: Any) -> TensorDict:
        self._count += 1
        entries = {
            "observation": torch.full((3,), float(self._count)) + td["action"],
            "reward": torch.ones(self._reward),
        }
        ended = torch.tensor([self._count == 5])
        return TensorDict({**entries, **{name: ended.clone() for name in self._flags}})

    def _set_seed(self, seed: int | None) -> None:
        pass


class LazyRootEnv(EnvBase):
    """An environment of agents with a lazy stack after a reset and one TensorDict after a step.

    The step reads a state that only resets return.
    """

    def __init__(self) -> None:
        super().__init__()
        leaf = Unbounded((2, 1))
        self.observation_spec = Composite(agents=Composite(seen=leaf, shape=(2,)))
        self.state_spec = Composite(agents=Composite(hidden=leaf, shape=(2,)))
        self.action_spec = Composite(agents=Composite(action=leaf, shape=(2,)))
        self.reward_spec = Unbounded((1,))

    def _reset(self, td: Any) -> TensorDict:
        agents = [TensorDict(seen=torch.zeros(1), hidden=torch.full((1,), 7.0)) for _ in range(2)]
        return TensorDict(agents=LazyStackedTensorDict(*agents), done=torch.tensor([False]))

    def _step(self, td: Any) -> TensorDict:
        agents = TensorDict(seen=td["agents", "hidden"] + 1, batch_size=(2,))
        return TensorDict(agents=agents, reward=torch.ones(1), done=torch.tensor([False]))

    def _set_seed(self, seed: int | None) -> None:
        pass


class FlagsOfAgentsEnv(EnvBase):
    """An environment with a node of flags only, which has a dimension name only after resets."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(last=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        self.done_spec = Composite(
            agents=Composite(done=Binary(1, (2, 1), dtype=torch.bool), shape=(2,))
        )

    def _flags(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(2, 1, dtype=torch.bool) for name in ("done", "terminated")}

    def _reset(self, td: Any) -> TensorDict:
        agents = TensorDict(self._flags(), batch_size=(2,), names=["agent"])
        return TensorDict(agents=agents, last=torch.zeros(1))

    def _step(self, td: Any) -> TensorDict:
        agents = TensorDict({**self._flags(), "reward": torch.ones(2, 1)}, batch_size=(2,))
        return TensorDict(agents=agents, last=torch.ones(1))

    def _set_seed(self, seed: int | None) -> None:
        pass


class LoweredRootEnv(DoneOnlyEnv):
    """The root of each step is lower than the previous "next" entry."""

    def step_and_maybe_reset(self, tensordict: Any) -> Any:
        stepped, root = super().step_and_maybe_reset(tensordict)
        return stepped, root.set("observation", root["observation"] - 2.0)


class TripledRewardEnv(DoneOnlyEnv):
    """Change the reward after each step."""

    def _step_proc_data(self, next_tensordict_out: Any) -> Any:
        following = super()._step_proc_data(next_tensordict_out)
        return following.set("reward", following["reward"] * 3.0)


@pytest.mark.parametrize("env", [LoweredRootEnv, TripledRewardEnv])
@pytest.mark.parametrize("kwargs", [{}, {"max_frames_per_traj": 3}, {"compact_obs": True}], ids=str)
def test_overridden_steps(env: Make, kwargs: dict[str, Any]) -> None:
    compare(env, **kwargs)


class Negated(Transform):
    """A user's transform that changes the action before the step."""

    def _inv_call(self, td: Any) -> Any:
        return td.set("action", -td["action"])


def transformed(make: Make, *transforms: Callable[[], Transform]) -> Make:
    return lambda: TransformedEnv(make(), Compose(*(transform() for transform in transforms)))


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


ENVS: dict[str, Make] = {
    "flat": mock.ContinuousActionVecMockEnv,
    "params": PendulumEnv,
    "nested": mock.NestedCountingEnv,
    "several keys": mock.MultiKeyCountingEnv,
    "agents": mock.HeterogeneousCountingEnv,
    "text": mock.CountingEnvWithString,
    "tensorclass": mock.EnvWithTensorClass,
    "batched": lambda: mock.CountingBatchedEnv(
        max_steps=torch.full((3,), 5), start_val=torch.zeros(3), batch_size=(3,)
    ),
    "states": mock.StateLessCountingEnv,
    "gym": pendulum,
    "done alone": DoneOnlyEnv,
    "terminated alone": lambda: DoneOnlyEnv(("terminated",)),
    "no flags": lambda: DoneOnlyEnv(()),
    "a lazy stack at first": LazyRootEnv,
    "a node of flags": FlagsOfAgentsEnv,
    "a reward of another shape": lambda: DoneOnlyEnv(reward=()),
    "serial": lambda: SerialEnv(2, DoneOnlyEnv),
    "gym, transformed": transformed(pendulum, RewardSum, StepCounter, InitTracker),
    "gym, a user's inverse": transformed(pendulum, Negated),
    "gym, TorchRL's inverse": transformed(pendulum, lambda: ActionDiscretizer(num_intervals=4)),
    "gym, transformed twice": transformed(transformed(pendulum, RewardSum), StepCounter),
    "renamed": transformed(
        pendulum, lambda: RenameTransform(["observation"], [("group", "observation")])
    ),
    "done alone, transformed": transformed(DoneOnlyEnv, RewardSum),
}


def expect_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.batch_size == theirs.batch_size
    assert ours.device == theirs.device
    assert ours.names == theirs.names
    if isinstance(theirs, LazyStackedTensorDict):  # entries of several shapes cannot be stacked
        for mine, its in zip(ours.tensordicts, theirs.tensordicts, strict=True):
            expect_same(mine, its)
        return
    assert set(ours.keys()) == set(theirs.keys())
    for name in theirs.keys():  # noqa: SIM118 (not a dict)
        mine, its = ours.get(name), theirs.get(name)
        if is_tensor_collection(its) and not is_non_tensor(its):
            expect_same(mine, its)
        elif isinstance(its, torch.Tensor):
            assert torch.equal(mine, its)
            assert mine.dtype == its.dtype


@pytest.mark.parametrize("name", ENVS)
def test_a_step_equals_torchrls(name: str) -> None:
    ours, theirs = ENVS[name](), ENVS[name]()
    following, complete, advance = make_following(ours), make_complete(ours), make_advance(ours)
    roots = []
    for env in (ours, theirs):
        torch.manual_seed(0)
        env.set_seed(0)
        roots.append(env.reset())
    our_root, root = roots
    for _ in range(4):
        for env, td in ((ours, our_root), (theirs, root)):
            torch.manual_seed(1)
            env.rand_action(td)
        given = our_root.clone()
        our_next = complete(following(our_root))
        expect_same(our_root, given)
        our_root.set("next", our_next)
        stepped = theirs.step(root)
        expect_same(our_root, stepped)
        our_root, root = advance(our_root), theirs.step_mdp(stepped)
        expect_same(our_root, root)


PUT = ["action", ("agents", "action"), ("agents", "inner", "state")]
VALUES = torch.arange(3.0), torch.ones(2, 1), torch.zeros(2, 4)


def a_root(*others: str) -> TensorDict:
    agents = {"inner": {"x": torch.ones(2, 3)}, **{name: torch.ones(2) for name in others}}
    return TensorDict(
        {"agents": TensorDict(agents, batch_size=[2]), **{name: torch.ones(1) for name in others}}
    )


@pytest.mark.parametrize(
    "make", [a_root, lambda: a_root("action"), TensorDict], ids=["new", "replaced", "nodes_missing"]
)
def test_entries_are_written_as_by_set(make: Callable[[], TensorDict]) -> None:
    put, expected = make_put(PUT, to_device=False), make()
    for name, value in zip(PUT, VALUES, strict=True):
        expected.set(name, value)
    for _ in range(3):
        root = make()
        put(root, VALUES)
        expect_same(root, expected)
        assert all(root[name] is value for name, value in zip(PUT, VALUES, strict=True))


def test_entries_are_written_into_other_kinds_of_tensordicts() -> None:
    put = make_put(["action"], to_device=False)
    value = torch.rand(2, 3)
    for _ in range(3):
        root = LazyStackedTensorDict(TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2)))
        put(root, [value])
        assert torch.equal(root.get("action"), value)


def test_values_of_another_batch_size_are_refused() -> None:
    put = make_put(PUT, to_device=False)
    with pytest.raises(RuntimeError):
        put(a_root(), (VALUES[0], torch.ones(3, 1), VALUES[2]))


def test_an_output_that_changes_its_shape_later_is_refused() -> None:
    """It reaches a batch of environments unchecked, and the Recorder names it."""
    widths = iter([3, 3, 3, 3, 4])

    def policy(td: TensorDict) -> TensorDict:
        return td.set("action", torch.ones(3, 1)).set("more", torch.ones(3, next(widths, 3)))

    env = SerialEnv(3, lambda: DoneOnlyEnv())
    collector = SyncDataCollector(env, policy, frames_per_batch=30)
    with collector, refused(ValueError, "more"):
        collector.next()


def test_entries_are_moved_to_the_tensordicts_device() -> None:
    put = make_put(["action"], to_device=True)
    for _ in range(2):
        root = TensorDict(device="meta")
        put(root, [torch.ones(2)])
        assert root["action"].device.type == "meta"


def test_a_gym_env_below_transforms_is_stepped_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    env = transformed(pendulum, RewardSum)()
    with SyncDataCollector(env, None, frames_per_batch=10) as collector:
        monkeypatch.setattr(GymEnv, "_step", None)
        batch = collector.next()
    assert batch is not None
    sums = batch["next", "reward"].cumsum(0)
    torch.testing.assert_close(batch["next", "episode_reward"], sums)


def test_a_missing_flag_is_an_error_as_in_torchrl() -> None:
    env = DoneOnlyEnv(("done", "truncated"))
    collector = SyncDataCollector(env, None, frames_per_batch=5)
    with pytest.raises(RuntimeError):
        collector.next()
