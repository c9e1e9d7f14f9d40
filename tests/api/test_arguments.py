"""Every invalid argument raises an error with its name before any process starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from collect_support import case_name, parity_policy
from echo_envs import ENTRIES, echo_fns
from envs_for_tests import CountingEnv
from raising import refused

from pycollect import (
    Collector,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
    sync_sync_collector,
)
from pycollect.api.set_up import WorkerKind

ENV = echo_fns(0)[0]


def single(**arguments: Any) -> None:
    arguments = {"create_env_fn": ENV, "policy": None, "frames_per_batch": 6, **arguments}
    SyncDataCollector(**arguments).shutdown()


def actors(**arguments: Any) -> None:
    arguments = {"create_env_fn": [ENV, ENV], "policy": None, "frames_per_batch": 6, **arguments}
    RayCollector(**arguments).shutdown()


def processes(cls: Any = MultiSyncDataCollector, **arguments: Any) -> None:
    arguments = {"create_env_fn": [ENV, ENV], "policy": None, "frames_per_batch": 6, **arguments}
    cls(**arguments).shutdown()


@pytest.fixture
def no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if Ray starts; errors in arguments must come first."""
    ray = pytest.importorskip("ray")

    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was asked for")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", start)


# (argument, value, error)
COMMON: list[tuple[str, Any, type[Exception]]] = [
    ("create_env_fn", None, TypeError),
    ("create_env_fn", 3, TypeError),
    ("create_env_fn", [], ValueError),
    ("create_env_fn", [[]], ValueError),
    ("create_env_fn", [3], TypeError),
    ("policy", 3, TypeError),
    ("policy", torch.nn.Linear, TypeError),
    ("frames_per_batch", 0, ValueError),
    ("frames_per_batch", -5, ValueError),
    ("frames_per_batch", None, TypeError),
    ("frames_per_batch", 2.5, TypeError),
    ("frames_per_batch", "6", TypeError),
    ("frames_per_batch", True, TypeError),
    ("total_frames", 1.5, TypeError),
    ("total_frames", "all", TypeError),
    ("total_frames", False, TypeError),
    *[
        (name, value, TypeError)
        for name in ("max_frames_per_traj", "init_random_frames")
        for value in (1.5, "3", True, [3])
    ],
    ("postproc", 3, TypeError),
    ("exploration_type", "sideways", ValueError),
    ("exploration_type", 3, ValueError),
    ("num_threads", 0, ValueError),
    ("num_threads", "two", TypeError),
    ("create_env_kwargs", 3, TypeError),
    ("create_env_kwargs", [3, 3], TypeError),
    ("create_env_kwargs", [[{}], [{}]], TypeError),
    ("create_env_kwargs", [{}, {}, {}], ValueError),
    *[
        (name, value, ValueError)
        for name in ("device", "storing_device", "env_device", "policy_device")
        for value in ("nowhere", 2.5, ["cpu"] * 3, [])
    ],
    *[  # actors may have other devices
        (name, value, ValueError)
        for name in ("device", "storing_device")
        for value in ("cuda:99", "meta")
    ],
    ("autoreset_mode", "SOMETIMES", ValueError),
    *[(name, 3, TypeError) for name in ("init_fn", "pre_collect_hook", "post_collect_hook")],
    ("replay_buffer", print, TypeError),
    ("traj_format", "flat", ValueError),
    ("trajs_per_batch", 1.5, TypeError),
    *[
        (name, value, TypeError)
        for name in ("split_trajs", "drop_uncollected", "set_truncated", "track_policy_version")
        for value in ("no", 2, [])
    ],
]


@pytest.mark.parametrize(("name", "value", "error"), COMMON)
def test_bad_values_in_process(name: str, value: Any, error: Any) -> None:
    if name == "create_env_kwargs" and isinstance(value, list) and len(value) == 2:
        value = value[:1]
    if name == "autoreset_mode":
        create = partial(single, create_env_fn=ENTRIES["ignores masks"](0))
    else:
        create = partial(single)
    with refused(error, name):
        create(**{name: value})


@pytest.mark.usefixtures("no_actors")
@pytest.mark.parametrize(("name", "value", "error"), COMMON)
def test_bad_values_for_actors(name: str, value: Any, error: Any) -> None:
    with refused(error, name):
        actors(**{name: value})


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
@pytest.mark.parametrize(("name", "value", "error"), COMMON)
def test_bad_values_for_processes(cls: Any, name: str, value: Any, error: Any) -> None:
    with refused(error, name):
        processes(cls, **{name: value})


PROCESSES_OWN: list[tuple[dict[str, Any], Any, str]] = [
    ({"create_env_fn": ENV}, ValueError, "num_workers"),
    ({"num_workers": 3}, ValueError, "num_workers"),
    ({"create_env_fn": ENV, "num_workers": 0}, ValueError, "num_workers"),
    ({"create_env_fn": ENV, "num_workers": "2"}, TypeError, "num_workers"),
    ({"frames_per_batch": [3]}, ValueError, "frames_per_batch"),
    ({"frames_per_batch": [3, 0]}, ValueError, "frames_per_batch"),
    ({"frames_per_batch": [3, "4"]}, TypeError, "frames_per_batch"),
    ({"cat_results": 1}, ValueError, "cat_results"),
    ({"cat_results": "time"}, ValueError, "cat_results"),
    ({"collector_class": "threads"}, ValueError, "collector_class"),
    ({"num_sub_threads": 0}, ValueError, "num_sub_threads"),
    ({"prefetch": -1}, ValueError, "prefetch"),
    ({"prefetch": 1.5}, TypeError, "prefetch"),
    ({"sync": True}, ValueError, "sync"),
    ({"num_collectors": 2}, ValueError, "num_collectors"),
    (
        {"policy": print, "policy_factory": lambda: print, "weight_updater": dict},
        ValueError,
        "policy_factory",
    ),
    ({"create_env_fn": [ENV, partial(CountingEnv, threading.Lock())]}, TypeError, "create_env_fn"),
    ({"worker_timeout": 0}, ValueError, "worker_timeout"),
    ({"update_at_each_batch": "no"}, TypeError, "update_at_each_batch"),
    ({"restart_on_error": "no"}, TypeError, "restart_on_error"),
    ({"storing_device": ["cpu", None]}, ValueError, "storing_device"),
]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("arguments", "error", "name"), PROCESSES_OWN)
def test_bad_values_that_only_processes_have(
    arguments: dict[str, Any], error: Any, name: str
) -> None:
    with refused(error, name):
        processes(**arguments)


UNEVEN: list[dict[str, Any]] = [{"preemptive_threshold": 0.5}, {"frames_per_batch": [3, 4]}]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("arguments", UNEVEN)
def test_rollouts_of_different_lengths_cannot_be_joined_env_by_env(
    arguments: dict[str, Any],
) -> None:
    with refused(ValueError, "cat_results"):
        processes(create_env_fn=[[ENV] * 2] * 2, cat_results=0, **arguments)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("arguments", UNEVEN)
def test_vector_rollouts_of_different_lengths_cannot_be_joined_env_by_env(
    arguments: dict[str, Any],
) -> None:
    entry = ENTRIES["vector NEXT_STEP of 3"](0)
    with refused(ValueError, "cat_results"):
        processes(create_env_fn=[entry, entry], cat_results=0, **arguments)


STRAGGLERS: list[tuple[dict[str, Any], str]] = [
    *[
        ({"preemptive_threshold": value}, "preemptive_threshold")
        for value in (-0.1, 1.5, "half", True, float("nan"))
    ],
    ({"preemptive_threshold": 0.5, "min_fraction": 2}, "min_fraction"),
    ({"min_fraction": 0.5}, "min_fraction"),
]


@pytest.mark.usefixtures("no_actors", "no_processes")
@pytest.mark.parametrize(("arguments", "name"), STRAGGLERS)
def test_invalid_thresholds_for_stragglers(arguments: dict[str, Any], name: str) -> None:
    with refused(ValueError, name):
        processes(**arguments)
    with refused(ValueError, name):
        actors(sync=True, **arguments)


@pytest.mark.usefixtures("no_actors", "no_processes")
def test_only_sync_workers_support_preemptive_threshold() -> None:
    for create in (single, actors, partial(processes, MultiaSyncDataCollector)):
        with refused(ValueError, "preemptive_threshold"):
            create(preemptive_threshold=0.5)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("cat_results", [0, -1, "cat"])
def test_async_collectors_refuse_cat_results(cat_results: Any) -> None:
    with refused(ValueError, "cat_results"):
        processes(MultiaSyncDataCollector, cat_results=cat_results)


RAYS_OWN: list[tuple[dict[str, Any], Any, str]] = [
    ({"create_env_fn": ENV}, ValueError, "num_collectors"),
    ({"num_collectors": 3}, ValueError, "num_collectors"),
    ({"create_env_fn": ENV, "num_collectors": 0}, ValueError, "num_collectors"),
    ({"create_env_fn": ENV, "num_collectors": "2"}, TypeError, "num_collectors"),
    ({"num_workers_per_collector": 0}, ValueError, "num_workers_per_collector"),
    ({"num_workers_per_collector": 1.5}, TypeError, "num_workers_per_collector"),
    (
        {"create_env_fn": [[ENV, ENV], [ENV, ENV]], "num_workers_per_collector": 2},
        ValueError,
        "num_workers_per_collector",
    ),
    (
        {"create_env_fn": [CountingEnv()], "num_workers_per_collector": 2},
        ValueError,
        "num_workers_per_collector",
    ),
    ({"collector_class": "threads"}, ValueError, "collector_class"),
    *[
        ({"collector_class": "sync", **arguments}, error, name)
        for arguments, error, name in (
            (
                {"create_env_fn": [[ENV] * 2] * 2, "num_workers_per_collector": 2},
                ValueError,
                "num_workers_per_collector",
            ),
            ({"create_env_fn": [[], [ENV, ENV]]}, ValueError, "create_env_fn"),
            ({"create_env_fn": [[ENV, 3], [ENV, ENV]]}, TypeError, "create_env_fn"),
            ({"collector_kwargs": {"cat_results": 1}}, ValueError, "collector_kwargs"),
            ({"collector_kwargs": {"prefetch": -1}}, ValueError, "collector_kwargs"),
            ({"collector_kwargs": {"prefetch": "1"}}, TypeError, "collector_kwargs"),
            ({"collector_kwargs": {"num_collectors": 1}}, ValueError, "collector_kwargs"),
            ({"collector_kwargs": {"device": ["cpu", "cuda"]}}, ValueError, "device"),
            (
                {"collector_kwargs": {"create_env_kwargs": [{}] * 3}},
                ValueError,
                "create_env_kwargs",
            ),
        )
    ],
    *[
        (
            {"collector_class": kind, "collector_kwargs": {"cat_results": 0}},
            ValueError,
            "collector_kwargs",
        )
        for kind in ("async", "single")
    ],
    (
        {"collector_class": "sync", "sync": True, "preemptive_threshold": 0.5, "cat_results": -1},
        ValueError,
        "cat_results",
    ),
    ({"collector_class": 3}, ValueError, "collector_class"),
    ({"collector_class": dict}, ValueError, "collector_class"),
    ({"collector_kwargs": 3}, TypeError, "collector_kwargs"),
    ({"collector_kwargs": [3, 3]}, TypeError, "collector_kwargs"),
    ({"collector_kwargs": [{}]}, ValueError, "collector_kwargs"),
    *[
        ({"collector_kwargs": {name: None}}, ValueError, "collector_kwargs")
        for name in (
            "create_env_fn",
            "policy",
            "frames_per_batch",
            "total_frames",
            "postproc",
            "split_trajs",
            "replay_buffer",
            "sync",
        )
    ],
    ({"collector_kwargs": {"max_frames_traj": 3}}, TypeError, "collector_kwargs"),
    ({"collector_kwargs": {"num_threads": 0}}, ValueError, "num_threads"),
    ({"collector_kwargs": [{"init_random_frames": 1}, {}]}, ValueError, "init_random_frames"),
    ({"cat_results": 0}, ValueError, "cat_results"),
    *[
        ({"cat_results": value, "sync": True}, ValueError, "cat_results")
        for value in (1, "cat", False, 0.0)
    ],
    ({"prefetch": -1}, ValueError, "prefetch"),
    ({"prefetch": "2"}, TypeError, "prefetch"),
    ({"prefetch": 1.5}, TypeError, "prefetch"),
    ({"max_weight_update_interval": 1.5}, TypeError, "max_weight_update_interval"),
    ({"max_worker_restarts": "3"}, TypeError, "max_worker_restarts"),
    ({"worker_timeout": 0}, ValueError, "worker_timeout"),
    ({"worker_timeout": "1"}, ValueError, "worker_timeout"),
    ({"worker_init_timeout": -1.0}, ValueError, "worker_init_timeout"),
    ({"ray_init_config": 3}, TypeError, "ray_init_config"),
    ({"remote_configs": 3}, TypeError, "remote_configs"),
    ({"remote_configs": [{}]}, ValueError, "remote_configs"),
    *[
        ({"remote_configs": {name: value}}, ValueError, "remote_configs")
        for name, value in (
            ("max_restarts", 1),
            ("max_task_retries", 1),
            ("max_concurrency", 4),
            ("allow_out_of_order_execution", True),
            ("lifetime", "detached"),
            ("get_if_exists", True),
            ("name", "actor"),
            ("num_cpus", -1),
            ("num_cpus", "two"),
            ("num_gpus", True),
            ("memory", "2GB"),
            ("num_cpu", 1),
            ("resources", 3),
            ("resources", {"special": "much"}),
        )
    ],
    ({"policy": threading.Lock().acquire}, TypeError, "policy"),
]


@pytest.mark.usefixtures("no_actors")
@pytest.mark.parametrize(("arguments", "error", "name"), RAYS_OWN, ids=case_name)
def test_bad_values_of_rays_own_arguments(arguments: Any, error: Any, name: str) -> None:
    with refused(error, name) as caught:
        actors(**arguments)
    entries = arguments.get(name)
    if isinstance(entries, dict):
        assert any(key in str(caught.value) for key in (*entries, "special"))


def test_names_of_the_collector_class_in_an_actor() -> None:
    for value in ("sync", MultiSyncDataCollector, "MultiSyncCollector"):
        assert WorkerKind.checked(value).nest == "sync"
    for value in ("async", MultiaSyncDataCollector, "MultiAsyncCollector"):
        assert WorkerKind.checked(value).nest == "async"
    assert WorkerKind.checked(SyncDataCollector).nest is None


@pytest.mark.usefixtures("no_actors")
def test_an_env_that_does_not_pickle() -> None:
    env = CountingEnv()
    env.lock = threading.Lock()  # type: ignore[attr-defined]
    with refused(TypeError, "create_env_fn"):
        actors(create_env_fn=[env, env])


HINTS = (
    "use_buffers",
    "return_same_td",
    "no_cuda_sync",
    "use_env_creator",
    "worker_idx",
    "reset_when_done",
)
REFUSED = ("interruptor",)


@pytest.mark.usefixtures("no_actors", "no_processes")
@pytest.mark.parametrize("create", [single, actors, processes])
def test_unsupported_arguments_are_refused_by_name(create: Callable[..., None]) -> None:
    for name in REFUSED:
        with refused(ValueError, name):
            create(**{name: 3})
    with refused(ValueError, "reset_when_done"):
        create(reset_when_done=False)


@pytest.mark.usefixtures("no_actors", "no_processes")
@pytest.mark.parametrize("create", [single, actors, processes])
def test_impossible_write_modes(create: Callable[..., None]) -> None:
    of_rollouts = {"replay_write_mode": "rollout"}
    for name, arguments in (
        ("replay_write_mode", {"replay_write_mode": "episode", "replay_buffer": []}),
        ("replay_write_mode", {"replay_write_mode": "rollout"}),
        ("replay_write_mode", {"replay_buffer": [], "trajs_per_batch": 1}),
        ("trajs_per_write", {"trajs_per_write": 1}),
        ("trajs_per_write", {"trajs_per_write": 1, "replay_buffer": [], **of_rollouts}),
        ("trajs_per_write", {"trajs_per_write": 1, "replay_buffer": [], "replay_write_mode": None}),
        ("max_policy_lag", {"replay_buffer": [], "max_policy_lag": 1}),
        ("drop_uncollected", {"replay_buffer": [], "drop_uncollected": True}),
    ):
        with refused(ValueError, name):
            create(**{"replay_write_mode": "trajectory", **arguments})
    if create is actors:
        with refused(ValueError, "collector_kwargs"):
            create(collector_kwargs={"replay_write_mode": "trajectory"}, replay_buffer=[])


def test_the_write_mode_follows_from_other_arguments() -> None:
    for mode, arguments in (
        (None, {}),
        (None, {"trajs_per_batch": 1}),
        ("rollout", {"replay_buffer": []}),
        ("trajectory", {"replay_buffer": [], "trajs_per_batch": 1}),
    ):
        with SyncDataCollector(
            ENV, None, frames_per_batch=4, max_frames_per_traj=4, **arguments
        ) as collector:
            assert collector.replay_write_mode == mode


@pytest.mark.parametrize("kind", [float, np.int32, np.float64])
def test_whole_numbers_are_counts(kind: Any) -> None:
    counts = {"frames_per_batch": kind(4), "total_frames": kind(8), "max_frames_per_traj": kind(2)}
    with SyncDataCollector(ENV, None, **counts) as collector:
        assert [td.numel() for td in collector] == [4, 4]


@pytest.mark.slow
@pytest.mark.processes
def test_whole_floats_are_counts_of_processes() -> None:
    counts = {"frames_per_batch": 8e0, "total_frames": np.float32(8), "prefetch": 1.0}
    limits = {"worker_timeout": np.int64(100), "worker_init_timeout": np.float64(100)}
    with MultiSyncDataCollector([ENV] * 2, None, **counts, **limits) as collector:
        assert [td.numel() for td in collector] == [8]


def test_whole_floats_are_counts_of_environments() -> None:
    with sync_sync_collector(
        ENV, {}, num_env_per_collector=2.0, num_collectors=1.0, frames_per_batch=8
    ) as collector:
        assert collector.next().shape == (2, 4)
    with SyncDataCollector([ENV] * 2, None, frames_per_batch=8.0) as collector:
        assert collector.next().shape == (2, 4)
    assert WorkerKind().entries([ENV], None, 2.0, "num_envs") == [[ENV] * 2]


def test_hints_have_no_effect() -> None:
    single(traj_format=None, **dict.fromkeys(HINTS, True), **dict.fromkeys(REFUSED))
    assert Collector is SyncDataCollector


@pytest.mark.parametrize("off", [None, 0, -1, -20, np.int64(-3)])
def test_counts_that_disable_a_feature(off: Any) -> None:
    features = ("max_frames_per_traj", "init_random_frames", "trajs_per_batch")
    with SyncDataCollector(
        ENV, None, frames_per_batch=6, **dict.fromkeys(features, off)
    ) as collector:
        td = collector.next()
    assert td.shape == (6,)  # not one trajectory per row
    assert "step_count" not in td


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("kind", [bool, int, np.bool_, torch.tensor, lambda own: own or None])
def test_values_of_flags(kind: Any, is_set: bool) -> None:
    with SyncDataCollector(
        ENV, None, frames_per_batch=6, set_truncated=kind(is_set), track_traj_ids=kind(is_set)
    ) as collector:
        td = collector.next()
    assert td["next", "truncated"][..., -1, 0].all() == is_set
    assert (("collector", "traj_ids") in td.keys(True)) is is_set


def test_truncation_of_environments_that_ignore_masks_is_refused() -> None:
    with refused(ValueError, "max_frames_per_traj"):
        single(create_env_fn=ENTRIES["ignores masks"](0), max_frames_per_traj=3)


def test_worker_ids() -> None:
    with SyncDataCollector(ENV, parity_policy(), frames_per_batch=6) as collector:
        for good in (None, 0, [0], (0,), []):
            collector.update_policy_weights_(worker_ids=good)
        for bad in (1, -1, [0, 3], [False]):
            with refused(ValueError, "worker_ids"):
                collector.update_policy_weights_(worker_ids=bad)
        for bad in ("0", 0.0, [None]):
            with refused((TypeError, ValueError), "worker_ids"):
                collector.update_policy_weights_(worker_ids=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 1.5, "3", True, -1])
def test_seeds(seed: Any) -> None:
    with (
        SyncDataCollector(ENV, None, frames_per_batch=6) as collector,
        refused((TypeError, ValueError), "seed"),
    ):
        collector.set_seed(seed)


# Checks that need a cluster


@pytest.mark.ray
@pytest.mark.parametrize(
    ("config", "resource"),
    [
        ({"num_cpus": 3}, "CPU"),
        ({"num_gpus": 1}, "GPU"),
        ({"resources": {"special": 1}}, "special"),
        ({"memory": 1024**5}, "memory"),
        ([{"num_cpus": 1}, {"num_cpus": 100}], "CPU"),
    ],
)
def test_impossible_resources(config: Any, resource: str) -> None:
    with refused(ValueError, "remote_configs") as caught:
        actors(remote_configs=config)
    assert resource in str(caught.value)


@pytest.mark.ray
def test_batches_larger_than_memory() -> None:
    half = psutil.virtual_memory().total // 100  # frames of 50 bytes; four rollouts exist
    with refused(ValueError, "frames_per_batch", "prefetch"):
        actors(frames_per_batch=half, create_env_fn=[ENV], prefetch=3)


@pytest.mark.ray
def test_a_sync_collector_needs_equal_workers() -> None:
    with refused(ValueError, "create_env_fn") as caught:
        actors(create_env_fn=[echo_fns(0, 2), echo_fns(1, 3)], sync=True, frames_per_batch=12)
    assert "worker 1" in str(caught.value)


@pytest.mark.slow
@pytest.mark.ray
def test_the_callers_dicts_are_not_changed() -> None:
    kwargs = {"device": "cpu", "storing_device": "cpu", "max_frames_per_traj": 2}
    config = {"num_cpus": 0.5, "memory": 1024**3}
    init: dict[str, Any] = {"num_cpus": 4}
    env_kwargs = {"length": 3}
    before = [dict(d) for d in (kwargs, config, init, env_kwargs)]
    with RayCollector(
        CountingEnv,
        None,
        frames_per_batch=4,
        num_collectors=1,
        num_workers_per_collector=2,
        create_env_kwargs=env_kwargs,
        collector_kwargs=kwargs,
        remote_configs=config,
        ray_init_config=init,
        storing_device=None,
        track_policy_version=True,
    ) as collector:
        td = collector.next()
    assert [kwargs, config, init, env_kwargs] == before
    assert td.shape == (2, 2)
    assert td["next", "truncated"][:, 1].all()  # collector_kwargs override the default
    assert td.device == torch.device("cpu")  # from `device`; storing_device=None is explicit
    assert ("collector", "policy_version") in td.keys(include_nested=True)
