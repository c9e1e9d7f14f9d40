"""N-step transitions if each done flag of a frame ends its own trajectory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase


def each_has_its_own(td: TensorDictBase, flags: torch.Size) -> bool:
    """Return whether frames have several flags, and all entries begin with their dimensions."""
    return (
        flags[: td.ndim] == td.shape
        and flags[td.ndim :].numel() > 1
        and all(leaf.shape[: len(flags)] == flags for leaf in td.values(True, True))
    )


def flag_by_flag(
    step: Callable[[TensorDictBase], TensorDictBase], td: TensorDictBase, flags: torch.Size
) -> TensorDictBase:
    """Apply `step` to the trajectories of each flag; return the layout of the batch.

    Args:
        step: Takes a batch with time as its last dimension.
        td: Batch size [*batch, T].
        flags: Shape [*batch, T, *K], with which all entries begin.

    Returns:
        Batch size [*batch, T]; entries with one value per frame and flag are [*batch, T, *K].
    """
    time = td.ndim - 1
    wide = td.clone(False)
    wide.batch_size = flags
    result = step(wide.transpose(time, -1)).transpose(time, -1)
    for key in [None, *_nodes(td)]:
        source, target = (td, result) if key is None else (td.get(key), result.get(key))
        target.batch_size = source.batch_size
    result.names = td.names
    return result


def _nodes(td: TensorDictBase) -> list[str | tuple[str, ...]]:
    """Return the keys of nested TensorDicts."""
    leaves = set(td.keys(True, True))
    return [key for key in td.keys(True) if key not in leaves]
