"""What one batch goes through in the program that asks for it: a short way down, and none back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from collect_support import IN_PROCESS, MULTI_ASYNC, MULTI_STACK, STACK, Way, case_name
from envs_for_tests import CountingEnv

import pycollect

HOME = str(Path(pycollect.__file__).parent)
DEEPEST = 9  # files below each other: an engine that asks whether a process lives is the deepest


def files_below(frame: FrameType | None) -> tuple[str, ...]:
    """The files of pycollect that call each other, outermost first, neighbours counted once."""
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOME) and (not files or files[-1] != name):
            files.append(name)
        frame = frame.f_back
    return tuple(name[len(HOME) + 1 :] for name in reversed(files))


WAYS = [
    IN_PROCESS,
    pytest.param(MULTI_STACK, marks=pytest.mark.processes(usual=2)),
    pytest.param(MULTI_ASYNC[2], marks=pytest.mark.processes(usual=2)),
    pytest.param(STACK, marks=pytest.mark.ray),
]


@pytest.mark.parametrize("way", WAYS, ids=case_name)
def test_no_call_of_one_batch_comes_back_to_a_file(way: Way) -> None:
    chains: set[tuple[str, ...]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            chains.add(files_below(frame))

    envs = [CountingEnv] * way.workers if way.remote else CountingEnv
    frames = 8 * way.workers if way.sync else 8
    with way.collector(envs, frames_per_batch=frames, total_frames=-1) as collector:
        for _ in range(3):
            collector.next()
        sys.setprofile(note)
        try:
            collector.next()
        finally:
            sys.setprofile(None)

    assert chains
    assert [chain for chain in chains if len(set(chain)) < len(chain)] == []
    assert [chain for chain in chains if len(chain) > DEEPEST] == []
