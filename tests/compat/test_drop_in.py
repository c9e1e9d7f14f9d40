"""One program, run with TorchRL's RayCollector and with ours: only the import differs.

Each episode begins alike, so that the two can be compared frame by frame. More programs, compared
with TorchRL's collector in this process: `test_programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_torchrl_multistep import assert_same

import pycollect

pytest.importorskip("torchrl.collectors")

FRAMES = 120
IDS = ("collector", "traj_ids")


def maker() -> Callable[[], Any]:
    """Return a factory of environments; local, to be pickled by value."""

    class SameStart(gymnasium.Wrapper):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed=7, options=options)

    def make() -> Any:
        from torchrl.envs import GymWrapper

        return GymWrapper(SameStart(gymnasium.make("Pendulum-v1")))

    return make


def policy() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


MAKE = maker()


def run(make_collector: Callable[..., Any], **kwargs: Any) -> list[TensorDict]:
    """Run the program and return copies of its batches."""
    collector = make_collector([MAKE] * 2, policy(), **kwargs)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.ray
def test_on_ray(ray_cluster: Any) -> None:
    kwargs = {
        "frames_per_batch": FRAMES,
        "total_frames": 2 * FRAMES,
        "collector_kwargs": {"device": "cpu", "storing_device": "cpu"},
        "remote_configs": {"num_cpus": 1},
        "sync": True,
    }
    from torchrl.collectors.distributed import RayCollector

    theirs = run(RayCollector, **deepcopy(kwargs))  # it modifies the dicts
    ours = run(pycollect.RayCollector, **kwargs)
    assert_same(ours[0], theirs[0], {IDS})  # ids of different actors collide in TorchRL
    assert ours[0][IDS].unique().numel() == 2


@pytest.mark.ray
def test_the_documented_example(ray_cluster: Any) -> None:
    """The example of TorchRL's RayCollector, unchanged except for its imports and its length."""
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.envs.libs.gym import GymEnv

    from pycollect import RayCollector, SyncDataCollector

    env = GymEnv("Pendulum-v1", device="cpu")
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    distributed_collector = RayCollector(
        create_env_fn=[env],
        policy=policy,
        collector_class=SyncDataCollector,
        max_frames_per_traj=50,
        init_random_frames=-1,
        reset_at_each_iter=-False,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
        num_collectors=1,
        total_frames=1000,
        frames_per_batch=200,
    )
    counter = 0
    for data in distributed_collector:
        counter += data.numel()
        assert data.shape == (200,)
        assert data.device == torch.device("cpu")
        assert (data["step_count"] < 50).all()
    distributed_collector.shutdown()
    assert counter == 1000
