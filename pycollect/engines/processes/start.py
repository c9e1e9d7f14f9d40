"""Starts children of this process: as forks of its template, or spawned."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import process
from typing import Any
from weakref import WeakSet

from pycollect.engines.processes.child import Child
from pycollect.engines.processes.forked import ForkedChild, ForkedProcess
from pycollect.engines.processes.forking import TemplateError
from pycollect.engines.processes.log import Inherited, WorkerLog
from pycollect.engines.processes.script import check_spawned
from pycollect.engines.processes.spawned import SpawnedChild
from pycollect.engines.unguarded import check_not_importing
from pycollect.errors import warn_user

_started: WeakSet[Any] = WeakSet()  # as multiprocessing's objects


def _forget_started() -> None:
    """Have multiprocessing not join them in a fork: they are children of its parent."""
    process._children.difference_update(_started)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_started)

_TRIES = 2  # a template that was idle may end while it is asked

_reported: set[str] = set()  # reasons for which this program's workers were not forked


def start_child(
    target: Callable[..., None], args: tuple[Any, ...], name: str, start_method: str
) -> tuple[Child, WorkerLog]:
    """Start a process; return it, and its standard error.

    Args:
        target: its main function; it gets the arguments, and the descriptor of that file.
        start_method: "forkserver": a fork of this program's template, and as with "spawn" where
            there can be none; "spawn": a new interpreter.

    Raises:
        ValueError: a new interpreter could not import the program, which is no file.
        RuntimeError: this process is a worker that imports a module.
    """
    check_not_importing()
    log = WorkerLog()
    what: dict[str, Any] = {
        "target": target,
        "args": (*args, Inherited(log.fileno())),
        "name": name,
        "daemon": False,  # a daemon may not have processes of its own, but environments do
    }
    try:
        child = _child(what, start_method)
        _started.add(child.native)
        return child, log
    except BaseException:
        log.close()
        raise


def _child(what: dict[str, Any], start_method: str) -> Child:
    reason = ""
    for _ in range(_TRIES if start_method == "forkserver" else 0):
        forked = ForkedProcess(**what)
        try:
            forked.start()
        except TemplateError as error:
            reason = str(error)
            continue
        return ForkedChild(forked)
    check_spawned(what["name"])
    if reason:
        _report_spawning(reason)
    spawned = multiprocessing.get_context("spawn").Process(**what)
    spawned.start()
    return SpawnedChild(spawned)


def _report_spawning(reason: str) -> None:
    """Warn that workers are spawned, once for each reason."""
    if reason in _reported:
        return
    _reported.add(reason)
    warn_user(
        "start_method: workers are spawned instead of forked, so each spends seconds on imports "
        f"and needs its own memory for them: {reason}. Remove the cause, or pass "
        "start_method='spawn' to silence this warning."
    )
