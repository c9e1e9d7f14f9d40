"""Vector environments as an EnvBatch: each autoreset mode gives the same frames, no dummies."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from env_batch_support import MODES, actions, envs, expect_counting, expect_dense, fns, frames, run
from envs_for_tests import (
    CompactVectorEnv,
    ConstantEnv,
    CountingEnv,
    CountingVectorEnv,
    DiscreteEnv,
    NestedEnv,
    OldEnvPool,
    ReusedBufferEnv,
    SparseRewardEnv,
)
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from raising import refused, warned

from pycollect import SyncDataCollector
from pycollect.envs.make import make_env_batch


class TestSyncVectorEnv:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("kind", [CountingEnv, ReusedBufferEnv, ConstantEnv])
    def test_a_bare_vector_env_is_switched_to_disabled(self, kind: Any, mode: str) -> None:
        env = SyncVectorEnv(fns(kind), autoreset_mode=AutoresetMode[mode])
        batch = make_env_batch(lambda: env)
        assert env.autoreset_mode is AutoresetMode.DISABLED
        assert env.envs[0].episode == -1  # no step was used to detect the mode
        assert batch.spec.batch_size
        assert batch.spec.can_reset
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
        assert batch.spec.can_reset
        expect_dense(batch)

    def test_long_episodes_under_wrappers(self) -> None:
        env = SyncVectorEnv([lambda: CountingEnv(length=10_000)] * 3)
        batch = make_env_batch(wrappers.RecordEpisodeStatistics(env))
        assert batch.spec.can_reset
        assert env.envs[0].episode < 10
        assert len(env.envs[0].actions) <= 16

    def test_sub_environments_do_not_see_the_mask(self) -> None:
        seen = []

        class Seeing(CountingEnv):
            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                seen.append(options)
                return super().reset(seed=seed)

        batch = make_env_batch(wrappers.TransformReward(SyncVectorEnv(fns(Seeing)), abs))
        batch.reset()
        seen.clear()
        batch.reset_done(np.array([False, True, False]))
        (options,) = seen
        assert [dict(options), list(options), len(options), {**options}] == [{}, [], 0, {}]
        assert type(pickle.loads(pickle.dumps(options))) is dict

    def test_a_wrapper_that_refuses_masks(self) -> None:
        env = wrappers.NormalizeObservation(SyncVectorEnv(fns()))
        batch = make_env_batch(env)
        assert batch.spec.skips_after_done

    def test_a_swallowed_step_is_seen_through_a_reward_wrapper(self) -> None:
        broken = CountingVectorEnv(envs(), swallows=True)
        batch = make_env_batch(wrappers.TransformReward(broken, lambda reward: reward - 0.5))
        assert batch.spec.skips_after_done
        sound = CountingVectorEnv(envs())
        batch = make_env_batch(wrappers.TransformReward(sound, lambda reward: reward - 0.5))
        assert not batch.spec.skips_after_done

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
        assert batch.spec.can_reset
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
        assert not batch.spec.skips_after_done
        broken = CountingVectorEnv(envs(length=4), swallows=True)
        assert make_env_batch(broken).spec.skips_after_done

    @pytest.mark.parametrize("fault", ["ignores_mask", "swallows"])
    @pytest.mark.parametrize("count", [2, 3])
    def test_next_step_without_masks_skips(self, fault: str, count: int) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(count=count), **{fault: True}))
        assert batch.spec.skips_after_done
        assert not batch.spec.can_reset
        for i, row in enumerate(frames(batch, 20)):
            assert len(row) < 20
            expect_counting(row, i)
        with refused(RuntimeError, "reset_done"):
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
        with warned("create_env_fn"):
            batch.reset()

    def test_one_row_cannot_ignore_a_mask(self) -> None:
        batch = make_env_batch(CountingVectorEnv(envs(count=1), ignores_mask=True))
        expect_dense(batch)
        batch = make_env_batch(CountingVectorEnv(envs(count=1), swallows=True))
        assert batch.spec.skips_after_done

    @pytest.mark.parametrize("kind", [ConstantEnv, SparseRewardEnv])
    def test_masks_are_used_only_if_the_probe_confirms_them(self, kind: Any) -> None:
        assert make_env_batch(CountingVectorEnv(envs(kind, length=3))).spec.skips_after_done

    def test_episodes_too_long_for_the_probe(self) -> None:
        assert make_env_batch(CountingVectorEnv(envs(length=10_000))).spec.skips_after_done

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
            assert batch.spec.can_reset
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
        assert not batch.spec.can_reset
        batch.reset()
        batch.step(np.zeros(3, int))
        with refused(RuntimeError, "reset_done"):
            batch.reset_done(np.array([True, False, False]))
        expect_dense(batch)

    def test_same_step_without_final_observation(self) -> None:
        class Without(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                return (*super().step(actions)[:4], {})

        batch = make_env_batch(Without(envs(length=9), "SAME_STEP"))
        batch.reset()
        with refused(ValueError, "final_observation") as caught:
            run(batch, 9)
        assert "final_obs" in str(caught.value)

    def test_same_step_with_final_observations_of_only_ended_rows(self) -> None:
        class Partial(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                *values, info = super().step(actions)
                if "final_obs" in info:
                    ended = np.flatnonzero(values[2] | values[3])
                    info["final_obs"] = np.stack([info["final_obs"][row] for row in ended])
                return *values, info

        batch = make_env_batch(Partial(envs(), "SAME_STEP"))
        batch.reset()
        with refused(ValueError, "final_observation"):
            run(batch, 9)

    @pytest.mark.parametrize(
        "name", ["num_envs", "single_observation_space", "single_action_space"]
    )
    def test_an_incomplete_interface(self, name: str) -> None:
        env = CountingVectorEnv(envs())
        delattr(env, name)
        with refused(TypeError, "create_env_fn") as caught:
            make_env_batch(env)
        assert f"without {name}" in str(caught.value)

    def test_disabled(self) -> None:
        expect_dense(make_env_batch(CountingVectorEnv(envs(), "DISABLED")))
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch(CountingVectorEnv(envs(), "DISABLED", ignores_mask=True))
        assert "DISABLED" in str(caught.value)

    def test_the_mode_is_required_and_never_guessed(self) -> None:
        with refused(ValueError, "autoreset_mode"):
            make_env_batch(CountingVectorEnv(envs(), None))
        for name in ("NEXT_STEP", "next_step", "NextStep", AutoresetMode.NEXT_STEP):
            expect_dense(make_env_batch(CountingVectorEnv(envs(), None), autoreset_mode=name))
        with refused(ValueError, "autoreset_mode") as caught:
            make_env_batch(CountingVectorEnv(envs(), None), autoreset_mode="never")
        assert "'never'" in str(caught.value)
        with refused(ValueError, "autoreset_mode") as caught:
            make_env_batch(CountingVectorEnv(envs()), autoreset_mode="SAME_STEP")
        assert "SAME_STEP" in str(caught.value)

    @pytest.mark.parametrize("make", [CountingEnv, [CountingEnv], CountingEnv()])
    def test_only_vector_environments_have_a_mode(self, make: Any) -> None:
        with refused(ValueError, "autoreset_mode"):
            make_env_batch(make, autoreset_mode="SAME_STEP")

    def test_the_shared_metadata_of_vector_env_is_ignored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
        env = CountingVectorEnv(envs())
        env.metadata = VectorEnv.metadata
        with refused(ValueError, "autoreset_mode"):
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
        with refused(ValueError, "seeds"):
            batch.reset([1])

    def test_an_env_that_returns_only_the_rows_it_reset(self) -> None:
        batch = make_env_batch(CompactVectorEnv(envs()))
        expect_dense(batch, 20)

    def test_the_old_interface_of_envpool(self) -> None:
        with refused(ValueError, "autoreset_mode"):
            make_env_batch(OldEnvPool(envs()))
        batch = make_env_batch(OldEnvPool(envs()), autoreset_mode="NEXT_STEP")
        batch.reset([1, 2, 3])
        expect_dense(batch, 20)
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch(OldEnvPool(envs(), batch_size=2), autoreset_mode="NEXT_STEP")
        assert "batch_size=2" in str(caught.value)

    def test_shapes_from_a_vector_env_are_checked(self) -> None:
        class Wrong(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                observation, reward, *rest = super().step(actions)
                return observation, reward[:, None], *rest

        batch = make_env_batch(lambda: Wrong(envs(count=1), "DISABLED"))
        batch.reset()
        with refused(ValueError, "reward"):
            batch.step(np.zeros(1, int))

    @pytest.mark.parametrize("place", [1, 2, 3])
    @pytest.mark.parametrize("wrong", [None, "False", 1j])
    def test_rewards_and_flags_must_be_real_numbers(self, place: int, wrong: Any) -> None:
        class Wrong(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                result = [*super().step(actions)]
                result[place] = [wrong] * self.num_envs
                return tuple(result)

        with refused(TypeError, ("reward", "terminated", "truncated")[place - 1]):
            make_env_batch(lambda: Wrong(envs(), "DISABLED"))

    @pytest.mark.parametrize("stated", ["NEXT_STEP", "DISABLED"])
    @pytest.mark.parametrize("batched_final", [False, True])
    def test_a_wrong_autoreset_mode_is_found_at_the_first_end(
        self, stated: str, batched_final: bool
    ) -> None:
        class Wrong(CountingVectorEnv):
            def step(self, actions: Any) -> Any:
                self.mode = "SAME_STEP"
                return super().step(actions)

        env = Wrong(envs(), stated, batched_final=batched_final)
        collected = []
        with (
            SyncDataCollector(lambda: env, None, frames_per_batch=3) as collector,
            refused(ValueError, "autoreset_mode"),
        ):
            for td in collector:
                collected.append(td)
        assert not any(td["next", "done"].any() for td in collected)

    @pytest.mark.parametrize("ends", [False, True])
    def test_a_step_that_resets_has_no_reward_and_no_end(self, ends: bool) -> None:
        class Wrong(CountingVectorEnv):
            was_probed = False

            def step(self, actions: Any) -> Any:
                resets = self.ended & self.was_probed
                observation, reward, terminated, *rest = super().step(actions)
                return observation, reward + resets, terminated | (resets & ends), *rest

        env = Wrong(envs(length=4), swallows=True)
        batch = make_env_batch(env)
        assert batch.spec.skips_after_done
        env.was_probed = True
        with refused(ValueError, "autoreset_mode") if ends else warned("autoreset_mode"):
            frames(batch, 9)

    def test_an_environment_without_resets_should_declare_disabled(self) -> None:
        env = CountingVectorEnv(envs(length=4))
        env.mode = "DISABLED"
        with refused(ValueError, "autoreset_mode") as caught:
            frames(make_env_batch(env), 9)
        assert "DISABLED" in str(caught.value)

    @pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 4), (3, 4)])
    def test_an_env_with_masks_is_probed_before_use(self, count: int, length: int) -> None:
        class Wrong(CountingVectorEnv):
            """Resets in the same step without `final_obs`."""

            steps = 0

            def step(self, actions: Any) -> Any:
                self.mode = "SAME_STEP"
                self.steps += 1
                observation, _, *flags, _ = super().step(actions)
                return observation, np.full(count, float(self.steps)), *flags, {}

        env = Wrong(envs(CountingEnv, count, length=length))
        with refused(ValueError, "autoreset_mode") if length == 1 else warned("autoreset_mode"):
            make_env_batch(env)

    def test_a_wrapper_may_change_the_reward_of_a_step_that_resets(self) -> None:
        env = CountingVectorEnv(envs(length=4), swallows=True)
        batch = make_env_batch(wrappers.TransformReward(env, lambda reward: reward - 1))
        assert batch.spec.skips_after_done
        frames(batch, 9)

    def test_a_refused_env_is_closed(self) -> None:
        made = envs()
        with refused(ValueError, "autoreset_mode"):
            make_env_batch(lambda: CountingVectorEnv(made, None))
        assert [env.closed for env in made] == [1, 1, 1]


class TestOverwrittenFinalObservation:
    def test_a_missing_final_observation_causes_one_warning(self) -> None:
        env = wrappers.RecordEpisodeStatistics(
            SyncVectorEnv(fns(ReusedBufferEnv), autoreset_mode=AutoresetMode.SAME_STEP)
        )
        batch = make_env_batch(env)
        batch.reset()
        with warned("create_env_fn") as caught:
            run(batch, 10)
        assert len(caught) == 1
