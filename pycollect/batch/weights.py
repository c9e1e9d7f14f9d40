"""A policy's weights: found by name, and packed as one slab, once per version."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from pycollect._core import Layout, Leaf, Placement, Slab, SlabPool
from pycollect.batch.layout import dtype_name

Weights = Mapping[str, torch.Tensor]


def weights_from(source: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name ("module.0.weight").

    Args:
        source: an nn.Module; a TensorDict of parameters (``TensorDict.from_module``), also a
            TensorDictParams; a ``state_dict()``; or nested dicts of tensors.

    Raises:
        TypeError: `source` is none of these.
    """
    if isinstance(source, TensorDictBase):  # a TensorDictParams is a module, too
        source = source.flatten_keys(".").to_dict()
    if isinstance(source, nn.Module):
        return named_weights(source)
    if not isinstance(source, Mapping):
        raise TypeError(
            "policy_or_weights: expected an nn.Module, a TensorDict of parameters or a state dict, "
            f"got {type(source).__name__}"
        )
    weights = {}
    for name, value in source.items():
        if isinstance(value, (Mapping, TensorDictBase)):
            weights.update({f"{name}.{sub}": own for sub, own in weights_from(value).items()})
        elif isinstance(value, torch.Tensor):
            weights[str(name)] = value.detach()
        else:
            raise TypeError(
                f"policy_or_weights: expected tensors, got {type(value).__name__} for {name!r}"
            )
    return weights


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    """The weights of a policy in any accepted form; none for a plain callable."""
    return named_weights(policy) if isinstance(policy, nn.Module) else {}


def check_same(leaves: Sequence[Leaf], came: Weights) -> None:
    """Raise ValueError that says which names or shapes differ from these."""
    expected = {leaf.key[0] for leaf in leaves}
    if expected != came.keys():
        raise _other_names(expected, came)
    check_part(leaves, came)


def check_part(leaves: Sequence[Leaf], came: Weights) -> None:
    """Raise ValueError unless these are some of the weights, in their shapes: the others stay."""
    expected = {leaf.key[0]: list(leaf.shape) for leaf in leaves}
    if came.keys() - expected.keys() or (expected and not came):
        raise _other_names(expected.keys(), came)
    for name, tensor in came.items():
        if expected[name] != list(tensor.shape):
            raise ValueError(
                f"policy_or_weights: expected shape {expected[name]} for {name!r}, "
                f"got {list(tensor.shape)}"
            )


def _other_names(expected: Set[str], came: Weights) -> ValueError:
    missing = sorted(expected - came.keys())
    unknown = sorted(came.keys() - expected)
    return ValueError(
        "policy_or_weights: expected the names of the collector's policy; "
        f"missing: {missing or 'none'}, unknown: {unknown or 'none'}"
    )


def same_values(ours: Weights, theirs: Weights) -> bool:
    """Whether two sets of weights of the same names are equal, bit for bit or as numbers."""
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def load_weights(target: Weights, source: Weights) -> None:
    """Write `source` into tensors of `target`, in place, after checking that they are its own."""
    check_part(weight_leaves(target), source)
    with torch.no_grad():
        for name, value in source.items():
            if target[name].data_ptr() != value.data_ptr():
                target[name].copy_(value)


def weight_leaves(weights: Weights) -> tuple[Leaf, ...]:
    """Names, dtypes and shapes of weights."""
    return tuple(Leaf((name,), dtype_name(t.dtype), tuple(t.shape)) for name, t in weights.items())


_GIVEN = ("", "given")  # which of the weights are there; none of them has such a name


class WeightSlab:
    """Packs weights of fixed names, dtypes and shapes, or some of them, into one buffer.

    Args:
        leaves: the form of all, see :func:`weight_leaves`; at least one.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._names = [leaf.key[0] for leaf in leaves]
        layout = Layout([*leaves, Leaf(_GIVEN, "bool", (len(leaves),))])
        self._pool = SlabPool(Placement(layout, 1, 1, 1), 1)

    def pack(self, weights: Weights) -> npt.NDArray[np.uint8]:
        """The values of these weights now, as one array of bytes of its own."""
        slab = self._pool.acquire()
        views, given = self._views(slab)
        given.copy_(torch.tensor([name in weights for name in self._names], device="cpu"))
        load_weights(views, weights)
        packed: npt.NDArray[np.uint8] = slab.array()
        return packed

    def unpack(self, buffer: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Tensors that hold what was packed; ValueError for a buffer of another size."""
        slab = self._pool.acquire()
        target = slab.array()
        if buffer.nbytes != target.nbytes:
            raise ValueError(f"buffer: expected {target.nbytes} bytes, got {buffer.nbytes}")
        target[:] = buffer
        views, given = self._views(slab)
        there = zip(views.items(), given.tolist(), strict=True)
        return {name: view for (name, view), is_there in there if is_there}

    def _views(self, slab: Slab) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        *tensors, given = slab.tensors([1], torch.Tensor)
        views = {name: t.squeeze(0) for name, t in zip(self._names, tensors, strict=True)}
        return views, given.squeeze(0)


def named_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a policy by name, detached, sharing memory with the module.

    A parameter used in two places appears once. Empty for what is not an nn.Module: a callable
    object that holds one is not searched. Writing into a tensor changes the module; a module whose
    parameters are exchanged (`p.data = x`) has to be asked again.

    Raises ValueError for a lazy parameter that no call has given a shape yet.
    """
    if not isinstance(policy, nn.Module):
        return {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(policy):
        if is_lazy(tensor):
            raise ValueError(
                f"policy: expected initialised parameters, but {name!r} has no shape yet; "
                "call the policy once first"
            )
        weights[name] = tensor.detach()
    return weights


def device_of(policy: Any) -> torch.device | None:
    """Where a policy's first parameter or buffer lies; None for one that has none."""
    return next((tensor.device for _, tensor in _tensors(policy)), None)


def check_on_device(policy: Any, device: torch.device) -> None:
    """Raise ValueError that names the first parameter or buffer that lies elsewhere."""
    for name, tensor in _tensors(policy):
        if tensor.device != device:
            raise ValueError(
                f"policy: expected its parameters on {device}, but {name!r} is on "
                f"{tensor.device}; pass policy_device"
            )


def placed(policy: Any, device: torch.device) -> Any:
    """The policy with all of its parameters and buffers on that device.

    That is the policy itself where they are, else a copy of it.
    """
    if all(tensor.device == device for _, tensor in _tensors(policy)):
        return policy
    return copy.deepcopy(policy).to(device)


def _tensors(policy: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if not isinstance(policy, nn.Module):
        return ()
    return chain(policy.named_parameters(), policy.named_buffers())
