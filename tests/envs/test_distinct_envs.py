"""Passing one environment twice raises an error: its steps would be counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from collect_support import EVERYWHERE, Way, collecting, parity
from echo_envs import EchoEnv, echo_fns
from envs_for_tests import CountingEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from raising import refused

from pycollect import AsyncBatchedCollector, Evaluator, MultiSyncDataCollector, SyncDataCollector
from pycollect.scheme.gym import GymEnvs


@contextmanager
def refuses_same(*numbers: str) -> Iterator[None]:
    """Expect an error that names the positions of the repeated environment."""
    with refused(ValueError, "create_env_fn") as caught:
        yield
    assert any(own in str(caught.value) for own in numbers or ("[0, 1]",)), caught.value


class Same:
    """Return the same environment from each call, and pickle it with the callable."""

    def __init__(self, make: Callable[[], Any] = CountingEnv) -> None:
        self.env = make()

    def __call__(self) -> Any:
        return self.env


def wrapped(same: Same) -> Any:
    return TimeLimit(same(), 10)


def vector_of(fns: Any) -> Any:
    return SyncVectorEnv(fns)


@pytest.mark.parametrize("way", EVERYWHERE)
def test_a_list_of_a_worker(way: Way) -> None:
    """Callables that share an environment share one copy of it in each worker."""
    same = Same()
    with refuses_same(), collecting(way, lambda w: [same, same], parity, frames=4):
        pass


def _entries() -> dict[str, Any]:
    env = CountingEnv()
    own, others = Same(), Same()
    return {
        "lambdas": [lambda: env, lambda: env],
        "wrapped by one": [own, partial(wrapped, own)],
        "wrapped by each": [partial(wrapped, own), partial(wrapped, own)],
        "one of three": [own, own, CountingEnv],
        "vector": partial(vector_of, [own, own]),
        "vector of wrapped": partial(vector_of, [own, partial(wrapped, own)]),
        "instance of a vector": SyncVectorEnv([others, others]),
    }


@pytest.mark.parametrize("kind", _entries())
def test_every_form(kind: str) -> None:
    with refuses_same():
        SyncDataCollector(_entries()[kind], None, frames_per_batch=6)


def test_the_places_are_counted_from_0() -> None:
    same = Same()
    entry = [CountingEnv, same, CountingEnv, same, same]
    with refuses_same("[1, 3, 4]"):
        SyncDataCollector(entry, None, frames_per_batch=5)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["groups", "shared between groups", "one vector"])
def test_groups(kind: str) -> None:
    """Refuse a vector environment passed twice, and two that share an environment."""
    same = Same()
    entry: Any = {
        "groups": [same, same],
        "shared between groups": [
            partial(vector_of, [same, CountingEnv]),
            partial(vector_of, [CountingEnv, same]),
        ],
        "one vector": Same(partial(vector_of, [CountingEnv, CountingEnv])),
    }[kind]
    numbers = ("[0, 3]",) if kind == "shared between groups" else ("[0, 1]", "[0, 2]")
    with refuses_same(*numbers):
        MultiSyncDataCollector(
            [entry], parity, frames_per_batch=8, inference="central", env_groups=2
        )


@pytest.mark.slow
def test_a_vector_environment_of_processes_in_two_groups() -> None:
    env = AsyncVectorEnv(echo_fns(0, 2))
    with refuses_same():
        SyncDataCollector(lambda: env, parity, frames_per_batch=8, env_groups=2)


@pytest.mark.processes
@pytest.mark.slow
def test_an_async_batched_collector() -> None:
    same = Same()
    with refuses_same():
        AsyncBatchedCollector([same] * 4, policy=parity, frames_per_batch=8, envs_per_worker=2)


def test_an_evaluator() -> None:
    same = Same()
    with refuses_same():
        Evaluator([same, same], None)


def test_environments_of_the_scheme() -> None:
    same = Same()
    with refuses_same():
        GymEnvs.create_factory(same, num_envs=2)(torch.device("cpu"), 0, 0)


class View(gymnasium.Env):
    """An environment that shares its simulator with other views, but is itself distinct."""

    def __init__(self, simulator: object) -> None:
        inner = CountingEnv()
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.reset, self.step = inner.reset, inner.step  # type: ignore[method-assign]
        self.envs = [simulator, simulator]


def test_environments_of_their_own_that_share_something() -> None:
    simulator = CountingEnv()
    with SyncDataCollector([lambda: View(simulator)] * 2, None, frames_per_batch=4) as collector:
        assert collector.next().shape == (2, 2)


@pytest.mark.processes
def test_workers_have_copies() -> None:
    """Each process unpickles its own environment, so a callable may be passed twice."""
    same = Same(partial(EchoEnv, 0))
    with MultiSyncDataCollector([same, same], None, frames_per_batch=4) as collector:
        assert collector.next()["observation"][..., 2].tolist() == [[0, 1], [0, 1]]


def test_an_environment_that_is_refused_is_closed() -> None:
    same = Same()
    with refuses_same():
        SyncDataCollector([same, same], None, frames_per_batch=4)
    assert same.env.closed
