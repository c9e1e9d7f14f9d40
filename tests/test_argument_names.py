"""What is said of an argument by a name that its class does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from envs_for_tests import CountingEnv

from pycollect import AsyncBatchedCollector, AsyncCollector, Evaluator, SyncDataCollector

ENV = CountingEnv


@pytest.mark.parametrize(
    ("create", "words"),
    [
        (lambda: SyncDataCollector(env=ENV, frames_per_batch=4), "'env'; did you mean 'create_env"),
        (lambda: SyncDataCollector(ENV, batch_size=4), "'batch_size'; did you mean 'frames_per_b"),
        (lambda: SyncDataCollector(ENV, num_envs=2, frames_per_batch=4), "'num_envs'.*are a list"),
        (
            lambda: AsyncCollector(create_env_fns=ENV),
            "'create_env_fns'; did you mean 'create_env_fn'",
        ),
        (lambda: AsyncCollector(frames_per_batch=4), "AsyncCollector: missing.*'create_env_fn'"),
        (lambda: AsyncBatchedCollector([ENV], polcy=None), "'polcy'; did you mean 'policy'"),
        (lambda: AsyncBatchedCollector([ENV], num_workers=2), "'num_workers', which is one of M"),
        (lambda: Evaluator(envs=ENV), "'envs'; did you mean 'env'"),
        (lambda: Evaluator(create_env_fn=ENV), "'create_env_fn'; did you mean 'env'"),
        (lambda: Evaluator(ENV, polcy=None), "'polcy'; did you mean 'policy'"),
    ],
)
def test_what_is_meant_is_told(create: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        create()


def test_a_subclass_tells_what_is_missing() -> None:
    class Own(AsyncCollector):
        pass

    with pytest.raises(TypeError, match="Own: missing a required argument: 'create_env_fn'"):
        Own(frames_per_batch=4)
    with pytest.raises(TypeError, match=r"Own got an unexpected keyword argument 'argument'$"):
        Own(argument=4)


def test_the_only_worker_of_an_async_collector() -> None:
    with pytest.raises(ValueError, match=r"num_workers: expected None or 1, got 2; .*MultiaSync"):
        AsyncCollector(ENV, None, num_workers=2, frames_per_batch=4)


def test_a_misspelt_argument_of_another_collector_is_told() -> None:
    with pytest.raises(TypeError, match="did you mean 'inference', which is one of MultiSync"):
        SyncDataCollector(ENV, None, frames_per_batch=4, inferense="central")
