"""A batched simulator with tensors on a device, collected in several ways.

A step costs as much as a small physics step: a dozen operations on [P, 17] tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect.bench.clock import median_seconds
from pycollect.bench.report import Row, missing
from pycollect.bench.sides import Stream, captured_calls, count, lacks, ours, torchrls

STEPS = 32
"""Steps per environment in a batch."""
SIZES = (1024, 8192)
_FEATURES, _ACTIONS, _LIMIT = 17, 6, 200


class PointMasses(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """P environments with a smooth nonlinear motion; episodes end at random or after 200 steps.

    It resets in the same step, and returns last observations as `info["final_obs"]`, [P, 17].
    """

    def __init__(self, envs: int, device: torch.device | str = "cpu") -> None:
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


def alone(envs: int, device: torch.device, captured: bool = False) -> Stream:
    """Environments and policy, without recording; or a CUDA graph of a whole batch of them."""
    env, policy = PointMasses(envs, device), Policy().to(device)
    observation, _ = env.reset()

    @torch.no_grad()
    def batch() -> None:
        seen = observation
        for _ in range(STEPS):
            seen = env.step(policy(seen))[0]
        observation.copy_(seen)

    collect = captured_calls(batch) if captured else batch
    while True:
        collect()
        yield envs * STEPS


def loop(envs: int, device: torch.device, by_time: bool = False) -> Stream:
    """Loop by hand into tensors [P, T, ...], or `by_time` [T, P, ...], which is faster to write."""
    env, policy = PointMasses(envs, device), Policy().to(device)
    lead = (STEPS, envs) if by_time else (envs, STEPS)
    make = partial(torch.zeros, device=device)
    memory = [make(*lead, _FEATURES), make(*lead, _ACTIONS), make(*lead, _FEATURES), make(*lead)]
    memory += [make(*lead, dtype=torch.bool) for _ in range(2)]
    seen, _ = env.reset()
    while True:
        with torch.no_grad():
            for step in range(STEPS):
                action = policy(seen)
                following, reward, terminated, truncated, info = env.step(action)
                values = seen, action, info["final_obs"], reward, terminated, truncated
                for own, value in zip(memory, values, strict=True):
                    (own[step] if by_time else own[:, step]).copy_(value)
                seen = following
        yield envs * STEPS


def collector(envs: int, device: torch.device, captured: bool = False) -> Stream:
    """The collector of this package."""
    return ours(
        "SyncDataCollector",
        partial(PointMasses, envs, device),
        lambda: Policy().to(device),
        read=count,
        frames_per_batch=envs * STEPS,
        cudagraph_policy=captured or None,
    )


def of_torchrl(envs: int, device: torch.device) -> Stream:
    """The collector of this package over TorchRL's kind of environment."""
    return _over_torchrl(ours, envs, device)


def by_torchrl(envs: int, device: torch.device) -> Stream:
    """TorchRL's collector over the same environments as a batched EnvBase."""
    return _over_torchrl(torchrls, envs, device, device=device)


def _over_torchrl(by: Callable[..., Stream], envs: int, there: torch.device, **more: Any) -> Stream:
    return by(
        "SyncDataCollector",
        partial(point_masses_env, envs, there),
        lambda: TensorDictModule(Policy().to(there), ["observation"], ["action"]),
        read=count,
        frames_per_batch=envs * STEPS,
        **more,
    )


def point_masses_env(envs: int, device: torch.device | str) -> Any:
    """Return `PointMasses` as TorchRL's users write a batched environment."""
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    simulator = PointMasses(envs, device)

    class PointMassesEnv(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(device=device, batch_size=[envs])
            self._following = torch.zeros(envs, _FEATURES, device=device)
            seen = Unbounded(self._following.shape, device=device)
            self.observation_spec = Composite(observation=seen, shape=(envs,))
            self.action_spec = Bounded(-1, 1, (envs, _ACTIONS), device=device)
            self.reward_spec = Unbounded((envs, 1), device=device)

        def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
            # Rows of a partial reset have been reset by the simulator already.
            partial = tensordict is not None and "_reset" in tensordict
            observation = self._following if partial else simulator.reset()[0]
            flags = torch.zeros(envs, 1, dtype=torch.bool, device=device)
            values = {"observation": observation, "done": flags, "terminated": flags.clone()}
            return TensorDict(values, [envs], device=device)

        def _step(self, tensordict: Any) -> TensorDict:
            step = simulator.step(tensordict.get("action"))
            self._following, reward, terminated, truncated, info = step
            values = {
                "observation": info["final_obs"],
                "reward": reward.unsqueeze(-1),
                "done": (terminated | truncated).unsqueeze(-1),
                "terminated": terminated.unsqueeze(-1),
            }
            return TensorDict(values, [envs], device=device)

        def _set_seed(self, seed: int | None) -> None:
            """The simulator draws nothing."""

    return PointMassesEnv()


def simulator_rows(envs: int, seconds: float, device: torch.device, lacking: str) -> list[Row]:
    """Measure all ways with `envs` environments; `lacking`: why the device is missing, else ""."""
    title = f"{envs} environments there"
    limit, captured = f"{title}, alone", f"{title}, alone, captured"
    of_theirs, peer = f"{title}, pycollect, TorchRL's EnvBase", f"{title}, TorchRL"
    sides: dict[str, tuple[Callable[..., Stream], str | None]] = {
        limit: (alone, None),
        f"{title}, loop [P, T]": (loop, limit),
        f"{title}, loop [T, P]": (partial(loop, by_time=True), limit),
        f"{title}, pycollect": (collector, limit),
        captured: (partial(alone, captured=True), None),
        f"{title}, pycollect, captured": (partial(collector, captured=True), captured),
        of_theirs: (of_torchrl, limit),
        peer: (by_torchrl, limit),
    }
    lacking_there = dict.fromkeys((of_theirs, peer), lacking or lacks("torchrl"))
    rows = []
    for name, (stream, below) in sides.items():
        if device.type != "cuda" and "captured" in name:
            continue
        if why := lacking_there.get(name, lacking):
            rows.append(missing(name, why))
            continue
        row = _measured(Row(name, limit=below), stream, envs, seconds, device)
        if row.seconds and name != peer:
            row = replace(row, peer=peer, note=f"{1e6 * row.seconds / STEPS:.1f} us/step")
        rows.append(row)
    return rows


def _measured(
    row: Row, stream: Callable[..., Stream], envs: int, seconds: float, device: torch.device
) -> Row:
    try:
        with closing(stream(envs, device)) as batches:
            took = median_seconds(partial(next, batches), seconds, device)
    except Exception as error:  # the time on such a machine is short
        return missing(row.name, f"failed: {type(error).__name__}: {error}")
    return replace(row, seconds=took, frames=envs * STEPS)
