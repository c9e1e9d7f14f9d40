"""C++ environments in Python's collectors: batches equal the environments' own logs.

They use the same table as in C++; `tests/embed` has compiled ones.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from compiled_env_support import DiscreteEnvs, LoggedEnvs, chosen, frames_of
from raising import refused

import pycollect
from pycollect import MultiSyncDataCollector, SyncDataCollector
from pycollect.envs.make import make_env_batch


def collected(env: LoggedEnvs, policy: Any = chosen, batches: int = 3, **options: Any) -> list[Any]:
    options = {"frames_per_batch": 7 * env.num_envs, **options}
    total = batches * options["frames_per_batch"]
    with SyncDataCollector(env, policy, total_frames=total, **options) as collector:
        return [batch.clone() for batch in collector]


def ids_begin_with_episodes(batches: list[Any]) -> bool:
    """Return whether each episode of each environment has exactly one id."""
    cells = [
        (*row[:2], p, i)
        for batch in batches
        for p in range(len(batch))
        for row, i in zip(
            batch["observation"][p].tolist(),
            batch["collector", "traj_ids"][p].tolist(),
            strict=True,
        )
    ]
    return len({cell[3] for cell in cells}) == len({cell[1:3] for cell in cells}) == len(set(cells))


@pytest.mark.parametrize("envs", [1, 3])
def test_batches_equal_the_log_of_the_environments(envs: int) -> None:
    env = LoggedEnvs(envs)
    batches = collected(env)
    assert [tuple(batch.shape) for batch in batches] == [(envs, 7)] * 3
    for p in range(envs):
        seen = [frame for batch in batches for frame in frames_of(batch)[p]]
        assert seen == env.log[p]
        assert seen[0].root == [0, 0, 0]
    done = torch.cat([batch["next", "done"] for batch in batches], 1)
    flags = [
        torch.cat([b["next", name] for b in batches], 1) for name in ("terminated", "truncated")
    ]
    assert (done == flags[0] | flags[1]).all()
    assert flags[0].any()
    assert flags[1].any()
    assert ids_begin_with_episodes(batches)
    assert env.closed == 1


def test_actions_and_observations_of_several_leaves() -> None:
    class Several(LoggedEnvs):
        observation = ((("sensors", "count"), "int64", (3,)), (("level",), "float64", ()))
        action = ((("action", "push"), "float32", ()), (("action", "turn"), "uint8", (2,)))

    def policy(td: Any) -> Any:
        td["action", "push"] = chosen(td["sensors", "count"])
        td["action", "turn"] = torch.ones(3, 2, dtype=torch.uint8)
        return td

    env = Several(3)
    batch = collected(env, policy, batches=1)[0]
    assert batch["sensors", "count"].shape == (3, 7, 3)
    assert batch["level"].dtype == torch.float64
    assert batch["action", "push"].tolist() == [[f.action for f in log] for log in env.log]
    assert batch["action", "turn"].sum() == 3 * 7 * 2


def test_a_truncated_trajectory_is_reset_individually() -> None:
    env = LoggedEnvs(3)
    batches = collected(env, max_frames_per_traj=2)
    for p in range(3):
        log = [frame for batch in batches for frame in frames_of(batch)[p]]
        for frame, following in itertools.pairwise(log):
            over = frame.terminated or frame.truncated
            assert over == (frame.after[2] == 2 or frame.after[2] == p + frame.after[1] + 1)
            assert following.root[2] == (0 if over else frame.after[2])
    assert ids_begin_with_episodes(batches)


@pytest.mark.parametrize("each", [True, False])
def test_seeds(each: bool) -> None:
    def first(seed: int) -> tuple[LoggedEnvs, Any]:
        env = LoggedEnvs(3, each_seeded=each)
        with SyncDataCollector(env, chosen, frames_per_batch=21) as collector:
            collector.set_seed(seed)
            return env, next(iter(collector)).clone()

    (one, batch), (_, again), (other, _) = first(5), first(5), first(6)
    assert one.seeds[0] == 5
    assert len(set(one.seeds)) == (3 if each else 1)
    assert batch["observation"][:, 0, 0].tolist() == one.seeds
    assert (batch == again).all()
    assert other.seeds != one.seeds


def test_exceptions_of_environments_are_raised_and_collection_continues() -> None:
    env = LoggedEnvs(3)
    with SyncDataCollector(env, chosen, frames_per_batch=21, total_frames=63) as collector:
        batches = iter(collector)
        next(batches)
        env.raises_at = 1.0
        with pytest.raises(OverflowError, match="is too large"):
            next(batches)
        assert collector.ledger()["total"]["delivered"] == 21


def test_a_failure_without_an_exception_is_an_error() -> None:
    class Silent(LoggedEnvs):
        raises_at = 0.0

        def _raise(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="module"):
        collected(Silent())


def test_a_policy_may_overwrite_and_return_its_input() -> None:
    seen: list[Any] = []

    def policy(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = chosen(observation)
        seen.append(observation.clone())
        observation += 1000
        return action, observation

    env = LoggedEnvs(3)  # asserts that no other code writes its memory
    (batch,) = collected(env, policy, batches=1)
    assert frames_of(batch) == env.log
    assert (batch["output1"].movedim(1, 0) == torch.stack(seen[-7:]) + 1000).all()


def test_actions_of_other_layouts_are_converted() -> None:
    env = LoggedEnvs(3)

    def policy(observation: torch.Tensor) -> torch.Tensor:
        return chosen(observation).double().repeat(2, 1).T[:, 0]

    (batch,) = collected(env, policy, batches=1)
    assert frames_of(batch) == env.log
    assert batch["action"].dtype == torch.float32


def test_random_actions_need_a_space() -> None:
    with refused(ValueError, "policy") as caught:
        collected(LoggedEnvs(), None)
    assert "action_space" in str(caught.value)
    env = DiscreteEnvs(3)
    (batch,) = collected(env, None, batches=1)
    assert batch["action"].tolist() == [[f.action for f in log] for log in env.log]


def test_refused_arguments() -> None:
    class OtherForm(LoggedEnvs):
        form = 2

    class OwnKey(LoggedEnvs):
        observation = ((("reward",), "int64", (3,)),)

    class NoAction(LoggedEnvs):
        action = ()

    class OtherSpace(LoggedEnvs):
        action_space = DiscreteEnvs.action_space

    class Half(LoggedEnvs):
        observation = ((("observation",), "bfloat16", (3,)),)

    for kind, name, text in (
        (OtherForm, "create_env_fn", f"(pycollect {pycollect.__version__})"),
        (OtherForm, "create_env_fn", "(pycollect 9.8.7)"),
        (OwnKey, "create_env_fn", "'reward'"),
        (NoAction, "create_env_fn", "action"),
        (OtherSpace, "action_space", "Discrete(2)"),
        (Half, "create_env_fn", "bfloat16"),
    ):
        with refused(ValueError, name) as caught:
            make_env_batch(kind())
        assert text in str(caught.value)
    with refused(ValueError, "envs"):
        make_env_batch(LoggedEnvs(0))
    with refused(TypeError, "create_env_fn") as caught:
        make_env_batch([LoggedEnvs])
    assert "[0]" in str(caught.value)
    with refused(ValueError, "info_keys"):
        make_env_batch(LoggedEnvs, info_keys={("x",): None})


@pytest.mark.processes
def test_in_processes_with_seeds_of_their_own() -> None:
    with MultiSyncDataCollector(
        [LoggedEnvs, LoggedEnvs], chosen, frames_per_batch=42, total_frames=84
    ) as collector:
        collector.set_seed(3)
        batches = [batch.clone() for batch in collector]
    first = batches[0].reshape(6, 7)
    assert len(set(first["observation"][:, 0, 0].tolist())) == 6
    assert (first["action"] == chosen(first["observation"].flatten(0, 1)).reshape(6, 7)).all()
    assert first["collector", "traj_ids"].unique().numel() == len(
        {tuple(row[:2]) for row in first["observation"].flatten(0, 1).tolist()}
    )
