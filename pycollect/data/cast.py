"""Cast and scale observations: `observation_dtype` and `observation_scale`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.data.frame import FLAGS, BatchLeaves
from pycollect.data.layout import Key, as_key, dotted, dtype_name, torch_dtype

_ByKey = Mapping[Key | None, Any]
"""A value by observation key; the key ``None`` stands for all observations without a key."""


_DTYPE, _SCALE = "observation_dtype", "observation_scale"


@dataclass(frozen=True)
class ObservationCast:
    """Dtypes and scales of observations, from `observation_dtype` and `observation_scale`.

    An observation x becomes ``x.to(dtype) * scale``, at the root, under "next" and for the policy.
    Flags are not cast. Bool and complex observations are cast only if they are named. A policy's
    output that replaces an observation is not cast.
    """

    dtypes: _ByKey
    scales: _ByKey

    @classmethod
    def checked(cls, dtype: Any, scale: Any) -> ObservationCast | None:
        """Check both arguments; return ``None`` if neither is given."""
        dtypes = _by_key(_DTYPE, dtype, _checked_dtype)
        scales = _by_key(_SCALE, scale, _checked_scale)
        if not dtypes and not scales:
            return None
        for key in {*dtypes, *scales}:
            target = dtypes.get(key, dtypes.get(None))
            factor = scales.get(key, scales.get(None))
            if factor is not None and target is not None and not target.is_floating_point:
                raise ValueError(f"{_SCALE}: requires a floating-point {_DTYPE}, got {target}")
        return cls(dtypes, scales)

    def check_keys(self, leaves: BatchLeaves) -> None:
        """Raise a ValueError for a key that is not an observation of the environment."""
        known = [leaf.key for leaf in _observations(leaves.observation)]
        for name, values in ((_DTYPE, self.dtypes), (_SCALE, self.scales)):
            unknown = [key for key in values if key is not None and key not in known]
            if unknown:
                raise ValueError(
                    f"{name}: expected keys among {[dotted(key) for key in known]}, got "
                    f"{[dotted(key) for key in unknown]}"
                )

    def apply(
        self, tensors: Mapping[Key, torch.Tensor], leaves: BatchLeaves
    ) -> dict[Key, torch.Tensor]:
        """Return a batch's tensors with cast observations, on the same device.

        An observation that already has the dtype is scaled in place.
        """
        result = dict(tensors)
        outputs = {leaf.key for leaf in leaves.outputs}
        for leaf, dtype, scale in self.targets(leaves.observation):
            for place in (leaf.key, ("next", *leaf.key)):
                if place in result and place not in outputs:
                    result[place] = scaled(result[place], dtype, scale)
        return result

    def targets(self, leaves: Iterable[Leaf]) -> Iterator[tuple[Leaf, torch.dtype, float | None]]:
        """Yield each leaf that is cast, with its dtype and scale."""
        for leaf in _observations(leaves):
            source = torch_dtype(leaf.dtype)
            named = leaf.key in self.dtypes or leaf.key in self.scales
            if not named and (source is torch.bool or source.is_complex):
                continue
            scale = self.scales.get(leaf.key, self.scales.get(None))
            dtype = self.dtypes.get(leaf.key, self.dtypes.get(None))
            if dtype is None:
                to_floating = scale is not None and not source.is_floating_point
                dtype = torch.float32 if to_floating else source
            yield leaf, dtype, scale


def _observations(leaves: Iterable[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.key[-1] not in FLAGS]


def scaled(tensor: torch.Tensor, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
    """Return the tensor cast and multiplied, in place if it already has the dtype."""
    if scale is not None and tensor.device.type != "cpu" and _fits(tensor.dtype, dtype):
        return scaled_at_once(tensor, dtype, scale)
    result = tensor.to(dtype)
    return result if scale is None else result.mul_(scale)


def scaled_at_once(tensor: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return the same as `scaled` in one pass, which is faster on devices.

    `tensor` has integers that `dtype`, float32, float16 or bfloat16, represents exactly. The
    product is computed in float32 and rounded once, as torch does for float16 and bfloat16. On the
    CPU, torch would make a temporary float32 tensor.
    """
    result = torch.empty_like(tensor, dtype=dtype)
    return torch.mul(tensor, torch.tensor(scale, dtype=torch.float32, device="cpu"), out=result)


def _fits(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether `target`, up to float32, represents all integers of dtype `source` exactly."""
    bits = {torch.uint8: 8, torch.int8: 8, torch.int16: 16}.get(source, 64)
    precision = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(target, 0)
    return bits <= precision


def _by_key(name: str, value: Any, check: Callable[[str, Any], Any]) -> _ByKey:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {None: check(name, value)}
    for key in value:
        if not isinstance(key, str) and not (
            isinstance(key, tuple) and key and all(isinstance(part, str) for part in key)
        ):
            raise TypeError(f"{name}: expected strings or tuples of strings as keys, got {key!r}")
    return {as_key(key): check(name, item) for key, item in value.items()}


def _checked_dtype(name: str, value: Any) -> torch.dtype:
    try:
        dtype = torch_dtype(value if isinstance(value, str) else dtype_name(value))
    except (KeyError, TypeError, ValueError):
        raise TypeError(f"{name}: expected a numeric dtype, got {value!r}") from None
    if dtype is torch.bool or dtype.is_complex:
        raise ValueError(f"{name}: expected a dtype of real numbers, got {value!r}")
    return dtype


def _checked_scale(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not math.isfinite(float(value)):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return float(value)
