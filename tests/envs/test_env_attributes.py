"""`quicken` makes steps faster and changes nothing else about an environment."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import pytest
from envs_for_tests import CountingEnv

from pycollect.envs.torchrl.gym import quicken


def chain() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(CountingEnv(), 5)


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 13), reason="nothing is done here")
def test_each_env_of_a_chain_has_a_dict_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    env = chain()
    before = [vars(env), vars(env.unwrapped)]
    monkeypatch.setattr("sys.getrefcount", lambda kept: 3)  # as if nothing else kept them
    quicken(env)
    assert vars(env) is not before[0]
    assert vars(env.unwrapped) is not before[1]


def test_attributes_are_the_same_and_can_be_set() -> None:
    env = chain()
    before = dict(vars(env.unwrapped))
    quicken(env)
    assert vars(env.unwrapped) == before
    env.unwrapped.__dict__["added"] = 3
    assert env.unwrapped.added == 3
    env.reset(seed=0)
    assert any(env.step(env.action_space.sample())[3] for _ in range(5))


def test_a_referenced_dict_is_not_replaced() -> None:
    env = chain()
    kept = vars(env.unwrapped)
    quicken(env)
    assert vars(env.unwrapped) is kept


def test_envs_that_share_a_dict_still_share_it() -> None:
    first, second = chain(), chain()
    second.unwrapped.__dict__ = first.unwrapped.__dict__
    quicken(first)
    first.unwrapped.__dict__["added"] = 3
    assert second.unwrapped.added == 3
