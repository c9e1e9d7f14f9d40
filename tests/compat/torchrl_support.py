"""Environments for the tests of TorchRL environments, and both collectors on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from tensordict.nn import TensorDictModule

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    CatTensors,
    Compose,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    PendulumEnv,
    RenameTransform,
    RewardSum,
    SelectTransform,
    SerialEnv,
    TensorDictPrimer,
    TimeMaxPool,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import WorldModelWrapper

IDS = ("collector", "traj_ids")
MAX_STEPS = {"max_frames_per_traj": 4}
Make = Callable[[], Any]


def collect(
    collector_class: Any,
    make: Make,
    policy: Any = None,
    *,
    frames: int = 24,
    batches: int = 4,
    **kwargs: Any,
) -> list[TensorDictBase]:
    """Return the first batches, with torch's global generator seeded alike."""
    torch.manual_seed(0)
    env = make()
    torch.manual_seed(1)
    kwargs = {"frames_per_batch": frames, "total_frames": batches * frames, **kwargs}
    collector = collector_class(env, policy, **kwargs)
    torch.manual_seed(2)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def in_order(ids: torch.Tensor) -> torch.Tensor:
    """Renumber ids by first appearance, because TorchRL numbers a batch's ids by time."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids.flatten().tolist()])


def assert_alike(ours: list[Any], theirs: list[Any], skipped: tuple[Any, ...] = ()) -> None:
    assert len(ours) == len(theirs) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our.batch_size == their.batch_size
        assert our.names == their.names
        assert our.device == their.device
        assert_same_entries(our, their, (IDS, *skipped))
    if IDS not in skipped:
        both = [torch.cat([td[IDS].flatten() for td in tds]) for tds in (ours, theirs)]
        assert torch.equal(*map(in_order, both))


def assert_same_entries(ours: Any, theirs: Any, skipped: tuple[Any, ...], path: Any = ()) -> None:
    """Compare keys, types, batch sizes, dtypes and values; lazy stacks row by row."""
    assert type(ours) is type(theirs), path
    assert ours.batch_size == theirs.batch_size, path
    assert ours.names == theirs.names, path
    if is_tensorclass(ours):
        ours, theirs = ours.to_tensordict(), theirs.to_tensordict()
    if isinstance(ours, LazyStackedTensorDict):
        assert ours.stack_dim == theirs.stack_dim, path
        for our, their in zip(ours.tensordicts, theirs.tensordicts, strict=True):
            assert_same_entries(our, their, skipped, path)
        return
    assert set(ours.keys()) == set(theirs.keys()), path
    for name in theirs.keys():  # noqa: SIM118 (not a dict)
        key = (*path, name)
        our, their = ours.get(name), theirs.get(name)
        if is_non_tensor(their):
            assert our.batch_size == their.batch_size, key
            assert key in skipped or our.tolist() == their.tolist(), key
        elif is_tensor_collection(their):
            assert_same_entries(our, their, skipped, key)
        else:
            assert our.dtype == their.dtype, key
            assert our.shape == their.shape, key
            if key not in skipped and name not in skipped:
                torch.testing.assert_close(our, their, rtol=0, atol=0, msg=str(key))


def compare(
    make: Make, make_policy: Callable[[], Any] | None = None, skipped: Any = (), **kwargs: Any
) -> list[TensorDictBase]:
    policies = [make_policy() if make_policy else None for _ in range(2)]
    theirs = collect(Collector, make, policies[0], **kwargs)
    ours = collect(pycollect.SyncDataCollector, make, policies[1], **kwargs)
    assert_alike(ours, theirs, skipped)
    return ours


def seeded(make: Make, seed: int = 3) -> Any:
    """Set the seed of a mock env that counts from it, before any other call."""
    env = make()
    env.set_seed(seed)
    return env


def batched(make: Callable[..., Any], *size: int, **kwargs: Any) -> Make:
    return lambda: make(batch_size=torch.Size(size), **kwargs)


def counting_policy() -> Any:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (observation % 2 == 0).to(torch.int8), observation * 2.0

    return TensorDictModule(act, ["observation"], ["action", ("info", "double")])


def cart_poles(mode: AutoresetMode) -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=mode)


class Worded(mock.CountingEnvWithString):
    """Return a string of the count instead of a random string."""

    def get_random_string(self) -> str:
        return "ab" * (1 + int(self.count.sum())) if hasattr(self, "count") else ""


class Talking(mock.Str2StrEnv):
    """Repeat the last input after the step number; episodes have 5 steps."""

    told, steps = "", 0

    def get_random_string(self) -> str:
        return f"{self.steps} {self.told}"

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        self.told, self.steps = "nothing", 0
        return super()._reset(tensordict).set("done", torch.zeros(1, dtype=torch.bool))

    def _step(self, tensordict: Any, **kwargs: Any) -> Any:
        self.told, self.steps = tensordict["action"], self.steps + 1
        out = super()._step(tensordict)
        return out.set("done", torch.tensor([self.steps >= 5])).set("reward", torch.ones(1))


def world_model(*size: int) -> Any:
    torch.manual_seed(0)
    merge = mock.ActionObsMergeLinear(5, 4)
    model = WorldModelWrapper(
        TensorDictModule(merge, ["hidden_observation", "action"], ["hidden_observation"]),
        TensorDictModule(torch.nn.Linear(4, 1), ["hidden_observation"], ["reward"]),
    )
    return mock.DummyModelBasedEnvBase(model, batch_size=torch.Size(size))


ENVS: dict[str, Make] = {
    "ContinuousActionConvMockEnv": mock.ContinuousActionConvMockEnv,
    "ContinuousActionConvMockEnvNumpy": mock.ContinuousActionConvMockEnvNumpy,
    "ContinuousActionVecMockEnv": mock.ContinuousActionVecMockEnv,
    "CountingBatchedEnv": mock.CountingBatchedEnv,
    "CountingBatchedEnv [3]": batched(
        mock.CountingBatchedEnv, 3, max_steps=torch.tensor([3, 5, 7])
    ),
    "CountingBatchedEnv [2, 3]": batched(
        mock.CountingBatchedEnv, 2, 3, max_steps=torch.arange(3, 9).view(2, 3)
    ),
    "CountingEnv": mock.CountingEnv,
    "CountingEnv [1]": batched(mock.CountingEnv, 1),
    "CountingEnv [3]": batched(mock.CountingEnv, 3),
    "DiscreteActionConvMockEnv": mock.DiscreteActionConvMockEnv,
    "DiscreteActionConvMockEnvNumpy": mock.DiscreteActionConvMockEnvNumpy,
    "DiscreteActionVecMockEnv": mock.DiscreteActionVecMockEnv,
    "DiscreteActionVecMockEnv index": lambda: mock.DiscreteActionVecMockEnv(
        categorical_action_encoding=True
    ),
    "EnvWithScalarAction": mock.EnvWithScalarAction,
    "EnvWithScalarAction []": lambda: mock.EnvWithScalarAction(singleton=True),
    "FastImageEnv": mock.FastImageEnv,
    "IncrementingEnv": mock.IncrementingEnv,
    "MockBatchedLockedEnv": lambda: mock.MockBatchedLockedEnv("cpu"),
    "MockBatchedLockedEnv [3]": lambda: mock.MockBatchedLockedEnv("cpu", batch_size=[3]),
    "MockBatchedUnLockedEnv": lambda: mock.MockBatchedUnLockedEnv("cpu"),
    "MockBatchedUnLockedEnv [3]": lambda: mock.MockBatchedUnLockedEnv("cpu", batch_size=[3]),
    "MockSerialEnv": lambda: seeded(lambda: mock.MockSerialEnv("cpu")),
    "MultiAgentCountingEnv": lambda: mock.MultiAgentCountingEnv(3),
    "MultiKeyCountingEnv": mock.MultiKeyCountingEnv,
    "MultiKeyCountingEnv [2]": batched(mock.MultiKeyCountingEnv, 2),
    "NestedCountingEnv": mock.NestedCountingEnv,
    "NestedCountingEnv [3]": batched(mock.NestedCountingEnv, 3),
    "NestedCountingEnv root done": batched(mock.NestedCountingEnv, 3, has_root_done=True),
    "NestedCountingEnv root reward": batched(
        mock.NestedCountingEnv, 3, nest_done=False, nest_reward=False
    ),
    "AutoResettingCountingEnv": lambda: mock.AutoResettingCountingEnv(max_steps=4, auto_reset=True),
    "SerialEnv": lambda: SerialEnv(2, [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)]),
    "SerialEnv nested": lambda: SerialEnv(2, batched(mock.NestedCountingEnv, 3)),
    "SerialEnv transformed": lambda: SerialEnv(
        2, lambda: TransformedEnv(mock.CountingEnv(max_steps=3), RewardSum())
    ),
    "RewardSum": lambda: TransformedEnv(mock.CountingEnv(max_steps=4), RewardSum()),
    "InitTracker": lambda: TransformedEnv(mock.CountingEnv(max_steps=4), InitTracker()),
    "RewardSum [2]": lambda: TransformedEnv(
        SerialEnv(2, mock.CountingEnv), Compose(RewardSum(), InitTracker())
    ),
    "ObservationNorm, CatTensors": lambda: TransformedEnv(
        mock.ContinuousActionVecMockEnv(),
        Compose(
            ObservationNorm(0.5, 2.0, in_keys=["observation"]),
            CatTensors(["observation", "observation_orig"], "both", del_keys=False),
        ),
    ),
    "RenameTransform": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4), RenameTransform(["observation"], [("deep", "er")])
    ),
    "TensorDictPrimer": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4), TensorDictPrimer(hidden=Unbounded(4), default_value=2.0)
    ),
    "SelectTransform": lambda: TransformedEnv(
        mock.MultiKeyCountingEnv(max_steps=3),
        SelectTransform("observation", "reward", "done", "terminated"),
    ),
    "CatFrames": lambda: TransformedEnv(
        mock.CountingEnv(max_steps=4), CatFrames(3, dim=-1, in_keys=["observation"])
    ),
    "FrameSkipTransform": lambda: TransformedEnv(
        seeded(lambda: GymEnv("Pendulum-v1")), FrameSkipTransform(3)
    ),
    "NoopResetEnv": lambda: TransformedEnv(seeded(lambda: GymEnv("CartPole-v1")), NoopResetEnv(3)),
    "TimeMaxPool": lambda: TransformedEnv(
        seeded(lambda: GymEnv("CartPole-v1")), TimeMaxPool(["observation"], T=2)
    ),
    "VecNormV2": lambda: TransformedEnv(
        seeded(lambda: GymEnv("Pendulum-v1")), VecNormV2(in_keys=["observation"], out_keys=["n"])
    ),
    "PendulumEnv": PendulumEnv,
    "HeterogeneousCountingEnv": lambda: mock.HeterogeneousCountingEnv(max_steps=3),
    "HeterogeneousCountingEnv [2]": batched(mock.HeterogeneousCountingEnv, 2, max_steps=3),
    "SerialEnv heterogeneous": lambda: SerialEnv(2, mock.HeterogeneousCountingEnv),
    "EnvWithDynamicSpec": lambda: mock.EnvWithDynamicSpec(max_count=4),
    "SerialEnv dynamic": lambda: SerialEnv(2, mock.EnvWithDynamicSpec),
    "EnvWithMetadata": mock.EnvWithMetadata,
    "SerialEnv metadata": lambda: SerialEnv(2, mock.EnvWithMetadata),
    "CountingEnvWithString": lambda: Worded(max_steps=3),
    "SerialEnv string": lambda: SerialEnv(2, [lambda n=n: Worded(max_steps=n) for n in (3, 5)]),
    "EnvWithTensorClass": lambda: mock.EnvWithTensorClass(max_steps=3),
    "SerialEnv tensorclass": lambda: SerialEnv(2, lambda: mock.EnvWithTensorClass(max_steps=3)),
    "Str2StrEnv": Talking,
    "DummyModelBasedEnvBase": world_model,
    "DummyModelBasedEnvBase [2]": lambda: world_model(2),
    "SAME_STEP": lambda: seeded(lambda: GymWrapper(cart_poles(AutoresetMode.SAME_STEP))),
    "DISABLED": lambda: seeded(lambda: GymWrapper(cart_poles(AutoresetMode.DISABLED))),
}

# In TorchRL, StepCounter misses their flags, or nested batches cannot be stacked.
WITHOUT_A_LIMIT = {
    "MultiAgentCountingEnv",
    "NestedCountingEnv",
    "NestedCountingEnv [3]",
    "SerialEnv nested",
}
