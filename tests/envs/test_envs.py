"""Single environments and lists as an EnvBatch: the same frames, however episodes end."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_batch_support import actions, envs, expect_counting, expect_dense, fns, frames
from envs_for_tests import (
    BoxActionEnv,
    CountingEnv,
    DiscreteEnv,
    EnvBrokeError,
    LongDoubleEnv,
    NestedEnv,
    PixelEnv,
    RaisingEnv,
    ReusedBufferEnv,
    WrongObservationEnv,
)
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import refused
from torch import nn

from pycollect.envs.make import make_env_batch


class TestSingleEnv:
    def test_one_env_is_not_batched(self) -> None:
        env = CountingEnv(7, length=2)
        batch = make_env_batch(lambda: env)
        assert (batch.spec.num_envs, batch.spec.batch_size) == (1, ())
        assert (batch.spec.skips_after_done, batch.spec.can_reset) == (False, True)
        assert batch.spec.action_space is env.action_space
        assert batch.reset([3]).tolist() == [7, 0, 0]
        assert env.seeds == [3]
        observation, reward, terminated, truncated = batch.step(np.array(1))
        assert (observation.tolist(), reward, terminated, truncated) == ([7, 0, 1], 1, False, False)
        observation, reward, terminated, truncated = batch.step(np.array(0))
        assert (observation.tolist(), reward, terminated, truncated) == ([7, 0, 2], 2, True, False)
        assert batch.reset_done(np.array([True])).tolist() == [7, 1, 0]

    def test_an_instance_and_a_class_are_accepted(self) -> None:
        for entry in (CountingEnv(), CountingEnv):
            assert make_env_batch(entry).reset().tolist() == [0, 0, 0]

    def test_kwargs_reach_the_callable(self) -> None:
        batch = make_env_batch(CountingEnv, {"number": 4})
        assert batch.reset().tolist() == [4, 0, 0]
        with refused(ValueError, "create_env_kwargs") as caught:
            make_env_batch(CountingEnv(), {"number": 4})
        assert "'number'" in str(caught.value)

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
        assert batch.spec.observation[0].shape == ()
        assert batch.reset() == -3
        observation, *_ = batch.step(np.array(6))
        assert type(observation) is int
        assert observation == -2

    def test_nested_spaces(self) -> None:
        env = NestedEnv()
        batch = make_env_batch(env)
        assert [leaf.key for leaf in batch.spec.observation] == [
            ("count",),
            ("deep", "er"),
            ("pair", "0"),
            ("pair", "1"),
        ]
        assert [leaf.key for leaf in batch.spec.action] == [
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
        [(lambda value: value[:2], "[2]"), (lambda value: value.astype(complex), "complex128")],
    )
    def test_observations_that_do_not_fit_are_an_error(self, convert: Any, came: str) -> None:
        batch = make_env_batch(WrongObservationEnv(convert))
        for call in (batch.reset, lambda: batch.step(np.array(0))):
            with refused(ValueError, "observation") as caught:
                call()
            assert "'observation'" in str(caught.value)
            assert came in str(caught.value)

    def test_one_seed_is_expected(self) -> None:
        with refused(ValueError, "seeds"):
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
        assert batch.spec.batch_size == (1,)
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
        with refused(ValueError, "seeds"):
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
        with refused(ValueError, "observation") as caught:
            batch.reset()
        assert "environment 1" in str(caught.value)
        assert "'observation'" in str(caught.value)

    def test_envs_must_fit_together(self) -> None:
        for other in (DiscreteEnv, partial(CountingEnv, dtype=np.float64)):
            with refused(ValueError, "create_env_fn") as caught:
                make_env_batch([CountingEnv, other])
            assert "environment 1" in str(caught.value)
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch([CountingEnv, BoxActionEnv])
        assert "environment 1" in str(caught.value)

    def test_a_failed_construction_closes_its_environments(self) -> None:
        first = CountingEnv()
        with pytest.raises(ZeroDivisionError):
            make_env_batch([lambda: first, lambda: 1 // 0])
        assert first.closed == 1


class TestBadEntries:
    @pytest.mark.parametrize("entry", [None, 3, {"env": 1}, nn.Linear(3, 1)])
    def test_no_callable(self, entry: Any) -> None:
        with refused(TypeError, "create_env_fn"):
            make_env_batch(entry)

    @pytest.mark.parametrize("result", [None, "env", CountingEnv])
    def test_a_callable_that_returns_no_env(self, result: Any) -> None:
        with refused(TypeError, "create_env_fn"):
            make_env_batch(lambda: result)
        with refused(TypeError, "create_env_fn") as caught:
            make_env_batch([CountingEnv, lambda: result])
        assert "[1]" in str(caught.value)

    def test_a_list_of_something_else(self) -> None:
        for entries, index in (([CountingEnv()], 0), ([CountingEnv, nn.Linear(3, 1)], 1)):
            with refused(TypeError, "create_env_fn") as caught:
                make_env_batch(entries)
            assert f"[{index}]" in str(caught.value)
        with refused(ValueError, "create_env_fn"):
            make_env_batch([])
        with refused(TypeError, "create_env_fn") as caught:
            make_env_batch([lambda: SyncVectorEnv(fns())])
        assert "[0]" in str(caught.value)

    def test_spaces(self) -> None:
        env = LongDoubleEnv()
        with refused(ValueError, "observation_space") as caught:
            make_env_batch(lambda: env)
        assert "'other'" in str(caught.value)
        assert env.closed == 1

    def test_an_instance_that_is_refused_stays_open(self) -> None:
        env = LongDoubleEnv()
        with refused(ValueError, "observation_space"):
            make_env_batch(env)
        assert env.closed == 0


def test_pixels_are_passed_on_without_a_copy() -> None:
    env = PixelEnv(length=100)
    batch = make_env_batch(env)
    batch.reset()
    assert batch.step(np.array(0))[0] is env.frame


@pytest.mark.parametrize(
    ("package", "adapter"),
    [
        ("jumanji", "JumanjiToGymWrapper"),
        ("dm_env", "DmControlCompatibilityV0"),
        ("gym", "GymV26CompatibilityV0"),
        ("unknown", None),
    ],
)
def test_an_environment_of_another_interface_is_refused_with_its_adapter(
    package: str, adapter: str | None
) -> None:
    base = type("Env", (), {"step": lambda self, action: None, "__module__": f"{package}.core"})
    env = type("Mine", (base,), {})
    for entry in (env(), lambda: env()):
        with refused(TypeError, "create_env_fn") as caught:
            make_env_batch(entry)
        assert "Mine" in str(caught.value)
        assert ("wrap it" in str(caught.value)) == (adapter is not None)
        assert (adapter or "") in str(caught.value)
    with refused(TypeError, "create_env_fn") as caught:
        make_env_batch([lambda: env()])
    assert (adapter or "") in str(caught.value)
