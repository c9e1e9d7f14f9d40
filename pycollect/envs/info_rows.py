"""Entries of an info, and of each row of a vector env's info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pycollect.data.layout import Key
from pycollect.envs.base import BoolArray

NOTHING = object()
"""Stands for an entry that an info does not have."""


def entry_of(info: Any, key: Key) -> Any:
    """An entry of one env's info; `NOTHING` if there is none."""
    for name in key:
        if not isinstance(info, Mapping) or name not in info:
            return NOTHING
        info = info[name]
    return info


def is_list(info: Any) -> bool:
    """Return whether a vector env's info is a list of one info per env."""
    return isinstance(info, list | tuple)


def final_observations(info: Any, ended: BoolArray) -> Any:
    """Return the terminal observations of the rows that `ended`, None if the info lacks any.

    They come as Gymnasium gives them: an array of objects, one per env, or one batched observation.
    """
    if not is_list(info):
        return info.get("final_obs", info.get("final_observation"))
    final = np.empty(len(ended), object)
    for row in np.flatnonzero(ended):
        # The last is SuperSuit's name.
        for name in ("final_obs", "final_observation", "terminal_observation"):
            if name in info[row]:
                final[row] = info[row][name]
    return None if any(final[row] is None for row in np.flatnonzero(ended)) else final


def rows_of(info: Any, key: Key, envs: int) -> list[Any]:
    """Return an entry of a vector environment's info, one value per row.

    A row has no entry if Gymnasium's mask ("_" and the entry's name) is False.
    An info may also be a list of dicts, as DictInfoToList and SuperSuit return it.

    Raises:
        ValueError: The list does not have one info per row.
    """
    if is_list(info):
        if len(info) != envs:
            raise ValueError(
                f"info: expected a list with one dict per environment ({envs}) from the vector "
                f"environment, got {len(info)}"
            )
        return [entry_of(own, key) for own in info]
    there = np.ones(envs, np.bool_)
    for name in key:
        if not isinstance(info, Mapping) or name not in info:
            return [NOTHING] * envs
        there &= np.asarray(info.get(f"_{name}", there), np.bool_)
        info = info[name]
    return [info[row] if there[row] else NOTHING for row in range(envs)]


def rows_of_step(info: Any, key: Key, ended: BoolArray, at_reset: Any) -> list[Any]:
    """Return the entry of each row after a step in SAME_STEP mode.

    Rows that ended have theirs in "final_info". Their other entries belong to the reset that
    followed, unless infos of resets lack the entry: a wrapper has then added it to the step's info.

    Args:
        at_reset: the info of a reset.
    """
    rows = rows_of(info, key, len(ended))
    if is_list(info):
        last = [entry_of(own, ("final_info", *key)) for own in info]
    else:
        final = info.get("final_info")
        if final is None:
            return rows
        if isinstance(final, Mapping):
            last = rows_of(final, key, len(ended))
        else:
            last = [entry_of(own, key) for own in final]
    of_reset = at_reset if is_list(at_reset) else [at_reset]
    if not any(isinstance(own, Mapping) and key[0] in own for own in of_reset):
        last = [row if own is NOTHING else own for own, row in zip(last, rows, strict=True)]
    return [last[p] if ended[p] else rows[p] for p in range(len(ended))]
