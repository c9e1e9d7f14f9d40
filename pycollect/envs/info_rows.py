"""Entries of an info and of each row of a vector environment's info; options of a masked reset."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from pycollect.data.layout import Key
from pycollect.envs.base import BoolArray
from pycollect.envs.spaces import Array, Space

NOTHING = object()
"""Marks a missing entry of an info."""

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


def entry_of(info: Any, key: Sequence[Hashable]) -> Any:
    """Return an entry of one environment's info, or `NOTHING` if it is missing."""
    for name in key:
        if not isinstance(info, Mapping) or name not in info:
            return NOTHING
        info = info[name]
    return info


def stacked_entry(infos: Any, agents: Sequence[Hashable], key: Key) -> Any:
    """Return an entry of the infos of several agents, or `NOTHING` if none of them has it.

    Numbers and arrays of equal shapes are stacked, with zeros for agents without the entry. Other
    values are returned as a list, which no tensor can hold.
    """
    values = [entry_of(infos, (agent, *key)) for agent in agents]
    present = [value for value in values if value is not NOTHING]
    if not present:
        return NOTHING
    arrays = [np.asarray(value) for value in present if isinstance(value, _NUMBERS)]
    if len(arrays) == len(present) and len({array.shape for array in arrays}) == 1:
        zeros = np.zeros_like(arrays[0])
        return np.stack([zeros if value is NOTHING else value for value in values])
    return present


def is_list(info: Any) -> bool:
    """Return whether a vector environment's info is a list with one info per environment."""
    return isinstance(info, list | tuple)


def final_observations(info: Any, ended: BoolArray, space: Space) -> Any:
    """Return the terminal observations of the rows that `ended`, or ``None`` if there are none.

    The result has Gymnasium's form: an array with one object per environment, or one batched
    observation. Unless the space of one observation is a Tuple, a list or tuple has one object per
    environment. See `lacks_final_rows` for missing rows.
    """
    if isinstance(info, Mapping):
        values = info.get("final_obs", info.get("final_observation"))
        if isinstance(space, spaces.Tuple) or not isinstance(values, list | tuple):
            return values
        objects = np.empty(len(values), object)
        for place, value in enumerate(values):
            objects[place] = value
        return objects
    if not is_list(info):
        raise TypeError(
            "step: expected a dict as info, or a list with one dict per environment, got "
            f"{type(info).__name__}"
        )
    if len(info) != len(ended):  # as from PufferLib, whose infos belong to no particular row
        return None
    final = np.empty(len(ended), object)
    for row in np.flatnonzero(ended):
        # SuperSuit uses "terminal_observation".
        for name in ("final_obs", "final_observation", "terminal_observation"):
            if name in info[row]:
                final[row] = info[row][name]
    return final if any(one is not None for one in final) else None


def final_mask(info: Any) -> Any:
    """Return Gymnasium's mask of the rows with a terminal observation, or ``None``."""
    return None if is_list(info) else info.get("_final_obs", info.get("_final_observation"))


def lacks_final_rows(info: Any, final: Any, ended: BoolArray) -> BoolArray:
    """Return which rows that `ended` have no terminal observation in `final`, as bool [P]."""
    if final is None:
        return ended
    mask = final_mask(info)
    lacks = np.zeros_like(ended) if mask is None else ended & ~_as_row(mask, len(ended))
    if isinstance(final, np.ndarray) and final.dtype == object:
        lacks |= ended & np.array([one is None for one in final])
    return lacks


def _as_row(mask: Any, envs: int) -> BoolArray:
    row = np.asarray(mask, np.bool_)
    if row.size != envs:
        raise ValueError(
            f"final_observation: expected info['_final_obs'] of shape [{envs}], got "
            f"{list(row.shape)}"
        )
    return row.reshape(envs)


def rows_of(info: Any, key: Key, envs: int) -> list[Any] | Array:
    """Return an entry of a vector environment's info, one value or `NOTHING` per row.

    An array that has the entry of every row is returned itself, without a loop over its rows.

    A row lacks the entry if Gymnasium's mask ("_" and the entry's name) is ``False``. The info may
    also be a list of dicts, as DictInfoToList and SuperSuit return it.
    """
    if is_list(info):
        if len(info) != envs:
            raise ValueError(
                f"info: expected a list with one dict per environment ({envs}) from the vector "
                f"environment, got {len(info)}"
            )
        return [entry_of(row, key) for row in info]
    present = np.ones(envs, np.bool_)
    for name in key:
        if not isinstance(info, Mapping) or name not in info:
            return [NOTHING] * envs
        present &= np.asarray(info.get(f"_{name}", present), np.bool_)
        info = info[name]
    if type(info) is np.ndarray and info.shape[:1] == (envs,) and present.all():
        return info
    return [info[row] if present[row] else NOTHING for row in range(envs)]


def rows_of_step(info: Any, key: Key, ended: BoolArray, at_reset: Any) -> list[Any] | Array:
    """Return the entry of each row after a step in SAME_STEP mode.

    For rows that ended, "final_info" holds the entry of the step, and the info itself holds that of
    the reset. Without a "final_info", the info itself is that of the step. If there is a wrapper,
    and `at_reset`, the info of a reset, lacks the entry, the wrapper has added it to the info of
    the step; it is then used for rows without an entry in "final_info".
    """
    rows = rows_of(info, key, len(ended))
    last: list[Any] | Array
    if is_list(info):
        last = [entry_of(row.get("final_info", row), key) for row in info]
    else:
        final = info.get("final_info")
        if final is None:
            return rows
        if isinstance(final, Mapping):
            last = rows_of(final, key, len(ended))
        else:
            last = [entry_of(row, key) for row in final]
    reset_infos = at_reset if is_list(at_reset) else [at_reset]
    if at_reset is not None and not any(
        isinstance(one, Mapping) and key[0] in one for one in reset_infos
    ):
        last = [row if end is NOTHING else end for end, row in zip(last, rows, strict=True)]
    return [last[p] if ended[p] else rows[p] for p in range(len(ended))]


_MASK = "reset_mask"


class MaskOptions(dict[str, Any]):
    """The options ``{"reset_mask": mask}``; the mask can be looked up even after `pop`.

    Gymnasium's vector environments pop the mask, so that their sub-environments do not receive it.
    Wrappers look it up afterwards. If it is missing, they reset their data of all rows: in
    Gymnasium 1.4.0, RecordEpisodeStatistics loses the returns of the continuing episodes. A popped
    mask is therefore no longer an item, but lookups by name still find it.
    """

    def __init__(self, reset_mask: BoolArray) -> None:
        """Store the mask; the argument has this name because Gymnasium's array wrappers use it."""
        super().__init__({_MASK: reset_mask})
        self._mask = reset_mask

    def pop(self, key: str, *default: Any) -> Any:
        if key == _MASK:
            super().pop(key, None)
            return self._mask
        return super().pop(key, *default)

    def get(self, key: str, default: Any = None) -> Any:
        return self._mask if key == _MASK else super().get(key, default)

    def __missing__(self, key: str) -> Any:
        if key == _MASK:
            return self._mask
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key == _MASK or super().__contains__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the items as a plain dict for sub-environments in other processes."""
        return dict, (dict(self),)
