"""The programs: an environment from its library, a policy, and the batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import gymnasium
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torch.distributions import Categorical, Distribution

from benchmarks import workloads
from pycollect.bench.sides import NatureCNN

Kind = Literal["one", "several", "processes", "vector"]


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        title: Title in tables.
        kind: "one" environment; "several", stepped one after the other with one policy call for
            all; "processes", one environment each; or a "vector" environment.
        make: Makes the environment or vector environment.
        network: Makes the network; `distribution` takes its output.
        policy: Makes the same policy for collectors.
        envs: Number of environments.
        steps: Steps of each environment per batch.
        episodes: Number of episodes to compare.
        needs: Required modules, with the package that provides each.
        left_out: Sides that do not support the program, with the reason.
        of_loop: Required ratio to the frames of the plain loop.
    """

    title: str
    kind: Kind
    make: Callable[..., Any]
    network: Callable[[], nn.Module]
    distribution: Callable[[Any], Distribution]
    policy: Callable[[], TensorDictModuleBase]
    envs: int
    steps: int
    episodes: int
    needs: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    of_loop: float = 1.0


def atari(game: str) -> gymnasium.Env:
    """Return a game with the usual wrappers: frame skip 4, gray 84x84, stack of 4, 30 no-ops."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env), 4)


def atari_vector(game: str, envs: int, **kwargs: Any) -> gymnasium.vector.VectorEnv:
    """Return ALE's vector environment: the same preprocessing in C++, on threads."""
    from ale_py import AtariVectorEnv

    return AtariVectorEnv(game, envs, **kwargs)


def half_cheetah() -> gymnasium.Env:
    """Return HalfCheetah-v5 with float32 observations."""
    from gymnasium.wrappers import TransformObservation

    env = gymnasium.make("HalfCheetah-v5")
    space = env.observation_space
    as_float32 = gymnasium.spaces.Box(-float("inf"), float("inf"), space.shape, "float32")
    return TransformObservation(env, partial(_cast, "float32"), as_float32)


def _cast(dtype: str, observation: Any) -> Any:
    return observation.astype(dtype)


def envpool_cartpole(envs: int) -> Any:
    """Return EnvPool's CartPole with its Gymnasium interface."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=envs, seed=0)


def nature(actions: int) -> nn.Module:
    """Return the Nature CNN."""
    torch.manual_seed(0)
    return NatureCNN(actions)


def loc_and_scale() -> nn.Module:
    """Return a 17-64-64-2x6 tanh network that outputs the parameters of a normal distribution."""
    from tensordict.nn import NormalParamExtractor

    torch.manual_seed(0)
    hidden = (nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(64, 2 * 6), NormalParamExtractor())


def categorical(logits: torch.Tensor) -> Distribution:
    """Return the distribution of a discrete action."""
    return Categorical(logits=logits)


def tanh_normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Distribution:
    """Return TorchRL's distribution of actions between -1 and 1."""
    from torchrl.modules import TanhNormal

    return TanhNormal(*parameters)


def tanh_normal_policy() -> TensorDictModuleBase:
    """Return TorchRL's actor for continuous actions, as in its tutorials."""
    from torchrl.modules import ProbabilisticActor, TanhNormal

    return ProbabilisticActor(
        TensorDictModule(loc_and_scale(), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def _discrete(network: Callable[[], nn.Module]) -> dict[str, Any]:
    policy = partial(workloads.categorical_policy, network)
    return {"network": network, "distribution": categorical, "policy": policy}


_MLP = _discrete(workloads.mlp)
_ALE = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}

PROGRAMS: dict[str, Program] = {
    "cartpole": Program(
        "CartPole", "one", workloads.cartpole, **_MLP, envs=1, steps=1000, episodes=50
    ),
    "cartpoles": Program(
        "8 CartPoles, one after the other",
        "several",
        workloads.cartpole,
        **_MLP,
        envs=8,
        steps=250,
        episodes=100,
    ),
    "half-cheetah": Program(
        "HalfCheetah-v5, TorchRL's TanhNormal",
        "one",
        half_cheetah,
        network=loc_and_scale,
        distribution=tanh_normal,
        policy=tanh_normal_policy,
        envs=1,
        steps=1000,
        episodes=3,
        needs={"mujoco": "mujoco", "torchrl": "torchrl"},
    ),
    "pong": Program(
        "Pong, standard wrappers, Nature CNN",
        "one",
        partial(atari, "Pong"),
        **_discrete(partial(nature, 6)),
        envs=1,
        steps=128,
        episodes=2,
        needs=_ALE,
    ),
    "breakout": Program(
        "Breakout, standard wrappers, Nature CNN",
        "one",
        partial(atari, "Breakout"),
        **_discrete(partial(nature, 4)),
        envs=1,
        steps=128,
        episodes=10,
        needs=_ALE,
    ),
    "pong-processes": Program(
        "Pong as above, in each of 2 processes",
        "processes",
        partial(atari, "Pong"),
        **_discrete(partial(nature, 6)),
        envs=2,
        steps=128,
        episodes=2,
        needs=_ALE,
    ),
    "atari-vector": Program(
        "Pong x8, ALE's AtariVectorEnv, Nature CNN",
        "vector",
        partial(atari_vector, "pong", 8),
        **_discrete(partial(nature, 6)),
        envs=8,
        steps=128,
        episodes=8,
        needs=_ALE,
    ),
    "envpool": Program(
        "CartPole x64, EnvPool",
        "vector",
        partial(envpool_cartpole, 64),
        **_MLP,
        envs=64,
        steps=128,
        episodes=300,
        needs={"envpool": "envpool"},
        left_out={
            "TorchRL": "its GymWrapper does not accept EnvPool, and its EnvPool wrapper does not "
            "support version 1.2"
        },
        of_loop=1.3,
    ),
}
"""Programs by command-line name."""
