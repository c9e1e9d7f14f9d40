"""What TorchRL's trainers and documented programs ask of a collector by TorchRL's names."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from echo_envs import wait_until
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

pytest.importorskip("torchrl.collectors")

from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.objectives import DDPGLoss
from torchrl.trainers import Trainer

from pycollect import Collector


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def value() -> TensorDictModule:
    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(torch.cat([observation, action], -1))
            return out

    return TensorDictModule(Value(), ["observation", "action"], ["state_action_value"])


def test_a_trainer_of_torchrl() -> None:
    actor = linear()
    loss = DDPGLoss(actor, value())
    loss.make_value_estimator(gamma=0.9)
    before = [parameter.clone() for parameter in actor.parameters()]
    collector = Collector(
        GymEnv("Pendulum-v1"), actor, frames_per_batch=10, total_frames=40, init_random_frames=20
    )
    trainer = Trainer(
        collector=collector,
        total_frames=40,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        optim_steps_per_batch=1,
        progress_bar=False,
    )
    trainer.train()
    assert trainer.collected_frames == 40
    assert collector.init_random_frames == 20
    assert collector.policy is actor
    assert any(not torch.equal(a, b) for a, b in zip(before, actor.parameters(), strict=True))


def test_the_documented_example_of_start() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4, shared=True)
    collector = Collector(
        partial(GymEnv, "Pendulum-v1"),
        linear(),
        frames_per_batch=10,
        total_frames=-1,
        replay_buffer=buffer,
    )
    collector.start()
    wait_until(lambda: collector.getattr_rb("write_count") >= 100)
    collector.async_shutdown(timeout=10)
    assert collector.closed
    assert collector.replay_buffer is buffer
    sample: TensorDict = buffer.sample()
    assert sample["next", "reward"].shape == (4, 1)


def test_a_stream_and_its_version() -> None:
    collector = Collector(GymEnv("Pendulum-v1"), linear(), frames_per_batch=10, total_frames=20)
    assert [td.shape for td in collector.iterator()] == [(10,), (10,)]
    collector.update_policy_weights_()
    assert collector.get_policy_version() == collector.policy_version == 1
    assert not collector.closed
    collector.shutdown()
