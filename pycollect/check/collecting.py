"""Checks through a collector, for environments of every kind."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect.api.multi import MultiSyncDataCollector
from pycollect.api.single import SyncDataCollector
from pycollect.check.calls import CALL_SECONDS, Budget, CallFailed, calling
from pycollect.check.report import ERROR, WARNING, Draft
from pycollect.check.single import SEED

_CALLS = 5  # a batch is one call
_BATCHES = 20
_CODES = (
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
            with calling("a collector", _CALLS):
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
        if warning.category is UserWarning and any(part in text for part, _ in _CODES):
            _add_message(report, text, "warned", WARNING)


def check_in_worker(entry: Any, report: Draft, autoreset_mode: Any = None) -> None:
    """A worker process steps the environment, with the results that it has in this process."""
    frames = report.frames * _rows_of(entry)
    arguments = {"frames_per_batch": frames, "total_frames": -1, "autoreset_mode": autoreset_mode}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            calling("a collector", _CALLS),
            SyncDataCollector(entry, None, **arguments) as collector,
        ):
            here = _first_batch(collector)
        try:
            with (
                calling("a collector", _CALLS),
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
    collector.set_seed(SEED)
    return _copied(collector.next())


def _add_message(report: Draft, text: str, otherwise: str, severity: str) -> None:
    code = next((code for part, code in _CODES if part in text), otherwise)
    if code != otherwise or report.ok:  # else an error that is known is its reason
        text = text.replace("create_env_fn: ", "")
        report.add(code, f"a collector says: {text}", severity)
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
            _check_finite(first, report)
            collector.set_seed(SEED)  # also resets
            different = _first_difference(first, _copied(collector.next()))
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
    return max(1, int(getattr(entry, "num_envs", 1) or 1))


def _copied(batch: Any) -> TensorDictBase:
    return batch.clone()


def _numeric(batch: TensorDictBase) -> dict[Any, torch.Tensor]:
    items = batch.items(include_nested=True, leaves_only=True)
    return {key: own for key, own in items if isinstance(own, torch.Tensor)}


def _check_finite(batch: TensorDictBase, report: Draft) -> None:
    for key, value in _numeric(batch).items():
        if value.is_floating_point() and torch.isnan(value).any():
            report.add("not-finite", f"batch[{key!r}] has NaN", about=str(key))


def _first_difference(first: TensorDictBase, again: TensorDictBase) -> str:
    """Return the key and index of the first value that differs, or ""."""
    other = _numeric(again)
    for key, value in sorted(_numeric(first).items(), key=lambda item: "info" in item[0]):
        if "collector" in key or key not in other or value.shape != other[key].shape:
            continue
        if not torch.allclose(value.double(), other[key].double(), equal_nan=True):
            place = torch.argwhere(value != other[key])[0].tolist()
            return f"batch[{key!r}], first at {place}"
    return ""
