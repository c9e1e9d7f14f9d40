"""The files that a batch and an argument pass: few on the way down, and none twice."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from collect_support import IN_PROCESS, MULTI_ASYNC, MULTI_STACK, STACK, Way, case_name
from envs_for_tests import CountingEnv

import pycollect
from pycollect.api.binding import Arguments

HOME = str(Path(pycollect.__file__).parent)
DEEPEST = 9  # nested files, in an engine's check that a process is alive

PICKLING = ("persistent_id", "is_inherited")  # called for every pickled value


def files_below(frame: FrameType | None) -> tuple[str, ...]:
    """Return pycollect's files on the call stack, outermost first, each run of one file once."""
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


@pytest.mark.parametrize("way", [IN_PROCESS, WAYS[1]], ids=case_name)
def test_frames_per_batch_passes_few_files_and_none_twice(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Follow the argument from the call to the worker, or to its message."""
    share = 7919
    files: list[str] = []

    def enter(frame: FrameType | None) -> None:
        name = "" if frame is None else frame.f_code.co_filename
        if name.startswith(HOME) and name[len(HOME) + 1 :] not in files[-1:]:
            files.append(name[len(HOME) + 1 :])

    def is_number(value: Any) -> bool:
        several = value if isinstance(value, list | tuple) else [value]
        return any(type(own) is int and own in (share, 2 * share) for own in several)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in PICKLING:
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
        given = [frame.f_locals.get(name) for name in code.co_varnames[: count + 1]]
        by_name = given.pop() if code.co_flags & 8 and len(given) > count else None
        given += by_name.values() if isinstance(by_name, dict) else []
        if code.co_filename.startswith(HOME) and any(map(is_number, given)):
            enter(frame.f_back)
            enter(frame)
        if files[-1:] == ["worker/worker.py"] or code.co_name == "start":
            sys.setprofile(None)

    def read(self: Arguments, name: str) -> Any:
        if name == "frames_per_batch":
            enter(sys._getframe(1))
        return dict.__getitem__(self, name)

    monkeypatch.setattr(Arguments, "__getitem__", read, raising=False)
    envs = [CountingEnv] * way.workers if way.remote else CountingEnv
    sys.setprofile(note)
    try:
        way.collector(envs, frames_per_batch=share * way.workers, total_frames=-1).shutdown()
    finally:
        sys.setprofile(None)
    assert files[0] == "api/choosing.py"
    assert len(files) <= 6
    assert len(set(files)) == len(files)
