"""Full texts of errors and warnings, one per kind of check.

Only this file contains full sentences. Every other test checks an error's class, the argument it
names and the relevant values, so rewording a message changes one line here and nothing else.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from echo_envs import ENTRIES
from envs_for_tests import BoxActionEnv, CountingEnv, WrongObservationEnv
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from pycollect import (
    AsyncCollector,
    Collector,
    DistributedDataCollector,
    Evaluator,
    MultiStep,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
)
from pycollect.__main__ import main

pytestmark = pytest.mark.usefixtures("no_processes")


def single(**arguments: Any) -> SyncDataCollector:
    return SyncDataCollector(**{"create_env_fn": CountingEnv, "frames_per_batch": 6, **arguments})


def collect(**arguments: Any) -> None:
    with single(**arguments) as collector:
        collector.next()


def processes(cls: Any = MultiSyncDataCollector, **arguments: Any) -> None:
    cls(**{"create_env_fn": [CountingEnv] * 2, "frames_per_batch": 6, **arguments})


def central(**arguments: Any) -> None:
    processes(**{"policy": act, "inference": "central", **arguments})


def actors(**arguments: Any) -> None:
    pytest.importorskip("ray")
    processes(RayCollector, **arguments)


ranks = partial(processes, DistributedDataCollector, launcher="mp")
evaluator = partial(Evaluator, CountingEnv)


def act(observation: torch.Tensor) -> torch.Tensor:
    return (observation[..., 2] % 2).long()


def module(out: str = "action", read: str = "observation") -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(3, 2), [read], [out])


def takes_another_dtype(observation: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("expected scalar type Double but found Float")


class Bytes(CountingEnv):
    """An environment with a one-byte action."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(0, 255, (1,), np.uint8)


class OldReset(CountingEnv):
    """An environment with Gym's old reset, which returns only an observation."""

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class TwoRewards(CountingEnv):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward, reward], np.float32), *rest


class Telling(CountingEnv):
    """An environment that returns the same info entry in each step."""

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"x": 300}


def update(*weights: Any, policy: Any = None, **arguments: Any) -> None:
    own = {"policy": policy or module()}
    with single(create_env_fn=BoxActionEnv, **own) as collector:
        collector.update_policy_weights_(*weights, **arguments)


def with_collector(call: Callable[[Any], Any], **arguments: Any) -> None:
    with single(**arguments) as collector:
        call(collector)


def after_shutdown() -> None:
    collector = single()
    collector.shutdown()
    collector.next()


class Named(CountingEnv):
    """An object with a fixed repr."""

    def __str__(self) -> str:
        return "<Named>"

    __repr__ = __str__


same = Named()

# (call, error as in the last line of a traceback)
ERRORS: list[tuple[Callable[[], Any], str]] = [
    # Numbers
    (lambda: single(frames_per_batch=2.5), "TypeError: frames_per_batch: expected an int, got 2.5"),
    (lambda: single(total_frames=True), "TypeError: total_frames: expected an int, got True"),
    (
        lambda: single(frames_per_batch=0),
        "ValueError: frames_per_batch: expected an int >= 1, got 0",
    ),
    (
        lambda: processes(preemptive_threshold=1.5),
        "ValueError: preemptive_threshold: expected a number from 0 to 1, or None, got 1.5",
    ),
    (
        lambda: processes(worker_timeout=0),
        "ValueError: worker_timeout: expected a number of seconds > 0, got 0",
    ),
    (
        lambda: with_collector(lambda own: own.set_seed(-1)),
        "ValueError: seed: expected an int >= 0, got -1",
    ),
    # Other kinds of values
    (lambda: single(trust_policy="yes"), "TypeError: trust_policy: expected a bool, got 'yes'"),
    (
        lambda: single(traj_format="flat"),
        "ValueError: traj_format: must be 'padded' or 'cat', got 'flat'",
    ),
    (
        lambda: single(exploration_type="sideways"),
        "ValueError: exploration_type: expected DETERMINISTIC, RANDOM, MODE or MEAN, as a "
        "string or a member of ExplorationType, got 'sideways'",
    ),
    (lambda: single(postproc=3), "TypeError: postproc: expected a callable or None, got int"),
    (
        lambda: single(replay_buffer=len),
        "TypeError: replay_buffer: expected an object with extend(), got "
        "builtin_function_or_method",
    ),
    (
        lambda: single(policy=torch.nn.Linear),
        "TypeError: policy: expected a module or a callable, got the class Linear; pass an "
        "instance, or a callable that makes one as policy_factory",
    ),
    (
        lambda: single(policy_factory=torch.nn.Linear(3, 2)),
        "TypeError: policy_factory: expected a function that returns a policy, got a module "
        "(Linear); pass the module as policy",
    ),
    (
        lambda: single(compile_policy={"warmup": -1}),
        "ValueError: compile_policy: expected an int >= 0 for 'warmup', got -1",
    ),
    # Names of arguments
    (
        lambda: single(frame_per_batch=6),
        "TypeError: frame_per_batch: not an argument of SyncDataCollector; did you mean "
        "'frames_per_batch'?",
    ),
    (
        lambda: single(inferense="central"),
        "TypeError: inferense: not an argument of SyncDataCollector; 'inference' is an "
        "argument of MultiSyncDataCollector, MultiaSyncDataCollector, RayCollector",
    ),
    (lambda: single(xyzzy=3), "TypeError: xyzzy: not an argument of SyncDataCollector"),
    (
        lambda: AsyncCollector(frames_per_batch=4),
        "TypeError: create_env_fn: AsyncCollector requires this argument",
    ),
    (
        lambda: SyncDataCollector(CountingEnv, None, 6),  # type: ignore[misc]
        "TypeError: SyncDataCollector: too many positional arguments; pass them by name, for "
        "example frames_per_batch=1000",
    ),
    (
        lambda: single(inference="central"),
        "ValueError: inference: not an argument of SyncDataCollector; use "
        "MultiSyncDataCollector, MultiaSyncDataCollector or RayCollector(inference='central')",
    ),
    (
        lambda: single(reset_when_done=False),
        "ValueError: reset_when_done: expected True, got False; finished environments are "
        "always reset",
    ),
    # Devices
    (
        lambda: single(storing_device="meta"),
        "ValueError: storing_device: expected an available device, got meta: torch cannot "
        "store data on devices of type 'meta'",
    ),
    (
        lambda: processes(policy=torch.nn.Linear(3, 1, device="meta")),
        "ValueError: policy: expected parameters with values, but 'weight' is on the meta "
        "device; call its to_empty(device='cpu') and load weights",
    ),
    (
        lambda: processes(storing_device=["cpu"] * 3),
        "ValueError: storing_device: expected one value per worker (2), got 3",
    ),
    # Environments
    (
        lambda: single(create_env_fn=3),
        "TypeError: create_env_fn: expected a callable, a Gymnasium id, a list of these or an"
        " environment, got 3 (int)",
    ),
    (
        lambda: single(create_env_fn=[CountingEnv, same]),
        "TypeError: create_env_fn[1]: expected a callable that returns an environment, got "
        "the environment <Named> (Named); pass for example lambda: gymnasium.make(...)",
    ),
    (
        lambda: single(create_env_fn=int),
        "TypeError: create_env_fn: <class 'int'> returned 0 (int); expected a gymnasium.Env, "
        "a gymnasium.vector.VectorEnv, a PettingZoo environment, a TorchRL EnvBase or C++ "
        "environments (python_env.h)",
    ),
    (
        lambda: single(create_env_fn=":CartPole-v1"),
        "ValueError: create_env_fn: expected a Gymnasium id, got ':CartPole-v1': Empty module name",
    ),
    (
        lambda: single(create_env_fn=[lambda: same, lambda: same]),
        "ValueError: create_env_fn: environments [0, 1] are the same object, <Named> (Named);"
        " create a new environment in each call",
    ),
    (
        lambda: single(create_env_fn=[CountingEnv, BoxActionEnv]),
        "ValueError: create_env_fn: the environments of a list must have equal action spaces,"
        " got Discrete(2) from environment 0 and Box(-1.0, 1.0, (2,), float32) from "
        "environment 1",
    ),
    (
        lambda: single(create_env_fn=OldReset),
        "TypeError: reset: expected (observation, info), got ndarray; if the environment uses"
        " Gym's old interface, wrap it for Gymnasium",
    ),
    (
        lambda: single(create_env_fn=partial(WrongObservationEnv, lambda value: value[:2])),
        "ValueError: observation: 'observation': expected shape [3], as in the observation "
        "space of the environment, got [2] (float32)",
    ),
    (
        lambda: collect(create_env_fn=TwoRewards),
        "ValueError: reward: expected one number for each of 1 environments, got shape [2]; "
        "for a vector of rewards, give the environment a reward_space, a Box of shape [k]",
    ),
    # Policies
    (
        lambda: single(policy=module(read="pixels")),
        "ValueError: policy: it reads 'pixels', but the keys of the environment's observation"
        " are 'observation'",
    ),
    (
        lambda: single(policy=module("other")),
        "ValueError: policy: expected the output(s) 'action' for the environment, got 'other'",
    ),
    (
        lambda: single(policy=lambda other, one: other),
        "ValueError: policy: Arguments to policy.forward are incompatible with entries in the"
        " observation: the parameters (other, one) match the 1 key(s) 'observation' neither "
        "by name nor by position. Name the parameters after the keys, or use a "
        "TensorDictModule with in_keys; pass a function or class that makes the policy as "
        "policy_factory",
    ),
    (
        lambda: single(policy=lambda observation: observation),
        "ValueError: policy: 'action': expected shape [], got [3]",
    ),
    (
        lambda: single(policy=takes_another_dtype),
        "RuntimeError: policy: the first call, with 'observation' float32 [3], raised: "
        "expected scalar type Double but found Float",
    ),
    (
        lambda: collect(create_env_fn=Bytes, policy=lambda observation: -torch.ones(1)),
        "ValueError: policy: 'action': uint8 (0 to 255), the dtype of the action space, "
        "cannot hold -1.0 (float32); clip the action in the policy",
    ),
    # Weights
    (
        lambda: update({"no such weight": torch.zeros(1)}),
        "ValueError: policy_or_weights: expected the names of the policy's parameters and "
        "buffers; missing: ['module.bias', 'module.weight'], unknown: ['no such weight']",
    ),
    # Infos
    (
        lambda: single(info_keys=["reward"]),
        "ValueError: info_keys: the key 'reward' is reserved for the collector (reserved "
        "keys: action, collector, done, next, reward, terminated, truncated)",
    ),
    (
        lambda: collect(create_env_fn=Telling, info_keys={"x": torch.int8}),
        "ValueError: info_keys: expected int8 of shape [] for 'x', got 300 (int); int8 cannot"
        " hold 300, so pass another dtype, for example info_keys={'x': torch.int64}",
    ),
    # Batches and trajectories
    (
        lambda: single(drop_uncollected=True, split_trajs=True),
        "ValueError: drop_uncollected: expected False with split_trajs, got True; batches of "
        "trajectories already leave out uncollected cells",
    ),
    (
        lambda: single(traj_format="cat"),
        "ValueError: traj_format: 'cat' requires trajs_per_batch, got trajs_per_batch=None; "
        "pass it, or use 'padded'",
    ),
    (lambda: MultiStep(0.9, 0), "ValueError: n_steps: expected an int >= 1, got 0"),
    (
        lambda: collect(postproc=lambda td: None),
        "TypeError: postproc: expected a function that returns the batch, got one that "
        "returned None",
    ),
    # Calls at the wrong time
    (
        lambda: with_collector(lambda own: own.start()),
        "RuntimeError: start: needs a replay buffer to fill; pass replay_buffer to the collector",
    ),
    (
        after_shutdown,
        "RuntimeError: the collector was shut down; create a new one to collect batches",
    ),
    # Several workers
    (
        lambda: processes(create_env_fn=CountingEnv),
        "ValueError: num_workers: expected a number of workers, because create_env_fn is not "
        "a list",
    ),
    (
        lambda: Collector(CountingEnv, frames_per_batch=6, sync=False),
        "ValueError: sync: expected None with backend='direct', the default without "
        "num_collectors, got False",
    ),
    (
        lambda: Collector(CountingEnv, frames_per_batch=6, backend="thread"),
        "ValueError: backend: expected None or one of ['direct', 'process', 'ray', 'rpc', "
        "'distributed', 'submitit'], got 'thread'",
    ),
    (
        lambda: central(policy=None),
        "ValueError: inference: expected None without a policy, got 'central'; the workers "
        "draw random actions themselves",
    ),
    # Other collectors
    (
        lambda: evaluator(num_workers=2),
        "ValueError: num_workers: expected 1 with backend='thread', got 2",
    ),
    (
        lambda: evaluator(collector_kwargs={"total_frames": 30}),
        "ValueError: collector_kwargs: cannot contain 'total_frames'; an Evaluator counts "
        "whole episodes of the policy, so it needs unlimited, unmodified batches",
    ),
    (
        lambda: actors(remote_configs={"num_cpus": "two"}),
        "ValueError: remote_configs: expected a number >= 0 for 'num_cpus', got 'two'",
    ),
    (
        lambda: actors(collector_kwargs={"policy": None}),
        "ValueError: collector_kwargs: 'policy' cannot be set for each worker; pass it to the"
        " collector itself",
    ),
    (
        lambda: ranks(slurm_kwargs={}),
        "ValueError: slurm_kwargs: expected None with the launcher 'mp', got {}",
    ),
    (
        lambda: ranks(tcp_port=1 << 16),
        "ValueError: tcp_port: expected a number from 0 to 65535, or None, got 65536",
    ),
]

# (call, full text)
WARNINGS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: single(create_env_fn=[CountingEnv] * 2, frames_per_batch=5),
        "frames_per_batch: 5 frames cannot be divided equally among the environments; "
        "batches have 6 frames",
    ),
    (
        lambda: single(create_env_fn=ENTRIES["ignores masks"](0), frames_per_batch=9),
        "create_env_fn: this vector environment uses NEXT_STEP autoreset; its reset "
        "steps are not frames, so ('collector', 'mask') is False there. To leave them "
        "out, use drop_uncollected=True, or the autoreset mode SAME_STEP or DISABLED",
    ),
    (
        lambda: single(info_keys=["absent"]),
        "info_keys: the first step's info has no 'absent', so objects are recorded (None "
        "for missing entries). To record tensors, pass a dtype, for example "
        "info_keys={'absent': torch.float32}",
    ),
]


def name(value: Any) -> str:
    """Return the first name in a message, as the id of its test case."""
    text = re.sub(r"^\w+Error: ", "", value) if isinstance(value, str) else ""
    return text.partition(":")[0]


@pytest.mark.parametrize(("call", "error"), ERRORS, ids=name)
def test_errors(call: Callable[[], Any], error: str) -> None:
    kind, _, text = error.partition(": ")
    with pytest.raises(getattr(builtins, kind)) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(("call", "text"), WARNINGS, ids=name)
def test_warnings(call: Callable[[], Any], text: str, recwarn: pytest.WarningsRecorder) -> None:
    call().shutdown()
    assert text in [str(own.message) for own in recwarn]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "cpu", "--workers", "0"])
    (*_, text) = capsys.readouterr().err.splitlines()
    assert text.endswith(": error: --workers: expected numbers of at least 1, got 0")
