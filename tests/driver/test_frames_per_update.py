"""max_frames_per_update: background collection keeps pace with the learner."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collect_support import IN_PROCESS, MULTI_ASYNC, MULTI_STACK, Way, collecting, parity_policy
from echo_envs import wait_until
from envs_for_tests import CountingEnv
from raising import refused
from test_ledger import check

from pycollect import MultiaSyncDataCollector, SyncDataCollector

T = 5
LIMIT = "max_frames_per_update"
WAYS = [
    pytest.param(IN_PROCESS, id="in process"),
    *(
        pytest.param(way, id=way.name, marks=pytest.mark.processes)
        for way in (MULTI_ASYNC[2], MULTI_STACK)
    ),
]


class Buffer(list[Any]):
    """A replay buffer that stores whole batches."""

    def extend(self, td: Any) -> None:
        self.append(td)

    @property
    def frames(self) -> int:
        return sum(td.numel() for td in self)


def filling(way: Way = IN_PROCESS, **options: Any) -> Any:
    """Return a collector that writes batches to a Buffer.

    A batch has T frames, or 2 * T with two synchronous workers.
    """

    def entry(worker: int) -> Any:
        return partial(CountingEnv, 10 * worker, 3)

    options = {"replay_buffer": Buffer(), **options}
    return collecting(way, entry, parity_policy(), frames=T, **options)


def settled(collector: Any, frames: int) -> bool:
    """Return whether this number of frames is collected, and no more for a while."""
    wait_until(lambda: collector.stats()["frames"] >= frames)
    time.sleep(0.1)
    return bool(collector.stats()["frames"] == frames == collector.replay_buffer.frames)


@pytest.mark.parametrize("way", WAYS)
def test_the_frames_of_each_update(way: Way) -> None:
    with filling(way, max_frames_per_update=4 * T) as collector:
        collector.start()
        assert settled(collector, 4 * T)
        for updates in range(1, 4):
            collector.update_policy_weights_()
            assert settled(collector, 4 * T * (1 + updates))
        for _ in range(5):  # without waiting in between
            collector.update_policy_weights_()
        assert settled(collector, 4 * T * 9)
        assert collector.is_running()
        check(collector.ledger())


def test_less_than_a_batch_for_each_update() -> None:
    with filling(max_frames_per_update=2) as collector:
        collector.start()
        assert settled(collector, T)
        for updates in range(1, 11):
            collector.update_policy_weights_()
            assert settled(collector, T + 2 * updates // T * T)


def test_random_frames_come_before_the_first_update() -> None:
    with filling(max_frames_per_update=2 * T, init_random_frames=18) as collector:
        collector.start()
        assert settled(collector, 5 * T)  # 28 are allowed
        collector.update_policy_weights_()
        assert settled(collector, 7 * T)


def test_next_is_not_limited_and_counts() -> None:
    with filling(max_frames_per_update=2 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        for _ in range(3):
            collector.next()
        assert settled(collector, 5 * T)
        collector.update_policy_weights_()
        assert settled(collector, 5 * T)
        collector.update_policy_weights_()
        assert settled(collector, 6 * T)


def test_frames_and_updates_before_the_start_do_not_count() -> None:
    with filling(max_frames_per_update=2 * T) as collector:
        for _ in range(3):
            collector.next()
            collector.update_policy_weights_()
        collector.start()
        assert settled(collector, 5 * T)


def test_a_pause_allows_no_more_frames() -> None:
    with filling(max_frames_per_update=2 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        for _ in range(3):
            start = time.monotonic()
            with collector.pause():
                assert not collector.is_running()
            assert time.monotonic() - start < 1.0
            collector.pause()
            collector.update_policy_weights_()
            collector.start()
        assert settled(collector, 8 * T)


@pytest.mark.parametrize("way", WAYS)
def test_a_shutdown_does_not_wait_for_an_update(way: Way) -> None:
    with filling(way, max_frames_per_update=2 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        assert check(collector.ledger())["delivered"] == 2 * T
    assert not collector.is_running()


def test_the_end_is_noticed_without_an_update() -> None:
    with filling(max_frames_per_update=2 * T, total_frames=2 * T) as collector:
        collector.start()
        wait_until(lambda: not collector.is_running())
        assert collector.stats()["completed"]


def test_a_first_trajectory_of_any_length_is_collected() -> None:
    def entry(worker: int) -> Any:
        return partial(CountingEnv, 0, 4 * T)

    buffer = Buffer()
    options = {"replay_buffer": buffer, "trajs_per_batch": 1, "max_frames_per_traj": 4 * T}
    with collecting(
        IN_PROCESS, entry, parity_policy(), frames=T, max_frames_per_update=2 * T, **options
    ) as collector:
        collector.start()
        assert settled(collector, 4 * T)  # else the buffer would stay empty
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        wait_until(lambda: collector.ledger()["total"]["in_flight"] == 2 * T)
        time.sleep(0.1)
        assert collector.ledger()["total"]["in_flight"] == 2 * T


def test_loading_a_state_lets_a_waiting_thread_continue() -> None:
    with filling(max_frames_per_update=2 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        collector.load_state_dict(collector.state_dict())
        wait_until(lambda: collector.stats()["frames"] >= 4 * T)


def test_the_end_that_another_call_reaches_ends_the_thread() -> None:
    with filling(max_frames_per_update=2 * T, total_frames=3 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        collector.next()
        wait_until(lambda: not collector.is_running())


def test_a_run_that_is_resumed_has_its_own_count() -> None:
    with filling(max_frames_per_update=2 * T) as collector:
        collector.start()
        assert settled(collector, 2 * T)
        with collector.pause(resume=False):
            state = collector.state_dict()
    with filling(max_frames_per_update=2 * T) as collector:
        collector.load_state_dict(state)
        collector.start()
        wait_until(lambda: collector.stats()["frames"] >= 4 * T)
        time.sleep(0.1)
        assert collector.stats()["frames"] == 4 * T
        collector.update_policy_weights_()
        wait_until(lambda: collector.stats()["frames"] == 6 * T)


@pytest.mark.processes
def test_the_limit_holds_with_a_limit_of_the_policy_lag() -> None:
    with filling(MULTI_ASYNC[2], max_frames_per_update=2 * T, max_policy_lag=1) as collector:
        collector.start()
        for _ in range(20):
            wait_until(lambda: not collector._may_fill())
            collector.update_policy_weights_()
        wait_until(lambda: collector.stats()["frames"] == 42 * T)
        assert max(collector.stats()["policy_lag"]) <= 1
        check(collector.ledger())


# The end of a program

PROGRAM = """
import sys, time
import gymnasium, torch
import pycollect

class Buffer(list):
    extend = list.append

def make():
    return gymnasium.make("Pendulum-v1")

if __name__ == "__main__":
    collector = pycollect.MultiaSyncDataCollector(
        [make] * 2, torch.nn.Linear(3, 1), frames_per_batch=20, max_frames_per_update=100,
        replay_buffer=Buffer(),
    )
    collector.start()
    while collector.stats()["frames"] < 100:
        time.sleep(0.01)
    if sys.argv[1] == "interrupt":
        import _thread
        _thread.interrupt_main()
        time.sleep(60)
    raise ValueError("the learner died")
"""


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize(("how", "error"), [("raise", "ValueError"), ("interrupt", "Keyboard")])
def test_a_program_whose_learner_dies_ends(tmp_path: Path, how: str, error: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), how], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert error in done.stderr.splitlines()[-1]


# Errors


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True])
def test_invalid_limits(value: Any) -> None:
    with refused((TypeError, ValueError), LIMIT):
        SyncDataCollector(
            CountingEnv,
            None,
            frames_per_batch=T,
            replay_buffer=Buffer(),
            max_frames_per_update=value,
        )


def test_the_limit_needs_a_replay_buffer() -> None:
    with refused(ValueError, LIMIT):
        SyncDataCollector(CountingEnv, None, frames_per_batch=T, max_frames_per_update=10)


@pytest.mark.parametrize(
    "automatic",
    [
        {"update_after_each_batch": True},
        {"update_at_each_batch": True},
        {"max_weight_update_interval": 2},
    ],
    ids=lambda automatic: next(iter(automatic)),
)
def test_automatic_updates_are_refused(automatic: dict[str, Any]) -> None:
    with refused(ValueError, LIMIT):
        MultiaSyncDataCollector(
            [CountingEnv],
            parity_policy(),
            frames_per_batch=T,
            replay_buffer=Buffer(),
            max_frames_per_update=10,
            **automatic,
        )
