"""PettingZoo environments: groups of agents, frame by frame, with every collector."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from agent_envs import GROUPS, KINDS, Crowd, Informed, crowd_fns, reward_of
from collect_support import (
    ASYNC,
    CENTRAL,
    CENTRAL_ASYNC,
    IN_PROCESS,
    MULTI_0,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    STEPS,
    Way,
    collecting,
    marks_of,
    of_ranks,
)
from collect_support import GROUPS as IN_GROUPS
from crowd_oracle import FLAGS, CrowdOracle, choose, policy_of
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from pycollect import AsyncBatchedCollector, MultiStep, SyncDataCollector, split_trajectories
from pycollect.envs.make import make_env_batch


def check(
    way: Way, kind: str, policy: Any, *, listed: bool = True, limit: int = 0, batches: int = 3
) -> None:
    envs = 3 if listed else 1
    oracle = CrowdOracle(kind, policy is not None, limit)
    with collecting(
        way,
        lambda worker: crowd_fns(kind, worker) if listed else crowd_fns(kind, worker)[0],
        policy,
        frames=envs * STEPS,
        max_frames_per_traj=limit or None,
    ) as collector:
        for _ in range(batches):
            td = collector.next()
            assert td.shape == way.shape(envs, listed, STEPS)
            for group, agents in GROUPS[kind].items():
                assert td[group].shape == td["next", group].shape == (*td.shape, len(agents))
            oracle.check(way.rows(td, envs, listed))
        assert oracle.frames == collector.stats()["frames"] or not way.sync


@pytest.mark.parametrize("acting", [True, False], ids=["policy", "random"])
@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("listed", [True, False], ids=["list", "one"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_in_process(kind: str, listed: bool, limit: int, acting: bool) -> None:
    policy = policy_of(kind) if acting else None
    check(IN_PROCESS, kind, policy, listed=listed, limit=limit, batches=5)


WAYS: list[tuple[Way, str, bool, int]] = [
    (MULTI_STACK, "leaves", True, 0),
    (MULTI_0, "objectives", False, 2),
    (MULTI_TIME, "different", True, 0),
    (MULTI_ASYNC[1], "joins", True, 2),
    (MULTI_ASYNC[2], "masked", False, 0),
    (CENTRAL, "leaves", True, 2),
    (CENTRAL, "different", False, 0),
    (CENTRAL_ASYNC, "joins", True, 0),
    (IN_GROUPS, "masked", True, 0),
    *((way, "leaves", True, 0) for way in of_ranks(MULTI_STACK)),
    (STACK, "leaves", True, 0),
    (ASYNC[1], "different", False, 2),
]


@pytest.mark.parametrize(
    ("way", "kind", "listed", "limit"),
    [pytest.param(*case, marks=marks_of(case[0]), id=f"{case[0].name} {case[1]}") for case in WAYS],
)
def test_every_frame_in_every_way(way: Way, kind: str, listed: bool, limit: int) -> None:
    check(way, kind, policy_of(kind), listed=listed, limit=limit)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["leaves", "masked"])
def test_random_actions_in_processes(kind: str) -> None:
    check(MULTI_STACK, kind, None)


@pytest.mark.processes
def test_batches_of_any_environments() -> None:
    oracle = CrowdOracle("leaves")
    with AsyncBatchedCollector(
        crowd_fns("leaves", 0, 4),
        policy=policy_of("leaves"),
        frames_per_batch=28,
        total_frames=28 * 4,
        transition_chunk_size=STEPS,
    ) as collector:
        for td in collector:
            assert td.shape == (28,)
            rows = [(None, 0, row) for row in td.split(STEPS)]
            oracle.check(rows)
            assert {int(row["env_index"][0]) for *_, row in rows} <= set(range(4))
    assert oracle.frames == 28 * 4


def collector_of(kind: str = "alike", policy: Any = None, **arguments: Any) -> SyncDataCollector:
    arguments = {"frames_per_batch": 16, "total_frames": -1, **arguments}
    return SyncDataCollector(partial(Crowd, 0, kind), policy, **arguments)


class Linear:
    """A wrapper that returns the sum of each agent's rewards."""

    def __init__(self) -> None:
        self.env, self.actions = Crowd(kind="objectives"), list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        return self.env

    def reset(self, **arguments: Any) -> Any:
        return self.env.reset(**arguments)

    def step(self, actions: Any) -> Any:
        self.actions.append(actions)
        observations, rewards, *rest = self.env.step(actions)
        return observations, {key: own.sum() for key, own in rewards.items()}, *rest


@pytest.mark.parametrize("listed", [True, False])
def test_a_declared_reward_of_one_number(listed: bool) -> None:
    class One(Crowd):
        def reward_space(self, agent: str) -> Any:
            return spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def _reward(self, index: int, action: float) -> Any:
            return np.array([super()._reward(index, action)])

    env = partial(One, 0, "leaves")
    with SyncDataCollector(
        [env, partial(One, 1, "leaves")] if listed else env,
        policy_of("leaves"),
        frames_per_batch=32,
    ) as collector:
        oracle = CrowdOracle("leaves")
        td = collector.next()
        oracle.check(IN_PROCESS.rows(td, 2 if listed else 1, listed))


class TestLayout:
    def test_one_environment_may_be_passed_itself(self) -> None:
        env = Crowd()
        with SyncDataCollector(env, policy_of("alike"), frames_per_batch=8) as collector:
            CrowdOracle("alike").check([(None, 0, collector.next())])
            assert collector.env is env
        assert env.closed == 1

    def test_names_that_end_in_a_number_are_one_group(self) -> None:
        class Named(Crowd):
            def __init__(self) -> None:
                super().__init__()
                self.possible_agents = ["a_0", "b", "a_1", "b_c", "7", "_d".strip("_")]

        env = make_env_batch(Named)
        actions = {leaf.key: leaf.shape for leaf in env.spec.action}
        env.close()
        assert actions == {
            ("a", "action"): (2,),
            ("b", "action"): (1,),
            ("b_c", "action"): (1,),
            ("7", "action"): (1,),
            ("d", "action"): (1,),
        }

    def test_agents_whose_observations_differ_only_in_bounds_are_one_group(self) -> None:
        env = Crowd()
        env.observation_space = lambda agent: spaces.Box(  # type: ignore[method-assign]
            -1.0, 1.0 + int(agent[-1]), (4,), np.float32
        )
        assert [leaf.key for leaf in make_env_batch(env).spec.action] == [("agent", "action")]

    def test_statistics_are_of_episodes_and_add_the_rewards_of_all_agents(self) -> None:
        with collector_of(policy=policy_of("alike"), frames_per_batch=8) as collector:
            td = collector.next()
            stats = collector.stats()
        assert stats["episodes"] == 3
        rewards = td["next", "agent", "reward"].sum((-1, -2))
        returns = [float(part.sum()) for part in rewards.split([3, 1, 4])]
        assert stats["episode_return"] == pytest.approx(np.mean(returns))

    def test_a_wrapper_may_make_one_number_of_several_rewards(self) -> None:
        with SyncDataCollector(Linear, policy_of("alike"), frames_per_batch=3) as collector:
            td = collector.next()
        step, agent = td["next", "agent", "observation"][..., 2:].split(1, -1)
        expected = reward_of(agent, step, td["agent", "action"].unsqueeze(-1)) / 2
        assert torch.equal(td["next", "agent", "reward"], expected)

    def test_the_step_of_a_wrapper_before_the_first_batch_is_always_the_same(self) -> None:
        envs = [Linear() for _ in range(6)]
        for env in envs:
            make_env_batch(env)
        first = [own.actions[0] for own in envs]
        assert first == first[:1] * 6

    def test_agents_with_unequal_rewards_are_groups_of_their_own(self) -> None:
        env = Crowd()
        env.reward_space = lambda agent: spaces.Box(  # type: ignore[method-assign]
            -1, 1, (2 + int(agent[-1]),)
        )
        shapes = {leaf.key[0]: leaf.shape for leaf in make_env_batch(env).spec.step_only}
        assert shapes == {"agent_0": (1, 2), "agent_1": (1, 3), "agent_2": (1, 4)}

    def test_trajectories(self) -> None:
        with collector_of("leaves", policy_of("leaves"), split_trajs=True) as collector:
            td = collector.next()
        assert td["collector", "mask"].sum(-1).tolist() == [3, 1, 4, 3, 1, 4]
        assert td["agent", "mask"].shape == (6, 4, 3)

    def test_splitting_is_by_the_flags_of_the_episode(self) -> None:
        with collector_of("leaves", policy_of("leaves")) as collector:
            td = collector.next()
        split = split_trajectories(td.exclude("collector"))
        assert split["mask"].sum(-1).tolist() == [3, 1, 4, 3, 1, 4]

    def test_complete_trajectories(self) -> None:
        with collector_of("leaves", policy_of("leaves"), trajs_per_batch=3) as collector:
            td = collector.next()
        assert td["collector", "mask"].sum(-1).tolist() == [3, 1, 4]

    def test_compact_batches_keep_flags_and_rewards(self) -> None:
        with collector_of(policy=policy_of("alike"), compact_obs=True) as collector:
            keys = set(collector.next()["next", "agent"].keys())
        assert keys == {"reward", *FLAGS}

    def test_multi_step_rewards(self) -> None:
        with collector_of(
            policy=policy_of("alike"), postproc=MultiStep(gamma=0.5, n_steps=2)
        ) as collector:
            td = collector.next()
        with collector_of(policy=policy_of("alike")) as collector:
            plain = collector.next()
        rewards = plain["next", "agent", "reward"]
        assert torch.allclose(td["next", "agent", "reward"][0], rewards[0] + 0.5 * rewards[1])

    def test_the_last_frame_may_be_flagged_as_truncated(self) -> None:
        with collector_of(set_truncated=True, frames_per_batch=6) as collector:
            td = collector.next()
        assert td["next", "agent", "truncated"][-1].all()
        assert td["next", "truncated"][-1].all()
        assert td["next", "done"][-1].all()

    def test_a_policy_may_read_flags_mask_and_count(self) -> None:
        def act(mask: torch.Tensor, done: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            assert not (mask & done.squeeze(-1)).any()
            return (count + torch.zeros_like(mask)).long() % 3

        keys = [("agent", "mask"), ("agent", "done"), "step_count"]
        policy = TensorDictModule(act, keys, [("agent", "action")])
        with collector_of("leaves", policy, max_frames_per_traj=9) as collector:
            td = collector.next()
        assert td["agent", "action"][:, 0].tolist() == [0, 1, 2, 0, 0, 1, 2, 0] * 2


class TestSeeds:
    def test_each_environment_gets_a_seed_of_its_own(self) -> None:
        envs = [Crowd(i) for i in range(3)]
        with SyncDataCollector([partial(_same, env) for env in envs], frames_per_batch=3) as c:
            c.set_seed(5)
            seeds = [env.seeds[-1] for env in envs]
        assert len({*seeds}) == 3
        assert None not in seeds

    @pytest.mark.parametrize("kind", ["alike", "masked"])
    def test_random_actions_are_repeated(self, kind: str) -> None:
        batches = []
        for _ in range(2):
            with collector_of(kind) as collector:
                collector.set_seed(3)
                batches.append(collector.next()["agent", "action"])
        assert torch.equal(*batches)
        assert len(batches[0].unique()) == 3


def _same(env: Crowd) -> Crowd:
    return env


INFOS = {("agent", "note"): torch.float32, ("agent", "deep", "pair"): None}
SLOW_WAYS = [
    pytest.param(way, marks=[*marks_of(way), pytest.mark.slow]) for way in (CENTRAL, STACK)
]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("way", [IN_PROCESS, MULTI_STACK, *SLOW_WAYS])
def test_infos_of_agents(way: Way, listed: bool) -> None:
    def entry(worker: int) -> Any:
        return (
            [partial(Informed, kind="leaves")] * 2 if listed else partial(Informed, kind="leaves")
        )

    keys = {**INFOS, ("agent", "last"): torch.int64}
    policy = policy_of("leaves")
    with collecting(way, entry, policy, frames=way.workers * 20, info_keys=keys) as collector:
        td = collector.next()
    assert td["next", "agent", "deep", "pair"].shape == (*td.shape, 3, 2)
    assert td["next", "agent", "last"].dtype == torch.int64
    for frame in td.reshape(-1).unbind(0):
        shown = frame["next", "agent", "observation"]
        there = shown.any(-1)
        steps = torch.where(there, shown[:, 2] + 10 * torch.arange(3), 0)
        assert torch.equal(frame["next", "agent", "note"], steps)
        assert torch.equal(frame["next", "agent", "deep", "pair"], shown[:, [1, 3]].long())
        last = shown[:, 2] * bool(frame["next", "done"])
        assert torch.equal(frame["next", "agent", "last"], last.long())


def test_infos_and_a_limit_of_steps() -> None:
    with SyncDataCollector(
        Informed, None, frames_per_batch=12, info_keys=INFOS, max_frames_per_traj=2
    ) as collector:
        td = collector.next()
    assert td["next", "step_count"].max() == 2
    assert torch.equal(
        td["next", "agent", "note"], td["next", "step_count"] + 10.0 * torch.arange(3)
    )


def test_infos_with_action_masks() -> None:
    with SyncDataCollector(
        partial(Informed, kind="masked"), None, frames_per_batch=12, info_keys=INFOS
    ) as collector:
        td = collector.next()
    shown = td["next", "agent", "observation", "observation"]
    assert torch.equal(td["next", "agent", "deep", "pair"], shown[..., [1, 3]].long())


CHOSEN = {"last": ["agent_2"], "first": ["agent_1", "agent_0"]}


@pytest.mark.parametrize("way", [IN_PROCESS, *SLOW_WAYS])
def test_groups_of_the_environments_choice(way: Way) -> None:
    class Grouped(Crowd):
        group_map = CHOSEN

    def act(last: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(last), choose(first)

    keys = [[(name, key) for name in CHOSEN] for key in ("observation", "action")]
    policy = TensorDictModule(act, *keys)
    with collecting(way, lambda worker: Grouped, policy, frames=way.workers * 20) as collector:
        td = collector.next()
    for frame in td.reshape(-1).unbind(0):
        for name, agents in CHOSEN.items():
            shown, following = frame[name, "observation"], frame["next", name, "observation"]
            assert [f"agent_{int(i)}" for i in shown[:, 3]] == agents
            assert torch.equal(frame[name, "action"], choose(shown))
            for agent, (_, _, step, index), action, reward in zip(
                agents, following, frame[name, "action"], frame["next", name, "reward"], strict=True
            ):
                assert reward == reward_of(int(index), int(step), float(action)), agent


def test_turn_based_environments_are_converted_by_pettingzoo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env, inner = Crowd(), Crowd()
    env.agent_iter = lambda: iter(())  # type: ignore[attr-defined]
    env.metadata = {"is_parallelizable": True}  # type: ignore[dict-item]
    module = ModuleType("pettingzoo.utils.conversions")
    module.aec_to_parallel = lambda own: {env: inner}[own]  # type: ignore[attr-defined]
    for name in ("pettingzoo", "pettingzoo.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with SyncDataCollector(env, policy_of("alike"), frames_per_batch=8) as collector:
        CrowdOracle("alike").check([(None, 0, collector.next())])
        assert collector.env is env


def test_agents_that_end_in_different_ways_truncate_the_episode() -> None:
    class Mixed(Crowd):
        def step(self, actions: Any) -> Any:
            observations, rewards, ended, cut, infos = super().step(actions)
            if not self.agents:
                ended, cut = dict.fromkeys(ended, True), dict.fromkeys(cut, False)
                ended["agent_1"], cut["agent_1"] = False, True
            return observations, rewards, ended, cut, infos

    with SyncDataCollector(Mixed, policy_of("alike"), frames_per_batch=3) as collector:
        td = collector.next()["next"][-1]
    assert [bool(td[flag]) for flag in FLAGS] == [True, False, True]
    assert td["agent", "terminated"].squeeze(-1).tolist() == [True, False, True]


def test_collecting_imports_no_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)  # makes its import fail
    with collector_of() as collector:
        assert isinstance(collector.next(), TensorDict)
