"""Environments by id, including ids registered only in the caller's program."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_STACK,
    NEST_STACK,
    STACK,
    Way,
    collecting,
    marked,
)
from envs_for_tests import CountingEnv
from gymnasium.envs.registration import WrapperSpec
from gymnasium.vector import SyncVectorEnv
from raising import refused

from pycollect import AsyncBatchedCollector, Evaluator, MultiSyncDataCollector, SyncDataCollector
from pycollect.envs.gymnasium_support import program_registrations, register

OURS = "PycollectTests/Counting-v0"
_NO_PICKLE = threading.Lock()


class Known(CountingEnv):
    """A counting environment registered under an id."""


@pytest.fixture(autouse=True)
def registered() -> Any:
    gymnasium.register(OURS, entry_point=Known, max_episode_steps=7)
    yield
    del gymnasium.registry[OURS]


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Write modules that the test and its workers can import."""
    names = []

    def write(name: str, code: str) -> None:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(code)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in names:
        sys.modules.pop(name, None)


def by_callable() -> Any:
    return gymnasium.make(OURS, number=3)


WAYS = marked(IN_PROCESS, MULTI_STACK, STACK, NEST_STACK, ASYNC[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", [OURS, [OURS, OURS], by_callable], ids=["id", "list", "callable"])
def test_an_id_is_known_in_every_kind_of_worker(way: Way, entry: Any) -> None:
    with collecting(way, lambda worker: entry, frames=8) as collector:
        td = collector.next()
    assert td.numel() >= 8
    if entry is by_callable:
        assert td["observation"][..., 0].unique().tolist() == [3]


def test_keyword_arguments_are_passed_to_make() -> None:
    kwargs = {"number": 5}
    with SyncDataCollector(OURS, None, frames_per_batch=16, create_env_kwargs=kwargs) as collector:
        td = collector.next()
    assert td["observation"][..., 0].unique().tolist() == [5]
    assert td["next", "observation"][..., 2].max() <= 7


def test_several_workers_of_one_id() -> None:
    with MultiSyncDataCollector(OURS, None, num_workers=2, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8


def test_an_unregistered_id_is_refused_before_anything_starts() -> None:
    with refused(gymnasium.error.Error, "create_env_fn") as caught:
        MultiSyncDataCollector(["PycollectTests/Counting-v9"], None, frames_per_batch=8)
    assert "PycollectTests/Counting" in str(caught.value)


@pytest.mark.parametrize("given", ["env_id_module:PycollectTests/Imported-v0", "CartPole"])
def test_ids_with_modules_and_without_versions(
    given: str, write_module: Callable[[str, str], None]
) -> None:
    """A module prefix is imported, and an id without a version means the newest version."""
    write_module(
        "env_id_module",
        "import gymnasium\n"
        "gymnasium.register('PycollectTests/Imported-v0', 'envs_for_tests:CountingEnv')\n",
    )
    with SyncDataCollector(given, None, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
    gymnasium.registry.pop("PycollectTests/Imported-v0", None)


def test_specs_of_gymnasium_are_accepted() -> None:
    spec = gymnasium.spec("CartPole-v1")
    for entry in (spec, [spec, "CartPole-v1"]):
        with SyncDataCollector(entry, None, frames_per_batch=8) as collector:
            assert collector.next().numel() == 8


def test_a_missing_module_is_named() -> None:
    with refused(ImportError, "create_env_fn") as caught:
        SyncDataCollector("no_such_module:CartPole-v1", None, frames_per_batch=8)
    assert "no_such_module" in str(caught.value)
    with refused(ValueError, "create_env_fn") as caught:
        SyncDataCollector(":CartPole-v1", None, frames_per_batch=8)
    assert "':CartPole-v1'" in str(caught.value)


@pytest.fixture
def registry() -> Any:
    """Remove the registrations that a test adds."""
    before = dict(gymnasium.registry)
    yield gymnasium.registry
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


class Number:
    """An object passed as a keyword argument to an environment."""

    def __init__(self, number: int) -> None:
        self.number = number


def with_number(config: Number) -> Any:
    return CountingEnv(number=config.number)


def make_all() -> Any:
    """Make every environment that `test_registrations_reach_every_worker` registers."""
    numbers = [
        int(env.reset()[0].flat[0])
        for env in (
            gymnasium.make("PycollectTests/Lambda-v0"),
            gymnasium.make("PycollectTests/Config-v0"),
            gymnasium.make("PycollectTests/Main-v0", number=6),
            gymnasium.make_vec("PycollectTests/Vector-v0", num_envs=2),
        )
    ]
    scaled = gymnasium.make("PycollectTests/Wrapped-v0")
    assert isinstance(scaled, gymnasium.wrappers.TransformReward)
    assert gymnasium.spec("CartPole-v1").max_episode_steps == 3
    return CountingEnv(number=numbers == [4, 5, 6, 7])


@pytest.mark.parametrize("way", WAYS)
def test_registrations_reach_every_worker(
    way: Way, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover entry points and keyword arguments of every kind, and a changed Gymnasium spec."""
    monkeypatch.setattr(sys.modules["__main__"], "Own", CountingEnv, raising=False)
    cartpole = replace(gymnasium.spec("CartPole-v1"), max_episode_steps=3)
    registry["CartPole-v1"] = cartpole
    wrapper = WrapperSpec(
        "Scaled", "gymnasium.wrappers:TransformReward", {"func": lambda reward: 2 * reward}
    )
    gymnasium.register("PycollectTests/Lambda-v0", lambda: CountingEnv(number=4))
    gymnasium.register("PycollectTests/Config-v0", with_number, kwargs={"config": Number(5)})
    gymnasium.register("PycollectTests/Main-v0", "__main__:Own")
    gymnasium.register(
        "PycollectTests/Vector-v0",
        vector_entry_point=lambda num_envs: SyncVectorEnv(
            [lambda: CountingEnv(number=7)] * num_envs
        ),
    )
    gymnasium.register("PycollectTests/Wrapped-v0", CountingEnv, additional_wrappers=(wrapper,))
    with collecting(way, lambda worker: make_all, frames=8) as collector:
        assert collector.next()["observation"][..., 0].unique().tolist() == [1]
    entry = ["PycollectTests/Main-v0"]
    if way is not NEST_STACK:
        with collecting(way, lambda worker: entry, frames=8) as collector:
            assert collector.next().numel() >= 8


MODULE = """
import os
import gymnasium
if os.getpid() != {driver}:
    raise RuntimeError("imported by a worker")
class Thing: pass
def make(thing): raise AssertionError
gymnasium.register("PycollectTests/Other-v0", make, kwargs={{"thing": Thing()}})
"""


@pytest.mark.parametrize("way", WAYS)
def test_workers_do_not_import_modules_of_unused_environments(
    way: Way, registry: Any, write_module: Callable[[str, str], None]
) -> None:
    write_module("registers_an_environment", MODULE.format(driver=os.getpid()))
    importlib.import_module("registers_an_environment")
    with collecting(way, lambda worker: by_callable, frames=8) as collector:
        assert collector.next().numel() >= 8


PACKAGE = """
import gymnasium
from envs_for_tests import CountingEnv
gymnasium.register("PycollectTests/Default-v0", "registers_a_default:CountingEnv")
"""


def make_twice() -> Any:
    return SyncVectorEnv([partial(gymnasium.make, "PycollectTests/Default-v0")] * 2)


@pytest.mark.processes
def test_the_import_of_a_package_does_not_undo_a_registration(
    registry: Any, write_module: Callable[[str, str], None]
) -> None:
    """The program's own registration differs from the one made by importing the package."""
    write_module("registers_a_default", PACKAGE)
    entry_point = "registers_a_default:CountingEnv"
    gymnasium.register("PycollectTests/Default-v0", entry_point, kwargs={"number": 8})
    with MultiSyncDataCollector([make_twice], None, frames_per_batch=16) as collector:
        assert collector.next()["observation"][..., 0].unique().tolist() == [8]


CHECKED = """
import gymnasium
from envs_for_tests import CountingEnv
known = gymnasium.registry.get("PycollectTests/Checked-v0")
if known is None:
    gymnasium.register("PycollectTests/Checked-v0", "checks_its_registration:CountingEnv")
elif known.entry_point != "checks_its_registration:CountingEnv":
    raise RuntimeError(f"another registration: {known}")
"""


def make_checked() -> Any:
    importlib.import_module("checks_its_registration")
    return gymnasium.make("PycollectTests/Checked-v0")


@pytest.mark.processes
def test_a_package_may_compare_an_existing_registration_with_its_own(
    registry: Any, write_module: Callable[[str, str], None]
) -> None:
    write_module("checks_its_registration", CHECKED)
    importlib.import_module("checks_its_registration")
    with MultiSyncDataCollector([make_checked], None, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8


def made_of_space() -> Any:
    """Return a policy that needs an environment to be built."""
    space = gymnasium.make(OURS).action_space
    return lambda observation: torch.full(observation.shape[:-1], int(space.n) - 1)


@pytest.mark.processes
@pytest.mark.parametrize("inference", [None, "central"])
def test_policy_factories_know_registrations(inference: str | None) -> None:
    with MultiSyncDataCollector(
        [by_callable], None, policy_factory=made_of_space, frames_per_batch=8, inference=inference
    ) as collector:
        assert collector.next()["action"].unique().tolist() == [1]


@pytest.mark.processes
def test_asynchronous_batches_and_evaluations_know_registrations() -> None:
    def act(observation: Any) -> Any:
        return torch.zeros(observation.shape[:-1], dtype=torch.long)

    with AsyncBatchedCollector([by_callable], policy=act, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
    with Evaluator(by_callable, act, backend="process", num_trajectories=1) as evaluator:
        assert evaluator.evaluate()


def by_lock() -> Any:
    return gymnasium.make("PycollectTests/Local-v0")


@pytest.mark.processes
def test_an_unpicklable_registration_fails_only_if_it_is_used(registry: Any) -> None:
    gymnasium.register("PycollectTests/Local-v0", entry_point=lambda lock=_NO_PICKLE: CountingEnv())
    with MultiSyncDataCollector([OURS], None, frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
    with refused(TypeError, "create_env_fn") as caught:
        MultiSyncDataCollector([by_lock], None, frames_per_batch=8)
    assert "'PycollectTests/Local-v0'" in str(caught.value)


def test_a_registration_with_an_array_may_already_exist(registry: Any) -> None:
    gymnasium.register(OURS, entry_point=Known, kwargs={"start": np.zeros(3)})
    register(program_registrations())
    assert gymnasium.spec(OURS).kwargs["start"].tolist() == [0, 0, 0]


def test_the_error_for_an_instance_in_a_list_names_the_remedy() -> None:
    with refused(TypeError, "create_env_fn") as caught:
        SyncDataCollector([OURS, Known()], None, frames_per_batch=8)
    assert "create_env_fn[1]" in str(caught.value)
    assert "Known" in str(caught.value)
