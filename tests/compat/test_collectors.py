"""Requirements from TorchRL's own collector tests, checked for both libraries.

See also `test_programs.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import warned
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from program_envs import ENVS
from program_policies import POLICIES
from programs import Program
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    EnvCreator,
    ExplorationType,
    GymEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    set_exploration_type,
)
from torchrl_support import IDS

OURS = pycollect.SyncDataCollector
BOTH = pytest.mark.parametrize("kind", [OURS, Collector], ids=["ours", "torchrl"])
SEED = 11

pytestmark = [
    pytest.mark.filterwarnings("ignore:total_frames:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to Collector:FutureWarning"),
]


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ("Pendulum, 25 steps", "linear"),
        ("CartPole", "greedy"),
        ("CartPole in a list", "greedy"),
        ("Pendulum, StepCounter", "linear"),
        ("one-hot CartPole", "Q values"),
        ("sees nested Dict", "Discrete by place"),
        ("CountingEnv", "counting"),
    ],
)
def test_as_a_rollout_of_the_env(env: str, policy: str) -> None:
    """Compare with `env.rollout`, which resets at each done and does nothing else between steps."""
    (batch, *_) = Program(env, policy).collected_by(OURS, SEED).batches
    torch.manual_seed(0)
    act = POLICIES[policy]()
    there = ENVS[env].theirs(act)()
    there.set_seed(SEED)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        rollout = there.rollout(batch.shape[-1], act, break_when_any_done=False)
    assert set(rollout.keys(True, True)) == set(batch.keys(True, True)) - {IDS}
    for key in rollout.keys(True, True):
        torch.testing.assert_close(batch[key], rollout[key], rtol=0, atol=0, msg=str(key))


@BOTH
@pytest.mark.parametrize(
    ("env", "policy", "arguments"),
    [
        ("CartPole", "greedy", {}),
        ("CartPole", "greedy", {"max_frames_per_traj": 7}),
        ("CartPole in a list", "greedy", {}),
        ("SerialEnv", "counting", {"max_frames_per_traj": 4}),
        ("Pendulum, primed", "GRU", {"exploration_type": ExplorationType.DETERMINISTIC}),
    ],
    ids=str,
)
def test_frames_do_not_depend_on_the_batch_size(
    kind: Any, env: str, policy: str, arguments: dict[str, Any]
) -> None:
    streams = [
        torch.cat(
            Program(env, policy, {**arguments, "frames_per_batch": frames, "total_frames": 120})
            .collected_by(kind)
            .batches,
            -1,
        )
        for frames in (120, 60, 30, 6)
    ]
    for stream in streams[1:]:
        assert stream.shape == streams[0].shape
        for key, value in streams[0].items(True, True):
            if key == IDS and kind is OURS and env != "CartPole":
                continue  # numbered by env within each batch
            assert torch.equal(stream[key], value), key


@BOTH
def test_reset_observations_are_at_the_root_and_terminal_ones_under_next(kind: Any) -> None:
    for batch in Program("CartPole in a list", "greedy").collected_by(kind).batches:
        done = batch["next", "done"].squeeze(-1)
        root, following = batch["observation"][:, 1:], batch["next", "observation"][:, :-1]
        goes_on = (root == following).all(-1)
        assert torch.equal(goes_on, ~done[:, :-1])
        assert not batch["done"].any()
        assert (root[done[:, :-1]].abs() <= 0.05).all()  # the initial range of CartPole


def ones(td: TensorDictBase) -> TensorDictBase:
    """The action with which TorchRL's counting environments count."""
    return td.set("action", torch.ones((*td.batch_size, 1), dtype=torch.int8))


@BOTH
@pytest.mark.parametrize("policy", ["linear", "normal", "actor and value", "private keys"])
def test_output_keys(kind: Any, policy: str) -> None:
    """Batches contain all outputs of the policy, except keys that begin with "_"."""
    (batch, *_) = Program("Pendulum", policy, draws=True).collected_by(kind).batches
    flags = {"done", "terminated", "truncated"}
    env = {"observation", *flags, *(("next", flag) for flag in flags)}
    env |= {("next", "observation"), ("next", "reward"), IDS}
    outputs = {
        "linear": {"action"},
        "normal": {"action", "loc", "scale", "action_log_prob"},
        "actor and value": {
            *("hidden", "action", "loc", "scale", "action_log_prob"),
            "state_value",
        },
        "private keys": {"action", ("deep", "seen")},
    }
    assert set(batch.keys(True, True)) == env | outputs[policy]


@BOTH
def test_an_error_of_the_env_reaches_the_caller(kind: Any) -> None:
    collector = kind(mock.EnvThatErrorsAfter10Iters(), None, frames_per_batch=4, total_frames=20)
    iterator = iter(collector)
    assert all(next(iterator).shape == (4,) for _ in range(2))
    with pytest.raises(RuntimeError, match="max steps"):
        next(iterator)
    collector.shutdown()


@BOTH
def test_trajectories_are_cut_at_the_limit(kind: Any) -> None:
    program = Program("CartPole in a list", "greedy", {"max_frames_per_traj": 7})
    for batch in program.collected_by(kind).batches:
        counts = batch["next", "step_count"]
        assert (counts >= 1).all()
        assert (counts <= 7).all()
        assert torch.equal(batch["next", "truncated"], counts == 7)
        assert torch.equal(
            batch["next", "done"], batch["next", "truncated"] | batch["next", "terminated"]
        )


@BOTH
def test_hooks_are_called_around_each_rollout(kind: Any) -> None:
    """The post-collect hook receives the batch after `postproc`, and may change it."""
    calls: list[Any] = []

    def note(td: TensorDictBase) -> TensorDictBase:
        calls.append("postproc")
        return td.set("new", td["observation"].float())

    def after(td: TensorDictBase) -> None:
        calls.append(("after", td.shape, set(td.keys()) >= {"new"}))
        td["new"] += 100

    collector = kind(
        ENVS["CountingEnv"].theirs(None)(),
        ones,
        frames_per_batch=4,
        total_frames=8,
        postproc=note,
        pre_collect_hook=lambda: calls.append("before"),
        post_collect_hook=after,
    )
    batches = list(collector)
    collector.shutdown()
    assert calls == ["before", "postproc", ("after", (4,), True)] * 2
    assert all(torch.equal(td["new"], td["observation"].float() + 100) for td in batches)


@BOTH
def test_a_hook_gets_the_batches_of_a_replay_buffer(kind: Any) -> None:
    seen: list[TensorDictBase] = []
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    collector = kind(
        ENVS["CountingEnv"].theirs(None)(),
        ones,
        frames_per_batch=4,
        total_frames=8,
        replay_buffer=buffer,
        post_collect_hook=lambda td: seen.append(td.clone()),
    )
    assert list(collector) == [None, None]
    collector.shutdown()
    assert torch.equal(torch.cat(seen)["observation"], buffer[:]["observation"])


@pytest.mark.parametrize("kind", [OURS, MultiSyncCollector], ids=["ours", "torchrl"])
def test_init_fn_runs_before_the_env_is_made(kind: Any, tmp_path: Path) -> None:
    """In TorchRL, only collectors with processes of their own accept it."""
    diary = tmp_path / "diary"

    def write(line: str) -> None:
        with open(diary, "a") as file:
            file.write(f"{line} in {os.getpid()}\n")

    def make() -> Any:
        write("env")
        return mock.CountingEnv()

    policy = TensorDictModule(
        lambda seen: (seen * 0 + 1).to(torch.int8), ["observation"], ["action"]
    )
    entry = make if kind is OURS else [EnvCreator(make)]
    collector = kind(
        entry, policy, frames_per_batch=4, total_frames=4, init_fn=lambda: write("init")
    )
    assert [batch.numel() for batch in collector] == [4]
    collector.shutdown()
    lines = diary.read_text().splitlines()
    (init,) = (line for line in lines if line.startswith("init"))
    worker = [line for line in lines if line.split()[-1] == init.split()[-1]]
    assert [line.split()[0] for line in worker[:2]] == ["init", "env"]


def test_complete_trajectories_of_torchrls_envs() -> None:
    """A time limit is found in a transform or in the Gymnasium env inside; otherwise warn."""

    def pendulum() -> GymEnv:
        return GymEnv("Pendulum-v1")

    bounded = [
        pendulum,
        lambda: TransformedEnv(pendulum(), RewardSum()),
        lambda: TransformedEnv(mock.ContinuousActionVecMockEnv(), StepCounter(5)),
        [pendulum, pendulum],
        lambda: SerialEnv(2, pendulum),
    ]
    for make in bounded:
        collector = pycollect.SyncDataCollector(make, None, frames_per_batch=200, trajs_per_batch=1)
        assert collector.next()["next", "done"].any()
        collector.shutdown()
    endless = mock.ContinuousActionVecMockEnv
    for make in (endless, lambda: SerialEnv(2, endless)):
        with warned("trajs_per_batch"):
            collector = pycollect.SyncDataCollector(
                make, None, frames_per_batch=10, total_frames=30, trajs_per_batch=1
            )
        collector.shutdown()
