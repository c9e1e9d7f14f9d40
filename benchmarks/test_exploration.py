"""Epsilon-greedy for CartPole, written in three ways."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from benchmarks import workloads
from benchmarks.race import Side

STEPS = 1000
FRAME_BYTES = 2 * 4 * 4
"""Observation before and after the step."""


def network() -> nn.Sequential:
    """A network 4-64-2."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))


class EpsilonGreedy(nn.Module):
    """Draw a random action with probability 0.5, else take the best one."""

    epsilon: torch.Tensor

    def __init__(self) -> None:
        """Register epsilon as a buffer."""
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Actions [...] of values [..., A]."""
        best = values.argmax(-1)
        drawn = torch.randint_like(best, values.shape[-1])
        return torch.where(torch.rand(best.shape) < self.epsilon, drawn, best)


def two_modules() -> Any:
    """The network and the exploration, as modules of their own."""
    return TensorDictSequential(
        TensorDictModule(network(), in_keys=["observation"], out_keys=["_values"]),
        TensorDictModule(EpsilonGreedy(), in_keys=["_values"], out_keys=["action"]),
    )


class OneModule(EpsilonGreedy):
    """Exploration that holds the network."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self.net = network()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Actions [...] of observations [..., 4]."""
        return super().forward(self.net(observation))


def torchrls() -> Any:
    """The modules of TorchRL."""
    from torchrl.data import Categorical
    from torchrl.modules import EGreedyModule, QValueActor

    values = QValueActor(
        network(), in_keys=["observation"], spec=Categorical(2), action_space="categorical"
    )
    return TensorDictSequential(values, EGreedyModule(Categorical(2), eps_init=0.5, eps_end=0.5))


def cartpole() -> gymnasium.Env:
    """One environment."""
    return gymnasium.make("CartPole-v1")


def ours(policy: Callable[[], Any], envs: int) -> Iterator[int]:
    """SyncDataCollector of pycollect."""
    from pycollect import SyncDataCollector

    with SyncDataCollector(
        cartpole if envs == 1 else [cartpole] * envs,
        policy(),
        frames_per_batch=STEPS,
        total_frames=workloads.FOREVER,
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


@pytest.mark.parametrize("envs", [1, 8])
def test_epsilon_greedy(compare: Callable[..., None], envs: int) -> None:
    """Compare the forms of one policy."""
    compare(
        f"epsilon-greedy: {envs} CartPole, 4-64-2, in process, {STEPS} frames",
        [
            Side("two modules over tensors", ours, {"policy": two_modules, "envs": envs}),
            Side("one module over tensors", ours, {"policy": OneModule, "envs": envs}),
            Side(
                "TorchRL's EGreedyModule",
                ours,
                {"policy": torchrls, "envs": envs},
                needs="torchrl",
            ),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"one module over tensors": 1.0, "TorchRL's EGreedyModule": 2.0},
    )
