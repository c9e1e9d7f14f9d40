"""What a policy was shown, and whether it wrote there."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from pycollect.batch.layout import Key


class Shown:
    """An entry of the TensorDict that a policy is called with.

    Args:
        key: there.
        td: before the call.
    """

    def __init__(self, key: Key, td: TensorDictBase) -> None:
        self.key = key
        self._td = td
        self._tensor = td.get(key)
        self._copy = self._tensor.clone()
        self._version = self._tensor._version
        self._is_kept = td.get(key) is self._tensor  # a stack makes another one each time

    def is_rewritten(self, out: TensorDictBase) -> bool:
        """Whether the policy wrote there; in a TensorDict of its own: another value.

        Args:
            out: what it returned.
        """
        came = out.get(self.key, None)
        if came is None:
            return False
        if out is self._td and self._is_kept:
            # A view of the same memory is what a policy leaves that changes the TensorDict's shape
            # for a while, as TorchRL's LSTMModule does.
            return not _same_memory(came, self._tensor) or came._version != self._version
        return not equal(came, self._copy)


def _same_memory(a: Any, b: torch.Tensor) -> bool:
    """Whether they are the same elements of the same memory."""
    return a is b or (
        isinstance(a, torch.Tensor)
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and a.data_ptr() == b.data_ptr()
    )


def equal(a: Any, b: torch.Tensor) -> bool:
    """Whether it is a tensor of the same shape, dtype and values, bit for bit but for NaN."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
