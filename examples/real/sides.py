"""Ways to collect one program's frames, each a generator that yields numbers of frames.

Each reads the observations, actions and rewards that it collected. Hand-written loops store
observations, actions, log-probabilities, rewards and flags in preallocated arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from benchmarks.race import Side
from examples.real.programs import PROGRAMS, Program
from pycollect.bench import sides

OURS, LOOP, TORCHRL = "pycollect", "plain loop", "TorchRL"
ALONE = "environment and network alone"
CENTRAL = "pycollect, one call of the policy for all"
SYNC, ASYNC = "Gymnasium, SyncVectorEnv", "Gymnasium, AsyncVectorEnv"
DUMMY, SUBPROC = "SB3, DummyVecEnv", "SB3, SubprocVecEnv"

WANTED = {TORCHRL: 1.7}
"""Required ratio of our frames per CPU-second to theirs; each program sets the loop's."""


def sides_of(name: str) -> tuple[list[Side], dict[str, str]]:
    """Return the sides of a program, and the reasons for omitted ones."""
    program, work = PROGRAMS[name], {"name": name}
    found = [Side(OURS, ours, work)]
    if program.kind == "processes":
        found.append(Side(CENTRAL, ours, {**work, "inference": "central"}))
        found.append(Side(f"{program.envs} {LOOP}s", one_by_hand, work, processes=program.envs))
        found.append(Side(ALONE, one_alone, work, processes=program.envs))
    elif program.kind == "one":
        found += [Side(LOOP, one_by_hand, work), Side(ALONE, one_alone, work)]
    else:
        way = {**work, "way": program.kind}
        found += [Side(LOOP, several_by_hand, way), Side(ALONE, several_alone, way)]
    found.append(Side(TORCHRL, torchrl, work, needs="torchrl"))
    others = {"one": [DUMMY], "several": [SYNC, DUMMY], "processes": [ASYNC, SUBPROC]}
    for way in others.get(program.kind, []):
        needs = "stable_baselines3" if way in (DUMMY, SUBPROC) else None
        found.append(Side(way, several_by_hand, {**work, "way": way}, needs=needs))
    why_not = dict(program.left_out)
    for side in found:
        if side.needs is not None and find_spec(side.needs) is None:
            why_not[side.name] = f"{side.needs} is not installed"
    return [side for side in found if side.name not in why_not], why_not


def work_of(program: Program, make: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of the program's collector; `make` makes an environment."""
    processes = program.kind == "processes"
    return {
        "collector": "MultiSyncDataCollector" if processes else "SyncDataCollector",
        "env": [make] * program.envs if processes or program.kind == "several" else make,
        "policy": program.policy,
        "frames_per_batch": program.steps * program.envs,
    }


def ours(name: str, **arguments: Any) -> Iterator[int]:
    """Collect with SyncDataCollector or MultiSyncDataCollector of pycollect."""
    program = PROGRAMS[name]
    return sides.ours(**work_of(program, program.make), read=_read_batch, **arguments)


def torchrl(name: str) -> Iterator[int]:
    """Collect with TorchRL's collector of the same name; it steps several as a vector env."""
    program = PROGRAMS[name]
    work = work_of(program, program.make)
    if program.kind == "processes":
        work["cat_results"] = "stack"
    elif program.envs > 1:
        work["env"] = _Together(program)
    return sides.torchrls(**work, read=_read_batch)


class _Together:
    """Makes several environments as one vector environment that TorchRL handles correctly.

    It does not reset rows itself, or it keeps the terminal observation when it does.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self) -> Any:
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        program = self.program
        if program.kind == "vector":
            return program.make(autoreset_mode=AutoresetMode.SAME_STEP)
        makers = [program.make] * program.envs
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)


def one_by_hand(name: str) -> Iterator[int]:
    """Run a plain loop over one environment."""
    program = PROGRAMS[name]
    env, network, distribution = program.make(), program.network(), program.distribution
    kept = _Kept(program.steps, env.observation_space, env.action_space)
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    observation, _ = env.reset(seed=0)
    while True:
        with torch.no_grad():
            for t in range(program.steps):
                head = distribution(network(torch.from_numpy(observation)))
                action = head.sample()
                kept.log_probs[t] = head.log_prob(action).item()
                kept.observations[t] = observation
                given = action.item() if discrete else action.numpy()
                kept.actions[t] = given
                observation, reward, ended, cut, _ = env.step(given)
                kept.rewards[t], kept.terminated[t], kept.truncated[t] = reward, ended, cut
                if ended or cut:
                    observation, _ = env.reset()
        yield kept.read()


def several_by_hand(name: str, way: str) -> Iterator[int]:
    """Run a plain loop over environments that share each call of the network.

    Args:
        way: Key of `_WAYS` that makes the environments.
    """
    program = PROGRAMS[name]
    env, network, distribution = _WAYS[way](program), program.network(), program.distribution
    spaces = (env.single_observation_space, env.single_action_space)
    kept = _Kept((program.steps, program.envs), *spaces)
    observation = env.reset()
    ended_before = np.zeros(program.envs, bool)
    try:
        while True:
            with torch.no_grad():
                for t in range(program.steps):
                    head = distribution(network(torch.from_numpy(observation)))
                    action = head.sample()
                    kept.log_probs[t] = head.log_prob(action).numpy()
                    kept.observations[t] = observation
                    kept.actions[t] = action.numpy()
                    observation, kept.rewards[t], kept.terminated[t], kept.truncated[t] = env.step(
                        action.numpy()
                    )
            dummies = 0
            if env.spends_steps_on_resets:
                done = kept.terminated | kept.truncated
                dummies = np.count_nonzero(ended_before) + np.count_nonzero(done[:-1])
                ended_before = done[-1]
            yield kept.read() - dummies
    finally:
        env.close()


def one_alone(name: str) -> Iterator[int]:
    """Only step one environment and call the network; actions are drawn in advance."""
    program = PROGRAMS[name]
    env, network = program.make(), program.network()
    actions = _drawn(env.action_space, program.steps)
    observation, _ = env.reset(seed=0)
    while True:
        with torch.no_grad():
            for action in actions:
                network(torch.from_numpy(observation))
                observation, _, ended, cut, _ = env.step(action)
                if ended or cut:
                    observation, _ = env.reset()
        yield program.steps


def several_alone(name: str, way: str) -> Iterator[int]:
    """Do the same with several environments; steps that only reset also count."""
    program = PROGRAMS[name]
    env, network = _WAYS[way](program), program.network()
    space = env.single_action_space
    actions = [np.stack(_drawn(space, program.envs)) for _ in range(program.steps)]
    observation = env.reset()
    try:
        while True:
            with torch.no_grad():
                for action in actions:
                    network(torch.from_numpy(observation))
                    observation = env.step(action)[0]
            yield program.steps * program.envs
    finally:
        env.close()


def _drawn(space: Any, count: int) -> list[Any]:
    """Return actions in the form of a hand-written loop."""
    drawn = [space.sample() for _ in range(count)]
    return [a.item() for a in drawn] if isinstance(space, gymnasium.spaces.Discrete) else drawn


class _Stepped(Protocol):
    """Environments that are stepped together and reset themselves.

    Attributes:
        spends_steps_on_resets: The step after an episode's end only resets, and is no frame.
    """

    single_observation_space: Any
    single_action_space: Any
    spends_steps_on_resets: bool

    def reset(self) -> Any: ...

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]: ...

    def close(self) -> None: ...


class _OneByOne:
    """Single environments, stepped one after the other."""

    spends_steps_on_resets = False

    def __init__(self, program: Program) -> None:
        self.envs = [program.make() for _ in range(program.envs)]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self) -> Any:
        self.observations = np.stack([env.reset(seed=p)[0] for p, env in enumerate(self.envs)])
        self.rewards, self.flags = np.empty(len(self.envs)), np.empty((2, len(self.envs)), bool)
        return self.observations

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        for p, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
            self.observations[p], self.rewards[p], ended, cut, _ = env.step(action)
            self.flags[:, p] = ended, cut
            if ended or cut:
                self.observations[p], _ = env.reset()
        return self.observations, self.rewards, *self.flags

    def close(self) -> None:
        for env in self.envs:
            env.close()


class _Vector:
    """A Gymnasium vector environment with NEXT_STEP autoreset."""

    spends_steps_on_resets = True

    def __init__(self, env: Any) -> None:
        self.env = env
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space

    def reset(self) -> Any:
        return self.env.reset()[0]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        return self.env.step(actions)[:4]

    def close(self) -> None:
        self.env.close()


class _StableBaselines:
    """A VecEnv of Stable-Baselines3."""

    spends_steps_on_resets = False

    def __init__(self, kind: str, program: Program) -> None:
        from stable_baselines3.common import vec_env

        self.env = getattr(vec_env, kind)([program.make] * program.envs)
        self.single_observation_space = self.env.observation_space
        self.single_action_space = self.env.action_space

    def reset(self) -> Any:
        return self.env.reset()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        observation, reward, done, _ = self.env.step(actions)
        return observation, reward, done, False

    def close(self) -> None:
        self.env.close()


_WAYS: dict[str, Callable[[Program], _Stepped]] = {
    "several": _OneByOne,
    "vector": lambda program: _Vector(program.make()),
    SYNC: lambda program: _Vector(gymnasium.vector.SyncVectorEnv([program.make] * program.envs)),
    ASYNC: lambda program: _Vector(gymnasium.vector.AsyncVectorEnv([program.make] * program.envs)),
    DUMMY: lambda program: _StableBaselines("DummyVecEnv", program),
    SUBPROC: lambda program: _StableBaselines("SubprocVecEnv", program),
}


class _Kept:
    """One batch of a hand-written loop, [*shape, *frame] each."""

    def __init__(self, shape: int | tuple[int, ...], observation: Any, action: Any) -> None:
        lead = (shape,) if isinstance(shape, int) else shape
        self.observations = np.empty((*lead, *observation.shape), observation.dtype)
        self.actions = np.empty((*lead, *action.shape), action.dtype)
        self.log_probs = np.empty(lead, np.float32)
        self.rewards = np.empty(lead, np.float32)
        self.terminated = np.empty(lead, bool)
        self.truncated = np.empty(lead, bool)

    def read(self) -> int:
        """Read the batch; return its number of frames."""
        _read(*map(torch.from_numpy, (self.observations, self.actions, self.rewards)))
        return self.rewards.size


def _read_batch(batch: Any) -> int:
    _read(batch["observation"], batch["action"], batch["next", "reward"])
    return sides.count(batch)


def _read(observation: torch.Tensor, action: torch.Tensor, reward: torch.Tensor) -> None:
    """Read these tensors, one line of pixels per frame."""
    is_pixels = observation.dtype is torch.uint8
    seen = observation[..., 0, 0, :] if is_pixels else observation
    sides.read_tensors(seen, action, reward)
