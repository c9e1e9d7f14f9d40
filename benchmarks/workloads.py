"""Environments, policies and readers that several benchmarks share."""

import time
from collections.abc import Callable, Iterator
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
from torch import nn

from benchmarks.race import note_process
from pycollect.bench.sides import Still, count, read_tensors

PENDULUM_BYTES, CARTPOLE_BYTES = 2 * 3 * 4, 2 * 4 * 4
"""Bytes of a frame: the observations before and after the step."""


def pendulum() -> gymnasium.Env:
    """Return Pendulum-v1."""
    return gymnasium.make("Pendulum-v1")


def cartpole() -> gymnasium.Env:
    """Return CartPole-v1."""
    return gymnasium.make("CartPole-v1")


def linear() -> nn.Linear:
    """Return the bare policy for Pendulum."""
    torch.manual_seed(0)
    return nn.Linear(3, 1)


class OwnLinear(nn.Linear):
    """A class that collectors do not know, so they must call it."""


def opaque() -> nn.Linear:
    """Return the same layer in an unknown class."""
    torch.manual_seed(0)
    return OwnLinear(3, 1)


class SlowLinear(nn.Linear):
    """A policy that takes a millisecond."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return super().forward(input)


def slow() -> nn.Linear:
    """Return the bare policy for Pendulum that takes a millisecond."""
    torch.manual_seed(0)
    return SlowLinear(3, 1)


def as_policy(network: Callable[[], nn.Module]) -> TensorDictModule:
    """Return a policy as users of collectors write it."""
    return TensorDictModule(network(), in_keys=["observation"], out_keys=["action"])


linear_policy = partial(as_policy, linear)
still_policy = partial(as_policy, Still)


def mlp() -> nn.Sequential:
    """Return a tanh network 4-64-64-2: the logits of a policy for CartPole."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


def categorical_policy(
    network: Callable[[], nn.Module] = mlp,
) -> ProbabilisticTensorDictSequential:
    """Return a policy that samples from a network's logits and records the log-probability."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network(), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def on_ray(collect: Callable[..., Iterator[int]], env: Any, census: str, **more: Any) -> Any:
    """Collect in Ray actors that note their processes in the census.

    Args:
        collect: `ours` or `torchrls` of `pycollect.bench.sides`.
        env: Makes the environment of each actor, in a list.
    """
    noted = [partial(_make_noted, make, census) for make in env]
    actor = {"num_cpus": 1, "num_gpus": 0}
    return collect("RayCollector", noted, remote_configs=actor, **more)


def _make_noted(make: Callable[[], Any], census: str) -> Any:
    note_process(census)
    return make()


def read_pixels(batch: TensorDictBase) -> int:
    """Read a line of every frame before and after the step, and rewards; return the frames."""
    read_tensors(
        batch["observation"][..., 0, 0, :],
        batch["next", "observation"][..., 0, 0, :],
        batch["next", "reward"],
    )
    return count(batch)
