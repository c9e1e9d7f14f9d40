"""One table of programs, environment x policy x arguments, for TorchRL's collectors and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from program_envs import ENVS, TRANSFORMS
from program_policies import POLICIES
from tensordict import TensorDict
from torch.distributions import Distribution
from torchrl.collectors import Collector
from torchrl.data import MultiStep
from torchrl.envs import ExplorationType, Reward2GoTransform, RewardScaling
from torchrl_support import IDS

FRAMES = 60
BATCHES = 3
SEED = 5


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        env: A key of `ENVS`.
        policy: A key of `POLICIES`.
        arguments: Arguments of the collectors, equal on both sides.
        draws: Whether to seed torch's generator instead of the collector, because the program draws
            from torch's generator and a seeded collector has its own.
        acts_alike: False if the two libraries draw random actions in different ways.
        skipped: Keys with values that differ on purpose; see `test_differences.py`.
        extra: Keys of TorchRL's batches that ours do not have.
    """

    env: str
    policy: str
    arguments: dict[str, Any] = field(default_factory=dict)
    draws: bool = False
    acts_alike: bool = True
    skipped: tuple[Any, ...] = ()
    extra: tuple[Any, ...] = ()

    def __str__(self) -> str:
        told = [
            f"{name}={type(value).__name__ if callable(value) else value}"
            for name, value in self.arguments.items()
        ]
        return "; ".join([self.env, self.policy, *told])

    def collected_by(self, collector_class: Any, seed: int = SEED, **more: Any) -> Collected:
        """Return the program's batches; `collector_class` is TorchRL's Collector or one of ours."""
        theirs = collector_class is Collector
        pair = ENVS[self.env]
        torch.manual_seed(0)
        policy = POLICIES[self.policy]()
        env = pair.theirs(policy) if theirs else pair.ours(policy)
        if theirs and "create_env_kwargs" not in self.arguments:
            env = env()
        if "num_collectors" in more:
            env = [env] * more["num_collectors"]
        counts = {"frames_per_batch": FRAMES, "total_frames": BATCHES * FRAMES}
        with unchecked_distributions():
            torch.manual_seed(1)
            collector = collector_class(env, policy, **{**counts, **self.arguments, **more})
            try:
                following = SEED
                if not self.draws:
                    following = collector.set_seed(seed)
                if theirs and not self.draws:
                    collector.reset()  # otherwise it continues from its current observation
                torch.manual_seed(2)
                return Collected([batch.clone() for batch in collector], following)
            finally:
                collector.shutdown()


@dataclass(frozen=True)
class Collected:
    """The batches of a program, and the seed that follows the collector's."""

    batches: list[TensorDict]
    following: int


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Turn off distribution checks, as TorchRL's import does; its TanhNormal fails them."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


NEXT_INIT = (("next", "is_init"),)  # always false, so it carries no information


def pendulums() -> list[Program]:
    """Programs for one env: policies in every form, and random draws."""
    plain = ("linear", "lazy", "module", "module on the TensorDict", "function of the TensorDict")
    others = ("private keys", "LayerNorm", "Delta", "TanhDelta", "actor and action value")
    drawing = (
        *("normal", "TanhNormal", "actor and value"),
        *("Gaussian noise", "NoisyLinear", "dropout"),
        *("TruncatedNormal", "safe normal", "RandomPolicy"),
    )
    return [
        *(Program("Pendulum", name) for name in (*plain, *others)),
        *(Program("Pendulum", name, draws=True) for name in drawing),
        *(
            Program("Pendulum", "normal", {"exploration_type": kind}, draws=True)
            for kind in map(ExplorationType, ("deterministic", "mode", "mean", "random"))
        ),
        *(Program(name, "linear") for name in ("GymWrapper", "GymEnv", "Pendulum, 25 steps")),
        *(Program(f"Pendulum, {name}", "linear") for name in TRANSFORMS),
        Program(
            "GymWrapper made with arguments",
            "linear",
            {"create_env_kwargs": {"max_episode_steps": 12}},
        ),
        Program("MountainCar", "random", acts_alike=False),
    ]


def recurrent() -> list[Program]:
    """Recurrent programs: states from the policy's modules, and through TorchRL's environment."""
    cut = {"max_frames_per_traj": 7}
    kinds = ("LSTM", "GRU", "LSTM of 2 layers", "GRU of 2 layers")
    there = "Pendulum, primed there"
    return [
        *(Program(there, kind, draws=True, extra=NEXT_INIT) for kind in kinds),
        *(Program("Pendulum, primed", kind, draws=True) for kind in ("LSTM", "GRU")),
        *(
            Program(there, kind, {"exploration_type": ExplorationType[how]}, extra=NEXT_INIT)
            for kind in ("LSTM", "GRU")
            for how in ("DETERMINISTIC", "MEAN")
        ),
        *(Program(there, kind, cut, draws=True, extra=NEXT_INIT) for kind in ("LSTM", "GRU")),
        Program("Pendulum, InitTracker", "correlated noise", draws=True),
        Program("Pendulum, InitTracker there", "correlated noise", draws=True, extra=NEXT_INIT),
    ]


def discrete() -> list[Program]:
    """Discrete actions: sampled or greedy, as index or one-hot, masked, and in batches of envs."""
    return [
        *(Program("CartPole", name, draws=True) for name in ("categorical", "probs")),
        *(Program("CartPole", name) for name in ("greedy", "Q values by index")),
        Program("CartPole", "random", acts_alike=False),
        *(Program(f"CartPole in a {name}", "greedy") for name in ("list", "vector")),
        Program("CartPole in a list", "random", acts_alike=False),
        *(Program("one-hot CartPole", name, draws=True) for name in ("one-hot", "epsilon-greedy")),
        Program("one-hot CartPole", "Q values"),
        *(
            Program(env, policy, {"max_frames_per_traj": 7})
            for env in ("CartPole", "CartPole in a list")
            for policy in ("by flags", "by step count")
        ),
        Program("Corridor", "masked", draws=True),
        Program(
            "Corridor", "masked", {"exploration_type": ExplorationType.DETERMINISTIC}, draws=True
        ),
    ]


def spaces() -> list[Program]:
    """Programs for every space with a fixed shape, as an observation and as an action."""
    seen = ("Discrete", "MultiDiscrete", "MultiBinary", "uint8", "float64")
    taken = ("Box", "MultiDiscrete", "MultiBinary")
    return [
        *(Program(f"sees {name}", "Discrete by place") for name in ("Dict", "nested Dict")),
        *(Program(f"sees {name}", "Discrete") for name in seen),
        *(Program(f"takes {name}", name) for name in (*taken, "Discrete")),
        *(Program(f"takes {name}", "random", acts_alike=False) for name in (*taken, "Discrete")),
    ]


def torchrl_kinds() -> list[Program]:
    """TorchRL's own environments with policies; `test_torchrl_envs.py` has those without."""
    random_first = {"init_random_frames": FRAMES + 10}
    return [
        Program("CountingEnv", "counting"),
        Program("CountingEnv [3]", "counting"),
        # In TorchRL, seeding requires a reset, which fails for collectors with nested flags.
        *(Program(f"NestedCountingEnv{s}", "nested counting", draws=True) for s in ("", " [3]")),
        Program("DiscreteActionConvMockEnv", "pixels"),
        *(Program(name, "three at once") for name in ("MultiAction", "SerialEnv, MultiAction")),
        Program("MultiAction", "three at once", {"max_frames_per_traj": 2}),
        *(Program(name, "counting in int64") for name in ("CountingEnv", "SerialEnv")),
        *(Program(name, "linear in float64") for name in ("GymWrapper", "Pendulum, InitTracker")),
        Program("one-hot CartPole", "Q values in float32"),
        Program("MultiKeyCountingEnv [2]", "random", draws=True),
        Program("SerialEnv", "counting", {"frames_per_batch": 7, "total_frames": 30}),
        Program("SerialEnv", "counting", {"reset_at_each_iter": True}),
        Program("SerialEnv transformed", "counting"),
        *(
            Program(name, policy, random_first, draws=True)
            for name, policy in (
                ("CountingEnv", "counting"),
                ("SerialEnv", "counting"),
                ("ContinuousActionVecMockEnv", "random"),
            )
        ),
    ]


ARGUMENTS: list[dict[str, Any]] = [
    {"total_frames": 130},
    {"frames_per_batch": 50, "total_frames": 150},
    {"frames_per_batch": 7, "total_frames": 60},
    {"max_frames_per_traj": 1},
    {"max_frames_per_traj": 7},
    {"max_frames_per_traj": -1, "init_random_frames": -1},
    {"set_truncated": True},
    {"set_truncated": True, "max_frames_per_traj": 7},
    {"split_trajs": True},
    {"split_trajs": True, "max_frames_per_traj": 7},
    {"reset_at_each_iter": True},
    {"reset_at_each_iter": True, "max_frames_per_traj": 7, "set_truncated": True},
    {"device": "cpu"},
    {"storing_device": "cpu"},
    {"policy_device": "cpu"},
    {"env_device": "cpu"},
    {"env_device": "cpu", "policy_device": "cpu"},
    {"trust_policy": True, "use_buffers": False, "no_cuda_sync": True, "reset_when_done": True},
    {"postproc": MultiStep(0.9, 3)},
    {"postproc": RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])},
    {"postproc": Reward2GoTransform(gamma=0.9)},
    {"postproc": RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]), "split_trajs": True},
]


def with_arguments() -> list[Program]:
    """Programs for every argument, for one env and for a batch of three."""
    return [
        Program(
            env,
            "greedy",
            arguments,
            # in TorchRL, padding has the id 0
            skipped=(IDS,) if "split_trajs" in arguments else (),
        )
        for arguments in ARGUMENTS
        for env in ("CartPole", "CartPole in a list")
    ] + [
        Program(env, "greedy", {"init_random_frames": FRAMES + 10}, acts_alike=False)
        for env in ("CartPole", "CartPole in a list")
    ]


PROGRAMS = [*pendulums(), *recurrent(), *discrete(), *spaces(), *torchrl_kinds(), *with_arguments()]

SYNC: dict[str, Any] = {"sync": True, "num_collectors": 1}
TWO: dict[str, Any] = {"sync": True, "num_collectors": 2}
ASYNC: dict[str, Any] = {"num_collectors": 1}
ON_RAY: list[tuple[Program, dict[str, Any]]] = [
    (Program("Pendulum", "linear"), SYNC),
    (Program("Pendulum", "private keys", {"max_frames_per_traj": 25}), TWO),
    (Program("CartPole", "greedy"), {**TWO, "cat_results": 0}),
    (Program("CartPole", "greedy", {"set_truncated": True}), {**TWO, "cat_results": -1}),
    (Program("CartPole in a list", "greedy", {"max_frames_per_traj": 7}), TWO),
    (Program("CartPole in a vector", "greedy"), {**SYNC, "update_after_each_batch": True}),
    (Program("GymWrapper", "module"), {**TWO, "collector_kwargs": {"num_threads": 1}}),
    (Program("one-hot CartPole", "Q values"), {**SYNC, "prefetch": 1}),
    (Program("sees nested Dict", "Discrete by place"), SYNC),
    (Program("Pendulum, StepCounter", "linear"), SYNC),
    (Program("CountingEnv [3]", "counting"), TWO),
    (Program("MountainCar", "random", acts_alike=False), SYNC),
    (Program("CartPole", "greedy", {"total_frames": 130}), ASYNC),
    (Program("takes MultiDiscrete", "MultiDiscrete"), {**ASYNC, "prefetch": 0}),
    (
        Program(
            "Pendulum, primed there",
            "GRU",
            {"exploration_type": ExplorationType.DETERMINISTIC},
            extra=NEXT_INIT,
        ),
        ASYNC,
    ),
]
