"""Gymnasium's own `check_env`: its errors and warnings as findings."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env

from pycollect.check.calls import CallFailed, calling
from pycollect.check.report import ERROR, WARNING
from pycollect.check.single import Subject

_CALLS = 20  # it resets and steps about as often
_SHARE = 5  # times `seconds`
_CHECKER = "env_checker.py:"  # a line of its own raised, not one of the environment
_COLORS = re.compile(r"\x1b\[\d+m")

_CODES = (
    ("share an object", "shared-object", "reused-buffer"),
    ("non-deterministic", "non-deterministic", "ignored-seed"),
    ("not equivalent", "non-deterministic", "ignored-seed"),
    ("although similar", "non-deterministic", "ignored-seed"),
    ("within the observation space", "observation-space", "observation-", "not-finite"),
    ("numpy array dtype", "observation-dtype", "observation-"),
    ("expecting a numpy array", "observation-dtype", "observation-"),
    ("should be an int or np.int64", "observation-dtype"),
    ("NaN value", "not-finite"),
    ("inf value", "not-finite"),
    ("signal to be a boolean", "flag-type"),
    ("provide a `seed`", "ignored-seed"),
)
"""Parts of Gymnasium's messages, the code of each, and other codes for the same fault."""

_STYLE = (
    "different from the unwrapped version",
    "probably too low",
    "probably too high",
    "recommend using a symmetric",
    "render",
    "Casting input x to numpy array",
    "The reward returned by `step()` must be a float",  # arrays of one number are fine
    "method is not within the observation space",  # an assertion repeats it
    "truncates after 1 step",  # also if the flag is a numpy bool
    "is now ignored",
)
"""Messages that no collector is concerned with, or that a check of this package replaces."""

_MAY_BE_INTENDED = (
    "random number generator",
    "random generates are not same",
    "`.np_random`",
    "share an object",
    "info are not equivalent",
)
"""Errors that are warnings here, because batches are right in spite of them."""


def check_by_gymnasium(subject: Subject) -> None:
    """Gymnasium's `check_env` finds nothing else."""
    report = subject.report
    if report.has("interface"):
        return
    walk = subject.walk
    needed = _CALLS * sum(max(own, default=0.0) for own in (walk.reset_seconds, walk.step_seconds))
    if needed > _SHARE * subject.seconds:
        report.skip("Gymnasium's check_env", f"it may take {needed:.0f} s; increase seconds")
        return
    env = _with_render_modes(subject.env)
    if inspect.getfullargspec(env.reset).varkw not in (None, "kwargs"):
        env = gymnasium.Wrapper(env)  # Gymnasium finds keyword arguments only by that name
    with _gymnasium_warnings() as texts:
        try:
            with calling("Gymnasium's check_env", _CALLS):
                check_env(env, skip_render_check=True, skip_close_check=True)
        except CallFailed as failed:
            error = failed.__cause__
            if report.has_mask:
                report.skip("Gymnasium's check_env", f"it ignores the action mask: {failed}")
            elif failed.place in report.places:
                report.note_end(failed.place)
            elif isinstance(error, AssertionError | gymnasium.error.Error):
                _add(subject, str(error), ERROR)
            elif _CHECKER in failed.place:
                report.skip("the rest of Gymnasium's check_env", str(failed))
            elif report.ok:
                raise
    for text in texts:
        _add(subject, text, WARNING)


def _with_render_modes(env: Any) -> Any:
    """Return the environment without the wrappers of `gymnasium.make`."""
    known = ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit")
    while isinstance(env, gymnasium.Wrapper) and type(env).__name__ in known:
        env = env.env
    return env


@contextmanager
def _gymnasium_warnings() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    for warning in caught:
        text = _COLORS.sub("", str(warning.message))
        if text.startswith("WARN: "):
            texts.append(text.removeprefix("WARN: "))


def _add(subject: Subject, text: str, severity: str) -> None:
    report = subject.report
    text = " ".join(text.split()) or "an assertion without a message failed"
    if any(part in text for part in _STYLE):
        return
    known = [codes for part, *codes in _CODES if part in text]
    if any(part in text for part in _MAY_BE_INTENDED):
        severity = WARNING
    if not any(report.has(*codes) for codes in known):
        code = known[0][0] if known else "gymnasium"
        report.add(code, f"Gymnasium's check_env says: {text}", severity, about=text)
    if severity == ERROR:
        report.note_end()
