"""The environments of the table of programs, for TorchRL's collectors and ours."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import torch
import torchrl.testing.mocking_classes as mock
import torchrl_support
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl import envs
from torchrl.data import Unbounded
from torchrl.envs import (
    GymEnv,
    GymWrapper,
    InitTracker,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules.utils import get_primers_from_module

for module in (sys.modules[__name__], torchrl_support):  # actors cannot import these files
    cloudpickle.register_pickle_by_value(module)

Make = Callable[[], Any]


class Restarting(gymnasium.Wrapper):
    """A reset that directly follows another one repeats it.

    So the stream does not depend on how often a collector resets before its first step, and an env
    with a fixed seed begins alike in every collector.
    """

    def __init__(self, env: Any, seed: int = 0) -> None:
        super().__init__(env)
        self.unwrapped.np_random = seeding.np_random(seed)[0]
        self._before: Any = None  # generator state before the last reset, until a step

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.unwrapped.np_random = seeding.np_random(seed)[0]
        elif self._before is not None:
            self.unwrapped.np_random.bit_generator.state = self._before
        self._before = self.unwrapped.np_random.bit_generator.state
        return super().reset(options=options)

    def step(self, action: Any) -> Any:
        self._before = None
        return super().step(action)


class SpacesEnv(gymnasium.Env):
    """Observe samples of any space; episodes have a random number of steps.

    The reward encodes the received action, so that tests compare it as well.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.left = 0

    def observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 9))
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.left -= 1
        told = spaces.flatten(self.action_space, action) @ np.arange(
            1.0, spaces.flatdim(self.action_space) + 1
        )
        return self.observe(), float(told), self.left == 0, self.left % 5 == 4, {}


class Corridor(gymnasium.Env):
    """Observe a place and a mask of four moves; a forbidden move is an error."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            observation=spaces.Box(0, 100, (2,), np.float32),
            action_mask=spaces.Box(0, 1, (4,), np.bool_),
        )
        self.action_space = spaces.Discrete(4)
        self.steps = self.place = 0

    def observe(self) -> dict[str, Any]:
        self.mask = np.array([(self.place + move) % 3 != 0 for move in range(4)])
        return {
            "observation": np.array([self.place, self.steps], np.float32),
            "action_mask": self.mask,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = self.place = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.mask[action]
        self.place, self.steps = self.place + int(action), self.steps + 1
        return self.observe(), float(action), self.place > 10, False, {}


@dataclass(frozen=True)
class EnvPair:
    """One environment for both sides: each function maps a policy to an entry for a worker."""

    theirs: Callable[[Any], Make]
    ours: Callable[[Any], Any]


def gym(make: Make, **encoding: Any) -> EnvPair:
    """A Gymnasium env, wrapped for TorchRL only."""
    return EnvPair(lambda policy: partial(wrapped, make, **encoding), lambda policy: make)


def torchrl(make: Make) -> EnvPair:
    """A TorchRL env on both sides."""
    return EnvPair(lambda policy: make, lambda policy: make)


def wrapped(make: Make, **encoding: Any) -> Any:
    return GymWrapper(make(), **encoding)


def primed(make: Make, policy: Any) -> Make:
    """Return TorchRL's environment for a recurrent policy: the states pass through it."""

    def make_primed() -> Any:
        env = TransformedEnv(GymWrapper(make()), InitTracker())
        return env.append_transform(get_primers_from_module(policy))

    return make_primed


def registered(name: str, seed: int = 0, **kwargs: Any) -> Any:
    return Restarting(gymnasium.make(name, **kwargs), seed)


pendulum = partial(registered, "Pendulum-v1")
short_pendulum = partial(registered, "Pendulum-v1", max_episode_steps=25)
cart_pole = partial(registered, "CartPole-v1")
INDEX = {"categorical_action_encoding": True}
CART_POLES = [partial(cart_pole, seed) for seed in range(3)]


def cart_pole_vector() -> Any:
    return SyncVectorEnv(CART_POLES, autoreset_mode=AutoresetMode.NEXT_STEP)


def three_cart_poles() -> Any:
    return SerialEnv(3, [partial(wrapped, make, **INDEX) for make in CART_POLES])


BOX = spaces.Box(-1, 1, (3,), np.float32)
DEEPER = spaces.Dict({"er": spaces.Box(-1, 1, (2, 2), np.float64), "bits": spaces.MultiBinary(2)})
OBSERVATIONS: dict[str, Any] = {
    "Box": BOX,
    "Dict": spaces.Dict({"place": BOX, "speed": spaces.Box(-1, 1, (2,), np.float32)}),
    "nested Dict": spaces.Dict({"place": BOX, "deep": DEEPER}),
    "Discrete": spaces.Discrete(7),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4, 5]),
    "MultiBinary": spaces.MultiBinary(4),
    "uint8": spaces.Box(0, 255, (4, 8, 8), np.uint8),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
}
ACTIONS: dict[str, Any] = {
    "Box": spaces.Box(-1, 1, (2, 2), np.float32),
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
}


def spaced(sees: str, takes: str) -> EnvPair:
    def make() -> Any:
        return Restarting(SpacesEnv(OBSERVATIONS[sees], ACTIONS[takes]))

    return gym(make, **INDEX)


def transformed(make: Make, make_transform: Make) -> Make:
    return lambda: TransformedEnv(GymWrapper(make()), make_transform())


def macro(make: Make) -> Any:
    """Take several actions per step; the batch is dense because only one reward is kept."""
    return TransformedEnv(make(), envs.MultiAction(stack_rewards=False))


def as_given(max_episode_steps: int) -> Any:
    """An environment for which the collector passes keyword arguments."""
    return GymWrapper(short_pendulum(max_episode_steps=max_episode_steps))


TRANSFORMS: dict[str, Make] = {
    "BinarizeReward": envs.BinarizeReward,
    "CatFrames": lambda: envs.CatFrames(2, -1, in_keys=["observation"], out_keys=["stack"]),
    "ClipTransform": lambda: envs.ClipTransform(["observation"], low=-0.5, high=0.5),
    "Compose": lambda: envs.Compose(InitTracker(), StepCounter(), envs.RewardSum()),
    "DTypeCastTransform": lambda: envs.DTypeCastTransform(
        torch.float32, torch.float64, in_keys=["reward"]
    ),
    "FiniteTensorDictCheck": envs.FiniteTensorDictCheck,
    "FrameSkipTransform": lambda: envs.FrameSkipTransform(2),
    "InitTracker": InitTracker,
    "ObservationNorm": lambda: envs.ObservationNorm(0.0, 2.0, in_keys=["observation"]),
    "RenameTransform": lambda: envs.RenameTransform(["reward"], ["gain"], create_copy=True),
    "RewardClipping": lambda: envs.RewardClipping(-1.0, 0.0),
    "RewardScaling": lambda: RewardScaling(8.0, 0.1),
    "SignTransform": lambda: envs.SignTransform(in_keys=["reward"]),
    "StepCounter": lambda: StepCounter(max_steps=9),
    "TargetReturn": lambda: envs.TargetReturn(10.0),
    "TensorDictPrimer": lambda: envs.TensorDictPrimer(hidden=Unbounded(3), default_value=1.0),
    "TrajCounter": envs.TrajCounter,
    "UnsqueezeTransform": lambda: envs.UnsqueezeTransform(
        -1, in_keys=["observation"], out_keys=["column"]
    ),
    "VecNormV2": lambda: envs.VecNormV2(in_keys=["observation"]),
    "gSDENoise": lambda: envs.gSDENoise(1, 3),
}

ENVS: dict[str, EnvPair] = {
    **{name: torchrl(make) for name, make in torchrl_support.ENVS.items()},
    "Pendulum": gym(pendulum),
    "Pendulum, 25 steps": gym(short_pendulum),
    "Pendulum, primed there": EnvPair(partial(primed, short_pendulum), lambda _: short_pendulum),
    "Pendulum, primed": EnvPair(partial(primed, short_pendulum), partial(primed, short_pendulum)),
    "GymWrapper": torchrl(lambda: GymWrapper(pendulum())),
    "GymWrapper made with arguments": torchrl(as_given),
    "GymEnv": torchrl(lambda: GymEnv("Pendulum-v1", device="cpu")),
    "one-hot CartPole": torchrl(lambda: GymWrapper(cart_pole())),
    "CartPole": gym(cart_pole, **INDEX),
    "CartPole in a list": EnvPair(lambda _: three_cart_poles, lambda _: CART_POLES),
    "CartPole in a vector": EnvPair(lambda _: three_cart_poles, lambda _: cart_pole_vector),
    "MultiAction": torchrl(partial(macro, partial(mock.CountingEnv, max_steps=7))),
    "SerialEnv, MultiAction": torchrl(
        partial(macro, lambda: SerialEnv(2, partial(mock.CountingEnv, max_steps=7)))
    ),
    "MountainCar": gym(partial(registered, "MountainCarContinuous-v0", max_episode_steps=40)),
    "Corridor": gym(lambda: Restarting(Corridor()), **INDEX),
    "Pendulum, InitTracker there": EnvPair(
        lambda _: transformed(short_pendulum, InitTracker), lambda _: short_pendulum
    ),
    **{
        f"Pendulum, {name}": torchrl(transformed(short_pendulum, make))
        for name, make in TRANSFORMS.items()
    },
    **{f"sees {name}": spaced(name, "Discrete") for name in OBSERVATIONS},
    **{f"takes {name}": spaced("Box", name) for name in ACTIONS},
}
