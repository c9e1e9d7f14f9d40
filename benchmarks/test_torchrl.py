"""TorchRL's own environments, the same on both sides."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import count, for_torchrl, ours, read_tensors, torchrls

PEER = "TorchRL"
CALLABLE = "lambda: gymnasium.make(...)"
STEP = "the env's own _step"
LIMIT = 50
"""Maximum length of a trajectory in TorchRL's documented example."""


def pendulum() -> Any:
    """Return the environment of TorchRL's documented example."""
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1", device="cpu")


def transformed() -> Any:
    """Return that environment with transforms, so that it must be stepped through TorchRL."""
    from torchrl.envs import Compose, InitTracker, RewardSum, TransformedEnv

    return TransformedEnv(pendulum(), Compose(RewardSum(), InitTracker()))


def custom() -> Any:
    """Return TorchRL's Pendulum of torch operations, with its parameters in nested entries."""
    from torchrl.envs.custom.pendulum import PendulumEnv

    return PendulumEnv()


def mock(name: str) -> Any:
    """Return an environment with which TorchRL tests its collectors."""
    from torchrl.testing import mocking_classes

    return getattr(mocking_classes, name)()


def users() -> Any:
    """Return a user's EnvBase of thirty lines: a point that moves by its actions."""
    from tensordict import TensorDict
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    class Point(EnvBase):
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((3,)))
            self.action_spec = Bounded(-1.0, 1.0, (1,))
            self.reward_spec = Unbounded((1,))

        def _reset(self, td: Any) -> Any:
            self.at, self.steps = torch.zeros(3), 0
            return TensorDict({"observation": self.at.clone()})

        def _step(self, td: Any) -> Any:
            self.at, self.steps = self.at + td["action"], self.steps + 1
            reward = -self.at.square().sum(-1, keepdim=True)
            done = torch.tensor([self.steps == 200])
            return TensorDict({"observation": self.at, "reward": reward, "done": done})

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Point()


def serial(make: Callable[[], Any]) -> Any:
    """Return two environments, stepped one after the other."""
    from torchrl.envs import SerialEnv

    return SerialEnv(2, make)


ENVS = {
    "GymEnv": pendulum,
    "TransformedEnv": transformed,
    "SerialEnv of GymEnvs": partial(serial, pendulum),
    "SerialEnv": partial(serial, transformed),
    "EnvBase of a user": users,
    "PendulumEnv": custom,
    "CountingEnv": partial(mock, "CountingEnv"),
    "ContinuousActionVecMockEnv": partial(mock, "ContinuousActionVecMockEnv"),
    "NestedCountingEnv": partial(mock, "NestedCountingEnv"),
    "MultiKeyCountingEnv": partial(mock, "MultiKeyCountingEnv"),
}
UNWRAPPED = ("GymEnv", "SerialEnv of GymEnvs")
OF_GYM = (*UNWRAPPED, "TransformedEnv", "SerialEnv")
ALWAYS = (*OF_GYM, "EnvBase of a user", "PendulumEnv")
"""Environments of every run; the others are measured in full runs."""


EXAMPLE = {
    "env": [pendulum],
    "policy": workloads.linear_policy,
    "max_frames_per_traj": LIMIT,
    "init_random_frames": -1,
    "reset_at_each_iter": False,
    "collector_kwargs": {"device": "cpu", "storing_device": "cpu"},
    "num_collectors": 1,
    "frames_per_batch": 200,
}
"""Arguments of TorchRL's documented example, without an end."""


def ours_on_ray(census: str) -> Iterator[int]:
    """Collect with RayCollector of pycollect."""
    from pycollect import SyncDataCollector

    return workloads.on_ray(ours, **EXAMPLE, census=census, collector_class=SyncDataCollector)


def torchrl_on_ray(census: str) -> Iterator[int]:
    """Collect with RayCollector of TorchRL."""
    from torchrl.collectors import Collector

    return workloads.on_ray(torchrls, **EXAMPLE, census=census, collector_class=Collector)


def read(batch: Any) -> int:
    """Read all results of the environment, whatever their keys; return the frames."""
    read_tensors(*batch["next"].values(True, True))
    return count(batch)


def own_step(env: str) -> Iterator[int]:
    """Call only the environment's own step, the lower limit for any collector of an EnvBase."""
    made = ENVS[env]()
    with torch.no_grad():
        root = made.rand_action(made.reset())
    while True:
        with torch.no_grad():
            for _ in range(100):
                made._step(root)
        yield 100


def test_documented_example(compare: Callable[..., None], ray_address: str) -> None:
    """Compare TorchRL's documented example of RayCollector, with its environment on both sides."""
    pytest.importorskip("torchrl")
    compare(
        "documented example, Ray, 1 actor, T=200",
        [
            Side("pycollect", ours_on_ray, {}, ray_address=ray_address, ahead=2),
            Side(PEER, torchrl_on_ray, {}, ray_address=ray_address, ahead=1, spawns=True),
        ],
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={PEER: 5},
    )


class Argmax(torch.nn.Module):
    """A network whose action is the index of the greatest output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = workloads.mlp()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return indices for observations [..., 4]."""
        return self.network(observation).argmax(-1)


def _gym_env(env: str) -> Any:
    from torchrl.envs import GymEnv

    return GymEnv(env, categorical_action_encoding=True)


@pytest.mark.parametrize(
    "env", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.full)]
)
def test_ways_to_one_environment(compare: Callable[..., None], env: str) -> None:
    """Compare TorchRL's GymEnv and GymWrapper with a callable that makes the bare environment."""
    pytest.importorskip("torchrl")
    make = partial(gymnasium.make, env)
    ways = {
        "GymEnv": partial(_gym_env, env),
        "GymWrapper": for_torchrl(make),
        CALLABLE: make,
    }
    network = Argmax if env == "CartPole-v1" else workloads.linear
    work = {
        "collector": "SyncDataCollector",
        "policy": partial(workloads.as_policy, network),
        "frames_per_batch": 400,
    }
    compare(
        f"ways to {env}, in process",
        [Side(name, ours, {**work, "env": way}) for name, way in ways.items()],
        frame_bytes=workloads.CARTPOLE_BYTES,
        wanted={CALLABLE: 0.97},
    )


def _cases() -> Iterator[Any]:
    """Yield each environment without a limit, and in full runs GymEnvs also with a limit."""
    for env in ENVS:
        yield pytest.param(env, 0, marks=() if env in ALWAYS else pytest.mark.full)
        if env in OF_GYM:
            yield pytest.param(env, LIMIT, marks=pytest.mark.full)


@pytest.mark.parametrize(("env", "limit"), list(_cases()))
def test_in_process(compare: Callable[..., None], env: str, limit: int) -> None:
    """Compare an environment of TorchRL in this process."""
    pytest.importorskip("torchrl")
    work = {
        "collector": "SyncDataCollector",
        "env": ENVS[env],
        "policy": workloads.linear_policy if env in OF_GYM else None,
        "frames_per_batch": 400,
        "max_frames_per_traj": limit,
        "read": read,
    }
    sides = [Side("pycollect", ours, work), Side(PEER, torchrls, work)]
    if env not in OF_GYM:
        sides.append(Side(STEP, own_step, {"env": env}))
    compare(
        f"TorchRL's {env}, in process, {f'trajectories of {limit}' if limit else 'no limit'}",
        sides,
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={PEER: 5 if env in UNWRAPPED else 1.5},
    )
