"""The environments, policies and readers that all sides of a benchmark share."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from benchmarks.race import note_process
from pycollect.bench.workloads import Still

FOREVER = 10**12
"""Frames that no run reaches (TorchRL's RayCollector yields nothing for its default, -1)."""

ACTOR = {"num_cpus": 1, "num_gpus": 0}
"""Ray options of every actor, ours and the peer's."""


def pendulum() -> gymnasium.Env:
    """Pendulum-v1 as ``gymnasium.make`` gives it."""
    return gymnasium.make("Pendulum-v1")


def linear() -> nn.Linear:
    """The bare policy for Pendulum."""
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def linear_policy() -> TensorDictModule:
    """The same policy as users of collectors write it."""
    return TensorDictModule(linear(), in_keys=["observation"], out_keys=["action"])


class OwnLinear(nn.Linear):
    """A class that no collector knows: it has to be called as it is."""


def opaque_policy() -> TensorDictModule:
    """The same policy, but written by somebody else."""
    torch.manual_seed(0)
    return TensorDictModule(OwnLinear(3, 1), in_keys=["observation"], out_keys=["action"])


class SlowLinear(nn.Linear):
    """A policy that takes a millisecond."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return super().forward(input)


def slow() -> nn.Linear:
    """The bare policy for Pendulum, a millisecond each."""
    torch.manual_seed(0)
    return SlowLinear(3, 1)


def slow_policy() -> TensorDictModule:
    """The same policy as users of collectors write it."""
    return TensorDictModule(slow(), in_keys=["observation"], out_keys=["action"])


def mlp() -> nn.Sequential:
    """4-64-64-2 with tanh: the logits of a policy for CartPole."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


def categorical_policy(
    network: Callable[[], nn.Module] = mlp,
) -> ProbabilisticTensorDictSequential:
    """A network's logits with a categorical head, sampled, with its log-probability."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network(), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def still_policy() -> TensorDictModule:
    """``Still`` as users of collectors write it."""
    return TensorDictModule(Still(), in_keys=["observation"], out_keys=["action"])


def in_actor(make: Callable[[], Any], census: str) -> Callable[[], Any]:
    """``make``, which also notes the process that it is called in."""
    return partial(_make_noted, make, census)


def _make_noted(make: Callable[[], Any], census: str) -> Any:
    note_process(census)
    return make()


def for_torchrl(make: Callable[[], Any]) -> Callable[[], Any]:
    """``make``, its environment wrapped the way TorchRL wants it."""
    return partial(_wrap, make)


def _wrap(make: Callable[[], Any]) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)


def read(batch: TensorDictBase) -> int:
    """Read observations, actions and rewards, as every side does; return the frames."""
    read_tensors(batch["observation"], batch["action"], batch["next", "reward"])
    return count(batch)


def read_tensors(*tensors: Tensor) -> None:
    """Read every element."""
    for tensor in tensors:
        tensor.sum()


def read_pixels(batch: TensorDictBase) -> int:
    """Read a line of every frame before and after the step, and rewards; return the frames."""
    read_tensors(
        batch["observation"][..., 0, 0, :],
        batch["next", "observation"][..., 0, 0, :],
        batch["next", "reward"],
    )
    return count(batch)


def count(batch: TensorDictBase) -> int:
    """Frames that were really collected: cells that a mask leaves out do not count."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())
