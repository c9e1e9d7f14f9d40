"""SIGINT at any moment: what was collected comes in the next batch, or is lost by name."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

import pytest
from collect_support import (
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    STEPS,
    FrameOracle,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import echo_fns
from test_restarts import check_ledger, endless, kill

from pycollect._core import Uninterrupted
from pycollect.scheduler import assembly
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream import collector as base
from pycollect.stream import in_process


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


class TestUninterrupted:
    def test_an_interrupt_comes_at_the_outermost_end(self) -> None:
        done = []

        def block() -> None:
            with Uninterrupted():
                with Uninterrupted():
                    interrupt()
                    done.append("inner")
                done.append("outer")

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == ["inner", "outer"]

    def test_afterwards_it_comes_at_once_again(self) -> None:
        with Uninterrupted():
            pass
        with pytest.raises(KeyboardInterrupt):
            interrupt()

    def test_an_error_passes_through(self) -> None:
        with pytest.raises(ZeroDivisionError, match="own words"), Uninterrupted():
            raise ZeroDivisionError("own words")

    def test_the_programs_own_handler_is_called_at_the_end(self) -> None:
        seen: list[str] = []
        before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
        try:
            with Uninterrupted():
                interrupt()
                seen.append("inside")
        finally:
            signal.signal(signal.SIGINT, before)
        assert seen == ["inside", "handled"]


def check_interrupted(monkeypatch: pytest.MonkeyPatch, way: Way, module: Any, name: str) -> None:
    """Six batches, and an interrupt before the fourth: nothing is lost, nothing comes twice."""
    oracle, envs = FrameOracle(), len(echo_fns(0))
    with collecting(way, echo_fns, parity_policy(), frames=STEPS * envs) as collector:
        for at in range(6):
            if at == 3:
                with monkeypatch.context() as patch:
                    patch_once(patch, module, name)
                    with pytest.raises(KeyboardInterrupt):
                        collector.next()
            oracle.check(way.rows(collector.next(), envs, True))
        total = collector.ledger()["total"]
        assert collector.stats()["batches"] == 6
    assert total["lost"] == 0
    assert (
        total["delivered"] == oracle.frames == 6 * STEPS * envs * (way.workers if way.sync else 1)
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (assembly, "_numbering"),  # within the joining
        (assembly, "Batch"),  # when all rollouts are in their rows
        (base, "assembled"),  # on the way to the caller
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[0]))
def test_a_batch_of_processes_that_was_interrupted_comes_next(
    monkeypatch: pytest.MonkeyPatch, way: Way, module: Any, name: str
) -> None:
    check_interrupted(monkeypatch, way, module, name)


@pytest.mark.parametrize("module", [in_process, base], ids=["joining", "delivering"])
def test_a_batch_of_this_process_that_was_interrupted_comes_next(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    name = "Batch" if module is in_process else "assembled"
    check_interrupted(monkeypatch, IN_PROCESS, module, name)


@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[0]))
def test_a_worker_whose_replacement_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """It is replaced once, and what was asked of it is lost once."""
    with collecting(way, endless, parity_policy(), frames=STEPS) as collector:
        collector.next()
        kill(collector, 1)
        with monkeypatch.context() as patch:
            patch_once(patch, WorkerGroup, "restart")
            with pytest.raises(KeyboardInterrupt):
                deque(collector, 0)
        for _ in range(6):
            collector.next()
        check_ledger(collector)
        workers = collector.stats()["workers"]
        assert [workers[index]["restarts"] for index in (0, 1)] == [0, 1]


def patch_once(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Have the function send an interrupt to this process when it is called next."""
    whole = getattr(module, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(module, name, whole)
        interrupt()
        return whole(*args, **kwargs)

    patch.setattr(module, name, interrupted)
