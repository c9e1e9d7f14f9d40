"""Weight sync schemes and weight updaters of a collector, with stand-in classes.

`compat/test_torchrl_weights.py` has TorchRL's own classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collect_support import IN_PROCESS, MULTI_STACK, bias_policy, collecting, marked
from echo_envs import ENTRIES
from raising import refused, warned

from pycollect import MultiSyncDataCollector

T = 4
ONE = ENTRIES["one"]


class Updater:
    """The methods of a weight updater that a collector calls."""

    def __init__(self) -> None:
        self.collector: Any = None
        self.calls: list[Any] = []

    def register_collector(self, collector: Any) -> None:
        self.collector = collector

    def init(self, *args: Any) -> None:
        self.calls.append(("init", args))

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None, **more: Any) -> None:
        self.calls.append((policy_or_weights, worker_ids, more))


class Piping(Updater):
    """Send weights through the pipes, with a different value for each worker."""

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None, **more: Any) -> None:
        super().__call__(policy_or_weights, worker_ids, **more)
        for number, pipe in enumerate(self.collector.pipes):
            pipe.send(({"module": {"bias": torch.full((1,), 1.0 + number)}}, "update"))
            assert pipe.poll()
            assert pipe.recv() == (None, "updated")


def test_an_updater_replaces_the_default_update() -> None:
    updater = Updater()
    with collecting(IN_PROCESS, ONE, bias_policy(), frames=T, weight_updater=updater) as collector:
        assert updater.collector is collector
        assert collector.weight_updater is updater
        collector.update_policy_weights_()
        collector.update_policy_weights_("anything", worker_ids=[3], more=1)
        collector.init_updater(5)
        assert updater.calls == [(None, None, {}), ("anything", [3], {"more": 1}), ("init", (5,))]
        assert collector.policy_version == 2
        for name in ("model_id", "weights_dict"):
            with refused(ValueError, name):
                collector.update_policy_weights_(**{name: {"policy": 3}})
        collector.weight_updater = None
        with pytest.raises(TypeError, match="more"):
            collector.update_policy_weights_(more=1)


def test_valid_and_invalid_updaters() -> None:
    for make in (Updater, lambda: Updater()):
        with collecting(IN_PROCESS, ONE, None, frames=T, weight_updater=make) as collector:
            assert isinstance(collector.weight_updater, Updater)
    shared = Updater()
    shared.register_collector = lambda collector: None  # type: ignore[method-assign]
    bad: list[tuple[type[Exception], dict[str, Any]]] = [
        (TypeError, {"weight_updater": 3}),
        (TypeError, {"weight_updater": Updater(), "weight_sync_schemes": {}}),
        (TypeError, {"weight_updater": dict}),
        (RuntimeError, {"weight_updater": shared}),
    ]
    for error, arguments in bad:
        with (
            refused(error, "weight_updater"),
            collecting(IN_PROCESS, ONE, None, frames=T, **arguments),
        ):
            pass


@pytest.mark.processes
def test_an_update_through_an_updater_counts_as_one_version() -> None:
    updater = Piping()
    with collecting(
        MULTI_STACK, ONE, bias_policy(), frames=T, weight_updater=updater, track_policy_version=True
    ) as collector:
        assert collector.next()["bias"].unique().tolist() == [0.0]
        collector.update_policy_weights_()
        td = collector.next()
        assert td["bias"][:, 0].flatten().tolist() == [1.0, 2.0]
        assert collector.policy_version == 1
        assert (td["collector", "policy_version"] == 1).all()
        pipe = collector.pipes[0]
        with refused(ValueError, "message"):
            pipe.send(("something", "else"))
        with pytest.raises(EOFError):
            pipe.recv()
        with refused(ValueError, "policy_or_weights") as caught:
            pipe.send(({"module": {"other": torch.zeros(1)}}, "update"))
        assert "other" in str(caught.value)


class WeightSyncScheme:
    """A stand-in that is recognized by its name and module."""


WeightSyncScheme.__module__ = "torchrl.weight_update.weight_sync_schemes"


def scheme(name: str, place: str = "torchrl.weight_update._shared") -> Any:
    return type(name, (WeightSyncScheme,), {"__module__": place})()


def made(**arguments: Any) -> None:
    with collecting(IN_PROCESS, ONE, bias_policy(), frames=T, **arguments) as collector:
        collector.update_policy_weights_({"module.bias": torch.ones(1)})
        assert collector.policy_version == 1
        assert collector.next()["bias"].unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["SharedMem", "MultiProcess", "Ray", "RPC", "Distributed"])
def test_a_scheme_that_only_selects_a_transport_is_ignored_with_a_warning(name: str) -> None:
    with warned("weight_sync_schemes") as caught:
        made(weight_sync_schemes={"policy": scheme(f"{name}WeightSyncScheme")})
    (own,) = caught
    assert name in str(own.message)
    made(weight_sync_schemes={})


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK))
def test_a_scheme_that_sends_nothing(way: Any) -> None:
    schemes = {"policy": scheme("NoWeightSyncScheme")}
    with collecting(way, ONE, bias_policy(), frames=T, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_({"module.bias": torch.ones(1)})
        assert collector.next()["bias"].unique().tolist() == [0.0]


def test_schemes_that_are_refused() -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "int"),
        ({"policy": 3}, TypeError, "'policy'"),
        ({"value": scheme("RayWeightSyncScheme")}, ValueError, "['value']"),
        ({"policy": scheme("RayModuleTransformScheme")}, ValueError, "RayModuleTransformScheme"),
        ({"policy": scheme("Mine", "mine")}, ValueError, "Mine"),
    ]
    for schemes, error, given in bad:
        with refused(error, "weight_sync_schemes") as caught:
            made(weight_sync_schemes=schemes)
        assert given in str(caught.value)
        with refused(error, "weight_sync_schemes") as caught:
            MultiSyncDataCollector([ONE(0)], frames_per_batch=4, weight_sync_schemes=schemes)
        assert given in str(caught.value)
