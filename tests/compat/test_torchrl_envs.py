"""TorchRL environments: the frames that TorchRL's own collector gives, from every kind of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential

import pycollect
from pycollect.envs import make_env_batch
from pycollect.layout import torch_dtype

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own extension does not load beside a newer torch
    pytest.importorskip("torchrl")
    import torchrl.testing.mocking_classes as mock
    from torchrl.collectors import Collector
    from torchrl.data import Binary, Composite, Unbounded
    from torchrl.envs import (
        ActionMask,
        CatFrames,
        CatTensors,
        Compose,
        EnvBase,
        EnvCreator,
        FrameSkipTransform,
        GymEnv,
        GymWrapper,
        InitTracker,
        NoopResetEnv,
        ObservationNorm,
        ParallelEnv,
        PendulumEnv,
        RenameTransform,
        RewardSum,
        SelectTransform,
        SerialEnv,
        StepCounter,
        TensorDictPrimer,
        TicTacToeEnv,
        TimeMaxPool,
        TransformedEnv,
        VecNormV2,
    )

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
    """The first batches; whatever draws from torch's global generator draws the same each time."""
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
    """Ids numbered anew by where they appear first: there, a batch's ids are numbered by time."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids.flatten().tolist()])


def assert_alike(ours: list[Any], theirs: list[Any], skipped: tuple[Any, ...] = ()) -> None:
    assert len(ours) == len(theirs) > 1
    for our, their in zip(ours, theirs, strict=True):
        assert our.batch_size == their.batch_size
        assert our.names == their.names
        assert our.device == their.device
        keys = set(their.keys(True, True))
        assert set(our.keys(True, True)) == keys
        for key in keys:
            assert our[key].dtype == their[key].dtype, key
            assert our[key].shape == their[key].shape, key
            if key not in (IDS, *skipped):
                torch.testing.assert_close(our[key], their[key], rtol=0, atol=0, msg=str(key))
    if IDS not in skipped:
        both = [torch.cat([td[IDS].flatten() for td in tds]) for tds in (ours, theirs)]
        assert torch.equal(*map(in_order, both))


def compare(
    make: Make, make_policy: Callable[[], Any] | None = None, skipped: Any = (), **kwargs: Any
) -> list[TensorDictBase]:
    policies = [make_policy() if make_policy else None for _ in range(2)]
    theirs = collect(Collector, make, policies[0], **kwargs)
    ours = collect(pycollect.SyncDataCollector, make, policies[1], **kwargs)
    assert_alike(ours, theirs, skipped)
    return ours


def seeded(make: Make, seed: int = 3) -> Any:
    """Mock envs that count from a seed have to be told one before anything else."""
    env = make()
    env.set_seed(seed)
    return env


def batched(make: Callable[..., Any], *size: int, **kwargs: Any) -> Make:
    return lambda: make(batch_size=torch.Size(size), **kwargs)


def cart_poles(mode: AutoresetMode) -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=mode)


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
    "SAME_STEP": lambda: seeded(lambda: GymWrapper(cart_poles(AutoresetMode.SAME_STEP))),
    "DISABLED": lambda: seeded(lambda: GymWrapper(cart_poles(AutoresetMode.DISABLED))),
}

# There: a StepCounter does not find the flags, or batches of nested sizes cannot be stacked.
WITHOUT_A_LIMIT = {
    "MultiAgentCountingEnv",
    "NestedCountingEnv",
    "NestedCountingEnv [3]",
    "SerialEnv nested",
}


@pytest.mark.parametrize("name", ENVS)
def test_frames(name: str) -> None:
    compare(ENVS[name])


@pytest.mark.parametrize("name", [name for name in ENVS if name not in WITHOUT_A_LIMIT])
def test_frames_with_a_limit(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS)


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_flagged_at_the_end(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, set_truncated=True)
    if name != "SerialEnv":
        compare(lambda: ENVS[name]().add_truncated_keys(), set_truncated=True)


@pytest.mark.parametrize("name", ["CountingEnv", "CountingBatchedEnv [3]", "SerialEnv"])
def test_frames_reset_at_each_iter(name: str) -> None:
    compare(ENVS[name], **MAX_STEPS, reset_at_each_iter=True)


@pytest.mark.parametrize("transformed", [False, True])
def test_parallel_env(transformed: bool) -> None:
    def make() -> Any:
        env = ParallelEnv(
            2, [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)], mp_start_method="fork"
        )
        return TransformedEnv(env, StepCounter()) if transformed else env

    compare(make, batches=2)


def counting_policy() -> Any:
    def act(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (observation % 2 == 0).to(torch.int8), observation * 2.0

    return TensorDictModule(act, ["observation"], ["action", ("info", "double")])


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


class SpeedEnv(EnvBase):
    """Walks by its action times what the policy says under "speed"; a state that it keeps there."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(place=Unbounded((1,)))
        self.state_spec = Composite(place=Unbounded((1,)), speed=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> Any:
        return TensorDict({"place": torch.zeros(1)}, [])

    def _step(self, tensordict: Any) -> Any:
        place = tensordict["place"] + tensordict["action"] * tensordict["speed"]
        done = place > 20
        return TensorDict({"place": place, "reward": place, "done": done, "terminated": done}, [])

    def _set_seed(self, seed: Any) -> None: ...


def test_outputs_beside_the_action_reach_the_env() -> None:
    def make_policy() -> Any:
        act = TensorDictModule(lambda place: place + 1, ["place"], ["action"])
        run = TensorDictModule(lambda place: place / 4 + 1, ["place"], ["speed"])
        return TensorDictSequential(act, run)

    batches = compare(SpeedEnv, make_policy)
    assert batches[0]["next", "done"].any()


class MaskedEnv(mock.CountingEnv):
    """Allows one of two actions, by turns."""

    def __init__(self) -> None:
        super().__init__(max_steps=4)
        self.observation_spec["mask"] = Binary(2, dtype=torch.bool)
        self.action_spec = type(mock.DiscreteActionVecMockEnv().action_spec)(2)

    def _mask(self) -> torch.Tensor:
        even = self.count % 2 == 0
        return torch.cat([even, ~even])

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        return super()._reset(tensordict, **kwargs).set("mask", self._mask())

    def _step(self, tensordict: Any) -> Any:
        self.count += 1
        done = self.count > self.max_steps
        source = {"observation": self.count.clone(), "mask": self._mask(), "reward": torch.ones(1)}
        return TensorDict({**source, "done": done, "terminated": done}, [])


def test_random_actions_honour_masks() -> None:
    def make() -> Any:
        return TransformedEnv(MaskedEnv(), ActionMask(mask_key="mask"))

    for batch in collect(pycollect.SyncDataCollector, make):
        assert torch.equal(batch["action"].bool(), batch["mask"])
    # There, only those of init_random_frames do.
    compare(make, init_random_frames=10**6)


def test_random_moves_are_legal() -> None:
    """≠ There, only those of init_random_frames are."""
    for batch in collect(pycollect.SyncDataCollector, TicTacToeEnv):
        moves = batch["action"].reshape(-1, 1)
        assert batch["mask"].gather(-1, moves).all()
    compare(TicTacToeEnv, init_random_frames=10**6)


@pytest.mark.parametrize(
    "make",
    [
        mock.EnvThatDoesNothing,
        lambda: mock.MockNestedResetEnv(3, True),
        lambda: mock.MockNestedResetEnv(3, False),
    ],
)
def test_envs_without_actions(make: Make) -> None:
    """≠ Not collected there."""
    first, second = collect(pycollect.SyncDataCollector, make, frames=6, batches=2)
    ends = [flag for flag in first["next"].values(True, True) if flag.dtype is torch.bool]
    ended = torch.stack([flag.flatten() for flag in ends]).any(0)
    following = torch.cat([first[IDS], second[IDS]])[1:7]
    assert torch.equal(following != first[IDS], ended)


class ReusingEnv(mock.CountingEnv):
    """Shows the same tensor each time."""

    def _shown(self, td: Any) -> Any:
        if not hasattr(self, "buffer"):
            self.buffer = td["observation"].clone()
        self.buffer.copy_(td["observation"])
        return td.set("observation", self.buffer)

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        return self._shown(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict: Any) -> Any:
        return self._shown(super()._step(tensordict))


def test_a_reused_buffer_is_read_before_it_is_written_again() -> None:
    """≠ There, every frame of a batch is the last one."""
    ours = collect(pycollect.SyncDataCollector, lambda: ReusingEnv(max_steps=4))
    theirs = collect(Collector, lambda: mock.CountingEnv(max_steps=4))
    assert_alike(ours, theirs, skipped=("action",))


def test_a_list_is_stepped_by_a_serial_env() -> None:
    fns = [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)]
    theirs = collect(Collector, lambda: SerialEnv(2, fns))
    ours = collect(pycollect.SyncDataCollector, lambda: fns)
    assert_alike(ours, theirs)
    assert make_env_batch([mock.CountingEnv]).batch_size == (1,)


@pytest.mark.parametrize("entry", ["instance", "callable", "class", "EnvCreator"])
def test_entries(entry: str) -> None:
    make: Any = mock.CountingEnv
    entries = {"instance": make(), "callable": lambda: make(), "class": make}
    env = entries.get(entry) or EnvCreator(make)
    collector = pycollect.SyncDataCollector(env, ones, frames_per_batch=3, total_frames=3)
    assert next(collector)["observation"].flatten().tolist() == [0, 1, 2]
    inner = collector._worker.env._env  # type: ignore[attr-defined]
    inner.is_closed = False  # it says True from the start
    collector.shutdown()
    assert inner.is_closed


def ones(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int8))


def test_arguments_of_the_env() -> None:
    for env in (mock.CountingEnv, SerialEnv(2, mock.CountingEnv)):
        collector = pycollect.SyncDataCollector(
            env, ones, frames_per_batch=8, create_env_kwargs={"max_steps": 2}
        )
        with collector:
            assert next(collector)["next", "done"][..., 2, 0].all()
    with pytest.raises(ValueError, match="create_env_kwargs"):
        make_env_batch(mock.CountingEnv(), {"max_steps": 2})


def test_seeds_follow_torchrls_chain() -> None:
    """≠ The batch after `set_seed` is the first of the new stream; there, one has to reset too."""

    class DiceEnv(mock.CountingEnv):
        def _set_seed(self, seed: Any) -> None:
            self.dice = torch.Generator().manual_seed(seed)

        def _step(self, tensordict: Any) -> Any:
            td = super()._step(tensordict)
            return td.set("reward", torch.rand(1, generator=self.dice))

    def rewards(collector_class: Any) -> torch.Tensor:
        env = SerialEnv(2, DiceEnv)
        collector = collector_class(env, None, frames_per_batch=8, total_frames=8)
        try:
            collector.set_seed(5)
            collector.reset() if collector_class is Collector else None
            (batch,) = collector
            return batch["next", "reward"].clone()
        finally:
            collector.shutdown()

    assert torch.equal(rewards(pycollect.SyncDataCollector), rewards(Collector))


def test_set_seed_repeats_random_actions() -> None:
    collector = pycollect.SyncDataCollector(
        mock.ContinuousActionVecMockEnv(), None, frames_per_batch=8
    )
    with collector:
        actions = []
        for seed in (1, 1, 2):
            collector.set_seed(seed)
            actions.append(next(collector)["action"].clone())
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_init_random_frames() -> None:
    collector = pycollect.SyncDataCollector(
        mock.CountingEnv(max_steps=4), counting_policy(), frames_per_batch=8, init_random_frames=8
    )
    with collector:
        first, second = next(collector), next(collector)
    assert not first["info", "double"].any()
    assert torch.equal(second["info", "double"], second["observation"] * 2.0)


@pytest.mark.parametrize("size", [(), (2,)])
def test_statistics_add_all_rewards(size: tuple[int, ...]) -> None:
    env = make_env_batch(batched(mock.MultiKeyCountingEnv, *size))
    env.given(env.action)
    env.reset()
    actions = tuple(
        torch.ones((*size, *leaf.shape), dtype=torch_dtype(leaf.dtype)) for leaf in env.action
    )
    arrays, total, *_ = env.step(actions)
    rewards = arrays[len(env.observation) :]
    assert len(rewards) == 3
    expected = sum(float(reward.double().sum()) for reward in rewards)
    assert float(torch.as_tensor(total).sum()) == expected > 0


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (mock.HeterogeneousCountingEnv, "lazy"),
        (mock.EnvWithDynamicSpec, "observation"),
        (mock.EnvWithMetadata, "non_tensor"),
        (mock.CountingEnvWithString, "string"),
        (mock.EnvWithTensorClass, r"tc\.field0"),
        (mock.Str2StrEnv, "observation"),
    ],
)
def test_entries_without_a_fixed_shape_are_named(make: Make, key: str) -> None:
    with pytest.raises(NotImplementedError, match=key):
        make_env_batch(make)


def test_refused() -> None:
    def collector(make: Make, **kwargs: Any) -> Any:
        return pycollect.SyncDataCollector(make, None, frames_per_batch=4, **kwargs)

    counted = TransformedEnv(mock.CountingEnv(), StepCounter())
    with pytest.raises(ValueError, match=r"max_frames_per_traj.*step_count"):
        collector(counted, max_frames_per_traj=3)
    with pytest.raises(ValueError, match=r"set_truncated.*add_truncated_keys"):
        collector(mock.CountingEnv, set_truncated=True)
    with pytest.raises(NotImplementedError, match=r"CPU.*meta"):
        collector(lambda: mock.CountingEnv().to("meta"))
    mixed = [mock.CountingEnv, lambda: gymnasium.make("CartPole-v1")]
    with pytest.raises(TypeError, match="all of TorchRL's or none"):
        make_env_batch(mixed)


def test_an_error_of_the_env_comes_through() -> None:
    collector = pycollect.SyncDataCollector(
        mock.EnvThatErrorsAfter10Iters, None, frames_per_batch=4
    )
    with collector, pytest.raises(RuntimeError, match="max steps"):
        list(collector)


@pytest.mark.ray
@pytest.mark.parametrize("entry", ["instance", "callable"])
def test_on_ray(ray_cluster: Any, entry: str) -> None:
    """Actors get copies; what they collect is what the same envs give in this process."""

    def make() -> Any:
        return SerialEnv(2, [partial(mock.CountingEnv, max_steps=n) for n in (3, 5)])

    def act(td: TensorDictBase) -> TensorDictBase:  # local: pickled by value
        return td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int8))

    env = make() if entry == "instance" else make
    collector = pycollect.RayCollector(
        [env] * 2,
        act,
        frames_per_batch=48,
        total_frames=96,
        sync=True,
        remote_configs={"num_cpus": 1, "memory": 1024**3},
        **MAX_STEPS,
    )
    with collector:
        ours = [batch.clone() for batch in collector]
    theirs = collect(Collector, make, act, batches=2, **MAX_STEPS)
    for actor in range(2):
        assert_alike([batch[actor] for batch in ours], theirs)
