"""Valid arguments for nests, and valid options of their actors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from envs_for_tests import CountingEnv
from raising import refused

from pycollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
)
from pycollect.api.set_up import WorkerKind

ENVS = [partial(CountingEnv), partial(CountingEnv)]
REFUSED: list[tuple[dict[str, Any], Any, str, str]] = [
    (
        {"entries": [ENVS, ENVS], "num_workers_per_collector": 2},
        ValueError,
        "num_workers_per_collector",
        "2",
    ),
    ({"entries": [[], ENVS]}, ValueError, "create_env_fn", ""),
    ({"entries": [[ENVS, 3], ENVS]}, TypeError, "create_env_fn", "3"),
    ({"collector_kwargs": {"cat_results": 1}}, ValueError, "collector_kwargs", "cat_results"),
    ({"collector_kwargs": {"prefetch": -1}}, ValueError, "collector_kwargs", "prefetch"),
    ({"collector_kwargs": {"prefetch": "1"}}, TypeError, "collector_kwargs", "prefetch"),
    ({"collector_kwargs": {"num_collectors": 1}}, ValueError, "collector_kwargs", "num_collectors"),
    ({"collector_kwargs": {"sync": True}}, ValueError, "collector_kwargs", "'sync'"),
    ({"collector_kwargs": {"create_env_kwargs": [{}] * 3}}, ValueError, "create_env_kwargs", "3"),
    ({"collector_kwargs": {"device": ["cpu", "cuda"]}}, ValueError, "device", "cuda"),
    (
        {"collector_class": "async", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "collector_kwargs",
        "cat_results",
    ),
    (
        {"collector_class": "single", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "collector_kwargs",
        "cat_results",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "name", "given"), REFUSED)
def test_what_is_refused(
    arguments: dict[str, Any], error: Any, name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("checked before Ray is started or joined")

    monkeypatch.setattr("pycollect.api.ray.RayEngine", started)
    passed = {"collector_class": "sync", **arguments}
    entries = passed.pop("entries", [partial(CountingEnv)] * 2)
    with refused(error, name) as caught:
        RayCollector(entries, None, frames_per_batch=4, sync=True, **passed)
    assert given in str(caught.value)


def test_names_of_what_an_actor_runs() -> None:
    for value in ("sync", MultiSyncDataCollector, "MultiSyncCollector"):
        assert WorkerKind.checked(value).nest == "sync"
    for value in ("async", MultiaSyncDataCollector, "MultiAsyncCollector"):
        assert WorkerKind.checked(value).nest == "async"
    assert WorkerKind.checked(SyncDataCollector).nest is None
