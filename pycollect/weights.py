"""Policy weights as one slab: packed once per version, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import nn

from pycollect._core import Layout, Leaf, Placement, Slab, SlabPool
from pycollect.layout import dtype_name
from pycollect.policy import named_weights

Weights = Mapping[str, torch.Tensor]


def weights_from(source: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name ("module.0.weight").

    Args:
        source: an nn.Module, a TensorDict of parameters (``TensorDict.from_module``), or a
            ``state_dict()``.

    Raises:
        TypeError: `source` is none of these.
    """
    if isinstance(source, nn.Module):
        return named_weights(source)
    if isinstance(source, TensorDictBase):
        source = source.flatten_keys(".").to_dict()
    if not isinstance(source, Mapping):
        raise TypeError(
            "policy_or_weights: expected an nn.Module, a TensorDict of parameters or a state dict, "
            f"got {type(source).__name__}"
        )
    weights = {}
    for name, value in source.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"policy_or_weights: expected tensors, got {type(value).__name__} for {name!r}"
            )
        weights[str(name)] = value.detach()
    return weights


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    """The weights of a policy in any accepted form; none for a plain callable."""
    return named_weights(policy) if isinstance(policy, nn.Module) else {}


def check_same(leaves: Sequence[Leaf], came: Weights) -> None:
    """Raise ValueError that says which names or shapes differ from these."""
    expected = {leaf.key[0]: list(leaf.shape) for leaf in leaves}
    missing = sorted(expected.keys() - came.keys())
    unknown = sorted(came.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            "policy_or_weights: expected the names of the collector's policy; "
            f"missing: {missing or 'none'}, unknown: {unknown or 'none'}"
        )
    for name, shape in expected.items():
        if shape != list(came[name].shape):
            raise ValueError(
                f"policy_or_weights: expected shape {shape} for {name!r}, "
                f"got {list(came[name].shape)}"
            )


def same_values(ours: Weights, theirs: Weights) -> bool:
    """Whether two sets of weights of the same names are equal, bit for bit or as numbers."""
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def load_weights(target: Weights, source: Weights) -> None:
    """Write `source` into the tensors of `target`, in place, after checking that they fit."""
    check_same(weight_leaves(target), source)
    with torch.no_grad():
        for name, tensor in target.items():
            if tensor.data_ptr() != source[name].data_ptr():
                tensor.copy_(source[name])


def weight_leaves(weights: Weights) -> tuple[Leaf, ...]:
    """Names, dtypes and shapes of weights."""
    return tuple(Leaf((name,), dtype_name(t.dtype), tuple(t.shape)) for name, t in weights.items())


class WeightSlab:
    """Packs weights of fixed names, dtypes and shapes into one buffer, and unpacks them.

    Args:
        leaves: their form, see :func:`weight_leaves`; at least one.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._names = [leaf.key[0] for leaf in leaves]
        self._pool = SlabPool(Placement(Layout(leaves), 1, 1, 1), 1)

    def pack(self, weights: Weights) -> npt.NDArray[np.uint8]:
        """The values of these weights now, as one array of bytes of its own."""
        slab = self._pool.acquire()
        load_weights(self._views(slab), weights)
        packed: npt.NDArray[np.uint8] = slab.array()
        return packed

    def unpack(self, buffer: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Tensors that hold what was packed; ValueError for a buffer of another size."""
        slab = self._pool.acquire()
        target = slab.array()
        if buffer.nbytes != target.nbytes:
            raise ValueError(f"buffer: expected {target.nbytes} bytes, got {buffer.nbytes}")
        target[:] = buffer
        return self._views(slab)

    def _views(self, slab: Slab) -> dict[str, torch.Tensor]:
        tensors = slab.tensors([1], torch.Tensor)
        return {name: t.squeeze(0) for name, t in zip(self._names, tensors, strict=True)}
