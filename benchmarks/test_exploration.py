"""Epsilon-greedy for CartPole: TorchRL's modules, a module of tensors, and a plain loop."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, read_tensors, torchrls

STEPS = 1000
EPSILON = 0.05
FRAME_BYTES = workloads.CARTPOLE_BYTES
PEER = "TorchRL's modules and collector"


def network() -> nn.Sequential:
    """Return a network 4-64-2."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))


class EpsilonGreedy(nn.Module):
    """Replaces the best action by a random one with probability epsilon."""

    epsilon: torch.Tensor

    def __init__(self) -> None:
        """Register epsilon as a buffer."""
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(EPSILON))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return actions [...] for values [..., A]."""
        best = values.argmax(-1)
        drawn = torch.randint_like(best, values.shape[-1])
        return torch.where(torch.rand(best.shape) < self.epsilon, drawn, best)


def two_modules() -> Any:
    """Return the network and the exploration as separate modules."""
    return TensorDictSequential(
        TensorDictModule(network(), in_keys=["observation"], out_keys=["_values"]),
        TensorDictModule(EpsilonGreedy(), in_keys=["_values"], out_keys=["action"]),
    )


def torchrls_modules() -> Any:
    """Return TorchRL's modules."""
    from torchrl.data import Categorical
    from torchrl.modules import EGreedyModule, QValueActor

    values = QValueActor(
        network(), in_keys=["observation"], spec=Categorical(2), action_space="categorical"
    )
    return TensorDictSequential(
        values, EGreedyModule(Categorical(2), eps_init=EPSILON, eps_end=EPSILON)
    )


def work(policy: Callable[[], Any], envs: int = 1) -> dict[str, Any]:
    """Return the arguments of a collector in this process."""
    env = workloads.cartpole if envs == 1 else [workloads.cartpole] * envs
    single = {"collector": "SyncDataCollector", "env": env, "policy": policy}
    return {**single, "frames_per_batch": STEPS}


def plain_loop() -> Iterator[int]:
    """Run a loop by hand: the network, an ``if`` for the random action, preallocated arrays."""
    env, net, rng = workloads.cartpole(), network(), np.random.default_rng(0)
    observations = np.empty((STEPS, 4), np.float32)
    actions = np.empty((STEPS,), np.int64)
    rewards = np.empty((STEPS, 1), np.float32)
    terminated = np.empty((STEPS, 1), bool)
    truncated = np.empty((STEPS, 1), bool)
    arrays = [torch.from_numpy(array) for array in (observations, actions, rewards)]
    observation, _ = env.reset()
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                if rng.random() < EPSILON:
                    action = int(rng.integers(2))
                else:
                    action = int(net(torch.from_numpy(observation)).argmax())
                observations[t] = observation
                actions[t] = action
                observation, reward, ended, cut, _ = env.step(action)
                rewards[t] = reward
                terminated[t] = ended
                truncated[t] = cut
                if ended or cut:
                    observation, _ = env.reset()
        read_tensors(*arrays)
        yield STEPS


def test_epsilon_greedy(compare: Callable[..., None]) -> None:
    """Compare one environment with a loop by hand and with TorchRL's collector."""
    compare(
        f"epsilon-greedy: CartPole, 4-64-2, in process, {STEPS} frames",
        [
            Side("TorchRL's modules", ours, work(torchrls_modules), needs="torchrl"),
            Side("a module over tensors", ours, work(two_modules)),
            Side(PEER, torchrls, work(torchrls_modules), needs="torchrl"),
            Side("plain loop", plain_loop),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 0.9, PEER: 5.0},
    )


def test_epsilon_greedy_in_a_batch(compare: Callable[..., None]) -> None:
    """Compare the forms of one policy for eight environments."""
    compare(
        f"epsilon-greedy: 8 CartPole, 4-64-2, in process, {STEPS} frames",
        [
            Side("TorchRL's modules", ours, work(torchrls_modules, 8), needs="torchrl"),
            Side("a module over tensors", ours, work(two_modules, 8)),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"a module over tensors": 0.8},
    )
