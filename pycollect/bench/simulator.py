"""A batched simulator whose tensors live on a device, collected in several ways.

Its costs are those of a small physics step: a dozen operations on [P, 17] tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from pycollect import SyncDataCollector
from pycollect.bench.clock import median_seconds
from pycollect.bench.rows import Row, missing
from pycollect.bench.sides import lacks
from pycollect.policy.graphs import called_beside

STEPS = 32
"""Steps per environment in a batch."""
SIZES = (1024, 8192)
_FEATURES, _ACTIONS, _LIMIT = 17, 6, 200

Batches = Callable[[], object]
"""Collects a batch."""


class PointMasses(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """P environments with a smooth nonlinear motion; episodes end at random or after 200 steps.

    It resets in the same step, and returns last observations as `info["final_obs"]`, [P, 17].

    Args:
        envs: P.
        device: Device of all tensors.
    """

    def __init__(self, envs: int, device: torch.device | str = "cpu") -> None:
        """Make the environments."""
        self.num_envs = envs
        self.metadata = {
            "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP,
            "cudagraph": True,  # keeps its state in place, and never asks the device for values
        }
        self.single_observation_space = Box(-np.inf, np.inf, (_FEATURES,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (_ACTIONS,), np.float32)
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator)
        self._drift = (0.05 * draw(_FEATURES, _FEATURES)).to(device)
        self._gain = (0.1 * draw(_ACTIONS, _FEATURES)).to(device)
        self._first = draw(envs, _FEATURES).to(device)
        self._state = self._first.clone()
        self._age = torch.arange(envs, device=device) % _LIMIT

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in each environment."""
        self._state.copy_(self._first)
        self._age.zero_()
        return self._state.clone(), {}

    def step(self, actions: torch.Tensor) -> Any:
        """Move; [P, 6] float32 to observations [P, 17], rewards and flags [P]."""
        state = self._state
        moved = torch.tanh(state + state @ self._drift + actions @ self._gain)
        self._age += 1
        terminated = moved[:, 0] > 0.999
        truncated = self._age >= _LIMIT
        done = terminated | truncated
        reward = 1 - moved.square().mean(1)
        torch.where(done.unsqueeze(1), self._first, moved, out=state)
        self._age.masked_fill_(done, 0)
        return state.clone(), reward, terminated, truncated, {"final_obs": moved}


class Policy(nn.Module):
    """Two hidden layers of 64."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        sizes = (_FEATURES, 64, 64, _ACTIONS)
        self.layers = nn.Sequential(
            *(
                layer
                for first, last in pairwise(sizes)
                for layer in (nn.Linear(first, last), nn.Tanh())
            )
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """[P, 17] to actions [P, 6]."""
        result: torch.Tensor = self.layers(observation)
        return result


def _steps(envs: int, device: torch.device) -> Batches:
    """Return a function that steps environments and policy, and keeps nothing."""
    env, policy = PointMasses(envs, device), Policy().to(device)
    observation, _ = env.reset()

    @torch.no_grad()
    def batch() -> None:
        shown = observation
        for _ in range(STEPS):
            shown = env.step(policy(shown))[0]
        observation.copy_(shown)

    return batch


@contextmanager
def alone(envs: int, device: torch.device) -> Iterator[Batches]:
    """Environments and policy, without recording."""
    yield _steps(envs, device)


@contextmanager
def alone_captured(envs: int, device: torch.device) -> Iterator[Batches]:
    """The same as a CUDA graph of a whole batch."""
    batch = _steps(envs, device)
    called_beside(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch()
    yield graph.replay


@contextmanager
def loop(envs: int, device: torch.device, by_time: bool = False) -> Iterator[Batches]:
    """A hand-written loop into preallocated tensors, [P, T, ...].

    Args:
        envs: P.
        device: Device of all tensors.
        by_time: The tensors are [T, P, ...], which is faster to write.
    """
    env, policy = PointMasses(envs, device), Policy().to(device)
    lead = (STEPS, envs) if by_time else (envs, STEPS)
    make = partial(torch.zeros, device=device)
    memory = [make(*lead, _FEATURES), make(*lead, _ACTIONS), make(*lead, _FEATURES), make(*lead)]
    memory += [make(*lead, dtype=torch.bool) for _ in range(2)]
    observation, _ = env.reset()

    @torch.no_grad()
    def batch() -> None:
        shown = observation
        for step in range(STEPS):
            action = policy(shown)
            following, reward, terminated, truncated, info = env.step(action)
            values = shown, action, info["final_obs"], reward, terminated, truncated
            for own, value in zip(memory, values, strict=True):
                (own[step] if by_time else own[:, step]).copy_(value)
            shown = following
        observation.copy_(shown)

    yield batch


@contextmanager
def collector(envs: int, device: torch.device, captured: bool = False) -> Iterator[Batches]:
    """The collector of this package.

    Args:
        envs: P.
        device: Device of environments, policy and batches.
        captured: Capture whole rollouts as CUDA graphs.
    """
    own = SyncDataCollector(
        partial(PointMasses, envs, device),
        Policy().to(device),
        frames_per_batch=envs * STEPS,
        total_frames=-1,
        cudagraph_policy=captured or None,
    )
    with own:
        batches = iter(own)
        yield lambda: next(batches)


@contextmanager
def torchrls(envs: int, device: torch.device) -> Iterator[Batches]:
    """TorchRL's collector over the same environments as a batched EnvBase."""
    from tensordict.nn import TensorDictModule

    from pycollect.bench.sides import torchrls_single
    from pycollect.bench.simulator_torchrl import PointMassesEnv

    policy = TensorDictModule(Policy().to(device), ["observation"], ["action"])
    own = torchrls_single()(
        PointMassesEnv(envs, device),
        policy,
        frames_per_batch=envs * STEPS,
        total_frames=10**12,
        device=device,
    )
    batches = iter(own)
    yield lambda: next(batches)
    own.shutdown()


def simulator_rows(envs: int, seconds: float, device: torch.device, lacking: str) -> list[Row]:
    """Measure all ways with `envs` environments; a row for each.

    Args:
        envs: P.
        seconds: Time to measure each.
        device: Device of the environments.
        lacking: Why the device is not available, or an empty string.
    """
    title = f"{envs} environments there"
    limit, captured, peer = f"{title}, alone", f"{title}, alone, captured", f"{title}, TorchRL"
    sides: dict[str, tuple[Any, str | None, str]] = {
        limit: (alone, None, lacking),
        f"{title}, loop [P, T]": (loop, limit, lacking),
        f"{title}, loop [T, P]": (partial(loop, by_time=True), limit, lacking),
        f"{title}, pycollect": (collector, limit, lacking),
        captured: (alone_captured, None, lacking),
        f"{title}, pycollect, captured": (partial(collector, captured=True), captured, lacking),
        peer: (torchrls, limit, lacking or lacks("torchrl")),
    }
    if device.type != "cuda":
        sides = {name: own for name, own in sides.items() if "captured" not in name}
    return [
        missing(name, why) if why else _measured(name, make, envs, seconds, device, below, peer)
        for name, (make, below, why) in sides.items()
    ]


def _measured(
    name: str,
    make: Any,
    envs: int,
    seconds: float,
    device: torch.device,
    limit: str | None,
    peer: str,
) -> Row:
    try:
        with make(envs, device) as batch:
            took = median_seconds(batch, seconds, device)
    except Exception as error:  # the time on such a machine is short
        return missing(name, f"failed: {type(error).__name__}: {error}")
    row = Row(name, seconds=took, frames=envs * STEPS, limit=limit)
    return (
        row if name == peer else replace(row, peer=peer, note=f"{1e6 * took / STEPS:.1f} us/step")
    )
