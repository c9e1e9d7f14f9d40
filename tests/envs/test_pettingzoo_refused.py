"""What PettingZoo environments, their groups and infos are refused for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from agent_envs import AGENTS, Crowd, Informed
from crowd_oracle import policy_of
from gymnasium import spaces
from raising import refused

from pycollect import SyncDataCollector
from pycollect.envs.make import make_env_batch


class TestRefused:
    def test_lists_of_unlike_environments(self) -> None:
        with refused(ValueError, "create_env_fn"):
            make_env_batch([partial(Crowd, 0, "alike"), partial(Crowd, 0, "different")])

    def test_lists_with_environments_of_gymnasium(self) -> None:
        from envs_for_tests import CountingEnv

        for fns in ([Crowd, CountingEnv], [CountingEnv, Crowd]):
            with refused(TypeError, "create_env_fn"):
                make_env_batch(fns)

    def test_one_environment_in_two_places(self) -> None:
        env = Crowd()
        with refused(ValueError, "create_env_fn"):
            make_env_batch([lambda: env, lambda: env])

    @pytest.mark.parametrize("names", [[], ["done"], ["_hidden"], ["a", "b", "a"]])
    def test_names_of_agents(self, names: list[str]) -> None:
        env = Crowd()
        env.possible_agents = names
        with refused(ValueError, "possible_agents" if names else "create_env_fn"):
            make_env_batch(env)

    def test_an_environment_without_possible_agents(self) -> None:
        base = type("ParallelEnv", (), {"__module__": "pettingzoo.utils.env"})
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch(type("Mine", (base,), {}))
        assert "possible_agents" in str(caught.value)

    def test_agents_that_were_not_announced(self) -> None:
        class Strangers(Crowd):
            def step(self, actions: Any) -> Any:
                result = super().step(actions)
                self.agents = [*self.agents, "stranger"]
                return result

        collector = SyncDataCollector(Strangers, policy_of("alike"), frames_per_batch=4)
        with collector, refused(ValueError, "possible_agents") as caught:
            collector.next()
        assert "stranger" in str(caught.value)

    def test_spaces_without_a_fixed_shape(self) -> None:
        env = Crowd()
        for name in ("observation_space", "action_space"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(env, name, lambda agent: spaces.Text(5))
                with refused(ValueError, name):
                    make_env_batch(env)

    @pytest.mark.parametrize(
        "what", ["agents gone", "no observation", "no dict", "no flags", "rewards"]
    )
    def test_steps_that_contradict_themselves(self, what: str) -> None:
        class Broken(Crowd):
            def step(self, actions: Any) -> Any:
                observations, rewards, *flags, infos = super().step(actions)
                if what == "agents gone":
                    self.agents = []
                elif what == "no observation":
                    del observations["agent_1"]
                elif what == "no dict":
                    observations = list(observations.values())
                elif what == "no flags":
                    flags = [False, False]
                else:
                    rewards = {agent: [1.0, 2.0] for agent in rewards}
                return observations, rewards, *flags, infos

        kind = TypeError if what in ("no dict", "no flags") else ValueError
        name = {"no observation": "observation", "rewards": "reward"}.get(what, "step")
        collector = SyncDataCollector(Broken, policy_of("alike"), frames_per_batch=4)
        with collector, refused(kind, name):
            collector.next()

    @pytest.mark.parametrize("wrong", [1.0, np.ones(1), np.ones(3), None])
    @pytest.mark.parametrize("agents", [("agent_1",), ("agent_0", "agent_1", "agent_2")])
    def test_rewards_that_do_not_fit_their_space(self, wrong: Any, agents: tuple[str, ...]) -> None:
        class Broken(Crowd):
            def step(self, actions: Any) -> Any:
                observations, rewards, *rest = super().step(actions)
                return observations, rewards | dict.fromkeys(agents, wrong), *rest

        collector = SyncDataCollector(
            partial(Broken, 0, "objectives"), policy_of("alike"), frames_per_batch=4
        )
        with collector, refused(ValueError, "reward"):
            collector.next()

    @pytest.mark.parametrize("agents", [("agent_1",), ("agent_0", "agent_1", "agent_2")])
    def test_a_reward_of_none_is_refused(self, agents: tuple[str, ...]) -> None:
        class Broken(Crowd):
            def step(self, actions: Any) -> Any:
                observations, rewards, *rest = super().step(actions)
                return observations, rewards | dict.fromkeys(agents), *rest

        collector = SyncDataCollector(Broken, policy_of("alike"), frames_per_batch=4)
        with collector, refused(ValueError, "reward"):
            collector.next()

    def test_turn_based_environments_that_cannot_be_converted(self) -> None:
        env = Crowd()
        env.agent_iter = lambda: iter(())  # type: ignore[attr-defined]
        with refused(ValueError, "create_env_fn") as caught:
            make_env_batch(env)
        assert "PettingZooWrapper" in str(caught.value)

    def test_action_masks_in_infos(self) -> None:
        class Informed(Crowd):
            def reset(self, seed: int | None = None, options: Any = None) -> Any:
                observations, _ = super().reset(seed, options)
                return observations, {"agent_1": {"action_mask": np.ones(3, np.int8)}}

        env = make_env_batch(Informed)
        with refused(ValueError, "action_mask"):
            env.reset()

    @pytest.mark.parametrize(
        "keys",
        [
            {("note",): None},
            {("other", "note"): None},
            {("agent", "reward"): None},
            {("agent", "action"): "float32"},
            {("agent", "absent"): None},
            {("agent", "name"): None},
        ],
    )
    def test_info_keys(self, keys: Any) -> None:
        with refused(ValueError, "info_keys"):
            make_env_batch(Informed, info_keys=keys)

    @pytest.mark.parametrize(
        "chosen",
        [
            ["agent_0"],
            {"all": "agent_0"},
            {"all": ["agent_0", "agent_1"]},
            {"all": ["agent_0", "agent_1", "agent_2"], "more": ["agent_2"]},
            {"done": ["agent_0", "agent_1", "agent_2"]},
            {1: ["agent_0", "agent_1", "agent_2"]},
            {"": ["agent_0", "agent_1", "agent_2"]},
            {"all": [["agent_0"], "agent_1", "agent_2"]},
        ],
    )
    def test_group_maps(self, chosen: Any) -> None:
        env = Crowd()
        env.group_map = chosen  # type: ignore[attr-defined]
        with refused(ValueError, "group_map"):
            make_env_batch(env)

    def test_groups_of_unlike_agents(self) -> None:
        env = Crowd(kind="different")
        env.group_map = {"all": list(AGENTS["different"])}  # type: ignore[attr-defined]
        with refused(ValueError, "group_map"):
            make_env_batch(env)
