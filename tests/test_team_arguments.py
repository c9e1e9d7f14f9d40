"""Which teams may be asked for, and what their actors may be called."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from envs_for_tests import CountingEnv

from pycollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
)
from pycollect.collectors.arguments.kinds import WorkerKind

ENVS = [partial(CountingEnv), partial(CountingEnv)]
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"entries": [ENVS, ENVS], "num_workers_per_collector": 2}, ValueError, "num_workers_per_coll"),
    ({"entries": [[], ENVS]}, ValueError, "create_env_fn"),
    ({"entries": [[ENVS, 3], ENVS]}, TypeError, "create_env_fn"),
    ({"collector_kwargs": {"cat_results": 1}}, ValueError, "collector_kwargs: cat_results"),
    ({"collector_kwargs": {"prefetch": -1}}, ValueError, "collector_kwargs: prefetch"),
    ({"collector_kwargs": {"prefetch": "1"}}, TypeError, "collector_kwargs: prefetch"),
    ({"collector_kwargs": {"num_collectors": 1}}, ValueError, "num_collectors"),
    ({"collector_kwargs": {"sync": True}}, ValueError, "'sync'"),
    ({"collector_kwargs": {"create_env_kwargs": [{}] * 3}}, ValueError, "create_env_kwargs"),
    (
        {"collector_class": "async", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "collector_kwargs: cat_results",
    ),
    (
        {"collector_class": "single", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "cat_results",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_what_is_refused(
    arguments: dict[str, Any], error: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("checked before Ray is started or joined")

    monkeypatch.setattr("pycollect.collectors.ray.RayEngine", started)
    given = {"collector_class": "sync", **arguments}
    entries = given.pop("entries", [partial(CountingEnv)] * 2)
    with pytest.raises(error, match=text):
        RayCollector(entries, None, frames_per_batch=4, sync=True, **given)


def test_names_of_what_an_actor_runs() -> None:
    for value in ("sync", MultiSyncDataCollector, "MultiSyncCollector"):
        assert WorkerKind.checked(value).team == "sync"
    for value in ("async", MultiaSyncDataCollector, "MultiAsyncCollector"):
        assert WorkerKind.checked(value).team == "async"
    assert WorkerKind.checked(SyncDataCollector).team is None
