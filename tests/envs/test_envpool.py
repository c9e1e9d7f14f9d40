"""The real EnvPool: every frame equals the one EnvPool returns when stepped by hand.

The tests are skipped if EnvPool is not installed. If it is installed but cannot be imported, they
fail.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from raising import refused

from pycollect import MultiSyncDataCollector, SyncDataCollector
from pycollect.envs.make import make_env_batch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs envpool"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
]

ENVS = 3
STEPS = 60
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 25},
    "Breakout-v5": {"max_episode_steps": 20},
    "Blackjack-v1": {},
    "MiniGrid-Empty-5x5-v0": {"max_episode_steps": 10},
}
"""An observation that is a vector, pixels, a Tuple and a Dict; actions of both kinds."""


def make(task: str = "CartPole-v1", **kwargs: Any) -> Any:
    import envpool

    return envpool.make_gymnasium(task, num_envs=ENVS, seed=3, **TASKS[task], **kwargs)


def as_tree(observation: Any) -> Any:
    """Return EnvPool's observation under the keys that collectors use."""
    if isinstance(observation, tuple):
        observation = {str(place): entry for place, entry in enumerate(observation)}
    if isinstance(observation, dict):
        return {key: as_tree(entry) for key, entry in observation.items()}
    return torch.from_numpy(np.array(observation))


def row(tree: Any, number: int) -> Any:
    if isinstance(tree, dict):
        return {key: row(entry, number) for key, entry in tree.items()}
    return tree[number]


def by_hand(env: Any, actions: np.ndarray) -> list[list[tuple[Any, Any, float, bool, bool]]]:
    """Step EnvPool itself until each env has executed all of its `actions` [P, T].

    EnvPool resets an env in the step after its end and ignores that step's action: such steps
    are not frames.
    """
    rows: list[list[Any]] = [[] for _ in range(ENVS)]
    ended = np.zeros(ENVS, bool)
    root = as_tree(env.reset()[0])
    while min(map(len, rows)) < STEPS:
        now = np.stack([actions[i, min(len(own), STEPS - 1)] for i, own in enumerate(rows)])
        observation, reward, terminated, truncated, _ = env.step(now)
        following = as_tree(observation)
        for i in np.flatnonzero(~ended):
            flags = bool(terminated[i]), bool(truncated[i])
            rows[i].append((row(root, i), row(following, i), float(reward[i]), *flags))
        root, ended = following, terminated | truncated
    return rows


def expect_same(td: Any, tree: Any) -> None:
    for key, entry in (tree if isinstance(tree, dict) else {"observation": tree}).items():
        if isinstance(entry, dict):
            expect_same(td[key], entry)
        else:
            # Compare in the dtype of the space: EnvPool returns some Discrete entries as int32.
            assert torch.equal(td[key], entry.reshape(td[key].shape))


@pytest.mark.parametrize("task", TASKS)
def test_frames_equal_those_of_a_hand_written_loop(task: str) -> None:
    with SyncDataCollector(
        lambda: make(task), None, frames_per_batch=ENVS * STEPS, track_traj_ids=False
    ) as collector:
        td = collector.next()
    assert td is not None
    assert td.batch_size == (ENVS, STEPS)
    assert td["next", "done"].any()
    env = make(task)
    make_env_batch(env)  # repeat the collector's probe, so that the random streams are equal
    for i, own in enumerate(by_hand(env, td["action"].numpy())):
        for t, (root, following, reward, terminated, truncated) in enumerate(own[:STEPS]):
            frame = td[i, t]
            expect_same(frame, root)
            expect_same(frame["next"], following)
            assert frame["next", "reward"].item() == reward
            assert frame["next", "terminated"].item() == terminated
            assert frame["next", "truncated"].item() == truncated


def test_only_rows_that_fell_behind_are_stepped_to_catch_up() -> None:
    env = make()
    step, reset, asked, resets = env.step, env.reset, [], []
    env.step = lambda action, env_id=None: (asked.append(env_id), step(action, env_id))[1]
    env.reset = lambda *args, **kwargs: (resets.append(args), reset(*args, **kwargs))[1]
    with SyncDataCollector(env, None, frames_per_batch=ENVS * STEPS) as collector:
        asked.clear()
        resets.clear()
        td = collector.next()
    assert td is not None
    assert resets == []
    together, alone = asked[:STEPS], asked[STEPS:]
    assert together == [None] * STEPS
    # One more step for each episode that ended before a row's last frame.
    ended = td["next", "done"][:, :-1, 0].sum(1)
    assert len(alone) == int(ended.max())
    for place, ids in enumerate(alone):
        assert ids.tolist() == (ended > place).nonzero().flatten().tolist()


def test_rows_are_reset_by_mask_and_info_is_recorded() -> None:
    options: dict[str, Any] = {"frames_per_batch": 300, "info_keys": ["elapsed_step"]}
    with SyncDataCollector(make, None, max_frames_per_traj=15, **options) as collector:
        td = collector.next()
    assert td is not None
    assert ("collector", "mask") not in td.keys(include_nested=True)
    done = td["next", "done"][:, :-1, 0]
    following = td["observation"][:, 1:]
    assert torch.equal(following[~done], td["next", "observation"][:, :-1][~done])
    assert (following[done].abs() <= 0.05).all()
    counts = td["next", "step_count"][..., 0]
    assert torch.equal(td["next", "elapsed_step"].long(), counts)


def test_an_asynchronous_pool_is_refused() -> None:
    with refused(ValueError, "create_env_fn"):
        SyncDataCollector(lambda: make(batch_size=2), None, frames_per_batch=30)


def test_a_seed_is_accepted_only_at_construction() -> None:
    with SyncDataCollector(make, None, frames_per_batch=30) as collector:
        with pytest.warns(UserWarning, match="seed"):
            collector.set_seed(1)
        assert collector.next() is not None


@pytest.mark.processes
def test_in_worker_processes() -> None:
    workers = 2
    with MultiSyncDataCollector(
        [make] * workers, None, frames_per_batch=workers * ENVS * 20
    ) as collector:
        td = collector.next()
    assert td is not None
    assert td.batch_size == (workers, ENVS, 20)
    assert td["collector", "traj_ids"].unique().numel() >= workers * ENVS


def test_two_pools_take_turns() -> None:
    def pool(seed: int) -> Any:
        import envpool

        return envpool.make_gymnasium("CartPole-v1", num_envs=2, seed=seed)

    entry = [lambda: pool(1), lambda: pool(2)]
    with SyncDataCollector(entry, None, frames_per_batch=4 * STEPS, env_groups=2) as collector:
        td = collector.next()
    assert td is not None
    assert td.shape == (4, STEPS)
    done = td["next", "done"][:, :-1, 0]
    assert done.any()
    following = td["observation"][:, 1:]
    assert torch.equal(following[~done], td["next", "observation"][:, :-1][~done])
    assert (following[done].abs() <= 0.05).all()
    assert not torch.equal(td["observation"][0, 0], td["observation"][2, 0])
