"""Compare each collected episode with its environment's own statistics."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import RecordEpisodeStatistics
from gymnasium.wrappers import vector as vector_wrappers
from tensordict import TensorDictBase

import pycollect
from examples.real.programs import Program
from examples.real.sides import work_of

STATISTICS = {
    ("episode", "r"): torch.float64,
    ("episode", "l"): torch.int64,
    ("episode", "crc"): torch.int64,
}
"""Infos of a watched environment at the end of an episode, in this order."""

_MOST_BATCHES = 300


class Comparison:
    """Ended episodes of consecutive batches, and their mismatches.

    Attributes:
        episodes: Number of ended episodes.
        wrong: One line per episode that differs from the environment's statistics.
    """

    def __init__(self) -> None:
        self.episodes = 0
        self.wrong: list[str] = []
        self._open: dict[int, tuple[float, int]] = {}  # return and length so far, by trajectory

    def add(self, batch: TensorDictBase) -> None:
        """Compare the episodes that end in the next batch.

        Args:
            batch: A batch with ("next", *key) for each key of `STATISTICS`.
        """
        mask = batch.get(("collector", "mask"), None)
        flat = batch.reshape(-1) if mask is None else batch[mask]
        following = flat["next"]
        frames = zip(
            flat["collector", "traj_ids"].tolist(),
            following["reward"].flatten().tolist(),
            following["done"].flatten().tolist(),
            strict=True,
        )
        for place, (trajectory, reward, done) in enumerate(frames):
            total, length = self._open.pop(trajectory, (0.0, 0))
            total, length = total + reward, length + 1
            if done:
                self._compare(trajectory, total, length, following[place])
            else:
                self._open[trajectory] = total, length

    def _compare(self, trajectory: int, total: float, length: int, last: TensorDictBase) -> None:
        self.episodes += 1
        collected = [total, length, checksum(last["observation"].numpy())]
        recorded = [last[key].item() for key in STATISTICS]
        # A batch has float32 rewards; Gymnasium sums in float64.
        same_return = np.isclose(total, recorded[0], rtol=1e-4, atol=1e-3)
        if not same_return or collected[1:] != recorded[1:]:
            self.wrong.append(
                f"trajectory {trajectory}: collected {collected}, environment recorded {recorded}"
            )


def compared(program: Program) -> Comparison:
    """Collect until the program's number of episodes has ended, and compare each of them.

    Raises:
        RuntimeError: Fewer episodes ended in many batches.
    """
    found = Comparison()
    with collector_of(program, _MOST_BATCHES) as collector:
        for batch in collector:
            found.add(batch)
            if found.episodes >= program.episodes:
                return found
    raise RuntimeError(
        f"{program.title}: only {found.episodes} of {program.episodes} episodes ended in "
        f"{_MOST_BATCHES} batches"
    )


def collector_of(program: Program, batches: int) -> Any:
    """Return a collector of that many batches, with the statistics of each episode."""
    work = work_of(program, partial(watched, program))
    return getattr(pycollect, work["collector"])(
        work["env"],
        work["policy"](),
        frames_per_batch=work["frames_per_batch"],
        total_frames=batches * work["frames_per_batch"],
        info_keys=STATISTICS,
    )


def watched(program: Program) -> Any:
    """Return the program's environment with statistics of each episode in the info.

    They are Gymnasium's return and length, and a checksum of the last observation.
    """
    env = program.make()
    if program.kind == "vector":
        return _ChecksummedRows(vector_wrappers.RecordEpisodeStatistics(env))
    return _Checksummed(RecordEpisodeStatistics(env))


class _Checksummed(gymnasium.Wrapper):
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if "episode" in info:
            info["episode"]["crc"] = checksum(observation)
        return observation, reward, terminated, truncated, info


class _ChecksummedRows(gymnasium.vector.VectorWrapper):
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        if "episode" in info:
            info["episode"]["crc"] = np.array([checksum(row) for row in observation])
        return observation, reward, terminated, truncated, info


def checksum(observation: np.ndarray) -> int:
    """Return a checksum of an observation's bytes."""
    return zlib.crc32(np.ascontiguousarray(observation).tobytes())
