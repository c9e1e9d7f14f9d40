"""Failures of an environment, a policy or a process, and the state after them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_STACK,
    REMOTELY,
    Way,
    collecting,
    is_gone,
    parity,
    parity_policy,
)
from echo_envs import EchoEnv, echo_fns, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError, RaisingEnv
from gymnasium.vector import AsyncVectorEnv
from raising import raised, refused
from tensordict.nn import TensorDictModule

from pycollect import RayCollector, SyncDataCollector, WorkerError
from pycollect.errors import WorkerDied

T = 5
ONE_ACTOR = Way("one actor", 1, {})


def names(value: Any) -> str | None:
    return value.name if isinstance(value, Way) else None


def breaking(worker: int) -> Any:
    """Return an environment that breaks in step 13."""
    return partial(RaisingEnv, at=13, number=10 * worker)


def mixed(worker: int) -> Any:
    return breaking(1) if worker else partial(CountingEnv, 0)


def check_cause(error: BaseException, worker: int) -> None:
    cause = error.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.worker, cause.incarnation) == (worker, 0)
    assert "RaisingEnv" not in str(type(error))
    assert "in step" in cause.remote_traceback
    assert "EnvBrokeError: env" in cause.remote_traceback


# Exceptions


def test_an_env_that_raises_in_process() -> None:
    with collecting(IN_PROCESS, breaking, frames=T, total_frames=100) as collector:
        collector.next()
        collector.next()
        for _ in range(2):
            with pytest.raises(EnvBrokeError, match="env 0 broke") as caught:
                collector.next()
            check_cause(caught.value, 0)
        with pytest.raises(EnvBrokeError):
            collector.set_seed(3)
        assert collector.stats()["frames"] == 2 * T


@pytest.mark.parametrize("way", REMOTELY, ids=names)
def test_an_env_that_raises_in_an_actor(way: Way) -> None:
    """Batches completed before the failure are delivered first, and whole."""
    frames = {0: 0, 1: 0}

    def count(collector: Any) -> None:
        for td in collector:
            for row in [td] if way.cat is None else td:
                frames[int(row["observation"][0, 0]) // 10] += T

    with collecting(way, mixed, frames=T) as collector:
        with pytest.raises(EnvBrokeError, match="env 10 broke") as caught:
            count(collector)
        check_cause(caught.value, 1)
        assert frames[1] == 2 * T
        with pytest.raises(EnvBrokeError):
            collector.next()
        with pytest.raises(EnvBrokeError):
            collector.set_seed(3)
        stats = collector.stats()
        assert stats["frames"] == sum(frames.values())
        assert stats["workers"][1]["frames"] == 2 * T
        collector.update_policy_weights_()
        collector.shutdown()
        collector.shutdown()


class ChainedError(CountingEnv):
    def step(self, action: Any) -> Any:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise EnvBrokeError("second") from error


def test_an_exception_with_a_cause_of_its_own() -> None:
    with (
        collecting(IN_PROCESS, lambda w: ChainedError, frames=T) as collector,
        pytest.raises(EnvBrokeError) as caught,
    ):
        collector.next()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)


class OddError(Exception):
    """An error that cannot be pickled, nor recreated from its `args`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} is odd")
        self.lock = threading.Lock()


class OddEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise OddError(1, 2)
        return super().step(action)


def odd_policy(observation: torch.Tensor) -> torch.Tensor:
    if observation[..., 2] == 3:
        raise EnvBrokeError("the policy")
    return parity(observation)[0]


class TwoNumbersError(Exception):
    """An error whose `args` its own constructor does not accept."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


class PrefixError(Exception):
    """An error whose constructor changes its argument."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class WithoutTextError(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


class RefusesPickleError(KeyError):
    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


class OwnErrorEnv(CountingEnv):
    error: Any = None

    def step(self, action: Any) -> Any:
        raise self.error


class TwoNumbersEnv(OwnErrorEnv):
    error = TwoNumbersError(1, 2)


class PrefixEnv(OwnErrorEnv):
    error = PrefixError(5)


class NestedEnv(OwnErrorEnv):
    error = ValueError("both", TwoNumbersError(1, 2), PrefixError(5))


class WithoutTextEnv(OwnErrorEnv):
    error = WithoutTextError("a")


class RefusesPickleEnv(OwnErrorEnv):
    error = RefusesPickleError("a key")


@pytest.mark.parametrize(
    "way", [MULTI_STACK, pytest.param(ONE_ACTOR, marks=[pytest.mark.ray, pytest.mark.slow])]
)
@pytest.mark.parametrize(
    "entry", [TwoNumbersEnv, PrefixEnv, NestedEnv, WithoutTextEnv, RefusesPickleEnv]
)
def test_exceptions_that_cannot_be_rebuilt_from_their_arguments(way: Way, entry: Any) -> None:
    with (
        collecting(way, lambda w: entry, frames=T) as collector,
        pytest.raises(type(entry.error)) as caught,
    ):
        collector.next()
    assert repr(caught.value.args) == repr(entry.error.args)
    assert vars(caught.value) == vars(entry.error)
    assert isinstance(caught.value.__cause__, WorkerError)


@pytest.mark.parametrize(
    "way", [MULTI_STACK, pytest.param(ONE_ACTOR, marks=[pytest.mark.ray, pytest.mark.slow])]
)
def test_exceptions_that_cannot_be_pickled(way: Way) -> None:
    with (
        collecting(way, lambda w: OddEnv, frames=T) as collector,
        pytest.raises(WorkerError, match="1 is odd") as caught,
    ):
        collector.next()
    assert caught.value.worker in (0, 1)
    assert "1 is odd" in caught.value.remote_traceback


@pytest.mark.parametrize(
    "way", [IN_PROCESS, pytest.param(ONE_ACTOR, marks=pytest.mark.ray)], ids=names
)
def test_a_policy_that_raises(way: Way) -> None:
    with (
        collecting(way, lambda w: partial(EchoEnv, 0), odd_policy, frames=T) as collector,
        pytest.raises(EnvBrokeError, match="the policy") as caught,
    ):
        collector.next()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "odd_policy" in caught.value.__cause__.remote_traceback


def test_an_interrupt_is_not_a_failure() -> None:
    """The rollout is discarded, and the next one begins with a reset."""

    class Interrupting(CountingEnv):
        calls = 0

        def step(self, action: Any) -> Any:
            self.calls += 1
            if self.calls == 8:
                raise KeyboardInterrupt
            return super().step(action)

    env = Interrupting(length=100)
    with SyncDataCollector(env, None, frames_per_batch=T) as collector:
        collector.next()
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        td = collector.next()
    assert td["observation"][:, 2].tolist() == list(range(T))
    assert td["collector", "traj_ids"].tolist() == [1] * T


# Constructors that fail


class Recorded(CountingEnv):
    made: list[Recorded] = []  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.made.append(self)


@pytest.mark.parametrize("envs", [1, 2])
def test_a_failed_constructor_closes_the_envs(envs: int) -> None:
    Recorded.made.clear()
    policy = TensorDictModule(lambda o: o.clone(), ["observation"], ["other"])
    with refused(ValueError, "policy") as caught:
        SyncDataCollector([Recorded] * envs, policy, frames_per_batch=4)
    assert "'action'" in str(caught.value)
    assert [env.closed for env in Recorded.made] == [1] * envs


def test_a_failed_constructor_leaves_no_env_process() -> None:
    """The check for leftover processes would fail this test."""
    fns = echo_fns(0)
    policy = TensorDictModule(lambda o: o.clone(), ["observation"], ["other"])
    with refused(ValueError, "policy"):
        SyncDataCollector(lambda: AsyncVectorEnv(fns), policy, frames_per_batch=4)


class Unmakeable(CountingEnv):
    def __init__(self) -> None:
        raise EnvBrokeError("cannot be made")


@pytest.mark.slow
@pytest.mark.ray
def test_an_env_that_cannot_be_made_in_an_actor() -> None:
    for entry in (Unmakeable, dict):
        expected = EnvBrokeError if entry is Unmakeable else TypeError
        with pytest.raises(expected) as caught:
            RayCollector([CountingEnv, entry], None, frames_per_batch=4)
        assert isinstance(caught.value.__cause__, WorkerError)
        assert caught.value.__cause__.worker == 1


# Deaths


@pytest.mark.parametrize("way", REMOTELY, ids=names)
def test_a_killed_actor(way: Way) -> None:
    with collecting(
        way, mixed_without_end, parity_policy(), frames=T, max_worker_restarts=0
    ) as collector:
        collector.next()
        pid = collector.stats()["workers"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid))
        start = time.monotonic()
        with raised(WorkerError, worker=1) as caught:
            list(collector)
        assert time.monotonic() - start < 30
        assert str(pid) in caught.value.remote_traceback
        told = str(caught.value).splitlines()[0]
        assert "worker 1" in told
        assert str(pid) in told
        if way.children:
            assert "SIGKILL" in told
        else:  # without Ray's advice
            assert "Worker exit type" not in told
            death = caught.value.__cause__
            assert isinstance(death, WorkerDied)
            assert "Worker exit type" in str(death.__cause__)
        with pytest.raises(WorkerError):
            collector.next()
        assert collector.stats()["frames"] >= T


class ExitingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        sys.exit(37)


@pytest.mark.slow
@pytest.mark.ray
def test_an_actor_that_exits() -> None:
    with (
        collecting(ONE_ACTOR, lambda w: ExitingEnv, frames=T, max_worker_restarts=1) as collector,
        raised(WorkerError, worker=0, incarnation=1) as caught,
    ):
        collector.next()
    assert "37" in str(caught.value)


def mixed_without_end(worker: int) -> Any:
    return partial(CountingEnv, 10 * worker)


# Shutdown


def test_shutdown_closes_the_envs_once() -> None:
    env = CountingEnv()
    collector = SyncDataCollector(env, None, frames_per_batch=T)
    collector.next()
    collector.shutdown()
    collector.shutdown()
    with collector:
        pass
    assert env.closed == 1


def test_the_end_of_iteration_does_not_shut_down() -> None:
    env = CountingEnv()
    with SyncDataCollector(env, None, frames_per_batch=T, total_frames=T) as collector:
        list(collector)
        assert env.closed == 0


class Closing(CountingEnv):
    """An environment that writes its pid into a folder when it is closed.

    If there is a gate, step T + 1 waits for it.
    """

    def __init__(self, folder: str, gate: str | None = None) -> None:
        super().__init__()
        self.folder, self.gate = Path(folder), gate

    def step(self, action: Any) -> Any:
        if self.gate and len(self.actions) == T:
            (self.folder / "stepping").touch()
            wait_until(Path(self.gate).exists)
        return super().step(action)

    def close(self) -> None:
        super().close()
        (self.folder / f"closed {os.getpid()}").touch()


@pytest.mark.ray
def test_shutdown_closes_the_envs_of_actors(tmp_path: Path) -> None:
    with collecting(ASYNC[2], lambda w: partial(Closing, str(tmp_path)), frames=T) as collector:
        collector.next()
        collector.next()
        pids = {worker["pid"] for worker in collector.stats()["workers"].values()}
    assert {int(path.name.split()[1]) for path in tmp_path.glob("closed*")} == pids
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.set_seed(1)


@pytest.mark.ray
def test_shutdown_during_a_rollout_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutdown does not wait for queued rollouts."""
    monkeypatch.setattr("pycollect.transport.engine._RESPOND_SECONDS", 0.5)
    entry = partial(Closing, str(tmp_path), str(tmp_path / "never"))
    with collecting(ONE_ACTOR, lambda w: entry, frames=T, prefetch=3) as collector:
        collector.next()
        wait_until((tmp_path / "stepping").exists)
        start = time.monotonic()
    assert time.monotonic() - start < 20


@pytest.mark.ray
def test_shutdown_ends_the_processes_of_vector_envs() -> None:
    entry = partial(gymnasium.vector.AsyncVectorEnv, echo_fns(0))
    with collecting(ONE_ACTOR, lambda w: entry, frames=6) as collector:
        collector.next()
        actor = psutil.Process(collector.stats()["workers"][0]["pid"])
        children = [child.pid for child in actor.children(recursive=True)]
        assert len(children) >= 3
    wait_until(lambda: not any(map(psutil.pid_exists, children)))


WHOSE_RAY = """
import sys
import ray
from envs_for_tests import CountingEnv
from pycollect import RayCollector

options = dict(num_cpus=3, include_dashboard=False, object_store_memory=100 * 1024**2)
options.update(_memory=8 * 1024**3, log_to_driver=False)

def make(env=CountingEnv):
    return RayCollector(
        [env], None, frames_per_batch=4, total_frames=8, ray_init_config=options,
        remote_configs={"memory": 1024**3},
    )

def broken():
    raise RuntimeError("cannot be made")

if sys.argv[1] == "ours":
    try:
        make(broken)
    except RuntimeError:
        pass
    assert not ray.is_initialized(), "after a failed constructor"
    first = make()
    second = make()
    list(first)
    first.shutdown()
    assert ray.is_initialized(), "while a collector is there"
    list(second)
    second.shutdown()
    second.shutdown()
    first.shutdown()
    assert not ray.is_initialized(), "after the last collector"
else:
    ray.init(**options)
    with make() as collector:
        list(collector)
    assert ray.is_initialized(), "it is the caller's"
print("as expected")
"""


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_ray_is_shut_down_only_by_the_collector_that_started_it(whose: str) -> None:
    pytest.importorskip("ray")
    run = subprocess.run(
        [sys.executable, "-c", WHOSE_RAY, whose],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "as expected" in run.stdout, run.stderr


def test_an_error_with_its_fields_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(WorkerError("worker 3 raised", 3, 2, "Traceback ...")))
    assert (str(error), error.worker, error.incarnation) == ("worker 3 raised", 3, 2)
    assert error.remote_traceback == "Traceback ..."
