"""StopIteration raised by user code within ``next()`` is an error, not the end of the loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    CENTRAL,
    CENTRAL_ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    NEST_STACK,
    STACK,
    Way,
    collecting,
    marked,
    marks_of,
    parity,
)
from compiled_env_support import LoggedEnvs
from echo_envs import EchoEnv, echo_fns, wait_until
from envs_for_tests import CountingEnv

from pycollect import AsyncBatchedCollector, Evaluator, SyncDataCollector, WorkerError

T = 5
ENV_WAYS = marked(IN_PROCESS, STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2], NEST_STACK)
CENTRAL_WAYS = [
    pytest.param(way, id=way.name, marks=marks_of(way)) for way in (CENTRAL, CENTRAL_ASYNC)
]


class ExhaustedEnv(CountingEnv):
    """Run out of data in the 13th step."""

    def __init__(self) -> None:
        super().__init__(length=100)
        self.rows = iter(range(12))

    def step(self, action: Any) -> Any:
        next(self.rows)
        return super().step(action)


def exhausted_policy(observation: torch.Tensor) -> torch.Tensor:
    if (observation[..., 2] == 3).any():
        next(iter(()))
    return parity(observation)[0]


def exhausted(*_: Any) -> Any:
    return next(iter(()))


class ExhaustedBuffer:
    def extend(self, data: Any) -> None:
        next(iter(()))


def assert_refused(collector: Any, where: str) -> RuntimeError:
    """Check that the loop does not end silently, and that a later ``next()`` raises."""
    with pytest.raises(RuntimeError, match=f"StopIteration.*in {where}") as caught:
        for _ in collector:
            pass
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(RuntimeError, match="StopIteration"):
        collector.next()
    if caught.value.__cause__.__cause__ is not None:  # from a worker: every later call raises it
        with pytest.raises(RuntimeError, match="StopIteration"):
            collector.set_seed(1)
    return caught.value


@pytest.mark.parametrize("way", ENV_WAYS)
def test_an_environment(way: Way) -> None:
    entry: Any = [ExhaustedEnv] if way == NEST_STACK else ExhaustedEnv
    with collecting(way, lambda w: entry, frames=T, total_frames=200) as collector:
        error = assert_refused(collector, "step")
    assert error.__cause__ is not None
    cause = error.__cause__.__cause__
    assert isinstance(cause, WorkerError)
    assert f"worker {cause.worker}, " in str(error)


@pytest.mark.parametrize("way", [pytest.param(IN_PROCESS, id="in process"), *CENTRAL_WAYS])
def test_a_policy(way: Way) -> None:
    entry = partial(EchoEnv, 0)
    with collecting(
        way, lambda w: entry, exhausted_policy, frames=T, total_frames=200
    ) as collector:
        assert_refused(collector, "exhausted_policy")


@pytest.mark.parametrize(
    "arguments",
    [
        {"postproc": exhausted},
        {"pre_collect_hook": exhausted},
        {"post_collect_hook": exhausted},
        {"replay_buffer": ExhaustedBuffer()},
        {"postproc": exhausted, "trajs_per_batch": 1},
        {"replay_buffer": ExhaustedBuffer(), "trajs_per_batch": 1},
    ],
    ids=lambda arguments: " and ".join(arguments),
)
@pytest.mark.parametrize("batched", [False, True], ids=["one", "list"])
def test_code_in_this_process(arguments: dict[str, Any], batched: bool) -> None:
    entry = echo_fns(0) if batched else echo_fns(0)[0]
    with SyncDataCollector(entry, None, frames_per_batch=15, total_frames=90, **arguments) as own:
        assert_refused(own, "exhausted|extend")


@pytest.mark.processes
def test_a_postproc_of_processes() -> None:
    with collecting(
        MULTI_STACK, lambda w: partial(EchoEnv, w), frames=T, total_frames=90, postproc=exhausted
    ) as collector:
        assert_refused(collector, "exhausted")


def test_a_list_of_environments() -> None:
    envs = [partial(CountingEnv, 0), ExhaustedEnv]
    with SyncDataCollector(envs, None, frames_per_batch=10, total_frames=200) as collector:
        assert_refused(collector, "step")


def test_compiled_environments() -> None:
    """The core steps compiled environments; the policy is called from Python."""
    with SyncDataCollector(
        LoggedEnvs(3), exhausted_policy, frames_per_batch=21, total_frames=210
    ) as own:
        assert_refused(own, "exhausted_policy")


@pytest.mark.processes
@pytest.mark.slow
def test_an_async_batched_collector() -> None:
    with AsyncBatchedCollector(
        [partial(EchoEnv, 0)] * 2, policy=exhausted_policy, frames_per_batch=10, total_frames=200
    ) as collector:
        assert_refused(collector, "exhausted_policy")


def test_a_rollout() -> None:
    with SyncDataCollector(ExhaustedEnv, None, frames_per_batch=20) as collector:
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            collector.rollout()
        assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_collector_in_the_background() -> None:
    with SyncDataCollector(
        echo_fns(0)[0], None, frames_per_batch=T, total_frames=100, replay_buffer=ExhaustedBuffer()
    ) as collector:
        collector.start()
        wait_until(lambda: not collector.is_running())
        with pytest.raises(RuntimeError, match=r"StopIteration.*in extend"):
            collector.next()


class LeavingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        raise SystemExit(3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_environment_that_exits_in_the_background() -> None:
    """Threads ignore SystemExit; the thread that requests a batch raises it."""

    class LeavesOnce(CountingEnv):
        def step(self, action: Any) -> Any:
            if not self.actions:
                self.actions.append(action)
                raise SystemExit(3)
            return super().step(action)

    with SyncDataCollector(
        LeavesOnce, None, frames_per_batch=T, replay_buffer=ExhaustedBuffer()
    ) as collector:
        collector.start()
        wait_until(lambda: not collector.is_running())
        with pytest.raises(SystemExit):
            collector.next()


@pytest.mark.parametrize(("env", "error"), [(ExhaustedEnv, RuntimeError), (LeavingEnv, SystemExit)])
def test_an_evaluation(env: Any, error: type[BaseException]) -> None:
    with Evaluator(env, None) as evaluator:
        with pytest.raises(error):
            evaluator.evaluate()
        evaluator.trigger_eval()
        with pytest.raises(error):
            evaluator.wait(timeout=60)
