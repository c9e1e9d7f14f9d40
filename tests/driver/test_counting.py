"""Counting environments: frame by frame, nothing is lost, repeated or shifted.

Observation = (env, episode, step), reward = step + 100 * action; the policy also returns its
observation. Ids are numbered in order of first delivery, by (worker, env, time).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from collect_support import (
    ASYNC,
    CAT_0,
    CAT_TIME,
    IN_PROCESS,
    MULTI_0,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    STACK,
    STEPS,
    FrameOracle,
    Way,
    collected_frames,
    collecting,
    marks_of,
    of_four,
    of_ranks,
    parity_policy,
)
from echo_envs import ENTRIES, MODES, envs_of

BATCHES = 5
SWITCHES = list(product((0, 2), (False, True), (False, True)))
PLAIN = (0, False, False)
# These ignore reset_mask: the step after a done is a dummy.
DUMMIES = ("ignores masks", "AsyncVectorEnv NEXT_STEP pipes")


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Way) else str(value)


def check_counting(way: Way, kind: str, switches: tuple[int, bool, bool], policy: Any) -> None:
    max_frames, reset_each, set_truncated = switches
    envs, batched = envs_of(kind)
    oracle = FrameOracle(
        max_frames=max_frames,
        reset_each=reset_each,
        set_truncated=set_truncated,
        # A reset at the start of a batch follows the automatic one; with pipes, a step comes first.
        exact=not reset_each and "pipes" not in kind,
        skips=kind in DUMMIES,
        acts=policy is not None,
    )
    arguments = {
        "max_frames_per_traj": max_frames,
        "reset_at_each_iter": reset_each,
        "set_truncated": set_truncated,
    }
    with collecting(way, ENTRIES[kind], policy, frames=envs * STEPS, **arguments) as collector:
        counted = 0
        for _ in range(BATCHES * (1 if way.sync or not way.remote else way.workers)):
            td = collector.next()
            assert td.shape == way.shape(envs, batched, STEPS)
            oracle.check(way.rows(td, envs, batched))
            counted += collected_frames(td)
        assert counted == oracle.frames == collector.stats()["frames"]


def refused(kind: str, switches: tuple[int, bool, bool]) -> bool:
    return kind in DUMMIES and switches[0] > 0


@pytest.mark.parametrize(
    ("kind", "switches"),
    [
        # Environments with processes take seconds to start.
        pytest.param(kind, switches, marks=[pytest.mark.slow] if "Async" in kind and place else [])
        for kind in ENTRIES
        for place, switches in enumerate(
            SWITCHES if "Async" not in kind else [PLAIN, (0, True, False), (2, False, True)]
        )
        if not refused(kind, switches)
    ],
)
def test_every_frame_in_process(kind: str, switches: tuple[int, bool, bool]) -> None:
    check_counting(IN_PROCESS, kind, switches, parity_policy())


@pytest.mark.parametrize(
    "kind", ["one", "list", "SyncVectorEnv NEXT_STEP", "pool of 3", "ignores masks"]
)
def test_random_actions_in_process(kind: str) -> None:
    check_counting(IN_PROCESS, kind, PLAIN, None)


# One env covers every switch in sync and async; each other kind and layout covers some.
@pytest.mark.ray(usual=2)
@pytest.mark.parametrize(
    ("way", "kind", "switches"),
    [
        (STACK, "one", PLAIN),
        (STACK, "one", (2, True, True)),
        (CAT_0, "one", (2, False, False)),
        (CAT_0, "list", (0, True, False)),
        (CAT_TIME, "one", (0, True, True)),
        (CAT_TIME, "ignores masks", (0, False, True)),
        (CAT_TIME, "AsyncVectorEnv DISABLED pipes", (2, False, False)),
        (ASYNC[0], "AsyncVectorEnv SAME_STEP", (2, True, False)),
        (ASYNC[1], "one", (2, True, True)),
        (ASYNC[1], "one", (2, False, False)),
        (ASYNC[0], "one", (0, True, False)),
        (ASYNC[2], "one", (0, False, True)),
        (ASYNC[2], "ignores masks", (0, True, False)),
    ],
    ids=name_of,
)
def test_every_frame_from_actors(way: Way, kind: str, switches: tuple[int, bool, bool]) -> None:
    check_counting(way, kind, switches, parity_policy())


PROCESSES: list[tuple[Way, str, tuple[int, bool, bool]]] = [
    (MULTI_STACK, "one", PLAIN),
    (MULTI_STACK, "list", (2, True, True)),
    (MULTI_0, "one", (2, False, False)),
    (MULTI_0, "list", (0, True, False)),
    (MULTI_TIME, "one", (0, True, True)),
    (MULTI_TIME, "ignores masks", (0, False, True)),
    (MULTI_TIME, "pool of 3", (2, False, True)),
    (MULTI_TIME, "AsyncVectorEnv DISABLED pipes", (2, False, False)),
    (MULTI_AHEAD, "list", PLAIN),
    (MULTI_ASYNC[0], "AsyncVectorEnv SAME_STEP", (2, True, False)),
    (MULTI_ASYNC[1], "one", (2, True, True)),
    (MULTI_ASYNC[2], "list", (0, False, True)),
    (MULTI_ASYNC[2], "ignores masks", (0, True, False)),
]


@pytest.mark.processes(usual=3)
@pytest.mark.parametrize(("way", "kind", "switches"), PROCESSES, ids=name_of)
def test_every_frame_from_processes(way: Way, kind: str, switches: tuple[int, bool, bool]) -> None:
    check_counting(way, kind, switches, parity_policy())


@pytest.mark.parametrize(
    ("way", "kind", "switches"),
    [
        pytest.param(own, *rest, marks=marks_of(own), id=f"{own.name}-{rest[0]}-{rest[1]}")
        for way, *rest in PROCESSES
        for own in (*of_ranks(way), *of_four(way))
    ],
)
def test_every_frame_from_ranks(way: Way, kind: str, switches: tuple[int, bool, bool]) -> None:
    check_counting(way, kind, switches, parity_policy())


# {autoreset mode} x {1, 3 envs} x {limit on, off} x {reset at each batch, or not}: in-process tests
# above cover the full product; the test below covers it with actors. Modes and resets vary over the
# actors of one collector.
ACTORS_OF_THE_MATRIX = list(product(MODES, (False, True)))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("how", [{"sync": True}, {"prefetch": 1}], ids=["sync", "async"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("max_frames", [0, 2])
def test_the_matrix_from_actors(how: dict[str, Any], count: int, max_frames: int) -> None:
    workers = len(ACTORS_OF_THE_MATRIX)
    way = Way("ray matrix", workers, how)
    ids: dict[tuple[int, int], int] = {}
    oracles = [
        FrameOracle(max_frames=max_frames, reset_each=resets, exact=not resets, ids=ids)
        for _, resets in ACTORS_OF_THE_MATRIX
    ]
    entries = [ENTRIES[f"vector {mode} of {count}"] for mode, _ in ACTORS_OF_THE_MATRIX]
    arguments = {
        "max_frames_per_traj": max_frames,
        "collector_kwargs": [{"reset_at_each_iter": each} for _, each in ACTORS_OF_THE_MATRIX],
        "remote_configs": {"num_cpus": 0.5, "memory": 512 * 1024**2},
    }
    with collecting(
        way,
        lambda worker: entries[worker](worker),
        parity_policy(),
        frames=count * STEPS,
        **arguments,
    ) as collector:
        batches = 0
        # Wait for async actors that start slowly, while the others deliver batches.
        while batches < BATCHES * (1 if way.sync else workers) or not all(
            oracle.frames for oracle in oracles
        ):
            td = collector.next()
            batches += 1
            for worker, env, row in way.rows(td, count, True):
                number = int(row["observation"][0, 0])
                oracles[number // 10].check([(worker, env, row)])
    assert all(oracle.frames >= STEPS * count for oracle in oracles)
    each = STEPS * count * (workers if way.sync else 1)
    assert sum(oracle.frames for oracle in oracles) == batches * each


@pytest.mark.slow
@pytest.mark.ray
def test_sync_rollouts_collected_ahead() -> None:
    way = Way("ray sync ahead", 2, {"sync": True, "prefetch": 2})
    check_counting(way, "list", PLAIN, parity_policy())


@pytest.mark.parametrize("fault", ["lost", "repeated", "shifted", "swapped"])
def test_the_oracle_detects_faults(fault: str) -> None:
    oracle = FrameOracle()
    with collecting(IN_PROCESS, ENTRIES["list"], parity_policy(), frames=3 * STEPS) as collector:
        first, second, third = (collector.next() for _ in range(3))
    oracle.check(IN_PROCESS.rows(first, 3, True))
    if fault == "lost":
        second = third
    elif fault == "repeated":
        second = first
    elif fault == "shifted":
        second["next", "reward"] = second["next", "reward"].roll(1, 1)
    else:
        second = second[[1, 0, 2]]
    with pytest.raises(AssertionError):
        oracle.check(IN_PROCESS.rows(second, 3, True))
