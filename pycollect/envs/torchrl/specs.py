"""Leaves and extras of TorchRL's specs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase, is_tensorclass
from torchrl.data import Bounded, Categorical, Composite, NonTensor, OneHot, StackedComposite
from torchrl.data.tensor_specs import Stacked
from torchrl.envs import EnvBase

from pycollect._core import Leaf
from pycollect.data.devices import why_not
from pycollect.data.extras import Extra, Kind
from pycollect.data.layout import Key, Node, as_key, dotted, dtype_name, torch_dtype

_DRAWN = (torch.float32, torch.float64, torch.float16)
_COLLECTORS = ("collector", "next")


def bounded(space: spaces.Box, leaf: Leaf) -> Bounded:
    """Return TorchRL's spec of a Box, with the shape and dtype of its leaf."""
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    return Bounded(low, high, torch.Size(leaf.shape), dtype=torch_dtype(leaf.dtype))


def name_of(key: Key) -> Any:
    """Return a key for TensorDicts, which look up a string faster than a tuple of one string."""
    return key[0] if len(key) == 1 else key


def draw(spec: Any) -> torch.Tensor:
    """Return the same numbers as `spec.rand()`, from the same generator, but faster.

    `rand` of an interval copies both bounds for each environment and checks the result twice.
    `rand` of a one-hot encoding computes the smallest and the largest index. Each takes longer than
    a step of a small environment.
    """
    rand = type(spec).rand
    if -1 not in spec.shape:
        if rand is Bounded.rand and spec.dtype in _DRAWN:
            return _draw_within(spec)
        if rand is OneHot.rand and spec.mask is None:
            index = torch.randint(spec.space.n, (*spec.shape[:-1], 1), device=spec.device)
            hot = index == _indices(spec.space.n, index.device)
            return hot if spec.dtype is torch.bool else hot.to(spec.dtype)
        if rand is Categorical.rand and spec.mask is None and spec.space.n > 0:
            return torch.randint(spec.space.n, spec.shape, device=spec.device, dtype=spec.dtype)
    return torch.as_tensor(spec.rand())


def _draw_within(spec: Any) -> torch.Tensor:
    """Draw from an interval; always clamp, because rounding may leave the interval."""
    low, high = spec.space._low, spec.space._high  # one environment's bounds if all are equal
    if low.device != spec.device:
        low, high = spec.space.low, spec.space.high
    unit = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device).uniform_()
    drawn = unit.mul_(high - low).add_(low)
    return torch.maximum(torch.minimum(drawn, high), low)


@lru_cache
def _indices(n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device)


def check_device(env: EnvBase) -> None:
    """Raise ValueError if the environment's device is not available."""
    reason = why_not(env.device) if env.device is not None else ""
    if reason:
        raise ValueError(
            f"create_env_fn: expected an environment on an available device, got {env.device}: "
            f"{reason}"
        )


def check_root(td: TensorDictBase, leaves: tuple[Leaf, ...]) -> None:
    """Raise ValueError if a leaf of the environment's reset does not match its spec."""
    for leaf in leaves:
        value = td.get(leaf.key, None)
        shape = (*td.batch_size, *leaf.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            returned = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"create_env_fn: expected shape {list(shape)} for {dotted(leaf.key)!r}, as in the "
                f"environment's spec, but reset returned {returned}"
            )


def observation_leaves(env: EnvBase) -> tuple[Leaf, ...]:
    """Return the leaves of a reset and of a step: observations, then flags."""
    batch = env.batch_size
    leaves = (*spec_leaves(env.observation_spec, batch), *spec_leaves(env.full_done_spec, batch))
    extras = spec_extras(env.observation_spec, batch)
    for key in [leaf.key for leaf in leaves] + [extra.key for extra in extras]:
        if key[0] in _COLLECTORS:
            raise ValueError(
                f"create_env_fn: {type(env).__name__} has an observation {dotted(key)!r}, but the "
                f"key {key[0]!r} is reserved for the collector; rename it with "
                "torchrl.envs.RenameTransform"
            )
    return leaves


def spec_leaves(spec: Composite, batch: torch.Size) -> tuple[Leaf, ...]:
    """Return one environment's leaves from the Composite of a batch, without extras."""
    return tuple(entry for entry in _entries(spec, (), batch) if isinstance(entry, Leaf))


def spec_extras(spec: Composite, batch: torch.Size) -> tuple[Extra, ...]:
    """Return the extras of a Composite: entries without a fixed shape and numeric dtype.

    A stack of unequal specs is one extra, together with the numeric leaves inside.
    """
    return tuple(entry for entry in _entries(spec, (), batch) if isinstance(entry, Extra))


def spec_nodes(specs: Sequence[Composite], batch: torch.Size) -> dict[Key, Node]:
    """Return nested Composites with more batch dimensions than `batch`, or with a tensorclass."""
    nodes: dict[Key, Node] = {}
    for spec in specs:
        for name in spec.keys(include_nested=True, leaves_only=False):
            child = spec[name]
            if not isinstance(child, Composite):
                continue
            key, before = as_key(name), nodes.get(as_key(name), Node())
            shape = tuple(child.shape[len(batch) :])
            data_cls = getattr(child, "data_cls", None)
            node = Node(
                max(shape, before.shape, key=len),
                data_cls if is_tensorclass(data_cls) else before.data_cls,
            )
            if node != Node():
                nodes[key] = node
    return nodes


def _entries(spec: Composite, path: Key, batch: torch.Size) -> Iterator[Leaf | Extra]:
    for name in list(spec.keys()):
        key, child = (*path, name), spec[name]
        if isinstance(child, StackedComposite):
            yield Extra(key, Kind.NODE)
        elif isinstance(child, Composite):
            yield from _entries(child, key, batch)
        elif child is not None:
            yield _entry(key, child, batch)


def _holds_objects(spec: Any) -> bool:
    if isinstance(spec, Stacked):
        return any(map(_holds_objects, spec.unbind(spec.stack_dim)))
    return isinstance(spec, NonTensor)


def _entry(key: Key, spec: Any, batch: torch.Size) -> Leaf | Extra:
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if _holds_objects(spec) or not isinstance(dtype, torch.dtype) or shape is None:
        return Extra(key)
    if shape[: len(batch)] != batch:
        raise ValueError(
            f"create_env_fn: the shape of the spec of {dotted(key)!r} must start with the "
            f"environment's batch size {list(batch)}, got {list(shape)}"
        )
    frame = tuple(shape[len(batch) :])
    if any(extent < 0 for extent in frame):
        return Extra(key, Kind.RAGGED, dtype, frame)
    return Leaf(key, dtype_name(dtype), frame)


def has_step_count(env: EnvBase) -> bool:
    """Return whether any output of the environment is a "step_count"."""
    keys = env.output_spec.keys(include_nested=True, leaves_only=True)
    return any("step_count" in ((key,) if isinstance(key, str) else key) for key in keys)
