"""What a policy's first call fails of, in the words of who wrote neither policy nor environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pycollect.batch.layout import Key
from pycollect.policy.program.steps import show

_OF_FORM = {
    RuntimeError: re.compile(r"dtype|\btype\b|shape|size|dimension|channels", re.IGNORECASE),
    IndexError: re.compile(
        r"too many indices|dimension specified|dimension out of range", re.IGNORECASE
    ),
}
"""What torch's errors say where dtypes or shapes do not fit."""


def explained(
    error: Exception, policy: Any, given: Mapping[Key, torch.Tensor]
) -> RuntimeError | None:
    """An error that says what the policy was given, where torch did not take that; else None.

    Args:
        given: the policy's inputs, by key.
    """
    words = _OF_FORM.get(type(error))
    if words is None or not words.search(str(error)):
        return None
    forms = ", ".join(
        f"{show(key)} {_name(tensor.dtype)} {list(tensor.shape)}" for key, tensor in given.items()
    )
    return RuntimeError(
        f"policy: its first call, with {forms}, raised: {error}{_remedy(policy, given)}"
    )


def _remedy(policy: Any, given: Mapping[Key, torch.Tensor]) -> str:
    """What to do about inputs of another dtype than the parameters; empty where there are none."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else ()
    own = {one.dtype for one in parameters if one.is_floating_point()}
    odd = [key for key, tensor in given.items() if tensor.dtype not in own]
    if len(own) != 1 or not odd:
        return ""
    dtype = _name(own.pop())
    return (
        f". Its parameters are {dtype}, {', '.join(map(show, odd))} not: "
        f"observation_dtype=torch.{dtype} casts what it reads, and the batch, to theirs"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
