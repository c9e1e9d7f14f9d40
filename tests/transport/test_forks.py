"""A collector belongs to the process that created it, not to forks of it or of its workers."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import (
    CENTRAL,
    CENTRAL_ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    STEPS,
    FrameOracle,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import LENGTHS, EchoEnv, echo_fns
from torch import nn

from pycollect import Evaluator, SyncDataCollector

LONG = 60
FORKS_AT = 4


def in_child(function: Callable[[], Any]) -> int:
    """Run the function in a fork of this process and return the exit code, 0 on success."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(LONG)
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_refuses(collector: Any, driver: int) -> None:
    """Check that each call raises an error naming the driver, and that shutdown does nothing."""
    refused: list[Callable[[], Any]] = [
        collector.next,
        lambda: next(iter(collector)),
        lambda: collector.set_seed(1),
        collector.state_dict,
        lambda: collector.load_state_dict({}),
        collector.update_policy_weights_,
        collector.reset,
        collector.start,
        collector.pause,
        lambda: setattr(collector, "pre_collect_hook", print),
    ]
    if hasattr(collector, "remove_collectors"):
        refused.append(lambda: collector.remove_collectors(0))
    for call in refused:
        with pytest.raises(RuntimeError, match=str(driver)):
            call()
    collector.stats()
    with collector:
        pass
    collector.shutdown()


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK, MULTI_ASYNC[1]))
def test_a_forked_child_cannot_move_its_parents_collector(way: Way) -> None:
    oracle, envs = FrameOracle(), len(echo_fns(0))
    with collecting(way, echo_fns, parity_policy(), frames=STEPS * envs) as collector:
        oracle.check(way.rows(collector.next(), envs, True))
        driver = os.getpid()
        assert in_child(lambda: check_refuses(collector, driver)) == 0
        for _ in range(3):
            oracle.check(way.rows(collector.next(), envs, True))


def test_a_forked_child_cannot_use_an_evaluator() -> None:
    evaluator = Evaluator(partial(EchoEnv, 0, LENGTHS), num_trajectories=1)
    driver = os.getpid()

    def check() -> None:
        for call in (evaluator.evaluate, evaluator.trigger_eval, evaluator.wait):
            with pytest.raises(RuntimeError, match=str(driver)):
                call()
        evaluator.shutdown()

    assert in_child(check) == 0
    assert evaluator.evaluate()["eval/num_episodes"] == 1
    evaluator.shutdown()


def fork_once(owner: Any, end: str) -> None:
    """Fork; the child returns, exits or raises, and the parent waits until the child has ended.

    Raises:
        AssertionError: the child did not end in time.
    """
    pid = os.fork()
    if pid == 0:
        owner.is_child = True
        if end == "exit":
            sys.exit()
        if end == "raise":
            raise ValueError("raised in the child of a fork")
        return
    deadline = time.monotonic() + LONG
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child of the fork goes on")
        time.sleep(0.01)


class ForkingEnv(EchoEnv):
    """An environment that forks in one of its steps or resets; see `fork_once`."""

    is_child = False

    def __init__(self, log: Path, where: str, end: str, number: int) -> None:
        super().__init__(number, LENGTHS)
        self._log, self._where, self._end = log, where, end
        self._left = FORKS_AT

    def _fork(self, where: str) -> None:
        if self.is_child:
            self._log.touch()
        self._left -= where == self._where
        if self._left == 0 and where == self._where:
            self._left = -1
            fork_once(self, self._end)

    def reset(self, **arguments: Any) -> Any:
        self._fork("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self._fork("step")
        return super().step(action)


@pytest.mark.parametrize(
    ("where", "end"),
    [
        ("step", "return"),
        pytest.param("step", "exit", marks=pytest.mark.slow),
        pytest.param("step", "raise", marks=pytest.mark.slow),
        pytest.param("reset", "return", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[1], STACK))
def test_a_child_that_an_environment_forks_ends(
    way: Way, where: str, end: str, tmp_path: Path
) -> None:
    """The child neither steps again nor answers, and the worker delivers only its own frames."""
    oracle, log = FrameOracle(), tmp_path / "log"

    def entry(worker: int) -> Any:
        forking = partial(ForkingEnv, log, where, end, 10 * worker)
        return [forking, partial(EchoEnv, 10 * worker + 1, LENGTHS)]

    with collecting(way, entry, parity_policy(), frames=2 * STEPS) as collector:
        for _ in range(4):
            oracle.check(way.rows(collector.next(), 2, True))
        assert not any(own["restarts"] for own in collector.stats()["workers"].values())
    assert not log.exists()


class ForkingPolicy(nn.Module):
    """A policy with action 0 that forks in one call; the child returns."""

    is_child = False

    def __init__(self) -> None:
        super().__init__()
        self.left = 3 * FORKS_AT

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            fork_once(self, "return")
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize(
    "way",
    [
        *marked(MULTI_STACK, central=False),
        pytest.param(CENTRAL_ASYNC, id=CENTRAL_ASYNC.name, marks=pytest.mark.processes),
    ],
)
def test_a_child_that_a_policy_forks_ends(way: Way) -> None:
    with collecting(way, echo_fns, ForkingPolicy(), frames=4 * STEPS) as collector:
        for _ in range(6):
            collector.next()
        stats = collector.stats()
        assert not any(own["restarts"] for own in stats["workers"].values())
        assert not stats.get("server", {}).get("restarts")


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_child_that_an_environment_of_this_process_forks(where: str, tmp_path: Path) -> None:
    """In the child, `next` raises; the parent continues."""
    driver, log = os.getpid(), tmp_path / "log"
    make = partial(ForkingEnv, log, where, "return", 0)
    with SyncDataCollector(make, frames_per_batch=20) as collector:
        check_next_of_both(collector, driver)
    assert not log.exists()


@pytest.mark.processes
def test_a_child_that_a_central_policy_forks_here() -> None:
    driver = os.getpid()
    with collecting(CENTRAL, echo_fns, ForkingPolicy(), frames=4 * STEPS) as collector:
        check_next_of_both(collector, driver)


def check_next_of_both(collector: Any, driver: int) -> None:
    for _ in range(4):
        try:
            collector.next()
        except BaseException as error:
            if os.getpid() == driver:
                raise
            is_right = isinstance(error, RuntimeError) and str(driver) in str(error)
            os._exit(0 if is_right else 1)
        if os.getpid() != driver:
            os._exit(2)
