"""TorchRL's helper functions: the collectors they create, and the arguments they pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collect_support import parity_policy
from envs_for_tests import CountingEnv
from raising import refused, warned
from tensordict import TensorDict

from pycollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    OffPolicyCollectorConfig,
    OnPolicyCollectorConfig,
    SyncDataCollector,
    make_collector_offpolicy,
    make_collector_onpolicy,
    sync_async_collector,
    sync_sync_collector,
)
from pycollect.api import helpers


class Recorder:
    """A stand-in for a collector that records the arguments it was created with."""

    def __init__(self, kind: str, create_env_fn: Any, **arguments: Any) -> None:
        self.kind, self.entries, self.arguments = kind, create_env_fn, arguments
        self.seeds: list[int] = []

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the collectors by Recorders, so that no process starts."""
    for name in ("SyncDataCollector", "MultiSyncDataCollector", "MultiaSyncDataCollector"):
        monkeypatch.setattr(helpers, name, partial(Recorder, name))


def small(kind: type[Any], **values: Any) -> Any:
    """Return a config with few frames."""
    return kind(**{"frames_per_batch": 12, "total_frames": 24, "num_workers": 1, **values})


# Counts


@pytest.mark.parametrize(
    ("envs", "per_collector", "collectors", "groups"),
    [
        ("abcd", 2, 2, ["ab", "cd"]),
        ("abcd", 2, None, ["ab", "cd"]),
        ("abcd", None, 2, ["ab", "cd"]),
        ("abcd", 4, None, ["abcd"]),
        ("ab", None, None, ["a", "b"]),
        ("ab", 1, 2, ["a", "b"]),
        ("abc", 2, None, ["ab", "c"]),
    ],
)
@pytest.mark.usefixtures("recorded")
def test_environments_go_to_collectors_in_order(
    envs: str, per_collector: int | None, collectors: int | None, groups: list[str]
) -> None:
    fns = {name: partial(CountingEnv, number) for number, name in enumerate(envs)}
    collector: Any = sync_async_collector(list(fns.values()), None, per_collector, collectors)
    assert collector.kind == "MultiaSyncDataCollector"
    batched = [[fns[name] for name in group] for group in groups]
    alone = per_collector == 1 or len(groups) == len(envs)
    assert collector.entries == ([group[0] for group in batched] if alone else batched)
    assert collector.arguments["frames_per_batch"] == 200


@pytest.mark.usefixtures("recorded")
def test_one_callable_is_repeated() -> None:
    fn = partial(CountingEnv, 1)
    collector: Any = sync_sync_collector(fn, {"length": 3}, 1, 2, policy=None)
    assert collector.kind == "MultiSyncDataCollector"
    assert collector.entries == [fn, fn]
    assert collector.arguments["create_env_kwargs"] == [{"length": 3}] * 2


@pytest.mark.parametrize("make", [sync_sync_collector, sync_async_collector])
@pytest.mark.parametrize(
    ("envs", "kwargs", "counts", "name"),
    [
        (CountingEnv, None, (None, 2), "num_env_per_collector"),
        (CountingEnv, None, (2, None), "num_collectors"),
        ([CountingEnv] * 5, None, (2, 2), "num_collectors"),
        ([CountingEnv] * 5, None, (None, 4), "num_collectors"),
        ([CountingEnv], None, (0, None), "num_env_per_collector"),
        ([], None, (1, None), "env_fns"),
        ([CountingEnv] * 2, [{}], (1, 2), "env_kwargs"),
    ],
)
def test_inconsistent_counts(
    make: Callable[..., Any], envs: Any, kwargs: Any, counts: Any, name: str
) -> None:
    with refused(ValueError, name):
        make(envs, kwargs, *counts, policy=None)


def test_sync_collectors_have_as_many_environments_each() -> None:
    with refused(ValueError, "num_env_per_collector") as caught:
        sync_sync_collector([CountingEnv] * 3, None, 2, policy=None)
    assert "[2, 1]" in str(caught.value)
    with refused(TypeError, "env_kwargs"):
        sync_sync_collector(CountingEnv, 3, 1, 1, policy=None)  # type: ignore[arg-type]


def test_one_collector_with_several_environments() -> None:
    collector = sync_sync_collector(
        CountingEnv, {"length": 3}, 2, 1, policy=parity_policy(), frames_per_batch=8
    )
    assert isinstance(collector, SyncDataCollector)
    with collector:
        assert collector.next().shape == (2, 4)


def test_environments_that_differ_in_their_arguments() -> None:
    collector = sync_sync_collector(
        [CountingEnv] * 4, [{"number": n} for n in range(4)], 2, policy=None, frames_per_batch=12
    )
    assert isinstance(collector, MultiSyncDataCollector)
    with collector:
        td = collector.next()
    assert td.shape == (2, 2, 3)
    assert td["observation"][..., 0, 0].tolist() == [[0, 1], [2, 3]]


# Configs


def test_a_collector_from_a_config() -> None:
    config = small(OnPolicyCollectorConfig, max_frames_per_traj=4, seed=7)
    made: list[CountingEnv] = []

    def make_env(**kwargs: Any) -> CountingEnv:
        made.append(CountingEnv(**kwargs))
        return made[-1]

    collector = make_collector_onpolicy(make_env, parity_policy(), config, {"length": 100})
    assert isinstance(collector, SyncDataCollector)
    with collector:
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(3, 4)] * 2  # rows are trajectories
    assert batches[0].device == torch.device("cpu")
    (env,) = made
    assert 7 in env.seeds


def test_an_async_collector_from_a_config() -> None:
    config = small(
        OffPolicyCollectorConfig,
        num_workers=2,
        env_per_collector=2,
        async_collection=True,
        multi_step=True,
        n_steps_return=2,
        gamma=0.5,
        init_random_frames=0,
    )
    envs = [partial(CountingEnv, 0, 4), partial(CountingEnv, 1, 4)]
    collector = make_collector_offpolicy(Batch(envs), parity_policy(), config)
    assert isinstance(collector, MultiaSyncDataCollector)
    with collector:
        td = collector.next()
    assert td.shape[0] == 4  # two envs, each with a trajectory of four and one of two steps
    first = td["next", "reward"][0, :4, 0].tolist()
    single = td["next", "original_reward"][0, :4, 0].tolist()
    assert first == [a + 0.5 * b for a, b in zip(single, [*single[1:], 0.0], strict=True)]


class Batch:
    """A `make_env` that creates its own vector environment."""

    def __init__(self, fns: list[Callable[[], CountingEnv]]) -> None:
        self.fns = fns

    def __call__(self) -> Any:
        from gymnasium.vector import SyncVectorEnv

        return SyncVectorEnv(self.fns)


@pytest.mark.parametrize(
    ("workers", "each", "collectors"), [(32, 8, 4), (5, 2, 3), (1, 8, 1), (7, 7, 1)]
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.usefixtures("recorded")
def test_the_number_of_collectors_is_rounded_up(
    workers: int, each: int, collectors: int, asynchronous: bool
) -> None:
    config = OffPolicyCollectorConfig(
        num_workers=workers, env_per_collector=each, async_collection=asynchronous, seed=3
    )
    made: Any = make_collector_offpolicy(CountingEnv, None, config)
    kind = "MultiSyncDataCollector" if collectors > 1 else "SyncDataCollector"
    assert made.kind == ("MultiaSyncDataCollector" if asynchronous else kind)
    entries = made.entries if isinstance(made.entries, list) else [made.entries]
    assert entries == [CountingEnv] * collectors
    assert made.seeds == [3]
    assert made.arguments["init_random_frames"] == 50_000
    assert made.arguments["split_trajs"]
    assert made.arguments["postproc"] is None


@pytest.mark.usefixtures("recorded")
def test_any_object_is_accepted_as_a_config_and_not_changed() -> None:
    for device in (["cpu"], "cpu", torch.device("cpu"), ["cpu", "cpu"], None):
        values = {**vars(OnPolicyCollectorConfig()), "collector_device": device}
        config = SimpleNamespace(**values, num_other=1)
        config.num_workers = 16
        before = copy.deepcopy(vars(config))
        collector: Any = make_collector_onpolicy(CountingEnv, None, config)
        assert vars(config) == before
        assert collector.arguments["device"] == ("cpu" if device == ["cpu"] else device)
    for name in ("max_frames_per_traj", "gamma", "pin_memory"):  # TorchRL's configs may lack these
        delattr(config, name)
    make_collector_onpolicy(CountingEnv, None, config)
    del config.frames_per_batch
    with refused(AttributeError, "cfg") as caught:
        make_collector_onpolicy(CountingEnv, None, config)
    assert "'frames_per_batch'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("seed", -1, ValueError),
        ("num_workers", 0, ValueError),
        ("env_per_collector", 1.5, TypeError),
        ("collector_device", [], ValueError),
        ("frames_per_batch", 0, ValueError),
        ("exploration_type", "wild", ValueError),
    ],
)
def test_bad_values(name: str, value: Any, error: type[Exception]) -> None:
    config = OnPolicyCollectorConfig(**{name: value})
    with refused(error, name):
        make_collector_onpolicy(CountingEnv, None, config)


@pytest.mark.usefixtures("recorded")
def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffPolicyCollectorConfig(pin_memory=True, multi_step=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warned("pin_memory") as said:
        collector: Any = make_collector_offpolicy(CountingEnv, None, config)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert type(collector.arguments["postproc"]).__name__ == "MultiStep"
    config.multi_step = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(TensorDict, "pin_memory", lambda td: ("pinned", td))
    collector = make_collector_offpolicy(CountingEnv, None, config)
    td, elsewhere = TensorDict(), TensorDict(device="meta")
    assert collector.arguments["postproc"](td) == ("pinned", td)
    assert collector.arguments["postproc"](elsewhere) is elsewhere
