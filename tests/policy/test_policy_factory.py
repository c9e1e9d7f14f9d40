"""Policies that are built in the worker (`policy_factory`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import IN_PROCESS, STACK, Way, collecting
from echo_envs import EchoEnv
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import RayCollector, SyncDataCollector

T = 6
ASYNC_ONE = Way("async", 1, {"prefetch": 0})
WAYS = [
    IN_PROCESS,
    pytest.param(STACK, marks=pytest.mark.ray),
    pytest.param(ASYNC_ONE, marks=pytest.mark.ray),
]


def entry(worker: int) -> Callable[[], Any]:
    return partial(EchoEnv, worker, 4)


class Constant(nn.Module):
    """Output the parameter and the buffer. Cannot be pickled because it holds a lock."""

    def __init__(self, value: float, size: int = 3) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.weight = nn.Parameter(torch.full((size,), value))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lead = observation.shape[:-1]
        action = torch.zeros(lead, dtype=torch.int64)
        return action, self.weight.mean().expand(lead), self.count.expand(lead)


def make_constant(value: float = 1.0, size: int = 3) -> TensorDictModule:
    return TensorDictModule(Constant(value, size), ["observation"], ["action", "weight", "count"])


def seen(td: Any) -> set[tuple[float, int]]:
    return set(zip(td["weight"].flatten().tolist(), td["count"].flatten().tolist(), strict=True))


def in_form(value: float, form: str) -> Any:
    policy = make_constant(value)
    policy.module.count.fill_(int(value))
    return {
        "module": policy,
        "tensordict": TensorDict.from_module(policy),
        "state dict": policy.state_dict(),
    }[form]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["module", "tensordict", "state dict"])
def test_built_in_the_worker_and_updated(way: Way, form: str) -> None:
    with collecting(way, entry, frames=T, policy_factory=make_constant) as collector:
        assert seen(collector.next()) == {(1.0, 0)}
        collector.update_policy_weights_(in_form(5.0, form), wait=True)
        assert collector.policy_version == 1
        for _ in range(2):
            td = collector.next()
        assert seen(td) == {(5.0, 5)}
        with refused(ValueError, "policy_or_weights") as caught:
            collector.update_policy_weights_()
        assert "policy_factory" in str(caught.value)
        with refused(ValueError, "policy_or_weights") as caught:
            collector.update_policy_weights_(make_constant(1.0, 4))
        assert "[4]" in str(caught.value)
        assert collector.policy_version == 1


@pytest.mark.slow
@pytest.mark.ray
def test_one_per_worker() -> None:
    factories = [partial(make_constant, 1.0), partial(make_constant, 2.0)]
    with collecting(STACK, entry, frames=T, policy_factory=factories) as collector:
        td = collector.next()
        assert [seen(row) for row in td] == [{(1.0, 0)}, {(2.0, 0)}]
        collector.update_policy_weights_(make_constant(7.0), worker_ids=1)
        assert [seen(row) for row in collector.next()] == [{(1.0, 0)}, {(7.0, 0)}]


@pytest.mark.slow
@pytest.mark.ray
def test_workers_with_policies_of_their_own_sizes() -> None:
    factories = [partial(make_constant, 1.0, 3), partial(make_constant, 2.0, 4)]
    with collecting(STACK, entry, frames=T, policy_factory=factories) as collector:
        collector.update_policy_weights_(make_constant(7.0, 4), worker_ids=[1])
        assert [seen(row) for row in collector.next()] == [{(1.0, 0)}, {(7.0, 0)}]
        with refused(ValueError, "policy_or_weights") as caught:
            collector.update_policy_weights_(make_constant(7.0, 4))
        assert "[4]" in str(caught.value)


@pytest.mark.slow
@pytest.mark.ray
def test_update_after_each_batch_has_nothing_to_send() -> None:
    with collecting(
        STACK, entry, frames=T, policy_factory=make_constant, update_after_each_batch=True
    ) as collector:
        for _ in range(2):
            assert seen(collector.next()) == {(1.0, 0)}
        assert collector.policy_version == 0


@pytest.mark.slow
@pytest.mark.ray
def test_in_collector_kwargs() -> None:
    own = [{"policy_factory": partial(make_constant, float(w))} for w in range(STACK.workers)]
    with collecting(STACK, entry, frames=T, collector_kwargs=own) as collector:
        assert [seen(row) for row in collector.next()] == [{(0.0, 0)}, {(1.0, 0)}]


def test_a_list_of_one_in_process() -> None:
    with collecting(IN_PROCESS, entry, frames=T, policy_factory=[make_constant]) as collector:
        assert seen(collector.next()) == {(1.0, 0)}


def test_with_states() -> None:
    def factory() -> TensorDictModule:
        return TensorDictModule(
            lambda x, n: (n.long() % 2, n + 1), ["observation", "n"], ["action", ("next", "n")]
        )

    with collecting(
        IN_PROCESS, entry, frames=T, policy_factory=factory, policy_state={"n": ()}
    ) as collector:
        assert collector.next()["n"].tolist() == [0, 1, 2, 3, 0, 1]


def fails() -> Any:
    raise ZeroDivisionError("no policy today")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_of_the_factory_reaches_the_caller(way: Way) -> None:
    with (
        pytest.raises(ZeroDivisionError, match="no policy today"),
        collecting(way, entry, frames=T, policy_factory=fails),
    ):
        pass


@pytest.mark.parametrize("result", [None, 3, nn.Linear])
def test_a_factory_must_return_a_policy(result: Any) -> None:
    with refused(TypeError, "policy_factory"):
        SyncDataCollector(EchoEnv, frames_per_batch=T, policy_factory=lambda: result)


def single(**kwargs: Any) -> None:
    SyncDataCollector(EchoEnv, frames_per_batch=T, **kwargs)


def actors(**kwargs: Any) -> None:
    RayCollector([EchoEnv, EchoEnv], frames_per_batch=T, **kwargs)


@pytest.mark.parametrize("create", [single, actors])
@pytest.mark.parametrize(
    ("kwargs", "error"),
    [({"policy_factory": [make_constant] * 3}, ValueError), ({"policy_factory": 3}, TypeError)],
)
def test_refused_arguments(create: Any, kwargs: Any, error: type[Exception]) -> None:
    with refused(error, "policy_factory"):
        create(**kwargs)


def test_a_policy_and_a_factory() -> None:
    both = {"policy": make_constant(), "policy_factory": make_constant}
    with refused(ValueError, "policy_factory"):
        single(**both)
    with refused(ValueError, "policy_factory"):
        actors(**both, weight_updater=dict)


def test_some_actors_without_one() -> None:
    with refused(ValueError, "policy_factory"):
        actors(collector_kwargs=[{"policy_factory": make_constant}, {}])
