"""Vector environments that count, with torch tensors or numpy arrays, and batches of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase

import pycollect

ENVS = 5
STEPS = 7
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"set_truncated": True},
    {"compact_obs": True, "track_policy_version": True},
    {"max_frames_per_traj": 4},
    {"reset_at_each_iter": True},
    {"split_trajs": True},
    {"drop_uncollected": True},
    {"postproc": pycollect.MultiStep(0.5, 2)},
    {"observation_dtype": torch.float16},
    {"init_random_frames": 20},
    {"trajs_per_batch": 3, "max_frames_per_traj": 6},
]
Result = tuple[list[TensorDictBase], dict[str, Any], dict[str, Any]]


class CountingTensors(VectorEnv[Any, Any, Any]):
    """Row p observes [episode, step] and ends after 3 + p % 4 steps: terminated if p is even.

    The reward is 100 * episode + step + action.

    Args:
        mode: Autoreset mode; "SKIPPING" is NEXT_STEP without `reset_mask`.
        final: Whether the info has the last observations of episodes; "each" returns one object per
            row, like Gymnasium's own environments.
        device: Device of all tensors.
    """

    def __init__(
        self, mode: str = "SAME_STEP", final: bool | str = True, device: str = "cpu"
    ) -> None:
        self._masks, mode = mode != "SKIPPING", mode.replace("SKIPPING", "NEXT_STEP")
        self.num_envs, self._mode, self._final = ENVS, mode, final
        self.metadata = {"autoreset_mode": AutoresetMode[mode], "cudagraph": mode == "SAME_STEP"}
        self.single_observation_space = Box(-1e9, 1e9, (2,), np.float32)
        self.single_action_space = Box(-9.0, 9.0, (1,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, ENVS)
        self.action_space = batch_space(self.single_action_space, ENVS)
        rows = torch.arange(ENVS, device=device)
        self.device = rows.device
        self._limit, self._is_even = 3 + rows % 4, rows % 2 == 0
        self._episode = torch.zeros(ENVS, device=device)
        self._step = torch.zeros(ENVS, device=device)
        self._ended = torch.zeros(ENVS, dtype=torch.bool, device=device)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        rows = torch.ones_like(self._ended)
        if options and "reset_mask" in options:
            if not self._masks:
                raise TypeError("options: unexpected 'reset_mask'")
            rows = torch.as_tensor(options["reset_mask"])
            assert rows.device == self.device
        elif seed is not None:
            first = seed if isinstance(seed, int) else seed[0]
            self._episode.fill_(first % 1000)
        self._begin(rows)
        self._ended &= ~rows
        return self._shown(), {}

    def _begin(self, rows: torch.Tensor) -> None:
        self._episode += rows
        self._step.masked_fill_(rows, 0)

    def _shown(self) -> torch.Tensor:
        return torch.stack([self._episode, self._step], 1)

    def step(self, actions: Any) -> Any:
        assert actions.device == self.device
        assert actions.shape == (ENVS, 1)
        skips = self._ended.clone() if self._mode == "NEXT_STEP" else torch.zeros_like(self._ended)
        self._step += 1
        self._begin(skips)
        done = self._step >= self._limit
        reward = (100 * self._episode + self._step + actions[:, 0]).masked_fill(skips, 0)
        terminated, truncated = done & self._is_even, done & ~self._is_even
        actions.zero_()  # an environment may overwrite its arguments
        shown, info = self._shown(), {}
        self._ended.copy_(done)
        if self._mode == "SAME_STEP":
            if self._final == "each":
                info = self._final_by_row(shown, done)
            elif self._final:
                info["final_obs"] = torch.where(done[:, None], shown, -1.0)
            self._begin(done)
            shown = self._shown()
        return shown, reward, terminated, truncated, info

    def _final_by_row(self, shown: torch.Tensor, done: torch.Tensor) -> dict[str, Any]:
        if not done.any():
            return {}
        final = np.full(ENVS, None, object)
        for row in done.nonzero().flatten().tolist():
            final[row] = shown[row]
        return {"final_obs": final, "_final_obs": done.cpu().numpy()}


class CountingArrays(VectorEnv[Any, Any, Any]):
    """`CountingTensors` on the CPU, with numpy arrays."""

    def __init__(self, *args: Any) -> None:
        self._env = CountingTensors(*args)

    def __getattribute__(self, name: str) -> Any:
        if name in ("reset", "step", "_env", "__class__"):
            return object.__getattribute__(self, name)
        return getattr(self._env, name)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        shown, info = self._env.reset(seed=seed, options=options)
        return shown.numpy(), info

    def step(self, actions: Any) -> Any:
        *values, info = self._env.step(torch.from_numpy(actions))
        final = info.get("final_obs")
        if isinstance(final, torch.Tensor):
            info["final_obs"] = final.numpy()
        elif final is not None:
            info["final_obs"] = np.array(
                [None if own is None else own.numpy() for own in final] + [None], object
            )[:-1]
        return *(value.numpy() for value in values), info


def record_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record tensors on the CPU as those on another device are recorded."""
    monkeypatch.setattr("pycollect.envs.make_vector.CPU", None)


def doubling(observation: torch.Tensor) -> torch.Tensor:
    return (observation[:, 1:] % 3) * 2


def collected(make: Callable[[], Any], policy: Any, count: int = 4, **arguments: Any) -> Result:
    given = {"frames_per_batch": STEPS * ENVS, "total_frames": count * STEPS * ENVS, **arguments}
    with pycollect.SyncDataCollector(make, policy, **given) as collector:
        collector.set_seed(3)
        batches = [batch.cpu().clone() for batch in collector]
        return batches, collector.stats(), collector.ledger()


def assert_same(ours: Result, theirs: Result) -> None:
    (batches, stats, ledger), (expected, their_stats, their_ledger) = ours, theirs
    assert ledger == their_ledger
    for key in ("frames", "episodes", "episode_return", "episode_length"):
        assert stats.get(key) == pytest.approx(their_stats.get(key)), key
    for batch, other in zip(batches, expected, strict=True):
        assert batch.shape == other.shape
        assert batch.names == other.names
        assert set(batch.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            assert batch[key].dtype is other[key].dtype, key
            torch.testing.assert_close(batch[key], other[key], rtol=0, atol=0, msg=str(key))
