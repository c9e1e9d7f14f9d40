"""Valid rows of a fixed-length storage after a rollout that ended early."""

from __future__ import annotations

from typing import Any

from pycollect.scheme.names import DONE, OBS, RHS

_OF_THE_STATE = (OBS, RHS, DONE)


def valid_rows(data: dict[str, Any], steps: int) -> dict[str, Any]:
    """Copy the rows of the collected steps, and the state after the last one.

    On-policy storages have one row more than steps: observation, hidden state and done flag after
    the last step. Other entries are 0 in that row, as after a full rollout. Entries that are not
    longer are returned unchanged.

    Args:
        data: Arrays or tensors ``[rows, P, ...]``, ``None``, or dicts of such values, by name.
        steps: Number of stored steps.
    """
    return {name: _cut(value, steps, name in _OF_THE_STATE) for name, value in data.items()}


def _cut(value: Any, steps: int, of_the_state: bool) -> Any:
    if isinstance(value, dict):
        return {name: _cut(item, steps, of_the_state) for name, item in value.items()}
    if value is None or len(value) <= steps + 1:
        return value
    rows = value[: steps + 1]
    rows = rows.clone() if hasattr(rows, "clone") else rows.copy()
    if not of_the_state:
        rows[steps:] = 0
    return rows
