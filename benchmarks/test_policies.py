"""One policy for Pendulum written in three ways, and a plain loop that calls it."""

from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import nn

from benchmarks import workloads
from benchmarks.race import Side
from benchmarks.test_pendulum import FRAME_BYTES, plain_loop, work
from pycollect.bench.sides import ours

STEPS = 1000


def network() -> nn.Sequential:
    """Return a network 3-64-64-1 with tanh."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


class OverTensors(nn.Module):
    """The same network in an unknown module."""

    def __init__(self) -> None:
        """Create the network."""
        super().__init__()
        self.net = network()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return actions [1] for observations [3]."""
        action: torch.Tensor = self.net(observation)
        return action


class OverTensorDict(OverTensors):
    """The same network in a module that takes a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """Write the action next to the observation."""
        return tensordict.set("action", self.net(tensordict["observation"]))


def test_policies(compare: Callable[..., None]) -> None:
    """Compare the three forms."""
    known = partial(workloads.as_policy, network)
    compare(
        f"policies: Pendulum, 3-64-64-1, in process, T={STEPS}",
        [
            Side("layers that are known", ours, work(STEPS, known)),
            Side("a module over tensors", ours, work(STEPS, OverTensors)),
            Side("one that takes a TensorDict", ours, work(STEPS, OverTensorDict)),
            Side("plain loop", plain_loop, {"frames": STEPS, "module": network}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 1.0},
    )
