"""Vector rewards: frame by frame with every collector, and the batch options that use them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_0,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    STEPS,
    SYNC_WAYS,
    FrameOracle,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import LENGTHS, EchoEnv, envs_of
from envs_for_tests import CountingVectorEnv
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import TimeLimit, TransformReward
from raising import refused
from tensordict import TensorDict
from vector_reward_envs import (
    ENTRIES,
    WEIGHTS,
    SeveralEnv,
    SeveralPool,
    SeveralRows,
    SeveralSync,
    fns,
    several,
    vector,
)

from pycollect import (
    AsyncBatchedCollector,
    Evaluator,
    MultiStep,
    MultiSyncDataCollector,
    StatsWriter,
    SyncDataCollector,
    split_trajectories,
)

WAYS = marked(MULTI_STACK, MULTI_0, MULTI_ASYNC[2], STACK, ASYNC[1])


def scalar(td: TensorDict) -> TensorDict:
    """Return the batch with its first reward only, after a check of the others."""
    rewards = td["next", "reward"]
    assert rewards.shape == (*td.shape, len(WEIGHTS))
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, rewards[..., :1] * torch.tensor(WEIGHTS).float())
    td = td.exclude("zero", ("next", "zero"))
    return td.set(("next", "reward"), rewards[..., :1])


def check_frames(way: Way, kind: str, max_frames: int = 0, **arguments: Any) -> None:
    envs, batched = envs_of(kind.partition(",")[0])
    oracle = FrameOracle(max_frames=max_frames, skips=kind == "ignores masks")
    if max_frames:
        arguments["max_frames_per_traj"] = max_frames
    with collecting(
        way, ENTRIES[kind], parity_policy(), frames=envs * STEPS, **arguments
    ) as collector:
        for _ in range(4 * (1 if way.sync or not way.remote else way.workers)):
            td = collector.next()
            oracle.check(way.rows(scalar(td), envs, batched))
        check_returns(collector.stats()["episode_return"])


def check_returns(returns: Any) -> None:
    assert isinstance(returns, list)
    assert all(type(value) is float for value in returns)
    np.testing.assert_allclose(returns, returns[0] * WEIGHTS)


@pytest.mark.parametrize("max_frames", [0, 2])
@pytest.mark.parametrize("kind", ENTRIES)
def test_every_frame_in_process(kind: str, max_frames: int) -> None:
    if kind == "ignores masks" and max_frames:
        pytest.skip("its rows cannot be reset")
    check_frames(IN_PROCESS, kind, max_frames)


@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("way", WAYS)
def test_every_frame_from_workers(way: Way, kind: str) -> None:
    check_frames(way, kind)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sync SAME_STEP", "pool", "ignores masks"])
def test_every_frame_of_vector_environments_from_workers(kind: str) -> None:
    check_frames(MULTI_STACK, kind)


@pytest.mark.processes
def test_every_frame_of_two_groups() -> None:
    oracle = FrameOracle()
    with collecting(
        MULTI_STACK,
        ENTRIES["list"],
        parity_policy(),
        frames=3 * STEPS,
        inference="central",
        env_groups=2,
    ) as collector:
        for _ in range(4):
            oracle.check(MULTI_STACK.rows(scalar(collector.next()), 3, True))


@pytest.mark.processes
def test_an_async_batched_collector() -> None:
    with AsyncBatchedCollector(
        fns(0, SeveralEnv, 2), policy=parity_policy(), frames_per_batch=12, total_frames=48
    ) as collector:
        for td in collector:
            reward = td["next", "observation"][..., 2] + 100 * td["action"]
            expected = torch.as_tensor(several(reward.numpy())).float()
            assert torch.equal(td["next", "reward"], expected)


# Returns and batch options


def episode() -> list[float]:
    """Return the returns of an episode of 4 steps with action 0."""
    return (10.0 * WEIGHTS).tolist()


def zeros(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize("way", SYNC_WAYS)
@pytest.mark.parametrize("is_list", [False, True])
def test_each_objective_has_its_return(way: Way, is_list: bool) -> None:
    one = partial(SeveralEnv, 0, (4,))
    entry: Any = [one, one] if is_list else one
    frames = 16 if is_list else 8
    with collecting(way, lambda worker: entry, zeros, frames=frames) as collector:
        assert collector.stats()["episode_return"] is None
        collector.next()
        assert collector.stats()["episode_return"] == episode()


def test_a_reward_space_of_one_number_has_one_return() -> None:
    class OneEnv(EchoEnv):
        reward_space = spaces.Box(-1, 1, (1,), np.float32)

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward], np.float32), *rest

    class OneRows(CountingVectorEnv):
        single_reward_space = OneEnv.reward_space

        def step(self, *given: Any) -> Any:
            observation, reward, *rest = super().step(*given)
            return observation, reward[:, None], *rest

    one = partial(OneEnv, 0, (4,))
    for entry in (one, [one] * 2, lambda: OneRows([EchoEnv(0, (4,))] * 1, "SAME_STEP")):
        with SyncDataCollector(entry, zeros, frames_per_batch=8, total_frames=8) as collector:
            assert collector.next()["next", "reward"].shape[-1] == 1
            assert collector.stats()["episode_return"] == 10.0


def test_a_stats_writer_has_a_column_per_objective(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    with (
        SyncDataCollector(
            partial(SeveralEnv, 0, (4,)), zeros, frames_per_batch=8, total_frames=8
        ) as collector,
        StatsWriter(path) as writer,
    ):
        collector.next()
        writer.write(collector)
    (row,) = csv.DictReader(path.open())
    assert [float(row[f"episode_return/{k}"]) for k in range(3)] == episode()


def test_progress_shows_all_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with SyncDataCollector(
        partial(SeveralEnv, 0, (4,)), zeros, frames_per_batch=8, total_frames=8, progress=True
    ) as collector:
        list(collector)
    assert "return=10.0 -5.0" in capsys.readouterr().err


@pytest.mark.processes
def test_an_evaluator_reports_their_sum() -> None:
    def per_objective(td: TensorDict) -> dict[str, float]:
        mask = td["collector", "mask"].unsqueeze(-1)
        returns = (td["next", "reward"] * mask).sum(1).mean(0)
        return {f"return_{k}": value for k, value in enumerate(returns.tolist())}

    with Evaluator(
        partial(SeveralEnv, 0, (4,)), zeros, num_trajectories=2, metrics_fn=per_objective
    ) as evaluator:
        result = evaluator.evaluate()
    assert result["eval/reward"] == sum(episode())
    assert [result[f"eval/return_{k}"] for k in range(3)] == episode()


@pytest.mark.parametrize("kind", ["one", "list", "rows SAME_STEP"])
def test_trajectories_keep_all_rewards(kind: str) -> None:
    envs, _ = envs_of(kind)
    with SyncDataCollector(
        ENTRIES[kind](0), zeros, frames_per_batch=envs * 16, total_frames=-1
    ) as collector:
        td = collector.next()
    split = split_trajectories(td)
    mask = split["collector", "mask"]
    expected = torch.as_tensor(several(split["next", "observation"][..., 2].numpy())).float()
    assert torch.equal(split["next", "reward"][mask], expected[mask])
    assert not split["next", "reward"][~mask].any()


@pytest.mark.parametrize("kind", ["one", "list"])
def test_complete_trajectories(kind: str) -> None:
    with SyncDataCollector(
        ENTRIES[kind](0), zeros, frames_per_batch=12, total_frames=-1, trajs_per_batch=3
    ) as collector:
        td = collector.next()
    mask = td["collector", "mask"]
    expected = torch.as_tensor(several(td["next", "observation"][..., 2].numpy())).float()
    assert torch.equal(td["next", "reward"][mask], expected[mask])


def test_multi_step_sums_each_objective() -> None:
    with SyncDataCollector(
        ENTRIES["list"](0), zeros, frames_per_batch=48, total_frames=-1, postproc=MultiStep(0.5, 2)
    ) as collector:
        td = collector.next()
    step = td["observation"][..., 2]
    two = (td["steps_to_next_obs"] == 2).squeeze(-1)
    expected = (step + 1) + torch.where(two, 0.5 * (step + 2), 0.0)
    torch.testing.assert_close(
        td["next", "reward"], torch.as_tensor(several(expected.numpy())).float()
    )
    assert two.any()
    assert not two.all()


# Environments with vector rewards


class Half(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A user's wrapper that keeps the shape of the rewards."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward / 2, *rest


class SumOfRows(VectorWrapper):
    def step(self, actions: Any) -> Any:
        observation, reward, *rest = super().step(actions)
        return observation, reward.sum(-1), *rest


def total(env: Any) -> Any:
    return TransformReward(env, lambda reward: float(reward.sum()))


@pytest.mark.parametrize(
    ("entry", "numbers"),
    [
        (lambda: TimeLimit(SeveralEnv(0, LENGTHS), 9), 3),
        (lambda: Half(TimeLimit(SeveralEnv(0, LENGTHS), 9)), 3),
        (lambda: total(SeveralEnv(0, LENGTHS)), 1),
        (lambda: TimeLimit(total(Half(SeveralEnv(0, LENGTHS))), 9), 1),
        ([lambda: Half(SeveralEnv(0, LENGTHS))], 3),
        ([lambda: total(SeveralEnv(0, LENGTHS))], 1),
        (lambda: VectorWrapper(vector(0, SeveralRows, "NEXT_STEP")), 3),
        (lambda: VectorWrapper(vector(0, SeveralSync, "SAME_STEP")), 3),
        (lambda: SumOfRows(vector(0, SeveralRows, "SAME_STEP")), 1),
        (lambda: SumOfRows(vector(0, SeveralPool, "NEXT_STEP")), 1),
        (lambda: SyncVectorEnv([lambda: total(SeveralEnv(0, LENGTHS))] * 2), 1),
    ],
)
def test_wrappers(entry: Any, numbers: int) -> None:
    with SyncDataCollector(entry, None, frames_per_batch=24, total_frames=24) as collector:
        assert collector.next()["next", "reward"].shape[-1] == numbers


def test_only_wrappers_that_may_change_rewards_cost_a_step() -> None:
    for wrap, steps in ((partial(TimeLimit, max_episode_steps=9), 0), (Half, 1)):
        env = SeveralEnv(0, LENGTHS)
        with SyncDataCollector(wrap(env), frames_per_batch=8):
            assert len(env.actions) == steps


class Undeclared(SeveralEnv):
    reward_space: Any = None


class OtherKind(SeveralEnv):
    """An environment with a `reward_space` of another meaning."""

    reward_space: Any = "return"


class UndeclaredRows(SeveralRows):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_space = None


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK))
@pytest.mark.parametrize(
    "entry",
    [
        partial(Undeclared, 0, LENGTHS),
        [partial(Undeclared, 0, LENGTHS)] * 2,
        partial(OtherKind, 0, LENGTHS),
        [partial(OtherKind, 0, LENGTHS)] * 2,
        partial(vector, 0, UndeclaredRows, "SAME_STEP"),
    ],
)
def test_a_vector_without_a_reward_space_is_refused(way: Way, entry: Any) -> None:
    with (
        refused(ValueError, "reward") as caught,
        collecting(way, lambda worker: entry, frames=8) as collector,
    ):
        collector.next()
    assert "reward_space" in str(caught.value)


def of_form(reward: Callable[[float], Any], base: type[EchoEnv] = SeveralEnv) -> Any:
    class FormEnv(base):  # type: ignore[misc, valid-type]
        def step(self, action: Any) -> Any:
            observation, own, *rest = EchoEnv.step(self, action)
            return observation, reward(own), *rest

    return partial(FormEnv, 0, LENGTHS)


@pytest.mark.parametrize(
    "reward",
    [float, lambda r: np.full(2, r), lambda r: np.full((1, 3), r), lambda r: [r, r]],
    ids=["number", "two", "row", "list of two"],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_rewards_of_another_shape_are_refused(reward: Any, is_list: bool) -> None:
    one = of_form(reward)
    with (
        refused(ValueError, "reward") as caught,
        SyncDataCollector([one, one] if is_list else one, frames_per_batch=8) as collector,
    ):
        collector.next()
    assert "reward_space" in str(caught.value)


def test_rows_of_another_shape_are_refused() -> None:
    class TwoRows(SeveralRows):
        def step(self, *given: Any) -> Any:
            observation, reward, *rest = super().step(*given)
            return observation, reward[:, :2], *rest

    with refused(ValueError, "reward") as caught:
        SyncDataCollector(lambda: vector(0, TwoRows, "SAME_STEP"), frames_per_batch=9)
    assert "reward_space" in str(caught.value)


@pytest.mark.parametrize(
    "reward",
    [
        lambda r: np.asarray(several(r), np.float32),
        lambda r: np.asarray(several(2 * r), np.int64) / 2,
        lambda r: torch.as_tensor(several(r)),
        lambda r: tuple(several(r)),
        lambda r: np.asarray(several(np.array([r, r])), np.float64)[0],
    ],
    ids=["float32", "other", "tensor", "tuple", "view"],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_rewards_of_any_type(reward: Any, is_list: bool) -> None:
    one = of_form(reward)
    with SyncDataCollector(
        [one, one] if is_list else one, zeros, frames_per_batch=16, total_frames=16
    ) as collector:
        scalar(collector.next())


class OneEnv(EchoEnv):
    """Declares rewards of shape [1], and converts them with `convert`."""

    reward_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    convert: Any = None

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, type(self).convert(reward), *rest


class OneOfNestedActions(OneEnv):
    """A OneEnv that is stepped by the general code."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.action_space = spaces.Tuple((self.action_space,))

    def step(self, action: Any) -> Any:
        return super().step(action[0])


@pytest.mark.parametrize(
    "reward",
    [float, lambda r: np.array([r]), lambda r: torch.tensor([r]), lambda r: [r]],
    ids=["number", "array", "tensor", "list"],
)
@pytest.mark.parametrize("base", [OneEnv, OneOfNestedActions])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_declared_reward_of_one_number(reward: Any, base: Any, is_list: bool) -> None:
    kind = type("Kind", (base,), {"convert": staticmethod(reward)})
    one = partial(kind, 0, LENGTHS)
    with SyncDataCollector(
        [one, partial(kind, 1, LENGTHS)] if is_list else one, frames_per_batch=8
    ) as collector:
        td = collector.next()
    action = td["action", "0"] if base is OneOfNestedActions else td["action"]
    expected = td["next", "observation"][..., 2] + 100 * action
    assert torch.equal(td["next", "reward"], expected.unsqueeze(-1).float())


@pytest.mark.parametrize("base", [EchoEnv, OneOfNestedActions])
@pytest.mark.parametrize("is_list", [False, True])
def test_an_int_that_exceeds_an_int64_is_recorded_as_a_float(base: Any, is_list: bool) -> None:
    convert = {"convert": staticmethod(lambda reward: 10**30), "reward_space": None}
    made = (
        of_form(lambda reward: 10**30, base)
        if base is EchoEnv
        else partial(type("Kind", (base,), convert), 0, LENGTHS)
    )
    entry = [made, made] if is_list else made
    with SyncDataCollector(entry, frames_per_batch=8) as collector:
        assert (collector.next()["next", "reward"] == 1e30).all()


def test_a_list_needs_rewards_of_one_shape() -> None:
    other = of_form(float, EchoEnv)
    with refused(ValueError, "create_env_fn"):
        SyncDataCollector([partial(SeveralEnv, 0, LENGTHS), other], frames_per_batch=8)


@pytest.mark.processes
def test_a_sync_collector_needs_rewards_of_one_shape() -> None:
    with refused(ValueError, "create_env_fn"):
        MultiSyncDataCollector(
            [partial(SeveralEnv, 0, LENGTHS), partial(EchoEnv, 10, LENGTHS)], frames_per_batch=8
        )


def test_the_schemes_environments_refuse_them() -> None:
    from pycollect.scheme.gym import GymEnvs

    with refused(ValueError, "entry"):
        GymEnvs(fns(0, SeveralEnv), torch.device("cpu"))


def test_info_entries_with_several_rewards() -> None:
    class Told(SeveralEnv):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"told": 3.0}

    with SyncDataCollector(
        partial(Told, 0, LENGTHS), zeros, frames_per_batch=8, total_frames=8, info_keys=["told"]
    ) as collector:
        td = collector.next()
    scalar(td)
    assert (td["next", "told"] == 3).all()
