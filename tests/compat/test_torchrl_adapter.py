"""TorchRL environments: masks, states, seeds, errors and ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from raising import refused
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl_support import (
    ENVS,
    IDS,
    MAX_STEPS,
    Make,
    assert_alike,
    batched,
    collect,
    compare,
)

import pycollect
from pycollect.envs.make import make_env_batch

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiOneHot, OneHot, Unbounded
from torchrl.envs import (
    ActionMask,
    EnvBase,
    EnvCreator,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TicTacToeEnv,
    TransformedEnv,
)

from pycollect.envs.torchrl.specs import draw


class SpeedEnv(EnvBase):
    """Walk by the action times the policy's "speed", which the environment keeps as a state."""

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


def test_outputs_other_than_the_action_reach_the_env() -> None:
    def make_policy() -> Any:
        act = TensorDictModule(lambda place: place + 1, ["place"], ["action"])
        run = TensorDictModule(lambda place: place / 4 + 1, ["place"], ["speed"])
        return TensorDictSequential(act, run)

    batches = compare(SpeedEnv, make_policy)
    assert batches[0]["next", "done"].any()


class MaskedEnv(mock.CountingEnv):
    """Allow one of two actions, in turn."""

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
    # In TorchRL, only random actions of init_random_frames respect the mask.
    compare(make, init_random_frames=10**6)


def test_random_moves_are_legal() -> None:
    """Differs from TorchRL, which draws legal moves only with init_random_frames."""
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
    """Differs from TorchRL, which does not collect these."""
    first, second = collect(pycollect.SyncDataCollector, make, frames=6, batches=2)
    ends = [flag for flag in first["next"].values(True, True) if flag.dtype is torch.bool]
    ended = torch.stack([flag.flatten() for flag in ends]).any(0)
    following = torch.cat([first[IDS], second[IDS]])[1:7]
    assert torch.equal(following != first[IDS], ended)


class ReusingEnv(mock.CountingEnv):
    """Return the same tensor in each step."""

    def _shown(self, td: Any) -> Any:
        if not hasattr(self, "buffer"):
            self.buffer = td["observation"].clone()
        self.buffer.copy_(td["observation"])
        return td.set("observation", self.buffer)

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        return self._shown(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict: Any) -> Any:
        return self._shown(super()._step(tensordict))


def test_a_reused_buffer_is_read_before_it_is_overwritten() -> None:
    """Differs from TorchRL, which returns the last frame in every row."""
    ours = collect(pycollect.SyncDataCollector, lambda: ReusingEnv(max_steps=4))
    theirs = collect(Collector, lambda: mock.CountingEnv(max_steps=4))
    assert_alike(ours, theirs, skipped=("action",))


def test_a_list_is_stepped_by_a_serial_env() -> None:
    fns = [lambda n=n: mock.CountingEnv(max_steps=n) for n in (3, 5)]
    theirs = collect(Collector, lambda: SerialEnv(2, fns))
    ours = collect(pycollect.SyncDataCollector, lambda: fns)
    assert_alike(ours, theirs)
    assert make_env_batch([mock.CountingEnv]).spec.batch_size == (1,)


@pytest.mark.parametrize("entry", ["instance", "callable", "class", "EnvCreator"])
def test_entries(entry: str) -> None:
    make: Any = mock.CountingEnv
    entries = {"instance": make(), "callable": lambda: make(), "class": make}
    env = entries.get(entry) or EnvCreator(make)
    collector = pycollect.SyncDataCollector(env, ones, frames_per_batch=3, total_frames=3)
    assert next(collector)["observation"].flatten().tolist() == [0, 1, 2]
    inner = collector._worker.env.groups[0]._env  # type: ignore[attr-defined]
    inner.is_closed = False  # it is True initially
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
    with refused(ValueError, "create_env_kwargs"):
        make_env_batch(mock.CountingEnv(), {"max_steps": 2})


def test_seeds_follow_torchrls_chain() -> None:
    """The first batch after `set_seed` begins the new stream; TorchRL also needs a reset."""

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


def serial(make: Make = mock.CountingEnv, count: int = 2) -> Any:
    return SerialEnv(count, make)


@pytest.mark.parametrize(
    "make",
    [
        mock.CountingEnv,
        ENVS["CountingEnv [3]"],
        ENVS["CountingBatchedEnv [2, 3]"],
        lambda: serial(count=3),
        lambda: serial(ENVS["CountingEnv [3]"]),
        lambda: serial(serial),
        pytest.param(lambda: ParallelEnv(2, mock.CountingEnv), marks=pytest.mark.slow),
        lambda: TransformedEnv(serial(count=3), RewardSum()),
    ],
    ids=["one", "[3]", "[2, 3]", "Serial", "Serial of [3]", "nested", "Parallel", "transformed"],
)
def test_the_next_seed_equals_torchrls(make: Make) -> None:
    """One env with a batch size takes one seed for any size; a SerialEnv takes one per worker."""
    following = []
    for kind in (pycollect.SyncDataCollector, Collector):
        collector = kind(make(), None, frames_per_batch=6, total_frames=6)
        following.append(collector.set_seed(5))
        collector.shutdown()
    assert following[0] == following[1]


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


@pytest.mark.parametrize("size", [(), (2,)])
def test_statistics_add_all_rewards(size: tuple[int, ...]) -> None:
    make = batched(mock.MultiKeyCountingEnv, *size, max_steps=1000)
    arguments = {"frames_per_batch": 8, "max_frames_per_traj": 4}
    with pycollect.SyncDataCollector(make, None, **arguments) as collector:
        batch = collector.next()
        returned = collector.stats()["episode_return"]
    rewards = [
        batch[("next", *key)] for key in (("reward",), ("nested_1", "gift"), ("nested_2", "reward"))
    ]
    ids = batch["collector", "traj_ids"]
    ended = batch["next", "done"][..., 0]
    for key in ("nested_1", "nested_2"):
        ended = ended | batch["next", key, "done"].flatten(ids.ndim).any(-1)
    earned = sum(reward.double().flatten(ids.ndim).sum(-1) for reward in rewards)
    complete = ids[ended].unique()
    expected = [float(earned[ids == one].sum()) for one in complete]
    assert len(expected) > 1
    assert returned == pytest.approx(sum(expected) / len(expected))


def test_one_tensordict_per_step_is_counted() -> None:
    for make, extras in ((mock.CountingEnv, 0), (mock.Str2StrEnv, 1)):
        with pycollect.SyncDataCollector(make, None, frames_per_batch=4) as collector:
            next(collector)
            assert collector.stats()["slow_paths"] == {
                "policy_tensordict": 0,
                "env_tensordict": 1,
                "extras": extras,
            }


def test_device_moves_only_an_env_without_a_device_but_env_device_moves_any() -> None:
    from pycollect.data.devices import Devices
    from pycollect.envs.torchrl import _moved

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    env = SpeedEnv()
    assert _moved(env, Devices()) is env
    assert _moved(env, Devices(default=cpu)) is env
    assert env.device is None

    class Told:
        device = cpu

        def to(self, device: torch.device) -> torch.device:
            return device

    assert isinstance(_moved(Told(), Devices(default=gpu)), Told)
    assert _moved(Told(), Devices(env=gpu)) == gpu


def test_refused() -> None:
    def collector(make: Make, **kwargs: Any) -> Any:
        return pycollect.SyncDataCollector(make, None, frames_per_batch=4, **kwargs)

    counted = TransformedEnv(mock.CountingEnv(), StepCounter())
    with refused(ValueError, "max_frames_per_traj") as caught:
        collector(counted, max_frames_per_traj=3)
    assert "step_count" in str(caught.value)
    with refused(ValueError, "set_truncated") as caught:
        collector(mock.CountingEnv, set_truncated=True)
    assert "add_truncated_keys" in str(caught.value)
    with refused(ValueError, "create_env_fn") as caught:
        collector(lambda: mock.CountingEnv().to("meta"))
    assert "meta" in str(caught.value)
    mixed = [mock.CountingEnv, lambda: gymnasium.make("CartPole-v1")]
    with refused(TypeError, "create_env_fn"):
        make_env_batch(mixed)


@pytest.mark.ray
@pytest.mark.parametrize("entry", ["instance", "callable"])
def test_on_ray(ray_cluster: Any, entry: str) -> None:
    """Actors get copies, and collect the same frames as these envs in this process."""

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


def test_only_entries_of_the_spec_are_collected() -> None:
    """In TorchRL, the root also has a reward, which this env's reset returns outside its specs."""
    ours = collect(pycollect.SyncDataCollector, mock.StateLessCountingEnv)
    theirs = collect(Collector, mock.StateLessCountingEnv)
    assert_alike(ours, [batch.exclude("reward") for batch in theirs])


def test_a_wrong_spec_is_named() -> None:
    class WrongEnv(mock.CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec["more"] = Unbounded((2,))

    with refused(ValueError, "create_env_fn") as caught:
        pycollect.SyncDataCollector(WrongEnv, None, frames_per_batch=2)
    assert "'more'" in str(caught.value)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("how", "shape"),
    [
        ({}, [2, 3, 8]),
        ({"sync": True}, [2, 2, 3, 4]),
        ({"sync": True, "cat_results": 0}, [4, 3, 4]),
        ({"sync": True, "cat_results": -1}, [2, 3, 8]),
    ],
    ids=["async", "stack", "0", "-1"],
)
def test_batch_sizes_of_two_dimensions_on_ray(
    ray_cluster: Any, how: dict[str, Any], shape: list[int]
) -> None:
    make = partial(mock.CountingEnv, batch_size=[2, 3])
    with pycollect.RayCollector([make, make], None, frames_per_batch=48, **how) as collector:
        batch = collector.next()
    assert batch is not None
    assert list(batch.shape) == shape
    assert batch.names == [None] * (len(shape) - 1) + ["time"]
    ids = batch["collector", "traj_ids"]
    assert ids.unique().numel() == ids.max() + 1


@pytest.mark.parametrize(
    "spec",
    [
        Bounded(-1.0, 1.0, (3,)),
        Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 1e-30]), (2,)),
        Bounded(0.1, 0.3, (4, 64), dtype=torch.float16),  # rounding leaves the interval
        Bounded(-1e308, 1e308, (2,), dtype=torch.float64),
        Bounded(float("-inf"), float("inf"), (2,)),
        Bounded(0, 5, (2,), dtype=torch.int64),
        Bounded(-1.0, 1.0, (2,), dtype=torch.bfloat16),
        Bounded(-1.0, 1.0, ()),
        Bounded(torch.tensor([0.0, 2.0]), torch.tensor([1.0, -1.0])),  # its ends are swapped
        Composite(a=Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 3.0]))).expand(3)["a"],
        OneHot(4),
        OneHot(4, dtype=torch.int64).expand(2, 3, 4),
        OneHot(3, mask=torch.tensor([True, False, True])),
        MultiOneHot((2, 3)),
        Categorical(5, shape=(3,)),
        Categorical(300, dtype=torch.int16),
        Categorical(3, mask=torch.tensor([True, False, True])),
        Unbounded((2,)),
    ],
    ids=str,
)
def test_actions_are_drawn_as_by_the_spec(spec: Any) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        ours, then = draw(spec), torch.rand(1)
        torch.manual_seed(seed)
        theirs = spec.rand()
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(then, torch.rand(1))  # the generator has the same state
