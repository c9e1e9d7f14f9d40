"""Errors name an unknown or invalid argument and suggest classes that accept it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from envs_for_tests import CountingEnv
from raising import refused

import pycollect
from pycollect import (
    AsyncBatchedCollector,
    AsyncCollector,
    Evaluator,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
)

ENV = CountingEnv


@pytest.mark.parametrize(
    ("create", "name", "meant"),
    [
        (lambda: SyncDataCollector(env=ENV, frames_per_batch=4), "env", "'create_env_fn'"),
        (lambda: SyncDataCollector(create_env=ENV), "create_env", "'create_env_fn'"),
        (lambda: SyncDataCollector(ENV, batch_size=4), "batch_size", "'frames_per_batch'"),
        (lambda: MultiSyncDataCollector([ENV], frame_per_batch=4), "frame_per_batch", "'frames_"),
        (lambda: SyncDataCollector(ENV, num_workers=2), "num_workers", "MultiSyncDataCollector"),
        (lambda: RayCollector([ENV], num_workers=2), "num_workers", "'num_collectors'"),
        (lambda: SyncDataCollector(ENV, num_envs=2, frames_per_batch=4), "num_envs", "list"),
        (lambda: SyncDataCollector(ENV, frames_per_batch=4, others=3), "others", "SyncData"),
        (lambda: AsyncCollector(create_env_fns=ENV), "create_env_fns", "'create_env_fn'"),
        (lambda: AsyncCollector(frames_per_batch=4), "create_env_fn", "AsyncCollector"),
        (lambda: AsyncBatchedCollector([ENV], polcy=None), "polcy", "'policy'"),
        (lambda: AsyncBatchedCollector([ENV], num_workers=2), "num_workers", "MultiSyncDataColl"),
        (lambda: Evaluator(envs=ENV), "envs", "'env'"),
        (lambda: Evaluator(create_env_fn=ENV), "create_env_fn", "'env'"),
        (lambda: Evaluator(ENV, polcy=None), "polcy", "'policy'"),
    ],
)
def test_errors_of_unknown_arguments_suggest_a_name(
    create: Callable[[], Any], name: str, meant: str
) -> None:
    with refused(TypeError, name) as caught:
        create()
    assert meant in str(caught.value)


def test_errors_of_a_subclass_have_its_name() -> None:
    class Own(AsyncCollector):
        pass

    with refused(TypeError, "create_env_fn") as caught:
        Own(frames_per_batch=4)
    assert "Own" in str(caught.value)
    with refused(TypeError, "argument") as caught:
        Own(argument=4)
    assert "Own" in str(caught.value)


def test_the_only_worker_of_an_async_collector() -> None:
    with refused(ValueError, "num_workers") as caught:
        AsyncCollector(ENV, None, num_workers=2, frames_per_batch=4)
    assert "MultiaSync" in str(caught.value)


class Odd:
    """An object that no argument accepts."""


ODD_VALUES: list[Any] = [
    np.array([1, 2]),
    torch.tensor([1, 2]),
    2**63,
    -(2**70),
    {1: 2},
    math.nan,
    math.inf,
    True,
    b"bytes",
    {3},
    Odd,
    Odd(),
    np.int64(3),
    np.array(3),
    "",
    "odd",
    1.5,
    [],
    [None],
    [np.array([1, 2])],
]
BASES: dict[str, dict[str, Any]] = {
    "SyncDataCollector": {"create_env_fn": ENV, "frames_per_batch": 4},
    "MultiSyncDataCollector": {"create_env_fn": [ENV, ENV], "frames_per_batch": 4},
    "MultiaSyncDataCollector": {"create_env_fn": [ENV, ENV], "frames_per_batch": 4},
    "AsyncCollector": {"create_env_fn": ENV, "frames_per_batch": 4},
    "RayCollector": {"create_env_fn": [ENV], "frames_per_batch": 4},
    "AsyncBatchedCollector": {
        "create_env_fn": [ENV],
        "policy": lambda observation: torch.zeros(len(observation)).long(),
        "frames_per_batch": 4,
    },
    "Evaluator": {"env": ENV},
    **{
        name: {"create_env_fn": [ENV], "frames_per_batch": 4, "launcher": "mp"}
        for name in ("DistributedDataCollector", "DistributedSyncDataCollector", "RPCDataCollector")
    },
}


SLOW = {
    "AsyncCollector",
    "DistributedSyncDataCollector",
    "RPCDataCollector",
    "MultiaSyncDataCollector",
}


class AcceptedError(BaseException):
    """Raised once all arguments are accepted, in place of starting workers."""


@pytest.fixture
def nothing_starts() -> Iterator[None]:
    with ExitStack() as patches:
        for place in (
            "pycollect.api.multi.Scheduler",
            "pycollect.api.ray.RayEngine",
            "pycollect.api.distributed.DistributedEngine",
            "pycollect.api.multi.ProcessEngine",
        ):
            patches.enter_context(mock.patch(place, side_effect=AcceptedError))
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in BASES]
)
def test_an_odd_value_is_accepted_or_the_error_names_its_argument(
    name: str, nothing_starts: None
) -> None:
    cls = getattr(pycollect, name)
    signed = MultiaSyncDataCollector if cls is AsyncCollector else cls
    arguments = [own for own in inspect.signature(signed).parameters if own != "others"]
    unnamed = []
    for argument in arguments:
        for value in ODD_VALUES:
            try:
                cls(**{**BASES[name], argument: value}).shutdown()
            except AcceptedError:
                pass
            except (TypeError, ValueError, gymnasium.error.Error) as error:
                if argument not in str(error):
                    unnamed.append((argument, value, error))
    assert not unnamed
    assert len(arguments) > 15


@pytest.mark.parametrize(
    ("create", "argument"),
    [
        (lambda own: AsyncBatchedCollector(**own, worker_affinity=1), "worker_affinity"),
        (lambda own: AsyncBatchedCollector(**own, server_config=True), "server_config"),
        (lambda own: AsyncBatchedCollector(**own, policy_version_key=True), "policy_version_key"),
        (lambda own: AsyncBatchedCollector(**own, weight_sync=True), "weight_sync"),
    ],
)
def test_arguments_of_asynchronous_batches_are_checked_at_once(
    create: Callable[[Any], Any], argument: str, nothing_starts: None
) -> None:
    with refused(TypeError, argument):
        create(BASES["AsyncBatchedCollector"])
