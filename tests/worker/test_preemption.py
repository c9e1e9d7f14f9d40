"""Rollouts that are stopped early: the delivered frames, and the rollouts that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from envs_for_tests import CountingEnv

from pycollect._core import RolloutControl, SharedNumber, Slab, SlabPool
from pycollect.data.slabs import slab_tensors
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker

STEPS = 6


class StoppingEnv(CountingEnv):
    """Count steps, and stop all rollouts at the given steps of this environment's life."""

    def __init__(self, stop: SharedNumber, at: tuple[int, ...], length: int) -> None:
        super().__init__(length=length)
        self.stop, self.at, self.life = stop, at, 0

    def step(self, action: Any) -> Any:
        self.life += 1
        if self.life in self.at:
            self.stop.value += 1
        return super().step(action)


def make_worker(stop: SharedNumber, at: tuple[int, ...], envs: int, length: int = 100) -> Worker:
    entry = [lambda: StoppingEnv(stop, at, length)] + [lambda: CountingEnv(length=length)] * (
        envs - 1
    )
    options = WorkerOptions(frames=STEPS * envs, mask=True)
    return Worker(0, entry, None, None, options)


def collected(worker: Worker, stop: SharedNumber, number: int, min_steps: int = 1) -> Slab:
    slab = SlabPool(worker.placement, 1, True).acquire()
    slab.array()[:] = 0xA5
    worker.collect(slab, 0, 0, control=RolloutControl(stop, number, min_steps))
    return slab


@pytest.mark.parametrize("envs", [1, 3])
def test_a_stopped_rollout_ends_with_the_current_step_and_the_next_continues(envs: int) -> None:
    stop = SharedNumber()
    worker = make_worker(stop, (4,), envs)
    slab = collected(worker, stop, 1)
    tensors = slab_tensors(slab, [envs, STEPS])
    assert slab.lengths() == [4] * envs
    assert slab.header().frames == 4 * envs
    mask = torch.arange(STEPS) < 4
    assert (tensors["collector", "mask"] == mask).all()
    assert ((tensors["collector", "traj_ids"] == -1) == ~mask).all()
    for key, tensor in tensors.items():
        if key != ("collector", "traj_ids"):
            assert not tensor[:, 4:].any(), key
    after = slab_tensors(collected(worker, stop, 2), [envs, STEPS])
    assert after["collector", "mask"].all()
    assert torch.equal(after["observation",][:, 0], tensors["next", "observation"][:, 3])
    assert torch.equal(after["collector", "traj_ids"][:, 0], tensors["collector", "traj_ids"][:, 3])


def test_an_episode_that_ends_with_the_last_step_is_reset() -> None:
    stop = SharedNumber()
    worker = make_worker(stop, (3,), 2, length=3)
    tensors = slab_tensors(collected(worker, stop, 1), [2, STEPS])
    assert tensors["next", "done"][:, 2].all()
    after = slab_tensors(collected(worker, stop, 2), [2, STEPS])
    assert (after["collector", "traj_ids"][:, 0] == 1).all()
    assert (after["observation",][:, 0, 2] == 0).all()  # number of steps in the current episode
