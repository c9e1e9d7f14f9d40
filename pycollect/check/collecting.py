"""Checks by other code: a collector, Gymnasium's `check_env`. Its messages become findings."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import gymnasium
import torch
from gymnasium.utils.env_checker import check_env
from tensordict import TensorDictBase

from pycollect.api.multi import MultiSyncDataCollector
from pycollect.api.single import SyncDataCollector
from pycollect.check.calls import CALL_SECONDS, Budget, CallFailed, calling
from pycollect.check.report import ERROR, WARNING, Draft
from pycollect.check.single import SEED, Subject

_COLLECTOR_CALLS = 5  # a batch is one call
_BATCHES = 20
_COLLECTOR_CODES = (
    ("reset_mask", "reset-mask"),
    ("autoreset_mode:", "autoreset-mode"),
    ("final_observation:", "final-observation"),
    ("final_obs of", "final-observation"),
    ("are the same object", "same-instance"),
)
"""Parts of messages of collectors, and the codes of their findings."""


def check_collecting(
    entry: Any, report: Draft, seconds: float, autoreset_mode: Any = None, twice: bool = False
) -> None:
    """A collector accepts the environment and collects batches of it.

    Args:
        twice: Compare two batches with the same seed, and look for NaN.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with calling("a collector", _COLLECTOR_CALLS):
                _collect(entry, report, min(seconds, CALL_SECONDS / 4), autoreset_mode, twice)
        except CallFailed as failed:
            if failed.refusal:
                _add_message(report, failed.refusal, "refused", ERROR)
            elif report.has_mask:
                report.skip("collecting", f"random actions ignore the action mask: {failed}")
            elif report.ok:
                raise
    for warning in caught:
        text = str(warning.message)
        if warning.category is UserWarning and any(part in text for part, _ in _COLLECTOR_CODES):
            _add_message(report, text, "warned", WARNING)


def check_in_worker(entry: Any, report: Draft, autoreset_mode: Any = None) -> None:
    """A worker process steps the environment, with the results that it has in this process."""
    frames = report.frames * _rows_of(entry)
    arguments = {"frames_per_batch": frames, "total_frames": -1, "autoreset_mode": autoreset_mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            calling("a collector", _COLLECTOR_CALLS),
            SyncDataCollector(entry, None, **arguments) as collector,
        ):
            here = _first_batch(collector)
        try:
            with (
                calling("a collector", _COLLECTOR_CALLS),
                MultiSyncDataCollector([entry], None, **arguments) as many,
            ):
                there = _first_batch(many)
        except CallFailed as failed:
            raise CallFailed(
                failed.code, f"in a worker process, {failed}", failed.place
            ) from failed
    different = _first_difference(here, there.reshape(here.shape))
    if different and not report.has("non-deterministic", "ignored-seed"):
        report.add("differs-in-worker", f"a batch from a worker process differs in {different}")


def _first_batch(collector: Any) -> TensorDictBase:
    collector.set_seed(SEED)  # also resets
    td: TensorDictBase = collector.next().clone()
    return td


def _add_message(report: Draft, text: str, otherwise: str, severity: str) -> None:
    code = next((code for part, code in _COLLECTOR_CODES if part in text), otherwise)
    if code != otherwise or report.ok:  # else an error that is known is its reason
        text = text.replace("create_env_fn: ", "")
        report.add(code, f"a collector reports: {text}", severity)
    if severity == ERROR:
        report.note_end()


def _collect(entry: Any, report: Draft, seconds: float, mode: Any, twice: bool) -> None:
    budget = Budget(seconds)
    frames = report.frames * _rows_of(entry)
    with SyncDataCollector(
        entry, None, frames_per_batch=frames, total_frames=-1, autoreset_mode=mode
    ) as collector:
        first = _first_batch(collector)
        if twice:
            for key, value in _numeric(first).items():
                if value.is_floating_point() and torch.isnan(value).any():
                    report.add("not-finite", f"batch[{key!r}] has NaN", about=str(key))
            different = _first_difference(first, _first_batch(collector))
            if different:
                text = f"two batches after set_seed({SEED}) differ in {different}"
                report.add("non-deterministic", text, WARNING if "'info'" in different else ERROR)
        for _ in range(_BATCHES):
            if not budget.is_left:
                break
            collector.next()
        stats = collector.stats()
        report.facts["collected"] = (
            f"{stats['frames_per_second']:,.0f} frames/s by SyncDataCollector, random actions"
        )


def _rows_of(entry: Any) -> int:
    if isinstance(entry, list | tuple):
        return len(entry)
    is_class = isinstance(entry, type)  # of which `num_envs` may be a property
    return 1 if is_class else max(1, int(getattr(entry, "num_envs", 1) or 1))


def _numeric(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    items = batch.items(include_nested=True, leaves_only=True)
    return {key: value for key, value in items if isinstance(value, torch.Tensor)}


def _first_difference(first: TensorDictBase, again: TensorDictBase) -> str:
    """Return the key and index of the first value that differs, or ""."""
    other = _numeric(again)
    for key, value in sorted(_numeric(first).items(), key=lambda item: "info" in item[0]):
        if "collector" in key or key not in other or value.shape != other[key].shape:
            continue
        # First without conversion, because images need eight times the memory as float64.
        if not torch.equal(value, other[key]) and not torch.allclose(
            value.double(), other[key].double(), equal_nan=True
        ):
            place = torch.argwhere(value != other[key])[0].tolist()
            return f"batch[{key!r}], first at {place}"
    return ""


_GYMNASIUM_CALLS = 20  # it resets and steps about as often
_SHARE = 5  # times `seconds`
_CHECKER = "env_checker.py:"  # a line of its own raised, not one of the environment
_COLORS = re.compile(r"\x1b\[\d+m")

_GYMNASIUM_CODES = (
    ("share an object", "shared-object", "reused-buffer"),
    ("non-deterministic", "non-deterministic", "ignored-seed", "reused-buffer"),
    ("not equivalent", "non-deterministic", "ignored-seed", "reused-buffer"),
    ("although similar", "non-deterministic", "ignored-seed", "reused-buffer"),
    ("within the observation space", "observation-space", "observation-", "not-finite"),
    ("numpy array dtype", "observation-dtype", "observation-"),
    ("expecting a numpy array", "observation-dtype", "observation-"),
    ("should be an int or np.int64", "observation-dtype"),
    ("NaN value", "not-finite"),
    ("inf value", "not-finite"),
    ("signal to be a boolean", "flag-type"),
    ("provide a `seed`", "ignored-seed"),
    ("generators are not different", "gymnasium", "ignored-seed"),
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
    needed = _GYMNASIUM_CALLS * sum(
        max(seconds, default=0.0) for seconds in (walk.reset_seconds, walk.step_seconds)
    )
    if needed > _SHARE * subject.seconds:
        report.skip("Gymnasium's check_env", f"it may take {needed:.0f} s; increase seconds")
        return
    env = _with_render_modes(subject.env)
    if inspect.getfullargspec(env.reset).varkw not in (None, "kwargs"):
        env = gymnasium.Wrapper(env)  # Gymnasium finds keyword arguments only by that name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with calling("Gymnasium's check_env", _GYMNASIUM_CALLS):
                check_env(env, skip_render_check=True, skip_close_check=True)
        except CallFailed as failed:
            error = failed.__cause__
            may_be_intended = any(part in str(error) for part in _MAY_BE_INTENDED)
            is_found = isinstance(error, AssertionError | gymnasium.error.Error)
            if isinstance(error, ImportError) or (_CHECKER in failed.place and not is_found):
                report.skip("the rest of Gymnasium's check_env", str(failed))
            elif report.has_mask and not may_be_intended:
                report.skip("Gymnasium's check_env", f"it ignores the action mask: {failed}")
            elif failed.place in report.places:
                report.note_end(failed.place)
            elif is_found:
                _add_gymnasiums(subject, str(error), ERROR)
            elif report.ok:
                raise
    for warning in caught:
        text = _COLORS.sub("", str(warning.message))
        if text.startswith("WARN: "):
            _add_gymnasiums(subject, text.removeprefix("WARN: "), WARNING)


def _with_render_modes(env: Any) -> Any:
    """Return the environment without the wrappers of `gymnasium.make`."""
    known = ("OrderEnforcing", "PassiveEnvChecker", "TimeLimit")
    while isinstance(env, gymnasium.Wrapper) and type(env).__name__ in known:
        env = env.env
    return env


def _add_gymnasiums(subject: Subject, text: str, severity: str) -> None:
    report = subject.report
    text = " ".join(text.split()) or "an assertion without a message failed"
    if any(part in text for part in _STYLE):
        return
    known = [codes for part, *codes in _GYMNASIUM_CODES if part in text]
    if any(part in text for part in _MAY_BE_INTENDED):
        severity = WARNING
    if not any(report.has(*codes) for codes in known):
        code = known[0][0] if known else "gymnasium"
        report.add(code, f"Gymnasium's check_env reports: {text}", severity, about=text)
    if severity == ERROR:
        report.note_end()
