"""Counting environments in every form that a collector accepts.

This module does not import torch. Processes that Gymnasium starts for an environment import only
this file, which takes a tenth of a second instead of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from envs_for_tests import CompactVectorEnv, CountingEnv, CountingVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

LENGTHS = (3, 1, 4)
PATIENCE = 600.0  # seconds; the machine may be busy


class EchoEnv(CountingEnv):
    """A CountingEnv with reward step + 100 * action."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + 100.0 * float(action), terminated, truncated, info


class TallyEnv(CountingEnv):
    """A CountingEnv that appends a byte to a file at each step."""

    def __init__(self, path: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path

    def step(self, action: Any) -> Any:
        with open(self.path, "ab", buffering=0) as file:
            file.write(b".")
        return super().step(action)


class GateEnv(CountingEnv):
    """A CountingEnv that waits for the gate's file in step `at` (from 1, over its life)."""

    def __init__(self, gate: Path, at: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate, self.at = gate, at

    def step(self, action: Any) -> Any:
        if len(self.actions) + 1 == self.at:
            self.gate.with_suffix(".reached").touch()
            wait_until(self.gate.exists)
        return super().step(action)


# Environments of worker w: env p has the number 10 * w + p.


def echo_fns(worker: int, count: int = 3) -> list[Callable[[], EchoEnv]]:
    return [partial(EchoEnv, 10 * worker + p, LENGTHS) for p in range(count)]


def gym_vector(worker: int, kind: Any, mode: str, **kwargs: Any) -> Any:
    return kind(echo_fns(worker), autoreset_mode=AutoresetMode[mode], **kwargs)


def foreign_vector(worker: int, count: int = 3, **kwargs: Any) -> CountingVectorEnv:
    return CountingVectorEnv([fn() for fn in echo_fns(worker, count)], **kwargs)


def pool(worker: int, count: int = 3) -> CompactVectorEnv:
    return CompactVectorEnv([fn() for fn in echo_fns(worker, count)])


MODES = ("NEXT_STEP", "SAME_STEP", "DISABLED")


ENTRIES: dict[str, Callable[[int], Any]] = {
    "one": lambda w: echo_fns(w)[0],
    "list": echo_fns,
    "list of one": lambda w: echo_fns(w, 1),
    **{
        f"SyncVectorEnv {mode}": partial(
            lambda mode, w: partial(gym_vector, w, SyncVectorEnv, mode), mode
        )
        for mode in MODES
    },
    **{
        f"vector {mode} of {count}": partial(
            lambda mode, count, w: partial(foreign_vector, w, count, mode=mode), mode, count
        )
        for mode in MODES
        for count in (1, 3)
    },
    **{
        f"AsyncVectorEnv {mode}{'' if shared else ' pipes'}": partial(
            lambda mode, shared, w: partial(
                gym_vector, w, AsyncVectorEnv, mode, shared_memory=shared
            ),
            mode,
            shared,
        )
        for mode in MODES
        for shared in (True, False)
    },
    **{f"pool of {count}": partial(lambda n, w: partial(pool, w, n), count) for count in (1, 3)},
    "ignores masks": lambda w: partial(foreign_vector, w, ignores_mask=True),
}


def envs_of(kind: str) -> tuple[int, bool]:
    """Return P and whether batches have a dimension for it."""
    if kind == "one":
        return 1, False
    return (1 if kind.endswith((" of one", " of 1")) else 3), True


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Poll until the condition is true, and return its value; fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"nothing happened within {seconds} s"
        time.sleep(0.01)
