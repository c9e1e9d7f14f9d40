"""Every kind of environment as an EnvBatch: the same frames, however its episodes end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs_for_tests import (
    BoxActionEnv,
    CompactVectorEnv,
    ConstantEnv,
    CountingEnv,
    CountingVectorEnv,
    DiscreteEnv,
    EnvBrokeError,
    NestedEnv,
    OldEnvPool,
    OneOfEnv,
    PixelEnv,
    RaisingEnv,
    ReusedBufferEnv,
    SparseRewardEnv,
    WrongObservationEnv,
)
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollect.envs import ActionSampler, EnvBatch, make_env_batch

LENGTHS = (3, 1, 4)


def fns(kind: type[CountingEnv] = CountingEnv, count: int = 3, **kwargs: Any) -> list[Callable]:
    """Env callables 0, 1, ... whose episodes have lengths of their own."""
    kwargs.setdefault("length", LENGTHS)
    return [partial(kind, number=i, **kwargs) for i in range(count)]


def envs(kind: type[CountingEnv] = CountingEnv, count: int = 3, **kwargs: Any) -> list[CountingEnv]:
    return [fn() for fn in fns(kind, count, **kwargs)]


def actions(batch: EnvBatch, steps: int) -> list[Any]:
    drawn = ActionSampler(batch.action_space, batch.num_envs, batch.batched).draw(
        steps, np.random.default_rng(0)
    )
    rows = [tuple(leaf[t, ...].copy() for leaf in drawn) for t in range(steps)]
    return [row[0] if len(row) == 1 else row for row in rows]


def take(arrays: Any) -> Any:
    """A copy, since the arrays may be buffers."""
    return tuple(map(np.array, arrays)) if isinstance(arrays, tuple) else np.array(arrays)


def frames(batch: EnvBatch, steps: int = 12) -> list[list[tuple[Any, ...]]]:
    """Collect as the Recorder does: for each env (root, next, reward, done) without dummies."""
    assert batch.batched
    root = take(batch.reset())
    rows: list[list[tuple[Any, ...]]] = [[] for _ in range(batch.num_envs)]
    done = np.zeros(batch.num_envs, bool)
    for action in actions(batch, steps):
        skipped = done if batch.skips_after_done else np.zeros_like(done)
        after, reward, terminated, truncated = batch.step(action)
        after = take(after)
        done = terminated | truncated
        for i in np.flatnonzero(~skipped):
            rows[i].append((root[i].tolist(), after[i].tolist(), float(reward[i]), bool(done[i])))
        root = after.copy()
        if done.any() and not batch.skips_after_done:
            root[done] = take(batch.reset_done(done.copy()))[done]
    return rows


def run(batch: EnvBatch, steps: int) -> None:
    for _ in range(steps):
        _, _, terminated, truncated = batch.step(np.zeros(batch.num_envs, int))
        if (terminated | truncated).any():
            batch.reset_done(terminated | truncated)


def expect_counting(rows: list[tuple[Any, ...]], number: int, lengths: Any = LENGTHS) -> None:
    """No frame is lost, repeated or shifted, from whatever episode the rows start with."""
    episode = int(rows[0][0][1])
    step = 0
    for root, after, reward, done in rows:
        assert root == [number, episode, step]
        step += 1
        assert after == [number, episode, step]
        assert reward == step
        assert done == (step == lengths[episode % len(lengths)])
        if done:
            episode, step = episode + 1, 0


def expect_dense(batch: EnvBatch, steps: int = 12) -> None:
    assert not batch.skips_after_done
    rows = frames(batch, steps)
    for i, row in enumerate(rows):
        assert len(row) == steps
        expect_counting(row, i)
    batch.close()


class TestSingleEnv:
    def test_one_env_is_not_batched(self) -> None:
        env = CountingEnv(7, length=2)
        batch = make_env_batch(lambda: env)
        assert (batch.num_envs, batch.batched) == (1, False)
        assert (batch.skips_after_done, batch.can_reset) == (False, True)
        assert batch.action_space is env.action_space
        assert batch.reset([3]).tolist() == [7, 0, 0]
        assert env.seeds == [3]
        observation, reward, terminated, truncated = batch.step(np.array(1))
        assert (observation.tolist(), reward, terminated, truncated) == ([7, 0, 1], 1, False, False)
        observation, reward, terminated, truncated = batch.step(np.array(0))
        assert (observation.tolist(), reward, terminated, truncated) == ([7, 0, 2], 2, True, False)
        assert batch.reset_done(np.array([True])).tolist() == [7, 1, 0]

    def test_an_instance_and_a_class_do_too(self) -> None:
        for entry in (CountingEnv(), CountingEnv):
            assert make_env_batch(entry).reset().tolist() == [0, 0, 0]

    def test_kwargs_reach_the_callable(self) -> None:
        batch = make_env_batch(CountingEnv, {"number": 4})
        assert batch.reset().tolist() == [4, 0, 0]
        with pytest.raises(ValueError, match=r"create_env_kwargs: expected None.*'number': 4"):
            make_env_batch(CountingEnv(), {"number": 4})

    def test_discrete_actions_are_numpy_scalars(self) -> None:
        env = CountingEnv()
        batch = make_env_batch(env)
        batch.reset()
        batch.step(np.array(1))
        assert type(env.actions[0]) is np.int64
        assert env.action_space.contains(env.actions[0])

    @pytest.mark.parametrize(
        ("space", "of"),
        [
            (spaces.Box(0, 1, (), np.float32), lambda action: action),
            (spaces.Dict(a=spaces.Box(0, 1, (), np.float32)), lambda action: action["a"]),
            (spaces.Tuple([spaces.Box(0, 1, (), np.float32)]), lambda action: action[0]),
        ],
        ids=["Box", "Dict", "Tuple"],
    )
    @pytest.mark.parametrize("count", [1, 2])
    def test_box_actions_without_dimensions_are_arrays(
        self, space: Any, of: Any, count: int
    ) -> None:
        class Env(CountingEnv):
            def __init__(self) -> None:
                super().__init__()
                self.action_space = space

            def step(self, action: Any) -> Any:
                given.append(of(action))
                return super().step(0)

        given: list[Any] = []
        batch = make_env_batch([Env] * count if count > 1 else Env)
        batch.reset()
        batch.step(np.zeros(count if count > 1 else (), np.float32))
        assert [(type(action), action.shape) for action in given] == [(np.ndarray, ())] * count

    def test_box_actions_are_the_array_itself(self) -> None:
        batch = make_env_batch(BoxActionEnv())
        batch.reset()
        action = np.ones(2, np.float32)
        batch.step(action)
        assert action.tolist() == [0, 0]

    def test_discrete_observations_are_ints(self) -> None:
        batch = make_env_batch(DiscreteEnv())
        assert batch.observation[0].shape == ()
        assert batch.reset() == -3
        observation, *_ = batch.step(np.array(6))
        assert type(observation) is int
        assert observation == -2

    def test_nested_spaces(self) -> None:
        env = NestedEnv()
        batch = make_env_batch(env)
        assert [leaf.key for leaf in batch.observation] == [
            ("count",),
            ("deep", "er"),
            ("pair", "0"),
            ("pair", "1"),
        ]
        assert [leaf.key for leaf in batch.action] == [
            ("action", "move"),
            ("action", "press", "0"),
            ("action", "press", "1"),
        ]
        batch.reset()
        (action,) = actions(batch, 1)
        count, er, zero, one = batch.step(action)[0]
        assert env.action_space.contains(env.actions[0])
        assert (count.tolist(), er.tolist()) == ([0, 0, 1], [[1, 1], [1, 1]])
        assert (zero, one.tolist()) == (1, [1] * 4)

    def test_a_dict_of_one_entry_is_one_array(self) -> None:
        env = CountingEnv()
        env.action_space = spaces.Dict({"a": spaces.Discrete(2)})
        env.observation_space = spaces.Dict({"o": env.observation_space})
        env.observe = lambda: {"o": np.zeros(3, np.float32)}  # type: ignore[method-assign]
        batch = make_env_batch(env)
        assert batch.reset().shape == (3,)
        assert batch.step(np.array(1))[0].shape == (3,)
        assert env.actions == [{"a": 1}]

    @pytest.mark.parametrize("convert", [np.float64, np.int64, list])
    def test_observations_are_cast_to_the_declared_dtype(self, convert: Any) -> None:
        make = convert if convert is list else (lambda value: value.astype(convert))
        batch = make_env_batch(WrongObservationEnv(make))
        assert batch.reset().dtype == np.float32
        assert batch.step(np.array(0))[0].dtype == np.float32

    @pytest.mark.parametrize(
        ("convert", "came"),
        [
            (lambda value: value[:2], r"shape \[3\].*\[2\]"),
            (lambda value: value.astype(complex), "complex128"),
        ],
    )
    def test_observations_that_do_not_fit_are_an_error(self, convert: Any, came: str) -> None:
        batch = make_env_batch(WrongObservationEnv(convert))
        with pytest.raises(ValueError, match=f"'observation'.*{came}"):
            batch.reset()
        with pytest.raises(ValueError, match=f"'observation'.*{came}"):
            batch.step(np.array(0))

    def test_one_seed_is_expected(self) -> None:
        with pytest.raises(ValueError, match=r"seeds: expected one per env \(1\), got 2"):
            make_env_batch(CountingEnv()).reset([1, 2])

    def test_real_envs(self) -> None:
        for name in ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1"):
            batch = make_env_batch(partial(gymnasium.make, name))
            peer = gymnasium.make(name)
            assert np.array_equal(batch.reset([5]), peer.reset(seed=5)[0])
            for action in actions(batch, 30):
                given = action[()] if isinstance(peer.action_space, spaces.Discrete) else action
                ours, theirs = batch.step(action), peer.step(given)
                assert np.array_equal(ours[0], theirs[0])
                assert ours[1:] == theirs[1:4]
                if ours[2] or ours[3]:
                    assert np.array_equal(batch.reset_done(np.array([True])), peer.reset()[0])
            batch.close()

    def test_close_is_idempotent_and_quiet(self) -> None:
        env = RaisingEnv(1, close_raises=True)
        batch = make_env_batch(env)
        batch.reset()
        with pytest.raises(EnvBrokeError):
            batch.step(np.array(0))
        batch.close()
        batch.close()
        assert env.closed == 1


class TestCallables:
    @pytest.mark.parametrize("kind", [CountingEnv, ReusedBufferEnv])
    def test_frames_are_dense(self, kind: type[CountingEnv]) -> None:
        expect_dense(make_env_batch(fns(kind)))

    def test_a_list_of_one_is_batched(self) -> None:
        batch = make_env_batch(fns(count=1))
        assert (batch.num_envs, batch.batched) == (1, True)
        expect_dense(batch)

    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
        st.booleans(),
    )
    def test_any_pattern_of_lengths(self, lengths: list[list[int]], truncates: bool) -> None:
        made = [
            partial(CountingEnv, number=i, length=own, truncates=truncates)
            for i, own in enumerate(lengths)
        ]
        for i, row in enumerate(frames(make_env_batch(made), 15)):
            expect_counting(row, i, lengths[i])

    def test_seeds_and_kwargs_reach_each_env(self) -> None:
        made: list[CountingEnv] = []

        def make(length: int) -> CountingEnv:
            made.append(CountingEnv(len(made), length))
            return made[-1]

        batch = make_env_batch([make, make], {"length": 9})
        batch.reset([8, 9])
        assert [env.seeds for env in made] == [[8], [9]]
        assert [env.lengths for env in made] == [(9,), (9,)]
        with pytest.raises(ValueError, match=r"expected one per env \(2\), got 1"):
            batch.reset([1])

    def test_actions_and_observations_of_nested_spaces(self) -> None:
        made = envs(NestedEnv, length=9)
        batch = make_env_batch([lambda env=env: env for env in made])
        assert [a.shape for a in batch.reset()] == [(3, 3), (3, 2, 2), (3,), (3, 4)]
        action = actions(batch, 1)[0]
        observation, reward, terminated, truncated = batch.step(action)
        assert reward.tolist() == [1, 1, 1]
        assert terminated.dtype == truncated.dtype == bool
        for i, env in enumerate(made):
            assert env.action_space.contains(env.actions[0])
            assert env.actions[0]["press"][0] == action[1][i]
            assert observation[0][i].tolist() == [i, 0, 1]

    def test_an_error_leaves_the_type_of_the_env(self) -> None:
        batch = make_env_batch([CountingEnv, partial(RaisingEnv, at=2, number=1)])
        batch.reset()
        batch.step(np.zeros(2, int))
        with pytest.raises(EnvBrokeError, match="env 1 broke"):
            batch.step(np.zeros(2, int))
        batch.close()

    def test_an_observation_that_does_not_fit_names_the_env(self) -> None:
        batch = make_env_batch([CountingEnv, partial(WrongObservationEnv, lambda value: value[:1])])
        with pytest.raises(ValueError, match=r"'observation'.*env 1.*got \[1\]"):
            batch.reset()

    def test_envs_must_fit_together(self) -> None:
        for other in (DiscreteEnv, partial(CountingEnv, dtype=np.float64)):
            with pytest.raises(ValueError, match=r"create_env_fn: .*same keys.*env 1"):
                make_env_batch([CountingEnv, other])
        with pytest.raises(ValueError, match=r"create_env_fn: .*equal action spaces.*env 1"):
            make_env_batch([CountingEnv, BoxActionEnv])

    def test_a_failed_construction_closes_what_it_made(self) -> None:
        first = CountingEnv()
        with pytest.raises(ZeroDivisionError):
            make_env_batch([lambda: first, lambda: 1 // 0])
        assert first.closed == 1


class TestBadEntries:
    @pytest.mark.parametrize("entry", ["CartPole-v1", None, 3, {"env": 1}])
    def test_no_callable(self, entry: Any) -> None:
        with pytest.raises(TypeError, match=r"create_env_fn: expected a callable.*got"):
            make_env_batch(entry)

    @pytest.mark.parametrize("result", [None, "env", CountingEnv])
    def test_a_callable_that_returns_no_env(self, result: Any) -> None:
        with pytest.raises(TypeError, match=r"create_env_fn: expected .* to return .*it returned"):
            make_env_batch(lambda: result)
        with pytest.raises(TypeError, match=r"create_env_fn\[1\]: .*it returned"):
            make_env_batch([CountingEnv, lambda: result])

    def test_a_list_of_something_else(self) -> None:
        with pytest.raises(TypeError, match=r"create_env_fn\[0\]: expected a callable"):
            make_env_batch([CountingEnv()])
        with pytest.raises(ValueError, match="create_env_fn: expected at least one"):
            make_env_batch([])
        with pytest.raises(TypeError, match=r"create_env_fn\[0\]: .*vector env"):
            make_env_batch([lambda: SyncVectorEnv(fns())])

    def test_spaces(self) -> None:
        env = OneOfEnv()
        with pytest.raises(ValueError, match="'other'"):
            make_env_batch(lambda: env)
        assert env.closed == 1

    def test_an_instance_that_is_refused_stays_open(self) -> None:
        env = OneOfEnv()
        with pytest.raises(ValueError, match="'other'"):
            make_env_batch(env)
        assert env.closed == 0


MODES = ["NEXT_STEP", "SAME_STEP", "DISABLED"]


class TestSyncVectorEnv:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("kind", [CountingEnv, ReusedBufferEnv, ConstantEnv])
    def test_a_bare_one_is_switched_to_disabled(self, kind: Any, mode: str) -> None:
        env = SyncVectorEnv(fns(kind), autoreset_mode=AutoresetMode[mode])
        batch = make_env_batch(lambda: env)
        assert env.autoreset_mode is AutoresetMode.DISABLED
        assert env.envs[0].episode == -1  # no probe
        assert batch.batched
        assert batch.can_reset
        if kind is not ConstantEnv:
            expect_dense(batch, 20)

    def test_a_subclass_with_its_own_step_is_probed_instead(self) -> None:
        class Own(SyncVectorEnv):
            def step(self, actions: Any) -> Any:
                return super().step(actions)

        env = Own(fns())
        batch = make_env_batch(env)
        assert env.autoreset_mode is AutoresetMode.NEXT_STEP
        expect_dense(batch)

    @pytest.mark.parametrize("mode", MODES)
    def test_under_wrappers(self, mode: str) -> None:
        env = SyncVectorEnv(fns(), autoreset_mode=AutoresetMode[mode])
        batch = make_env_batch(wrappers.RecordEpisodeStatistics(env))
        assert env.autoreset_mode is AutoresetMode[mode]
        assert batch.can_reset
        expect_dense(batch)

    def test_a_wrapper_that_refuses_masks(self) -> None:
        env = wrappers.NormalizeObservation(SyncVectorEnv(fns()))
        batch = make_env_batch(env)
        assert batch.skips_after_done

    def test_a_swallowed_step_is_seen_through_a_reward_wrapper(self) -> None:
        broken = CountingVectorEnv(envs(), swallows=True)
        batch = make_env_batch(wrappers.TransformReward(broken, lambda reward: reward - 0.5))
        assert batch.skips_after_done
        sound = CountingVectorEnv(envs())
        batch = make_env_batch(wrappers.TransformReward(sound, lambda reward: reward - 0.5))
        assert not batch.skips_after_done

    def test_seeds(self) -> None:
        env = SyncVectorEnv(fns())
        make_env_batch(env).reset([11, 22, 33])
        assert [one.seeds for one in env.envs] == [[11], [22], [33]]

    def test_nested_spaces(self) -> None:
        env = SyncVectorEnv(fns(NestedEnv))
        batch = make_env_batch(env)
        batch.reset()
        action = actions(batch, 1)[0]
        observation, *_ = batch.step(action)
        assert [a.shape for a in observation] == [(3, 3), (3, 2, 2), (3,), (3, 4)]
        assert [a.dtype.name for a in observation] == ["float32", "int64", "int64", "int8"]
        for i, one in enumerate(env.envs):
            assert one.actions[0]["press"][0] == action[1][i]
            assert observation[0][i].tolist() == [i, 0, 1]

    def test_discrete_start(self) -> None:
        env = SyncVectorEnv(fns(DiscreteEnv))
        batch = make_env_batch(env)
        assert batch.reset().tolist() == [-3] * 3
        batch.step(np.array([5, 6, 7]))
        assert [one.actions for one in env.envs] == [[5], [6], [7]]


class TestForeignVectorEnvs:
    def test_next_step_with_masks(self) -> None:
        env = CountingVectorEnv(envs())
        batch = make_env_batch(env)
        assert batch.can_reset
        env.masks.clear()
        expect_dense(batch, 20)
        assert any(mask is not None for mask in env.masks)

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_numbers_of_envs(self, count: int) -> None:
        expect_dense(make_env_batch(CountingVectorEnv(envs(count=count))))

    def test_episodes_that_all_end_at_once(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(length=4)))
        for i, row in enumerate(frames(batch, 9)):
            expect_counting(row, i, [4])
        assert not batch.skips_after_done
        broken = CountingVectorEnv(envs(length=4), swallows=True)
        assert make_env_batch(broken).skips_after_done

    @pytest.mark.parametrize("fault", ["ignores_mask", "swallows"])
    @pytest.mark.parametrize("count", [2, 3])
    def test_next_step_without_masks_skips(self, fault: str, count: int) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(count=count), **{fault: True}))
        assert batch.skips_after_done
        assert not batch.can_reset
        for i, row in enumerate(frames(batch, 20)):
            assert len(row) < 20
            expect_counting(row, i)
        with pytest.raises(RuntimeError, match="reset_done"):
            batch.reset_done(np.ones(count, bool))

    def test_a_reset_that_swallows_too_waits_for_a_step_without_an_end(self) -> None:
        env = CountingVectorEnv(envs(), swallows=True)
        batch = make_env_batch(env)
        for steps in range(1, 9):
            root = batch.reset().copy()
            for t, action in enumerate(actions(batch, steps)):
                observation, *_ = batch.step(action)
                if t == 0:
                    assert observation[:, 1].tolist() == root[:, 1].tolist()
                    assert observation[:, 2].tolist() == [1, 1, 1]

    def test_episodes_that_end_in_every_step_are_warned_about(self) -> None:
        made = [CountingEnv(0, length=1), CountingEnv(1, length=1)]
        batch = make_env_batch(CountingVectorEnv(made, swallows=True))
        made[1].lengths = (2,) + (1,) * 10_000
        made[1].episode = -1
        batch.reset()
        for action in actions(batch, 9):
            batch.step(action)
        with pytest.warns(UserWarning, match="swallow the first step"):
            batch.reset()

    def test_one_row_cannot_ignore_a_mask(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(count=1), ignores_mask=True))
        expect_dense(batch)
        batch = make_env_batch(CountingVectorEnv(envs(count=1), swallows=True))
        assert batch.skips_after_done

    @pytest.mark.parametrize("kind", [ConstantEnv, SparseRewardEnv])
    def test_what_cannot_be_shown_is_not_used(self, kind: Any) -> None:
        assert make_env_batch(CountingVectorEnv(envs(kind, length=3))).skips_after_done

    def test_episodes_too_long_for_the_probe(self) -> None:
        assert make_env_batch(CountingVectorEnv(envs(length=10_000))).skips_after_done

    def test_episodes_of_one_step(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(length=1)))
        for i, row in enumerate(frames(batch, 9)):
            expect_counting(row, i, [1])

    @pytest.mark.parametrize("batched_final", [False, True])
    def test_same_step(self, batched_final: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            env = CountingVectorEnv(envs(), "SAME_STEP", batched_final=batched_final)
            batch = make_env_batch(env)
            assert batch.can_reset
            expect_dense(batch, 20)

    def test_same_step_resets_other_rows_by_mask(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(length=(2, 5)), "SAME_STEP"))
        batch.reset()
        before = batch.step(np.zeros(3, int))[0].copy()
        after = batch.reset_done(np.array([False, True, False]))
        assert after[1].tolist() == [1, before[1, 1] + 1, 0]
        observation, reward, _, _ = batch.step(np.zeros(3, int))
        assert reward[1] == 1
        assert observation[:, 2].tolist() == [before[0, 2] + 1, 1, before[2, 2] + 1]

    def test_same_step_resets_rows_that_ended_and_others_together(self) -> None:
        env = CountingVectorEnv(envs(length=2), "SAME_STEP")
        env.envs[1].lengths = (9,)
        batch = make_env_batch(env)
        root = batch.reset().copy()
        batch.step(np.zeros(3, int))
        final, _, terminated, _ = batch.step(np.zeros(3, int))
        assert terminated.tolist() == [True, False, True]
        assert final[:, 2].tolist() == [2, 2, 2]
        fresh = batch.reset_done(np.ones(3, bool))
        assert fresh[:, 1].tolist() == (root[:, 1] + 1).tolist()
        assert fresh[:, 2].tolist() == [0, 0, 0]

    def test_same_step_without_masks(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(), "SAME_STEP", ignores_mask=True))
        assert not batch.can_reset
        batch.reset()
        batch.step(np.zeros(3, int))
        with pytest.raises(RuntimeError, match="reset_done"):
            batch.reset_done(np.array([True, False, False]))
        expect_dense(batch)

    def test_same_step_without_final_observation(self) -> None:
        class Without(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                return (*super().step(actions)[:4], {})

        batch = make_env_batch(Without(envs(length=9), "SAME_STEP"))
        batch.reset()
        with pytest.raises(ValueError, match=r"final_obs.*SAME_STEP"):
            run(batch, 9)

    def test_disabled(self) -> None:
        expect_dense(make_env_batch(CountingVectorEnv(envs(), "DISABLED")))
        with pytest.raises(ValueError, match=r"DISABLED.*reset_mask"):
            make_env_batch(CountingVectorEnv(envs(), "DISABLED", ignores_mask=True))

    def test_the_mode_is_asked_for_and_never_guessed(self) -> None:
        with pytest.raises(ValueError, match=r"autoreset_mode: .*expected NEXT_STEP, SAME_STEP"):
            make_env_batch(CountingVectorEnv(envs(), None))
        for name in ("NEXT_STEP", "next_step", "NextStep", AutoresetMode.NEXT_STEP):
            expect_dense(make_env_batch(CountingVectorEnv(envs(), None), autoreset_mode=name))
        with pytest.raises(ValueError, match=r"autoreset_mode: expected NEXT_STEP.*got 'never'"):
            make_env_batch(CountingVectorEnv(envs(), None), autoreset_mode="never")
        with pytest.raises(ValueError, match=r"autoreset_mode: expected NEXT_STEP.*got SAME_STEP"):
            make_env_batch(CountingVectorEnv(envs()), autoreset_mode="SAME_STEP")

    def test_the_shared_metadata_of_vector_env_tells_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
        env = CountingVectorEnv(envs())
        env.metadata = VectorEnv.metadata
        with pytest.raises(ValueError, match="does not tell"):
            make_env_batch(env)

    def test_the_probe_is_the_same_in_every_run_and_gives_no_seed(self) -> None:
        def probed() -> Any:
            env = CountingVectorEnv(envs())
            make_env_batch(env)
            return [(one.episode, one.steps, one.actions, one.seeds) for one in env.envs]

        np.random.seed(0)
        state = np.random.get_state()[1].tolist()
        first = probed()
        assert first == probed()
        assert all(steps == 0 and set(seeds) == {None} for _, steps, _, seeds in first)
        assert np.random.get_state()[1].tolist() == state

    def test_seeds_as_the_env_takes_them(self) -> None:
        env = CountingVectorEnv(envs())
        batch = make_env_batch(env)
        batch.reset([1, 2, 3])
        assert [one.seeds[-1] for one in env.envs] == [1, 2, 3]
        env = CountingVectorEnv(envs(), one_seed=True)
        batch = make_env_batch(env)
        for seed in (7, 8):
            batch.reset([seed, 2, 3])
            assert [one.seeds[-1] for one in env.envs] == [seed] * 3
        with pytest.raises(ValueError, match="one per env"):
            batch.reset([1])

    def test_an_env_that_returns_only_the_rows_it_reset(self) -> None:
        batch = make_env_batch(CompactVectorEnv(envs()))
        expect_dense(batch, 20)

    def test_the_old_interface_of_envpool(self) -> None:
        with pytest.raises(ValueError, match="autoreset_mode"):
            make_env_batch(OldEnvPool(envs()))
        batch = make_env_batch(OldEnvPool(envs()), autoreset_mode="NEXT_STEP")
        batch.reset([1, 2, 3])
        expect_dense(batch, 20)
        with pytest.raises(ValueError, match="batch_size=2 with num_envs=3"):
            make_env_batch(OldEnvPool(envs(), batch_size=2), autoreset_mode="NEXT_STEP")

    def test_shapes_from_a_vector_env_are_checked(self) -> None:
        class Wrong(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                observation, reward, *rest = super().step(actions)
                return observation, reward[:, None], *rest

        batch = make_env_batch(lambda: Wrong(envs(count=1), "DISABLED"))
        batch.reset()
        with pytest.raises(ValueError, match=r"reward: expected shape \[1\].*\[1, 1\]"):
            batch.step(np.zeros(1, int))

    def test_a_refused_env_is_closed(self) -> None:
        made = envs()
        with pytest.raises(ValueError, match="autoreset_mode"):
            make_env_batch(lambda: CountingVectorEnv(made, None))
        assert [env.closed for env in made] == [1, 1, 1]


class TestOverwrittenFinalObservation:
    def test_it_is_warned_about_once(self) -> None:
        env = wrappers.RecordEpisodeStatistics(
            SyncVectorEnv(fns(ReusedBufferEnv), autoreset_mode=AutoresetMode.SAME_STEP)
        )
        batch = make_env_batch(env)
        batch.reset()
        with pytest.warns(UserWarning, match="final_obs") as caught:
            run(batch, 10)
        assert len(caught) == 1


class TestRealVectorEnvs:
    @pytest.mark.parametrize("mode", MODES)
    def test_async(self, mode: str) -> None:
        env = partial(AsyncVectorEnv, fns(count=2), autoreset_mode=AutoresetMode[mode])
        expect_dense(make_env_batch(env), 20)

    def test_async_whose_observations_never_change(self) -> None:
        batch = make_env_batch(lambda: AsyncVectorEnv(fns(ConstantEnv, count=2)))
        assert not batch.skips_after_done
        batch.close()

    def test_async_without_shared_memory_swallows_a_step(self) -> None:
        batch = make_env_batch(lambda: AsyncVectorEnv(fns(count=2), shared_memory=False))
        assert batch.skips_after_done
        for i, row in enumerate(frames(batch, 20)):
            expect_counting(row, i)
        batch.close()

    @pytest.mark.parametrize("mode", MODES)
    def test_async_with_nested_spaces(self, mode: str) -> None:
        made = fns(NestedEnv, count=2)
        batch = make_env_batch(lambda: AsyncVectorEnv(made, autoreset_mode=AutoresetMode[mode]))
        batch.reset()
        ends = 0
        for action in actions(batch, 9):
            observation, _, terminated, _ = batch.step(action)
            count = observation[0][:, 2]
            assert np.array_equal(observation[2], count)
            assert np.array_equal(observation[1][:, 1, 1], count)
            assert (count[terminated] > 0).all()
            if terminated.any():
                ends += 1
                fresh = batch.reset_done(terminated)
                assert all((leaf[terminated][..., -1:] == 0).all() for leaf in fresh)
        assert ends > 2
        batch.close()

    def test_async_closes_when_a_worker_is_dead(self) -> None:
        env = AsyncVectorEnv(fns(count=2))
        batch = make_env_batch(env)
        batch.reset()
        env.processes[0].kill()
        env.processes[0].join()
        with pytest.raises((EOFError, OSError)):
            run(batch, 3)
        batch.close()
        batch.close()
        assert not any(process.is_alive() for process in env.processes)

    def test_async_closes_when_an_env_raised(self) -> None:
        batch = make_env_batch(
            lambda: AsyncVectorEnv([CountingEnv, partial(RaisingEnv, at=100, number=1)])
        )
        batch.reset()
        with pytest.raises(EnvBrokeError):
            run(batch, 100)
        batch.close()

    @pytest.mark.parametrize("count", [1, 8])
    def test_cartpole_entry_point(self, count: int) -> None:
        batch = make_env_batch(
            lambda: gymnasium.make_vec(
                "CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point"
            )
        )
        assert batch.skips_after_done == (count > 1)
        first = batch.reset(list(range(5, 5 + count))).copy()
        assert not np.array_equal(first, batch.reset(list(range(6, 6 + count))))
        assert np.array_equal(first, batch.reset(list(range(5, 5 + count))))
        done = np.zeros(count, bool)
        for action in actions(batch, 100):
            _, reward, terminated, truncated = batch.step(action)
            assert reward.dtype == np.float32
            assert np.array_equal(reward == 0, done)
            done = terminated | truncated
            if done.any() and not batch.skips_after_done:
                batch.reset_done(done)
                done = np.zeros(count, bool)
        batch.close()

    @pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
    def test_ale(self, mode: str) -> None:
        ale = pytest.importorskip("ale_py.vector_env")
        batch = make_env_batch(
            lambda: ale.AtariVectorEnv(
                "breakout", num_envs=3, autoreset_mode=mode, max_num_frames_per_episode=100
            )
        )
        assert not batch.skips_after_done
        assert batch.can_reset
        root = batch.reset([1, 2**32 - 2, 3]).copy()
        assert root.shape == (3, 4, 84, 84)
        assert root.dtype == np.uint8
        again = batch.reset([1, 2**32 - 2, 3])
        assert np.array_equal(root, again)
        ends = 0
        for action in actions(batch, 60):
            after, reward, terminated, truncated = batch.step(action)
            after = after.copy()
            assert reward.dtype == np.float64
            done = terminated | truncated
            if done.any():
                ends += 1
                fresh = batch.reset_done(done)
                assert (fresh[done] != after[done]).any()
        assert ends > 1
        batch.close()

    def test_ale_of_a_part_of_its_rows_is_refused(self) -> None:
        ale = pytest.importorskip("ale_py.vector_env")
        with pytest.raises(ValueError, match="batch_size=1 with num_envs=2"):
            make_env_batch(lambda: ale.AtariVectorEnv("pong", num_envs=2, batch_size=1))


def test_pixels_are_passed_on_without_a_copy() -> None:
    env = PixelEnv(length=100)
    batch = make_env_batch(env)
    batch.reset()
    assert batch.step(np.array(0))[0] is env.frame
