"""Errors that name the remedy: pickling by value, limits, and unsuitable rewards or policies."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import (
    ASYNC,
    MULTI_ASYNC,
    MULTI_STACK,
    NEST_STACK,
    STACK,
    SYNC_WAYS,
    Way,
    collecting,
    marked,
)
from envs_for_tests import CountingEnv
from gymnasium import spaces
from new_process import run_code
from raising import refused, warned
from torch import nn

from pycollect import MultiSyncDataCollector, SyncDataCollector

REMOTE_WAYS = marked(MULTI_STACK, MULTI_ASYNC[0], STACK, ASYNC[0], NEST_STACK)


def env_without_name() -> Any:
    """Return a class that is pickled by value; cloudpickle misses the name in its string."""

    class Local(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            eval("CountingEnv")
            return super().reset(seed=seed, options=options)

    return Local


@pytest.mark.parametrize("way", REMOTE_WAYS)
def test_a_name_that_an_environment_lacks_in_a_worker_is_explained(way: Way) -> None:
    entry = env_without_name()
    with (
        pytest.raises(NameError, match="pickled"),
        collecting(way, lambda worker: entry, frames=8) as collector,
    ):
        collector.next()


@pytest.mark.parametrize("way", marked(MULTI_STACK, STACK, central=False))
def test_a_name_that_a_policy_lacks_in_a_worker_is_explained(way: Way) -> None:
    def act(observation: Any) -> Any:
        return eval("torch").zeros(observation.shape[:-1])

    with (
        pytest.raises(NameError, match="pickled"),
        collecting(way, lambda worker: CountingEnv, act, frames=8) as collector,
    ):
        collector.next()


def fails_of_a_name() -> Any:
    raise NameError("name 'mine' is not defined")


def imports_a_faulty_module(folder: str) -> Any:
    sys.path.insert(0, folder)
    importlib.import_module("lacks_a_name")


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize("is_import", [False, True])
def test_other_name_errors_are_not_changed(is_import: bool, tmp_path: Path) -> None:
    (tmp_path / "lacks_a_name.py").write_text("class Env(mine): ...")
    entry = partial(imports_a_faulty_module, str(tmp_path)) if is_import else fails_of_a_name
    with pytest.raises(NameError, match=r"^name 'mine' is not defined$"):
        MultiSyncDataCollector([entry], None, frames_per_batch=8)


@pytest.mark.processes
def test_the_limit_of_processes_is_named() -> None:
    full = BlockingIOError(11, "Resource temporarily unavailable")
    with (
        mock.patch("multiprocessing.util.spawnv_passfds", side_effect=full),
        pytest.raises(OSError, match="RLIMIT_NPROC"),
    ):
        MultiSyncDataCollector([CountingEnv], None, frames_per_batch=8, start_method="spawn")


def test_the_bytes_of_an_allocation_that_fails_are_named() -> None:
    program = """
import resource
from envs_for_tests import CountingEnv
from pycollect import SyncDataCollector
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
try:
    SyncDataCollector(CountingEnv, None, frames_per_batch=1 << 27).next()
except MemoryError as error:
    assert "frames_per_batch" in str(error) and str(56 << 27) in str(error), error
    print("named")
"""
    assert run_code(program) == "named"


class Net(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, hidden)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layer(observation).argmax(-1)


@pytest.mark.parametrize("way", SYNC_WAYS)
@pytest.mark.parametrize(
    "policy",
    [Net, partial(Net, 2), partial(Net, hidden=2), lambda: Net(2), lambda observation, hidden: 0],
    ids=["class", "partial", "partial by name", "function", "two arguments"],
)
def test_an_error_for_a_policy_constructor_names_policy_factory(way: Way, policy: Any) -> None:
    with (
        refused((TypeError, ValueError), "policy") as caught,
        collecting(way, lambda worker: CountingEnv, policy, frames=8) as collector,
    ):
        collector.next()
    assert "policy_factory" in str(caught.value)


class Texts(gymnasium.Env[Any, Any]):
    observation_space: Any = spaces.Dict(
        image=spaces.Box(0, 1, (2,)), direction=spaces.Discrete(4), mission=spaces.Text(9)
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"image": np.zeros(2, np.float32), "direction": 1, "mission": "go"}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.parametrize("names", ["mission", "image, mission", "image, direction, mission, more"])
def test_a_policy_over_tensors_that_asks_for_a_text_is_shown_all_keys(names: str) -> None:
    policy = eval(f"lambda {names}: 0")
    with refused(TypeError, "policy") as caught:
        SyncDataCollector(Texts, policy, frames_per_batch=8)
    for word in ("'image'", "'direction'", "'mission'", "TensorDict"):
        assert word in str(caught.value)


@pytest.mark.processes
def test_an_error_about_unequal_frames_mentions_workers() -> None:
    with (
        warned("frames_per_batch") as said,
        MultiSyncDataCollector([CountingEnv] * 2, None, frames_per_batch=5),
    ):
        pass
    assert any("workers" in str(own.message) for own in said)
    with (
        warned("frames_per_batch") as said,
        SyncDataCollector([[CountingEnv] * 2], None, frames_per_batch=5),
    ):
        pass
    assert not any("workers" in str(own.message) for own in said)
