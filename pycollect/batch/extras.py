"""Extras: leaves without a fixed shape and numeric dtype, kept per frame in Python."""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, is_tensor_collection

from pycollect.batch.layout import Key, dotted

Cells: TypeAlias = npt.NDArray[np.object_]
"""One value per cell, of the shape of the batch: [P, T] in a rollout."""

Extras: TypeAlias = dict[Key, Cells]
"""The extras of a rollout or a batch by key, those under "next" with it; None where no frame is."""

ExtraValues: TypeAlias = dict[Key, list[Any]]
"""What one step has of each extra: a value per env."""


class Kind(enum.Enum):
    """What the values of an extra are."""

    OBJECT = "object"
    """Any Python object, text first of all: delivered as NonTensorData."""
    RAGGED = "ragged"
    """Tensors of different shapes: the TensorDict that holds them is a lazy stack over time."""
    NODE = "node"
    """TensorDicts [a, ...] whose rows differ in keys or shapes: delivered as lazy stacks [*, a]."""


@dataclass(frozen=True)
class Extra:
    """One leaf (or one nested TensorDict) that does not fit into a slab.

    Attributes:
        key: as that of a Leaf.
        dtype: of a ragged one.
        shape: of a ragged one's frames; -1 for an extent that varies.
    """

    key: Key
    kind: Kind = Kind.OBJECT
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()

    def under_next(self) -> Extra:
        """The same under "next"."""
        return Extra(("next", *self.key), self.kind, self.dtype, self.shape)

    def absent(self) -> Any:
        """What stands where there is no value: None, or a tensor without elements."""
        if self.kind is not Kind.RAGGED:
            return None
        return torch.zeros(
            [max(extent, 0) for extent in self.shape], dtype=self.dtype, device="cpu"
        )


def private(value: Any) -> Any:
    """A copy of what its giver may write again; what cannot be copied, as it is."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock: nothing that a copy is asked of
        return value


def cells_of(values: Sequence[Any], shape: Sequence[int]) -> Cells:
    """ExtraValues in row-major order as cells of that shape."""
    cells = np.empty(len(values), np.object_)
    for place, value in enumerate(values):
        cells[place] = value
    return cells.reshape(tuple(shape))


def fitted(rollout: Extras, steps: int) -> Extras:
    """A rollout's extras, [P, T] each, with so many steps: cut, or None behind its end."""
    result = {}
    for key, cells in rollout.items():
        result[key] = np.full((len(cells), steps), None, np.object_)
        kept = min(steps, cells.shape[1])
        result[key][:, :kept] = cells[:, :kept]
    return result


def joined(rollouts: Sequence[Extras], join: str | int, envs: Sequence[int]) -> Extras:
    """The extras of several workers as those of one batch.

    Args:
        rollouts: [P, T] each, in worker order; T may differ where they are joined along time.
        join: "stack", 0 or -1, as `cat_results`.
        envs: the batch dimensions of one worker's environments: (), (P,) or more.
    """
    result = {}
    for key in rollouts[0]:
        parts = [rollout[key].reshape(*envs, rollout[key].shape[-1]) for rollout in rollouts]
        if join == "stack":
            result[key] = np.stack(parts)
        else:
            result[key] = np.concatenate(parts, axis=-1 if join == -1 or not envs else 0)
    return result


def value_of(entry: Any) -> Any:
    """The value of one cell: the object inside NonTensorData, anything else as it is."""
    if isinstance(entry, NonTensorData) and not entry.batch_size:
        return entry.data
    return entry


def per_env(entry: Any, envs: Sequence[int]) -> list[Any]:
    """An entry of a TensorDict of the batch size `envs` ((), (P,) or more) as one value per env."""
    if not envs:
        return [value_of(entry)]
    return [value_of(entry[place]) for place in np.ndindex(*envs)]


def pickled_extras(extras: Extras) -> bytes:
    """Return the pickled extras of a rollout; raise TypeError that names a failing one."""
    try:
        data: bytes = cloudpickle.dumps(extras)
        return data
    except Exception:
        for key, cells in extras.items():
            try:
                cloudpickle.dumps(cells)
            except Exception as error:
                raise TypeError(
                    f"{dotted(key)}: expected values that can be pickled, because they are sent to "
                    f"another process: {error}"
                ) from error
        raise
