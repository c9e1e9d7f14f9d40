"""Exceptions kept by a collector or its caller hold no slab, or at least block nothing."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from collect_support import (
    ASYNC,
    EVERYWHERE,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import wait_until
from envs_for_tests import CountingEnv, EnvBrokeError
from test_interrupts import patch_once
from test_kills import shared_files
from test_restarts import check_ledger, endless

from pycollect import Evaluator, WorkerError
from pycollect.driver import stream as base
from pycollect.errors import without_frames

T = 5


class OddError(ValueError):
    """An exception with `args` that do not fit its constructor."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"{hint} ({code})")
        self.code = code


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that does not allow setting attributes."""

    code: int


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


class TestWithoutFrames:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("a", 1),
            KeyError("a"),
            FileNotFoundError(2, "No such file", "name"),
            ModuleNotFoundError("no module", name="own"),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            SyntaxError("invalid", ("file.py", 3, 1, "a b")),
            StopIteration(4),
            OddError(3, hint="odd"),
            WorkerError("worker 1 died", 1, 2, "remote"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_a_copy_is_equal_and_has_no_traceback(self, error: Any) -> None:
        error.own = [1]
        caught = raised(error)
        copy = without_frames(caught)
        assert type(copy) is type(error)
        assert (str(copy), repr(copy), vars(copy)) == (str(error), repr(error), vars(error))
        assert (copy.args, copy.__traceback__) == (error.args, None)
        assert caught.__traceback__ is not None
        for name in ("filename", "name", "value", "reason", "lineno"):
            assert getattr(copy, name, None) == getattr(error, name, None)

    def test_causes_and_contexts_are_copied_too(self) -> None:
        inner = raised(KeyError("inner"))
        error = ValueError("outer")
        error.__cause__, error.__context__ = inner, raised(TypeError("context"))
        copy = without_frames(error)
        assert isinstance(copy.__cause__, KeyError)
        assert isinstance(copy.__context__, TypeError)
        assert copy.__cause__.__traceback__ is copy.__context__.__traceback__ is None
        assert copy.__suppress_context__
        assert inner.__traceback__ is not None

    def test_an_exception_that_refuses_attributes_is_copied(self) -> None:
        error = FrozenError(7)
        copy = without_frames(raised(error))
        assert (type(copy), copy.code, copy.__traceback__) == (FrozenError, 7, None)

    def test_an_exception_that_cannot_be_copied_becomes_a_runtime_error(self) -> None:
        error = UnicodeDecodeError("utf-8", b"a", 0, 1, "why")
        error.args = ()
        assert str(without_frames(error)).startswith("UnicodeDecodeError: ")

    def test_a_cycle_of_causes_has_an_end(self) -> None:
        error = ValueError("a")
        error.__cause__ = KeyError("b")
        error.__cause__.__cause__ = error
        copy = without_frames(error)
        assert copy.__cause__ is not None
        assert copy.__cause__.__cause__ is copy


class Failing(CountingEnv):
    """An environment that raises or exits its process in its step number `at`."""

    def __init__(self, failure: str, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.failure, self.at = failure, at

    def step(self, action: Any) -> Any:
        self.at -= 1
        if self.at == 0:
            if self.failure == "exits":
                os._exit(37)
            raise EnvBrokeError("now")
        return super().step(action)


def fail_twice(collector: Any, kind: type[Exception]) -> list[str]:
    """Collect until the collector has raised twice, and return both errors as text."""
    texts = []
    while len(texts) < 2:
        try:
            collector.next()
        except kind as error:
            texts.append(f"{type(error).__name__}: {error}; {type(error.__cause__).__name__}")
    return texts


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("failure", ["raises", "exits"])
@pytest.mark.parametrize("way", EVERYWHERE)
def test_a_collector_that_failed_is_freed_with_its_last_reference(way: Way, failure: str) -> None:
    """The collector's slabs and workers are freed without shutdown or garbage collection."""
    if failure == "exits" and not way.remote:
        pytest.skip("its environment is in this process")
    before = shared_files()
    frames = T * way.workers if way.sync else T
    entries = [partial(Failing, failure, 2 * T, number=10 * w) for w in range(way.workers)]
    own = {"max_worker_restarts": 0} if way.remote else {}
    groups = "env_groups" in way.arguments
    collector = way.collector(
        [[entry] * 2 if groups else entry for entry in entries] if way.remote else entries[0],
        parity_policy(),
        frames_per_batch=2 * frames if groups else frames,
        **own,
    )
    first, again = fail_twice(collector, EnvBrokeError if failure == "raises" else WorkerError)
    assert first == again
    gone = weakref.ref(collector)
    del collector
    assert gone() is None
    wait_until(lambda: shared_files() == before, 20.0)


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_evaluator_that_failed_is_freed_with_its_last_reference() -> None:
    evaluator = Evaluator(partial(Failing, "raises", 2 * T), parity_policy(), num_trajectories=3)
    for _ in range(2):
        evaluator.trigger_eval()
        with suppress(EnvBrokeError):
            evaluator.wait()
    evaluator.shutdown()
    gone = weakref.ref(evaluator)
    del evaluator
    assert gone() is None


@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[2], STACK, ASYNC[2]))
def test_a_caller_may_keep_interrupts(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """The frames of each interrupt's traceback hold a slab, so the pool adds slabs."""
    kept: list[KeyboardInterrupt] = []
    with collecting(way, endless, parity_policy(), frames=T) as collector:
        for _ in range(8):
            with monkeypatch.context() as patch:
                patch_once(patch, base, "assemble")
                try:
                    collector.next()
                except KeyboardInterrupt as interrupt:
                    kept.append(interrupt)
            batches = [collector.next() for _ in range(2)]
        assert len(kept) == 8
        assert all(td.shape == way.shape(1, False, T) for td in batches)
        assert check_ledger(collector)["total"]["lost"] == 0


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[0], STACK))
def test_the_exception_of_a_worker_call_keeps_no_memory(way: Way) -> None:
    before = shared_files()
    with collecting(way, endless, parity_policy(), frames=T) as collector:
        collector.next()
        for _ in range(3):
            with suppress(AttributeError):
                collector.map_fn("env.no_such_name")
        collector.next()
    gone = weakref.ref(collector)
    del collector
    assert gone() is None
    assert shared_files() == before
