"""Unusual inputs from users, each of which once caused a bug."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs_for_tests import CountingEnv
from gymnasium.spaces import Box
from raising import refused, warned
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector


class Flipped(gym.Env[Any, Any]):
    """An environment with negative strides in its observation and episodes of three steps."""

    observation_space = Box(-10.0, 10.0, (2, 2), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.t += 1
        return self._look(), 1.0, self.t == 3, False, {}

    def _look(self) -> Any:
        frame = np.arange(4, dtype=np.float32).reshape(2, 2) + self.t
        frame.flags.writeable = False
        return frame[::-1, ::-1]


def test_a_first_observation_may_have_negative_strides_and_be_read_only() -> None:
    td = SyncDataCollector(Flipped, None, frames_per_batch=3).next()
    assert td is not None
    expected = [[[3.0, 2.0], [1.0, 0.0]], [[4.0, 3.0], [2.0, 1.0]], [[5.0, 4.0], [3.0, 2.0]]]
    assert td["observation"].tolist() == expected


def test_lazily_negated_and_conjugated_outputs_are_recorded_as_they_read() -> None:
    def policy(observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = torch.complex(observation[0], observation[0] + 1)
        return observation[0, :1].clone(), number.conj().imag, number.conj()

    module = TensorDictModule(policy, ["observation"], ["action", "negated", "conjugated"])
    td = SyncDataCollector(Flipped, module, frames_per_batch=2).next()
    assert td is not None
    assert td["negated"].tolist() == [[-4.0, -3.0], [-5.0, -4.0]]
    assert td["conjugated"][0].tolist() == [3 - 4j, 2 - 3j]


def test_a_lazy_bit_set_in_a_later_step_is_refused() -> None:
    calls = []

    def policy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(None)
        number = torch.complex(observation[0], observation[0])
        late = number.conj().imag if len(calls) > 2 else number.imag.clone()
        return observation[0, :1].clone(), late

    module = TensorDictModule(policy, ["observation"], ["action", "late"])
    collector = SyncDataCollector(Flipped, module, frames_per_batch=8)
    with refused(ValueError, "outputs"):
        collector.next()


def test_a_default_device_does_not_move_the_collectors_memory() -> None:
    with torch.device("meta"):
        collector = SyncDataCollector(Flipped, None, frames_per_batch=3)
        td = collector.next()
    assert td is not None
    assert td["observation"].device.type == "cpu"


def test_an_interrupted_rollouts_episodes_are_not_counted() -> None:
    class Interrupting(Flipped):
        steps = 0

        def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
            type(self).steps += 1
            if self.steps == 5:
                raise KeyboardInterrupt
            return super().step(action)

    collector = SyncDataCollector(Interrupting, None, frames_per_batch=6)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    td = collector.next()
    assert td is not None
    assert collector.stats()["episodes"] == int(td["next", "done"].sum()) == 2


def test_a_reset_that_raised_is_repeated() -> None:
    class Once(CountingEnv):
        refuses = False

        def reset(self, **kwargs: Any) -> Any:
            if self.refuses:
                self.refuses = False
                raise RuntimeError("not now")
            return super().reset(**kwargs)

    env = Once()
    collector = SyncDataCollector(env, None, frames_per_batch=3)
    collector.next()
    env.refuses = True
    with pytest.raises(RuntimeError, match="not now"):
        collector.reset()
    td = collector.next()
    assert td["observation"][:, 2].tolist() == [0, 1, 2]
    assert td["collector", "traj_ids"].tolist() == [1, 1, 1]
    collector.shutdown()


@pytest.mark.parametrize("frames", [10**12, 10**18, 2**64], ids=["1e12", "1e18", "2**64"])
def test_a_batch_that_no_memory_can_hold_is_refused_at_construction(frames: int) -> None:
    with refused(ValueError, "frames_per_batch"):
        SyncDataCollector(Flipped, None, frames_per_batch=frames)


def test_a_warning_turned_error_leaves_no_environment_open() -> None:
    closed = []

    class Closing(Flipped):
        def close(self) -> None:
            closed.append(self)

    with warned("frames_per_batch"):
        SyncDataCollector([Closing] * 3, None, frames_per_batch=4)
    assert not closed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(UserWarning, "frames_per_batch"):
            SyncDataCollector([Closing] * 3, None, frames_per_batch=4)
    assert len(closed) == 3


def test_cat_results_in_process_is_refused_with_the_reason() -> None:
    with refused(ValueError, "cat_results"):
        SyncDataCollector(Flipped, None, frames_per_batch=3, cat_results="stack")
