"""What a storage of fixed length gives away of a rollout that ended before it was full."""

from __future__ import annotations

from typing import Any

from pycollect.scheme.names import DONE, OBS, RHS

_OF_THE_STATE = (OBS, RHS, DONE)


def valid_rows(data: dict[str, Any], steps: int) -> dict[str, Any]:
    """Copies of the rows of so many steps, and of the state behind the last one.

    A storage for on-policy algorithms holds one row more than its steps: observation, hidden state
    and done flag after the last one. What there is no such row of is 0 there, as it is at the end
    of a full rollout. Leaves that are not longer stay as they are.

    Args:
        data: arrays or tensors ``[rows, P, ...]`` by name, or dicts of such; None: nothing.
        steps: how many were stored since it was empty.
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
