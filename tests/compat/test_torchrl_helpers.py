"""The helper functions and configs, compared with TorchRL's."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import gymnasium
import pytest

import pycollect

peer = pytest.importorskip("torchrl.trainers.helpers.collectors")

ADDED = {"max_frames_per_traj": -1, "gamma": 0.99}


def defaults(config: Any) -> dict[str, Any]:
    values = config()
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(config)}


@pytest.mark.parametrize("name", ["OnPolicyCollectorConfig", "OffPolicyCollectorConfig"])
def test_fields_and_their_defaults(name: str) -> None:
    ours, theirs = getattr(pycollect, name), getattr(peer, name)
    assert defaults(ours) == {**defaults(theirs), **ADDED}
    positional = [p.name for p in inspect.signature(theirs).parameters.values()]
    assert [
        p.name for p in inspect.signature(ours).parameters.values() if p.kind is not p.KEYWORD_ONLY
    ] == positional


@pytest.mark.parametrize(
    "name",
    [
        "sync_sync_collector",
        "sync_async_collector",
        "make_collector_onpolicy",
        "make_collector_offpolicy",
    ],
)
def test_signatures(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(home, name)) for home in (pycollect, peer))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_counts_that_torchrl_refuses() -> None:
    from torchrl.envs import GymEnv

    def make() -> Any:
        return GymEnv("CartPole-v1")

    arguments: dict[str, Any] = {"policy": None, "frames_per_batch": 8, "total_frames": 8}
    with pytest.raises(TypeError):
        peer.sync_sync_collector(make, None, 2, 1, **arguments)
    with pytest.raises(TypeError):
        peer.sync_sync_collector([make], None, **arguments)
    with pycollect.sync_sync_collector(make, None, 2, 1, **arguments) as collector:
        assert collector.next().shape == (2, 4)


def test_a_config_of_torchrl_will_do() -> None:
    config = peer.OnPolicyCollectorConfig(frames_per_batch=8, total_frames=8, num_workers=1)

    def make() -> Any:
        return gymnasium.make("CartPole-v1")

    with pycollect.make_collector_onpolicy(make, None, config) as collector:
        assert collector.next()["collector", "mask"].sum() == 8
    assert config.collector_device == ["cpu"]
