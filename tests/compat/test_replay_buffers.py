"""Collectors with replay buffers, in the ways of TorchRL's documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from collect_support import ASYNC, CAT_TIME, IN_PROCESS, STACK, Way, collecting
from envs_for_tests import CountingEnv
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from pycollect import MultiSyncDataCollector

T = 20
SLICE = 4
LENGTHS = (6, 9, 5)


def one(worker: int) -> Any:
    return partial(CountingEnv, 10 * worker, LENGTHS)


def several(worker: int) -> Any:
    return [partial(CountingEnv, 10 * worker + p, LENGTHS) for p in range(2)]


def check_slices(sample: Any) -> None:
    """Check slices of SLICE frames, each of one trajectory of one env, in order of time."""
    slices = sample.reshape(-1, SLICE)
    ids = slices["collector", "traj_ids"]
    assert (ids == ids[:, :1]).all()
    observation = slices["observation"]
    assert (observation[..., 0] == observation[:, :1, 0]).all()
    assert (observation[:, 1:, 2] == observation[:, :-1, 2] + 1).all()
    assert (slices["next", "observation"][..., 2] == observation[..., 2] + 1).all()


def buffer(ndim: int, size: int = 400, **arguments: Any) -> TensorDictReplayBuffer:
    sampler = SliceSampler(slice_len=SLICE, traj_key=("collector", "traj_ids"), strict_length=True)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, ndim=ndim), sampler=sampler, batch_size=8 * SLICE
    )


RECIPES: list[Any] = [
    pytest.param(IN_PROCESS, one, 1, id="one env, ndim 1"),
    pytest.param(IN_PROCESS, several, 2, id="a batch of envs, ndim 2"),
    pytest.param(STACK, one, 1, id="workers, ndim 1", marks=pytest.mark.ray),
    pytest.param(STACK, several, 2, id="workers of batches, ndim 2", marks=pytest.mark.ray),
    pytest.param(CAT_TIME, several, 2, id="joined in time, ndim 2", marks=pytest.mark.ray),
    pytest.param(ASYNC[2], one, 1, id="async, ndim 1", marks=pytest.mark.ray),
]


@pytest.mark.parametrize("itself", [False, True], ids=["extended", "given to the collector"])
@pytest.mark.parametrize(("way", "entry", "ndim"), RECIPES)
def test_slices_never_cross_a_trajectory(
    way: Way, entry: Callable[[int], Any], ndim: int, itself: bool
) -> None:
    if way is ASYNC[2] and not itself:
        pytest.skip("one way is enough: batches of several workers follow each other in it")
    replay = buffer(ndim)
    arguments: dict[str, Any] = {"replay_buffer": replay} if itself else {}
    with collecting(way, entry, frames=T, **arguments) as collector:
        for _ in range(4):
            td = collector.next()
            if not itself:
                for rollout in td.unbind(0) if way is STACK else [td]:
                    replay.extend(rollout)
            check_slices(replay.sample())
        assert len(replay) == collector.stats()["frames"]


def test_batched_env_instances_in_processes() -> None:
    """Each process gets its own copy of a SerialEnv that has not started."""

    def pendulum() -> GymEnv:
        return GymEnv("Pendulum-v1")

    replay = buffer(2)
    with MultiSyncDataCollector(
        [SerialEnv(2, pendulum), SerialEnv(2, pendulum)],
        None,
        frames_per_batch=4 * T,
        max_frames_per_traj=9,
        replay_buffer=replay,
    ) as collector:
        for _ in range(3):
            collector.next()
            sample = replay.sample().reshape(-1, SLICE)
            ids = sample["collector", "traj_ids"]
            assert (ids == ids[:, :1]).all()
            steps = sample["step_count"][..., 0]
            assert (steps[:, 1:] == steps[:, :-1] + 1).all()
            following = sample["next", "observation"][:, :-1]
            assert (following == sample["observation"][:, 1:]).all()
        assert len(replay) == 3 * 4 * T


def test_flat_batches_of_any_shape() -> None:
    replay = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=16)
    with collecting(IN_PROCESS, several, frames=T) as collector:
        for _ in range(3):
            replay.extend(collector.next().reshape(-1))
    assert len(replay) == 3 * T
    sample = replay.sample()
    following = sample["next", "observation"][..., 2] - sample["observation"][..., 2]
    assert (following == 1).all()


def test_steps_without_frames_are_omitted() -> None:
    from echo_envs import ENTRIES

    replay = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=16)
    with collecting(
        IN_PROCESS,
        ENTRIES["ignores masks"],
        frames=3 * 7,
        replay_buffer=replay,
        extend_buffer=False,
    ) as collector:
        for _ in range(3):
            assert collector.next() is None
        frames = collector.stats()["frames"]
    mask = replay["collector", "mask"]
    assert mask.shape == (len(replay), 3)
    assert len(replay) < 3 * 7
    assert mask.any(-1).all()
    assert mask.sum() == frames


def test_trajectories_in_a_buffer() -> None:
    """Batches of whole trajectories are appended in order."""
    replay = buffer(1)
    with collecting(
        IN_PROCESS,
        one,
        frames=T,
        trajs_per_batch=3,
        traj_format="cat",
        max_frames_per_traj=20,
        replay_buffer=replay,
    ) as collector:
        for _ in range(3):
            collector.next()
            check_slices(replay.sample())
