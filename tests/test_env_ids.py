"""Environments by id, and those that the caller's program alone has registered."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_STACK,
    STACK,
    TEAM_STACK,
    Way,
    collecting,
    marked,
)
from envs_for_tests import CountingEnv

from pycollect import MultiSyncDataCollector, SyncDataCollector

OURS = "PycollectTests/Counting-v0"
_NO_PICKLE = threading.Lock()


class Known(CountingEnv):
    """Counts, under an id."""


@pytest.fixture(autouse=True)
def registered() -> Any:
    gymnasium.register(OURS, entry_point=Known, max_episode_steps=7)
    yield
    del gymnasium.registry[OURS]


def by_callable() -> Any:
    return gymnasium.make(OURS, number=3)


WAYS = marked(IN_PROCESS, MULTI_STACK, STACK, TEAM_STACK, ASYNC[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", [OURS, [OURS, OURS], by_callable], ids=["id", "list", "callable"])
def test_an_id_is_known_wherever_workers_are(way: Way, entry: Any) -> None:
    with collecting(way, lambda worker: entry, frames=8) as collector:
        td = collector.next()
    assert td.numel() >= 8
    if entry is by_callable:
        assert td["observation"][..., 0].unique().tolist() == [3]


def test_keyword_arguments_go_to_make() -> None:
    kwargs = {"number": 5}
    with SyncDataCollector(OURS, None, frames_per_batch=16, create_env_kwargs=kwargs) as collector:
        td = collector.next()
    assert td["observation"][..., 0].unique().tolist() == [5]
    assert td["next", "observation"][..., 2].max() <= 7


def test_several_workers_of_one_id() -> None:
    with MultiSyncDataCollector(OURS, None, num_workers=2, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8


def test_an_id_that_nobody_registered_is_refused_before_anything_starts() -> None:
    with pytest.raises(gymnasium.error.Error, match="PycollectTests/Counting"):
        MultiSyncDataCollector(["PycollectTests/Counting-v9"], None, frames_per_batch=8)


@pytest.mark.parametrize("given", ["env_id_module:PycollectTests/Imported-v0", "CartPole"])
def test_what_gymnasium_makes_of_an_id_is_made(given: str, tmp_path: Path) -> None:
    """A module in front of it is imported; without a version it is the newest."""
    (tmp_path / "env_id_module.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('PycollectTests/Imported-v0', 'envs_for_tests:CountingEnv')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with SyncDataCollector(given, None, frames_per_batch=8) as collector:
            assert collector.next().numel() == 8
    gymnasium.registry.pop("PycollectTests/Imported-v0", None)
    sys.modules.pop("env_id_module", None)


def test_specs_of_gymnasiums_are_made() -> None:
    spec = gymnasium.spec("CartPole-v1")
    for entry in (spec, [spec, "CartPole-v1"]):
        with SyncDataCollector(entry, None, frames_per_batch=8) as collector:
            assert collector.next().numel() == 8


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(ImportError, match=r"create_env_fn: .*no_such_module"):
        SyncDataCollector("no_such_module:CartPole-v1", None, frames_per_batch=8)
    with pytest.raises(ValueError, match=r"create_env_fn: .*':CartPole-v1'"):
        SyncDataCollector(":CartPole-v1", None, frames_per_batch=8)


def test_an_environment_that_cannot_be_sent_does_not_hinder_others() -> None:
    gymnasium.register("PycollectTests/Local-v0", entry_point=lambda lock=_NO_PICKLE: CountingEnv())
    try:
        with MultiSyncDataCollector([OURS], None, frames_per_batch=8) as collector:
            assert collector.next().numel() == 8
    finally:
        del gymnasium.registry["PycollectTests/Local-v0"]


def test_an_instance_in_a_list_names_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"create_env_fn\[1\]: .*Known.*give what makes it"):
        SyncDataCollector([OURS, Known()], None, frames_per_batch=8)
