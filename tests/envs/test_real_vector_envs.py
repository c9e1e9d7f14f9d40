"""Vector environments built by their own libraries, as an EnvBatch."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from env_batch_support import MODES, actions, expect_counting, expect_dense, fns, frames, run
from envs_for_tests import ConstantEnv, CountingEnv, EnvBrokeError, NestedEnv, RaisingEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from raising import refused

from pycollect.envs.make import make_env_batch


class TestRealVectorEnvs:
    @pytest.mark.parametrize("mode", MODES)
    def test_async(self, mode: str) -> None:
        env = partial(AsyncVectorEnv, fns(count=2), autoreset_mode=AutoresetMode[mode])
        expect_dense(make_env_batch(env), 20)

    def test_async_whose_observations_never_change(self) -> None:
        batch = make_env_batch(lambda: AsyncVectorEnv(fns(ConstantEnv, count=2)))
        assert not batch.spec.skips_after_done
        batch.close()

    def test_async_without_shared_memory_swallows_a_step(self) -> None:
        batch = make_env_batch(lambda: AsyncVectorEnv(fns(count=2), shared_memory=False))
        assert batch.spec.skips_after_done
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
        assert batch.spec.skips_after_done == (count > 1)
        first = batch.reset(list(range(5, 5 + count))).copy()
        assert not np.array_equal(first, batch.reset(list(range(6, 6 + count))))
        assert np.array_equal(first, batch.reset(list(range(5, 5 + count))))
        done = np.zeros(count, bool)
        for action in actions(batch, 100):
            _, reward, terminated, truncated = batch.step(action)
            assert reward.dtype == np.float32
            assert np.array_equal(reward == 0, done)
            done = terminated | truncated
            if done.any() and not batch.spec.skips_after_done:
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
        assert not batch.spec.skips_after_done
        assert batch.spec.can_reset
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

    def test_an_asynchronous_ale_env_is_refused(self) -> None:
        ale = pytest.importorskip("ale_py.vector_env")
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch(lambda: ale.AtariVectorEnv("pong", num_envs=2, batch_size=1))
        assert "batch_size=1" in str(caught.value)
