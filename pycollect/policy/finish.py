"""What is done to single outputs of a policy after each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.batch.layout import Key, dtype_name, torch_dtype
from pycollect.envs.spaces import action_cast
from pycollect.policy.program.compile import Act, Finishers
from pycollect.policy.program.steps import PolicyOutputError, show


class Raw(NamedTuple):
    """What an output was like when the policy was first called.

    Attributes:
        lazy: torch negates or conjugates it only when it is read.
    """

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    lazy: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Raw:
        """What this output is like."""
        return cls(value.dtype, value.shape, value.requires_grad, value.is_neg() or value.is_conj())


def finishers(
    outputs: Sequence[Leaf],
    carried: Mapping[Key, Key],
    raw: Mapping[Key, Raw],
    batch: tuple[int, ...],
) -> Finishers:
    """Return functions for single outputs by their place: reshape an action, detach a parameter.

    Args:
        outputs: the leaves as they are recorded.
        carried: for each state, behind the outputs, the key of its next value. One that the policy
            does not write is its own: it is copied, as it is the memory that is written next.
        raw: every output as the policy returns it.
        batch: the environment's batch dimensions.
    """
    finish: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
    for place, leaf in enumerate(outputs):
        came = raw[leaf.key]
        if came.requires_grad:
            finish.append((place, torch.Tensor.detach))
        if came.lazy:
            finish.append((place, _resolve))
        if came.shape[len(batch) :] != leaf.shape:
            finish.append((place, _shaper(leaf, came.shape, batch)))
    for place, (key, source) in enumerate(carried.items(), len(outputs)):
        if key == source:
            finish.append((place, torch.Tensor.clone))
        elif raw[source].requires_grad:
            finish.append((place, torch.Tensor.detach))
    return finish


def _resolve(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().resolve_neg()


def casting(act: Act, outputs: Iterable[Leaf], raw: Mapping[Key, Raw]) -> Act:
    """Return `act` with its outputs cast to the recorded dtypes, on the host.

    Args:
        outputs: Recorded leaves of the first tensors that `act` returns, in their order.
        raw: Every output as the policy returns it.
    """
    casts = [
        (place, _caster(leaf, raw[leaf.key].dtype))
        for place, leaf in enumerate(outputs)
        if raw[leaf.key].dtype is not torch_dtype(leaf.dtype)
    ]
    if not casts:
        return act

    def act_and_cast() -> tuple[torch.Tensor, ...]:
        outs = list(act())
        for place, cast in casts:
            outs[place] = cast(outs[place])
        return tuple(outs)

    return act_and_cast


def _caster(leaf: Leaf, raw: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    is_known = raw is not torch.bfloat16  # to numpy
    cast = action_cast(leaf, np.dtype(dtype_name(raw if is_known else torch.float32)))

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not raw:
            raise PolicyOutputError(
                f"policy: {show(leaf.key)}: expected {raw}, as in its first call, got "
                f"{tensor.dtype}"
            )
        host = (tensor if is_known else tensor.float()).cpu()
        return torch.from_numpy(cast(host.numpy())).to(tensor.device)

    return cast_tensor


def _shaper(
    leaf: Leaf, raw: torch.Size, batch: tuple[int, ...]
) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = (*batch, *leaf.shape)

    def reshape(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != raw:
            raise PolicyOutputError(
                f"policy: {show(leaf.key)}: expected shape {list(raw)}, as in its first call, got "
                f"{list(tensor.shape)}"
            )
        return tensor.reshape(shape)

    return reshape
