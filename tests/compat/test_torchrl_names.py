"""The attributes of a collector that TorchRL's trainers and documented programs use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from echo_envs import wait_until
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Distribution

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import CQLLoss, DDPGLoss, SACLoss, SoftUpdate
from torchrl.record.loggers.monitoring import LoggerMonitor
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import CQLTrainer, SACTrainer

import pycollect
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


def stochastic() -> Any:
    """Return an actor without an action spec: a trainer reads the collector's."""
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def soft_actor_critic() -> dict[str, Any]:
    actor = stochastic()
    return {"loss_module": SACLoss(actor, value()), "policy": actor}


def conservative() -> dict[str, Any]:
    actor = stochastic()
    spec = GymEnv("Pendulum-v1").action_spec
    return {"loss_module": CQLLoss(actor, value(), action_spec=spec), "policy": actor}


@pytest.mark.parametrize("home", [torchrl.collectors, pycollect], ids=["theirs", "ours"])
@pytest.mark.parametrize(
    ("trainer", "parts"), [(SACTrainer, soft_actor_critic), (CQLTrainer, conservative)]
)
def test_trainers_of_algorithms(
    home: Any, trainer: Any, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers train, and are saved and loaded with their collector."""
    monkeypatch.setattr(Distribution, "_validate_args", False)  # as TorchRL's import does

    def made() -> Any:
        own = parts()
        loss = own["loss_module"]
        loss.make_value_estimator(gamma=0.9)
        collector = home.Collector(
            GymEnv("Pendulum-v1"),
            own["policy"],
            frames_per_batch=10,
            total_frames=40,
            init_random_frames=10,
        )
        return trainer(
            collector=collector,
            total_frames=40,
            frame_skip=1,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters()),
            optim_steps_per_batch=1,
            replay_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8),
            target_net_updater=SoftUpdate(loss, eps=0.9),
            enable_logging=False,
            progress_bar=False,
            save_trainer_file=tmp_path / "trainer.pt",
            save_trainer_interval=10,
            seed=0,
        )

    first = made()
    first.train()
    assert (first.collected_frames, len(first.replay_buffer)) == (40, 40)
    second = made()
    second.load_from_file(tmp_path / "trainer.pt", weights_only=False)
    assert second.collected_frames == 40
    assert second.collector.stats()["frames"] == 40
    second.shutdown()


def test_a_monitor_of_torchrl_logs_the_counts_of_a_collector() -> None:
    logged: list[dict[str, float]] = []

    class Sink:
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(metrics)

    keys = []
    for home in (torchrl.collectors, pycollect):
        logged.clear()
        collector = home.Collector(
            GymEnv("Pendulum-v1"), None, frames_per_batch=10, total_frames=20
        )
        monitor = LoggerMonitor(Sink())
        monitor.watch(collector, name="own")
        next(iter(collector))
        monitor.step()
        collector.shutdown()
        assert logged[0]["own/frames"] == 10
        keys.append(set(logged[0]))
    assert keys[0] <= keys[1]
