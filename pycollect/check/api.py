"""`check_env`: makes environments of every kind that a collector accepts, and checks them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium

from pycollect.check import single, vector
from pycollect.check.calls import (
    CallFailed,
    Start,
    calling,
    named,
    run,
    still_running,
    watched_starts,
)
from pycollect.check.collecting import check_by_gymnasium, check_collecting, check_in_worker
from pycollect.check.report import FIXES, WARNING, Draft, Report
from pycollect.envs.base import close_quietly
from pycollect.envs.gymnasium_support import make_importing
from pycollect.envs.make import (
    ENVS,
    check_distinct,
    check_entry,
    is_env,
    is_torchrl_env,
    is_vector_env,
    make_env_batch,
)
from pycollect.envs.make_vector import parse_autoreset
from pycollect.envs.spaces import describe
from pycollect.transport.pickling import pickle_with_inherited


def check_env(
    env: Any,
    *,
    seconds: float = 5.0,
    autoreset_mode: Any = None,
    worker: bool = False,
    ignore: Collection[str] = (),
) -> Report:
    """Step an environment in the ways in which it can be collected, and report its faults.

    An environment that raises does not end the check: its exception is a finding with the line of
    its code. A call that takes longer than a minute is interrupted if this is the main thread.

    Args:
        env: As `create_env_fn` of a collector: a Gymnasium id or `EnvSpec`, a callable, a list of
            these, or an environment. An environment is closed at the end, as by a collector. A
            callable or id allows more checks: it is called at least three times.
        seconds: About how long to step the environment. The whole check takes about three times as
            long, or less if the environment is fast (default: 5.0).
        autoreset_mode: Mode of a vector environment that does not declare one, as for collectors
            (default: ``None``).
        worker: Also step the environment in a worker process. Then the program needs
            ``if __name__ == "__main__":``, as for all collectors of processes (default: ``False``).
        ignore: Codes of findings to leave out. They are not listed and do not count for
            ``report.ok``. All checks still run; if an ignored error ends one, `skipped` notes it
            (default: none).

    Returns:
        The report. ``print(report)`` shows it; ``report.ok`` is whether there is no error.

    Raises:
        TypeError: `env` is not accepted by collectors, or another argument has the wrong type.
        ValueError: No environment has that id, `seconds` is not positive, `autoreset_mode` is not a
            mode, or `ignore` has an unknown code.
    """
    seconds, ignore = _checked_seconds(seconds), _checked_codes(ignore)
    parse_autoreset(autoreset_mode, "autoreset_mode")
    entry = _checked_entry(env)
    report = Draft(_name(env), ignored=ignore)
    makers = entry if isinstance(entry, list) else [entry]
    made: list[Any] = []
    with watched_starts() as starts, _reporting(report):
        try:
            if is_env(entry):
                made.append(entry)
                _check_instance_pickles(entry, report)
            else:
                for make in makers if len(makers) > 1 else makers * 2:
                    made.append(_made(make, report))
                if not isinstance(env, str | list | tuple):
                    report.env = named(made[0])
                _check_factories(makers, made, report)
            _check_kind(entry, made, report, seconds, autoreset_mode)
        finally:
            for made_env in made:
                with _reporting(report), calling("close()"):
                    close_quietly(made_env)
    _check_left(starts, report)
    if worker:
        with _reporting(report):
            _check_worker(entry, report, autoreset_mode)
    return report.final()


class _StopError(Exception):
    """No further check can run."""


@contextmanager
def _reporting(report: Draft) -> Iterator[None]:
    """Report an error that ends the block."""
    try:
        yield
    except CallFailed as failed:
        failed.report(report)
    except _StopError:
        report.note_end()


def _checked_seconds(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"seconds: expected a number, got {describe(seconds)}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds: expected a positive number, got {seconds}")
    return float(seconds)


def _checked_codes(codes: Any) -> frozenset[str]:
    if isinstance(codes, str) or not isinstance(codes, Collection):
        raise TypeError(f"ignore: expected a list of codes, got {describe(codes)}")
    for code in codes:
        if code not in FIXES:
            raise ValueError(f"ignore: expected codes of findings, got {code!r}; use {[*FIXES]}")
    return frozenset(codes)


def _checked_entry(env: Any) -> Any:
    try:
        return check_entry(env)
    except (TypeError, ValueError, ImportError, gymnasium.error.Error) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(str(error).replace("create_env_fn", "env", 1)) from None


def _name(env: Any) -> str:
    if isinstance(env, str):
        return env
    if isinstance(env, list | tuple):
        return f"[{', '.join(map(_name, env))}]"
    return named(env) if is_env(env) else str(getattr(env, "__qualname__", "") or env)


def _made(make: Callable[[], Any], report: Draft) -> Any:
    of_gymnasium = isinstance(make, partial) and make.func in (gymnasium.make, make_importing)
    with calling("making the environment"):
        # The passive checker would warn of the same, and raise for faults that are findings.
        options = {"disable_env_checker": True} if of_gymnasium else {}
        env = make(**options)
    if not is_env(env):
        report.add("refused", f"the callable returned {describe(env)}; expected {ENVS}")
        raise _StopError
    return env


def _check_factories(makers: Sequence[Any], made: Sequence[Any], report: Draft) -> None:
    """Each call makes a new environment, and the factory can be sent to workers."""
    try:
        check_distinct(made)
    except ValueError as same:
        report.add("same-instance", str(same).replace("create_env_fn: ", ""))
    for i, make in enumerate(makers):
        found = unpicklable(make)
        if found is not None:
            path, error = found
            place = f"{path.strip()} of the callable" if path else "the callable"
            report.add(
                "not-picklable",
                f"collectors with worker processes cannot send {place} to them ({error})",
                about=str(i),
            )


def _check_instance_pickles(env: Any, report: Draft) -> None:
    found = unpicklable(env)
    if found is not None:
        path, error = found
        report.add(
            "not-picklable",
            f"the environment{path} cannot be pickled ({error}); pass a callable that makes the "
            "environment, which is all that workers need",
            WARNING,
        )


def _check_kind(
    entry: Any, made: Sequence[Any], report: Draft, seconds: float, autoreset_mode: Any
) -> None:
    is_twice = len(made) == 2 and not isinstance(entry, list) and not report.has("same-instance")
    env, second = made[0], made[1] if is_twice else None
    if is_torchrl_env(env):
        _check_torchrl_specs(env, report)
        check_collecting(entry, report, seconds, twice=True)
    elif is_vector_env(env):
        vector.check_vector(env, second, report, seconds, autoreset_mode)
        check_collecting(entry, report, seconds, autoreset_mode)
    elif isinstance(env, gymnasium.Env):
        _check_single(env, second, report, seconds)
        if not report.has("hangs"):
            check_collecting(entry, report, seconds)
    else:
        check_collecting(entry, report, seconds, twice=True)


def _check_single(env: Any, second: Any, report: Draft, seconds: float) -> None:
    try:
        with calling("stepping the environment"):
            batch = make_env_batch(env)
    except CallFailed as failed:
        if not failed.refusal:
            raise
        report.add("refused", failed.refusal)
        raise _StopError from None
    subject = single.Subject(env, report, seconds, batch, second)
    run((*single.CHECKS, check_by_gymnasium), subject, report)


def _check_left(starts: list[Start], report: Draft) -> None:
    """`close` ends all processes that the environment started."""
    running = still_running(starts)
    if running:
        report.add(
            "leaves-process",
            f"{len(running)} started processes still ran a second after close(); one was started "
            f"at {running[0].place}",
            WARNING,
        )


def _check_worker(entry: Any, report: Draft, autoreset_mode: Any) -> None:
    about = "a worker process"
    if isinstance(entry, list) or is_env(entry):
        report.skip(about, "that needs one id or callable")
    elif report.has_mask:
        report.skip(about, "random actions ignore the action mask")
    elif not report.ok or report.has("hangs"):
        report.skip(about, "the environment has errors")
    else:
        check_in_worker(entry, report, autoreset_mode)


def _check_torchrl_specs(env: Any, report: Draft) -> None:
    """TorchRL's `check_env_specs` finds no fault."""
    from torchrl.envs.utils import check_env_specs

    try:
        with calling("TorchRL's check_env_specs"):
            check_env_specs(env)
    except CallFailed as failed:
        if not isinstance(failed.__cause__, AssertionError):
            raise
        report.add("specs", f"check_env_specs failed: {failed.__cause__}")


_DEPTH = 8


def unpicklable(value: Any) -> tuple[str, str] | None:
    """Return the path to the smallest part that cannot be pickled, and the error.

    The path is "" for the value itself, else for example ``.simulator.lock``. ``None`` is returned
    if the value can be pickled.
    """
    error = _error_of(value)
    if error is None:
        return None
    path = ""
    for _ in range(_DEPTH):
        for name, part in _parts(value):
            inner = _error_of(part)
            if inner is not None:
                path, value, error = path + name, part, inner
                break
        else:
            break
    return path, error


def _error_of(value: Any) -> str | None:
    try:
        pickle_with_inherited(value)
    except Exception as error:  # an object's own pickling may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that are pickled with it, and how to reach each."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", own) for key, own in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", own) for i, own in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f".args[{i}]", own) for i, own in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", own) for key, own in value.keywords.items())
        yield ".func", value.func
    elif (code := getattr(value, "__code__", None)) is not None:
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            yield f" (variable {name!r})", cell.cell_contents
        for name in code.co_names:
            if name in value.__globals__:
                yield f" (global {name!r})", value.__globals__[name]
    elif (owner := getattr(value, "__self__", None)) is not None:
        yield ".__self__", owner
    else:
        attributes = getattr(value, "__dict__", {})
        yield from ((f".{name}", own) for name, own in list(attributes.items()))
