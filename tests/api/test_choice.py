"""The collector that `Collector(num_collectors=..., sync=..., backend=...)` creates."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from echo_envs import echo_fns
from raising import refused

from pycollect import Collector, MultiaSyncDataCollector, MultiSyncDataCollector, RayCollector

ENV = echo_fns(0)[0]
pytestmark = pytest.mark.usefixtures("no_processes")


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    *[({"num_collectors": n}, ValueError, "num_collectors") for n in (0, -1)],
    *[({"num_collectors": n}, TypeError, "num_collectors") for n in (True, "2")],
    ({"num_collectors": 2, "backend": "direct"}, ValueError, "num_collectors"),
    ({"sync": False}, ValueError, "sync"),
    ({"backend_options": {"prefetch": 1}}, ValueError, "backend_options"),
    ({"num_collectors": 2, "sync": 1}, TypeError, "sync"),
    *[({"backend": name}, ValueError, "backend") for name in ("thread", "monarch", "no such", 3)],
    ({"backend": "submitit", "backend_options": {"launcher": "mp"}}, ValueError, "launcher"),
    ({"backend": ["process"]}, ValueError, "backend"),
    ({"num_collectors": 2, "backend_options": 3}, TypeError, "backend_options"),
    ({"num_collectors": 2, "backend_options": {1: 2}}, TypeError, "backend_options"),
    *[
        ({"num_collectors": 2, "backend_options": {name: 2}}, ValueError, "backend_options")
        for name in ("sync", "num_collectors", "num_workers", "backend_options")
    ],
    *[
        ({"num_collectors": 2, "backend_options": {name: 2}}, ValueError, "backend_options")
        for name in ("frames_per_batch", "policy")
    ],
    ({"num_collectors": 2, "backend_options": {"prefetsch": 1}}, TypeError, "prefetsch"),
    ({"num_collectors": 2, "others": {}}, TypeError, "others"),
    ({"num_collectors": 3, "create_env_fn": [ENV] * 2}, ValueError, "num_collectors"),
    ({"num_collectors": 2, "create_env_fn": []}, ValueError, "create_env_fn"),
    ({"num_collectors": 2, "max_frames": 2}, TypeError, "max_frames"),
    ({"num_collectors": 2, "frames_per_batch": 0}, ValueError, "frames_per_batch"),
]


@pytest.mark.parametrize(("arguments", "error", "name"), BAD, ids=str)
def test_incompatible_arguments(arguments: Any, error: Any, name: str) -> None:
    values = {"create_env_fn": ENV, "policy": None, "frames_per_batch": 6, **arguments}
    with refused(error, name) as caught:
        Collector(**values)
    if name == "backend_options" and isinstance(arguments[name], dict):
        assert all(repr(key) in str(caught.value) for key in arguments[name])


def test_only_the_base_class_chooses_a_subclass() -> None:
    class Own(Collector):
        pass

    with Own(ENV, None, frames_per_batch=6) as collector:
        assert isinstance(collector, Own)
    with refused(TypeError, "num_collectors") as caught:
        Own(ENV, None, frames_per_batch=6, num_collectors=2)
    assert "Own" in str(caught.value)
    for cls in (MultiSyncDataCollector, MultiaSyncDataCollector, RayCollector):
        with refused(ValueError, "backend"):
            cls([ENV], None, frames_per_batch=6, backend="process")


def test_the_signature_is_the_constructors() -> None:
    for cls in (Collector, MultiSyncDataCollector, MultiaSyncDataCollector, RayCollector):
        own = inspect.signature(cls).parameters
        assert list(own) == list(inspect.signature(cls.__init__).parameters)[1:]
    with refused(TypeError, "frames_per_batch"):
        Collector(ENV, None, num_collectors=2)


def test_a_list_is_a_batch_and_a_list_of_one_is_not() -> None:
    for entry, shape in (
        (ENV, (6,)),
        ([ENV], (6,)),
        ((ENV,), (6,)),
        ([[ENV]], (1, 6)),
        ([ENV, ENV], (2, 3)),
        ([[ENV, ENV]], (2, 3)),
    ):
        with Collector(entry, None, frames_per_batch=6) as collector:
            assert collector.next().shape == shape
