"""Three agents of a PettingZoo environment with a shared linear policy: four ways to collect.

A step of the light environment takes a microsecond, so the rest of a step is compared. `Together`
is the same environment as one Gymnasium environment with a Dict space and one reward for all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.race import Side
from pycollect.bench.sides import ours, read_tensors, torchrls

STEPS = 500
AGENTS = [f"agent_{i}" for i in range(3)]
ACTIONS = 5
NUMBERS = {"light": 8, "simple_spread_v3": 18}
"""Numbers in an agent's observation."""


class Light:
    """Shows the same observations, and ends after 100 steps."""

    metadata = {"name": "light"}  # noqa: RUF012 (as PettingZoo has it)
    render_mode = None

    def __init__(self) -> None:
        """Prepare the results of all steps."""
        self.possible_agents = AGENTS
        self.agents: list[str] = []
        self.observations = {agent: np.ones(8, np.float32) for agent in AGENTS}
        self.rewards = dict.fromkeys(AGENTS, 1.0)
        self.flags = {ended: dict.fromkeys(AGENTS, ended) for ended in (False, True)}
        self.infos: dict[str, dict] = {agent: {} for agent in AGENTS}
        self.spaces = spaces.Box(-1.0, 1.0, (8,), np.float32), spaces.Discrete(ACTIONS)

    def observation_space(self, agent: str) -> spaces.Space:
        """Return the space, which is the same for all agents."""
        return self.spaces[0]

    def action_space(self, agent: str) -> spaces.Space:
        """Return the space, which is the same for all agents."""
        return self.spaces[1]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Start an episode."""
        self.agents, self.steps = AGENTS, 0
        return self.observations, self.infos

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        """Return the prepared results, and count the steps."""
        self.steps += 1
        ended = self.steps == 100
        if ended:
            self.agents = []
        return self.observations, self.rewards, self.flags[ended], self.flags[False], self.infos

    def close(self) -> None:
        """Do nothing."""


def make(name: str) -> Any:
    """Return the environment."""
    if name == "light":
        return Light()
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


def by_torchrl(name: str) -> Any:
    """Return the environment in TorchRL's wrapper, which only accepts PettingZoo's class."""
    from pettingzoo import ParallelEnv
    from torchrl.envs import PettingZooWrapper

    env = make(name) if name != "light" else type("Light", (Light, ParallelEnv), {})()
    return PettingZooWrapper(env)


class Together(gymnasium.Env):
    """A parallel environment as one Gymnasium environment, with the sum of the rewards."""

    def __init__(self, name: str) -> None:
        """Create Dict spaces of all agents."""
        self.env = make(name)
        agents = self.env.possible_agents
        self.observation_space = spaces.Dict({a: self.env.observation_space(a) for a in agents})
        self.action_space = spaces.Dict({a: self.env.action_space(a) for a in agents})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Start an episode."""
        return self.env.reset(seed=seed)[0], {}

    def step(self, action: dict[str, Any]) -> tuple[dict, float, bool, bool, dict]:
        """Step all agents."""
        observation, rewards, ended, cut, _ = self.env.step(action)
        return observation, sum(rewards.values()), all(ended.values()), all(cut.values()), {}


class Choice(nn.Module):
    """A linear layer for each agent's observation, and the best action."""

    def __init__(self, numbers: int) -> None:
        """Create a layer with the same weights for all agents."""
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(numbers, ACTIONS)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return actions [..., agents] for observations [..., agents, numbers]."""
        return self.layer(observation).argmax(-1)


class ChoiceOfEach(Choice):
    """The same policy with one tensor per agent."""

    def forward(self, *observations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return an action per agent."""
        return super().forward(torch.stack(observations, -2)).unbind(-1)


def policy_of(name: str) -> TensorDictModule:
    """Return the policy of the agents' group."""
    return TensorDictModule(
        Choice(NUMBERS[name]), in_keys=[("agent", "observation")], out_keys=[("agent", "action")]
    )


def policy_of_each(name: str) -> TensorDictModule:
    """Return the policy with one tensor per agent."""
    return TensorDictModule(
        ChoiceOfEach(NUMBERS[name]),
        in_keys=AGENTS,
        out_keys=[("action", agent) for agent in AGENTS],
    )


def read(batch: TensorDictBase) -> int:
    """Read observations, actions and rewards; return the frames."""
    tensors = batch["agent", "observation"], batch["agent", "action"]
    read_tensors(*tensors, batch["next", "agent", "reward"])
    return batch.numel()


def read_each(batch: TensorDictBase) -> int:
    """Read one tensor per agent; return the frames."""
    parts = [batch[key] for agent in AGENTS for key in (agent, ("action", agent))]
    read_tensors(*parts, batch["next", "reward"])
    return batch.numel()


def plain_loop(name: str) -> Iterator[int]:
    """Run a loop by hand with preallocated arrays."""
    env, choose, count = make(name), Choice(NUMBERS[name]), len(AGENTS)
    observations = np.empty((STEPS + 1, count, NUMBERS[name]), np.float32)
    actions = np.empty((STEPS, count), np.int64)
    rewards = np.empty((STEPS, count), np.float32)
    flags = np.empty((2, STEPS, count), bool)
    shown, _ = env.reset()
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                for i, agent in enumerate(AGENTS):
                    observations[t, i] = shown[agent]
                actions[t] = choose(torch.from_numpy(observations[t])).numpy()
                step = env.step(dict(zip(AGENTS, actions[t], strict=True)))
                shown, earned, ended, cut, _ = step
                rewards[t] = [earned[agent] for agent in AGENTS]
                flags[0, t] = [ended[agent] for agent in AGENTS]
                flags[1, t] = [cut[agent] for agent in AGENTS]
                if not env.agents:
                    shown, _ = env.reset()
        read_tensors(*map(torch.from_numpy, (observations, actions, rewards)))
        yield STEPS


WANTED = {"light": (10.0, 15.0), "simple_spread_v3": (2.0, 3.0)}
"""Wanted ratios to TorchRL's wrapper in our collector, and in TorchRL's."""
OURS = "PettingZoo environment"
WRAPPED = "TorchRL's wrapper"
PEER = "TorchRL's wrapper and collector"


@pytest.mark.parametrize("name", NUMBERS)
def test_agents(compare: Callable[..., None], name: str) -> None:
    """Compare one environment with TorchRL's wrapper in both collectors, and with loops."""
    if name != "light":
        pytest.importorskip("mpe2")
    pytest.importorskip("pettingzoo")
    work = {
        "collector": "SyncDataCollector",
        "policy": partial(policy_of, name),
        "read": read,
        "frames_per_batch": STEPS,
    }
    wrapped = {**work, "env": partial(by_torchrl, name)}
    together = {**work, "env": partial(Together, name), "read": read_each}
    together["policy"] = partial(policy_of_each, name)
    compare(
        f"PettingZoo: {name}, 3 agents, linear policy, in process, {STEPS} frames",
        [
            Side(OURS, ours, {**work, "env": partial(make, name)}),
            Side(WRAPPED, ours, wrapped, needs="torchrl"),
            Side(PEER, torchrls, wrapped, needs="torchrl"),
            Side("Gymnasium environment with a Dict", ours, together),
            Side("plain loop", plain_loop, {"name": name}),
        ],
        frame_bytes=2 * len(AGENTS) * NUMBERS[name] * 4,
        wanted=dict(zip((WRAPPED, PEER), WANTED[name], strict=True)),
    )
