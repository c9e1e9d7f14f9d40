"""TorchRL's own environments, the same on both sides: what our collectors save on them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule

from benchmarks import workloads
from benchmarks.race import Side

PEER = "TorchRL"
CALLABLE = "lambda: gymnasium.make(...)"
STEP = "the env's own _step"
LIMIT = 50
"""Frames of a trajectory in TorchRL's documented example."""


def pendulum() -> Any:
    """The environment of TorchRL's documented example."""
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1", device="cpu")


def transformed() -> Any:
    """The same with transforms: it has to be stepped through TorchRL."""
    from torchrl.envs import Compose, InitTracker, RewardSum, TransformedEnv

    return TransformedEnv(pendulum(), Compose(RewardSum(), InitTracker()))


def custom() -> Any:
    """TorchRL's own Pendulum, of torch operations, with its parameters in nested entries."""
    from torchrl.envs.custom.pendulum import PendulumEnv

    return PendulumEnv()


def mock(name: str) -> Any:
    """One of the environments that TorchRL tests its collectors with."""
    from torchrl.testing import mocking_classes

    return getattr(mocking_classes, name)()


def users() -> Any:
    """What a user writes in thirty lines: a point that is pushed about."""
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
    """Two of them, stepped one after the other."""
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
"""The others are measured in full runs."""


def _example(collector: Callable[..., Any], collector_class: Any, census: str) -> Any:
    """TorchRL's documented example, for ever."""
    return collector(
        [workloads.in_actor(pendulum, census)],
        workloads.linear_policy(),
        collector_class=collector_class,
        max_frames_per_traj=LIMIT,
        init_random_frames=-1,
        reset_at_each_iter=False,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
        num_collectors=1,
        total_frames=workloads.FOREVER,
        frames_per_batch=200,
        remote_configs=workloads.ACTOR,
    )


def ours_on_ray(census: str) -> Iterator[int]:
    """RayCollector of pycollect."""
    from pycollect import RayCollector, SyncDataCollector

    with _example(RayCollector, SyncDataCollector, census) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl_on_ray(census: str) -> Iterator[int]:
    """RayCollector of TorchRL."""
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector

    collector = _example(RayCollector, Collector, census)
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def ours(env: str, limit: int) -> Iterator[int]:
    """SyncDataCollector of pycollect."""
    from pycollect import SyncDataCollector

    return _in_process(SyncDataCollector, env, limit)


def torchrl(env: str, limit: int) -> Iterator[int]:
    """Collector of TorchRL (its SyncDataCollector until 0.12)."""
    from torchrl.collectors import Collector

    return _in_process(Collector, env, limit)


def _in_process(collector_class: Callable[..., Any], env: str, limit: int) -> Iterator[int]:
    collector = collector_class(
        ENVS[env],
        workloads.linear_policy() if env in OF_GYM else None,
        frames_per_batch=400,
        total_frames=workloads.FOREVER,
        max_frames_per_traj=limit,
    )
    try:
        for batch in collector:
            yield read(batch)
    finally:
        collector.shutdown()


def read(batch: Any) -> int:
    """Read what the environment showed, whatever its keys; return the frames."""
    workloads.read_tensors(*batch["next"].values(True, True))
    return workloads.count(batch)


def own_step(env: str, limit: int) -> Iterator[int]:
    """The environment's own step and nothing else: below it no collector of an EnvBase can go."""
    made = ENVS[env]()
    with torch.no_grad():
        root = made.rand_action(made.reset())
    while True:
        with torch.no_grad():
            for _ in range(100):
                made._step(root)
        yield 100


def test_documented_example(compare: Callable[..., None], ray_address: str) -> None:
    """TorchRL's documented example of its RayCollector, its own environment on both sides."""
    pytest.importorskip("torchrl")
    compare(
        "documented example, Ray, 1 actor, T=200",
        [
            Side("pycollect", ours_on_ray, {}, ray_address=ray_address, ahead=2),
            Side(PEER, torchrl_on_ray, {}, ray_address=ray_address, ahead=1, spawns=True),
        ],
        frame_bytes=2 * 3 * 4,
        wanted={PEER: 5},
    )


class Argmax(torch.nn.Module):
    """The action of a network's greatest output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = workloads.mlp()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Indices of observations [..., 4]."""
        return self.network(observation).argmax(-1)


def _wrapped(env: str) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(gymnasium.make(env), categorical_action_encoding=True)


def _gym_env(env: str) -> Any:
    from torchrl.envs import GymEnv

    return GymEnv(env, categorical_action_encoding=True)


def _one_way(make: Callable[[str], Any], env: str) -> Iterator[int]:
    from pycollect import SyncDataCollector

    policy = workloads.linear_policy()
    if env == "CartPole-v1":
        policy = TensorDictModule(Argmax(), in_keys=["observation"], out_keys=["action"])
    with SyncDataCollector(
        partial(make, env), policy, frames_per_batch=400, total_frames=workloads.FOREVER
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


@pytest.mark.parametrize(
    "env", ["CartPole-v1", pytest.param("Pendulum-v1", marks=pytest.mark.full)]
)
def test_ways_to_one_environment(compare: Callable[..., None], env: str) -> None:
    """TorchRL's GymEnv and GymWrapper beside the callable that makes what is inside of them."""
    pytest.importorskip("torchrl")
    ways = {"GymEnv": _gym_env, "GymWrapper": _wrapped, CALLABLE: gymnasium.make}
    compare(
        f"ways to {env}, in process",
        [Side(name, _one_way, {"make": make, "env": env}) for name, make in ways.items()],
        frame_bytes=2 * 4 * 4,
        wanted={CALLABLE: 0.97},
    )


def _cases() -> Iterator[Any]:
    """Each environment without a limit; those made of GymEnvs in full runs also with one."""
    for env in ENVS:
        yield pytest.param(env, 0, marks=() if env in ALWAYS else pytest.mark.full)
        if env in OF_GYM:
            yield pytest.param(env, LIMIT, marks=pytest.mark.full)


@pytest.mark.parametrize(("env", "limit"), list(_cases()))
def test_in_process(compare: Callable[..., None], env: str, limit: int) -> None:
    """An environment of TorchRL in this process."""
    pytest.importorskip("torchrl")
    work = {"env": env, "limit": limit}
    sides = [Side("pycollect", ours, work), Side(PEER, torchrl, work)]
    if env not in OF_GYM:
        sides.append(Side(STEP, own_step, work))
    compare(
        f"TorchRL's {env}, in process, {f'trajectories of {limit}' if limit else 'no limit'}",
        sides,
        frame_bytes=2 * 3 * 4,
        wanted={PEER: 5 if env in UNWRAPPED else 1.5},
    )
