"""start() and pause(): a replay buffer that fills in the background."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collect_support import EVERYWHERE, REMOTELY, Way, collecting, parity_policy
from echo_envs import PATIENCE, GateEnv, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError, RaisingEnv
from raising import named, refused
from test_ledger import check
from torch import nn

from pycollect import SyncDataCollector
from pycollect._core import FairLock

T = 5


class Buffer(list[Any]):
    """Keep whole batches."""

    def extend(self, td: Any) -> None:
        self.append(td)


class Estimator(nn.Module):
    """Hide its network from `parameters()`, like TorchRL's value estimators."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.__dict__["network"] = network
        self.thread = ""

    def forward(self, td: Any) -> Any:
        self.thread = threading.current_thread().name
        return td


@pytest.mark.parametrize("frozen", [False, True])
def test_training_a_postproc_in_the_background_causes_a_warning(
    frozen: bool, recwarn: pytest.WarningsRecorder
) -> None:
    estimator, taken = Estimator(nn.Linear(1, 1).requires_grad_(not frozen)), Buffer()
    with SyncDataCollector(
        CountingEnv, None, frames_per_batch=T, postproc=estimator, replay_buffer=taken
    ) as collector:
        collector.start()
        collector.start()
        wait_until(lambda: len(taken) >= 1)
    assert estimator.thread == "pycollect"
    told = [str(warning.message) for warning in recwarn]
    assert sum(named(text) == ["start"] and "postproc" in text for text in told) == (not frozen)


@pytest.mark.parametrize("way", EVERYWHERE)
def test_the_buffer_is_filled_until_a_pause(way: Way) -> None:
    taken, rollouts = Buffer(), way.workers if way.sync else 1
    with collecting(
        way, lambda w: CountingEnv, parity_policy(), frames=T, replay_buffer=taken
    ) as collector:
        collector.start()
        collector.start()
        wait_until(lambda: len(taken) >= 3)
        with collector.pause():
            size = len(taken)
            state = collector.state_dict()
            assert state["batches"] == size // rollouts == collector.stats()["batches"]
        wait_until(lambda: len(taken) > size)
        collector.set_seed(3)  # while collection runs
        collector.update_policy_weights_()
        check(collector.ledger())
        collector.pause()
        size = len(taken)
        assert collector.next() is None
        assert len(taken) == size + rollouts
        collector.start()
        wait_until(lambda: len(taken) > size + 1)
    assert not [t for t in threading.enumerate() if t.name == "pycollect"]
    assert sum(td.numel() for td in taken) == collector.stats()["frames"]


def test_the_thread_ends_with_the_last_frame() -> None:
    taken = Buffer()
    collector = SyncDataCollector(
        CountingEnv, None, frames_per_batch=T, total_frames=4 * T, replay_buffer=taken
    )
    collector.start()
    wait_until(lambda: len(taken) == 4)
    collector.pause()
    assert list(collector) == []
    collector.shutdown()


@pytest.mark.parametrize(
    "own", [{}, {"trajs_per_batch": 4}, {"trajs_per_batch": 4, "trajs_per_write": 1}], ids=str
)
def test_collection_is_completed_only_when_the_buffer_has_all_trajectories(
    own: dict[str, Any],
) -> None:
    """Five trajectories end in each of the two batches, so one could wait for another batch."""
    completed: list[bool] = []

    class Asking(Buffer):
        def extend(self, td: Any) -> None:
            completed.append(collector.stats()["completed"])
            super().extend(td)

    with SyncDataCollector(
        partial(CountingEnv, 0, 2),
        None,
        frames_per_batch=10,
        total_frames=20,
        max_frames_per_traj=5,
        replay_buffer=(taken := Asking()),
        **own,
    ) as collector:
        assert list(collector) == [None, None]
        assert collector.stats()["completed"]
    assert not any(completed)
    assert sum(td.numel() for td in taken) == 20


def test_trajectories_that_an_interrupt_left_are_written_next() -> None:
    class InterruptedOnce(Buffer):
        calls = 0

        def extend(self, td: Any) -> None:
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt
            super().extend(td)

    with SyncDataCollector(
        partial(CountingEnv, 0, 2),
        None,
        frames_per_batch=10,
        total_frames=10,
        trajs_per_batch=8,
        trajs_per_write=1,
        max_frames_per_traj=5,
        replay_buffer=(taken := InterruptedOnce()),
    ) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        assert not collector.stats()["completed"]
        assert collector.next() is None
        total = check(collector.ledger())
        assert (total["issued"], total["reasons"]) == (10, {"replay_buffer": 2})
        assert sum(td.numel() for td in taken) == total["delivered"] == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_the_thread_is_raised_in_the_caller() -> None:
    taken = Buffer()
    collector = SyncDataCollector(
        lambda: RaisingEnv(at=3 * T), None, frames_per_batch=T, replay_buffer=taken
    )
    collector.start()
    wait_until(lambda: not collector._background.running)
    with pytest.raises(EnvBrokeError):
        collector.next()
    with pytest.raises(EnvBrokeError):
        collector.start()
    assert len(taken) == 2
    collector.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_the_buffer_is_raised_in_the_caller() -> None:
    class FullOnce(Buffer):
        was_full = False

        def extend(self, td: Any) -> None:
            if len(self) == 2 and not self.was_full:
                self.was_full = True
                raise OSError("full")
            super().extend(td)

    taken = FullOnce()
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T, replay_buffer=taken)
    collector.start()
    wait_until(lambda: not collector._background.running)
    with pytest.raises(OSError, match="full"):
        collector.start()
    collector.start()  # the error has been raised once
    wait_until(lambda: len(taken) > 3)
    collector.shutdown()


PROGRAM = """
import sys
from functools import partial

from envs_for_tests import CountingEnv
from pycollect import MultiaSyncDataCollector, SyncDataCollector

class Buffer(list):
    extend = list.append

if __name__ == "__main__":
    taken = Buffer()
    cls = MultiaSyncDataCollector if sys.argv[1] == "processes" else SyncDataCollector
    env = partial(CountingEnv) if cls is SyncDataCollector else [partial(CountingEnv)]
    collector = cls(env, None, frames_per_batch=5, replay_buffer=taken)
    collector.start()
    while len(taken) < 3:
        pass
    if sys.argv[2] == "raises":
        raise ArithmeticError("its own")
"""


@pytest.mark.parametrize(
    ("where", "end"),
    [
        pytest.param("this process", "raises", marks=pytest.mark.slow),
        pytest.param("this process", "ends", marks=pytest.mark.slow),
        pytest.param("processes", "ends", marks=pytest.mark.processes),
        pytest.param("processes", "raises", marks=[pytest.mark.processes, pytest.mark.slow]),
    ],
)
def test_a_program_may_end_during_background_collection(
    where: str, end: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(script), where, end], capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == (1 if end == "raises" else 0), result.stderr
    assert ("ArithmeticError: its own" in result.stderr) == (end == "raises")


def test_start_needs_a_buffer() -> None:
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T)
    with refused(RuntimeError, "start"):
        collector.start()
    with collector.pause():
        pass
    collector.shutdown()


def test_two_threads_share_one_stream() -> None:
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T, total_frames=40 * T)
    batches: list[Any] = []
    threads = [threading.Thread(target=lambda: batches.extend(collector)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches) == 40
    assert check(collector.ledger())["delivered"] == 40 * T
    collector.shutdown()


def in_threads(*functions: Callable[[], Any]) -> None:
    """Call all functions at once; none may raise or hang."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(timeout=60)


def test_any_thread_may_start_and_pause_collection() -> None:
    taken = Buffer()
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=T, replay_buffer=taken)

    def again(call: Callable[[], Any]) -> Callable[[], None]:
        return lambda: [call() for _ in range(100)] and None

    def look_in() -> None:
        with collector.pause():
            check(collector.ledger())

    in_threads(
        *(again(collector.start) for _ in range(2)),
        *(again(call) for call in (collector.pause, look_in, collector.next)),
        *(again(lambda: check(collector.ledger())) for _ in range(2)),
        *(again(collector.stats) for _ in range(2)),
    )
    collector.pause()
    assert not collector._background.running
    assert check(collector.ledger())["delivered"] == len(taken) * T
    collector.start()
    in_threads(collector.shutdown, collector.shutdown, collector.pause)
    assert not collector._background.running
    assert check(collector.ledger())["delivered"] == len(taken) * T


def test_a_shutdown_in_another_thread_waits_for_the_batch() -> None:
    stepping, gate = threading.Event(), threading.Event()

    class Gated(CountingEnv):
        def step(self, action: Any) -> Any:
            stepping.set()
            assert gate.wait(60)
            assert not self.closed
            return super().step(action)

    collector = SyncDataCollector(Gated, None, frames_per_batch=T)
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(collector.next)
        assert stepping.wait(60)
        closing = pool.submit(collector.shutdown)
        wait_until(lambda: collector.closed)
        gate.set()
        assert batch.result(60).shape == (T,)
        closing.result(60)
    total = check(collector.ledger())
    assert (total["delivered"], total["lost"]) == (T, 0)


@pytest.mark.parametrize("way", REMOTELY)
def test_a_shutdown_in_another_thread_ends_the_waiting(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycollect.transport.engine._RESPOND_SECONDS", 0.5)
    gate = tmp_path / "gate"
    with (
        collecting(way, lambda w: partial(GateEnv, gate, 1, number=10 * w), frames=T) as collector,
        ThreadPoolExecutor(1) as pool,
    ):
        batch = pool.submit(collector.next)
        wait_until(gate.with_suffix(".reached").exists)
        collector.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            batch.result(60)
        total = check(collector.ledger())
        assert total["reasons"] == {"shutdown": total["issued"]}


def test_the_fair_lock_admits_threads_in_order() -> None:
    turnstile, order = FairLock(), []

    def enter(name: int) -> None:
        with turnstile, turnstile:
            order.append(name)

    threads = [threading.Thread(target=enter, args=(name,)) for name in range(5)]
    with turnstile:
        for place, thread in enumerate(threads):
            thread.start()
            wait_until(lambda place=place: turnstile.n_waiting == place + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_a_thread_may_enter_the_fair_lock_only_if_it_is_free() -> None:
    turnstile = FairLock()
    with ThreadPoolExecutor(1) as other:
        with turnstile:
            assert not turnstile.enter_if_free()
            assert not other.submit(turnstile.enter_if_free).result(60)
        assert turnstile.enter_if_free()
        assert not other.submit(turnstile.enter_if_free).result(60)
        turnstile.__exit__(None, None, None)
        assert not turnstile.is_busy


END = """
import os, threading
from pycollect._core import FairLock

lock, held, leave = FairLock(), threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        leave.wait()
    print("left")

def follow():
    with lock:
        print("entered")

threading.Thread(target=hold, daemon=True).start()
held.wait()
threading.Thread(target=follow, daemon=True).start()
while not lock.n_waiting:
    pass
FairLock.keep_others_out()
leave.set()
FairLock.await_others(60.0)
assert not lock.is_busy
with lock:
    pass

def fork():
    if os.fork() == 0:
        with FairLock():
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.wait()[1]))

thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""


def test_the_end_of_a_program_suspends_threads_that_wait_for_the_fair_lock() -> None:
    """A thread that leaves sleeps, as does one that waits. A fork by another thread does not."""
    result = subprocess.run(
        [sys.executable, "-c", END], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (result.stdout, result.stderr, result.returncode) == ("7\n", "", 0)
