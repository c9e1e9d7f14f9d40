"""Trajectories as nested tensors: one row each, of its own length, without padding."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

_LAYOUTS = (torch.strided, torch.jagged)


def nested_layout(as_nested: bool | torch.layout) -> torch.layout | None:
    """Return the requested layout, or None.

    Raises:
        ValueError: The layout is not one of nested tensors.
        NotImplementedError: This version of torch does not support it.
    """
    if isinstance(as_nested, bool):
        return torch.strided if as_nested else None
    if as_nested not in _LAYOUTS:
        raise ValueError(
            "as_nested: expected True, False, torch.strided or torch.jagged, got "
            f'{as_nested!r}; for separate offsets and lengths, use format="cat"'
        )
    if as_nested == torch.jagged and not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise NotImplementedError(
            f"as_nested: torch {torch.__version__} does not support torch.jagged; use a newer "
            'version, torch.strided or format="cat"'
        )
    return as_nested


def nested(
    flat: TensorDict, offsets: torch.Tensor, lengths: torch.Tensor, layout: torch.layout
) -> TensorDict:
    """Return the entries of `flat` [F] as nested tensors of N rows; jagged ones are views.

    Args:
        offsets: Start of each row in F, and the end of the last, int64 [N + 1].
        lengths: Lengths of the rows, int64 [N].
        layout: torch.strided or torch.jagged.

    Returns:
        Batch size [N, -1] for strided tensors, or [N, T] if all rows have length T. Batch size [N]
        for jagged ones, because a batch size cannot hold their symbolic length.

    Raises:
        ValueError: There are no rows, which strided nested tensors do not support.
        TypeError: Strided nested tensors do not support a dtype.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    shortest = int(lengths.min()) if len(lengths) else 0
    if layout == torch.jagged:
        at: dict[torch.device, torch.Tensor] = {}  # one per device, so that all rows are alike

        def jagged(leaf: torch.Tensor) -> torch.Tensor:
            where = at.setdefault(leaf.device, offsets.to(leaf.device))
            return torch.nested.nested_tensor_from_jagged(
                leaf, where, min_seqlen=shortest, max_seqlen=longest
            )

        return _applied(flat, jagged, [len(lengths)])
    if not len(lengths):
        raise ValueError(
            "as_nested: expected at least one trajectory, got none; use torch.jagged, which also "
            "supports none"
        )

    sizes = lengths.tolist()

    def strided(leaf: torch.Tensor) -> torch.Tensor:
        try:
            return torch.nested.as_nested_tensor(list(torch.split(leaf, sizes)))
        except NotImplementedError as error:
            raise TypeError(
                f"as_nested: torch has no strided nested tensors of {leaf.dtype}; use torch.jagged"
            ) from error

    return _applied(flat, strided, [len(lengths), longest if longest == shortest else -1])


def _applied(flat: TensorDict, nest: Any, batch_size: list[int]) -> TensorDict:
    result: TensorDict = flat.apply(nest, batch_size=batch_size)
    return result
