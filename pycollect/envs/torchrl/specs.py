"""TorchRL's specs as leaves."""

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
from pycollect.data.layout import Key, Node, dotted, dtype_name, torch_dtype

_DRAWN = (torch.float32, torch.float64, torch.float16)
_COLLECTORS = ("collector", "next")


def as_key(key: Any) -> Key:
    """TorchRL's nested key (a string or a tuple of strings) as a key path."""
    return (key,) if isinstance(key, str) else tuple(key)


def bounded(space: spaces.Box, leaf: Leaf) -> Bounded:
    """TorchRL's spec of the arrays in a Box, whose leaf is given."""
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    return Bounded(low, high, torch.Size(leaf.shape), dtype=torch_dtype(leaf.dtype))


def name_of(key: Key) -> Any:
    """The key as TensorDicts take it; a string is looked up faster than a tuple of one."""
    return key[0] if len(key) == 1 else key


def draw(spec: Any) -> torch.Tensor:
    """`spec.rand()`: the same numbers from the same generator.

    `rand` of an interval copies both ends for each env of a batch, and looks twice whether anything
    is out of it; that of a one-hot encoding looks for the least and the greatest index. Either
    takes longer than the step of a small environment.
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
    """What is out of the interval, by rounding, is brought back whether there is any or not."""
    low, high = spec.space._low, spec.space._high  # those of one env, where all have the same
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
            came = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"create_env_fn: expected shape {list(shape)} for {dotted(leaf.key)!r}, as in the "
                f"environment's spec, but reset returned {came}"
            )


def observation_leaves(env: EnvBase) -> tuple[Leaf, ...]:
    """Return the leaves of a reset and of a step: observations, then flags.

    Raises:
        ValueError: A key is reserved for the collector.
    """
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
    """The leaves below a Composite of a batch of envs, each for one env; without its extras."""
    return tuple(entry for entry in _entries(spec, (), batch) if isinstance(entry, Leaf))


def spec_extras(spec: Composite, batch: torch.Size) -> tuple[Extra, ...]:
    """What below a Composite has no fixed shape and numeric dtype.

    Stacks of unequal specs are one extra as a whole, with the numeric leaves inside.
    """
    return tuple(entry for entry in _entries(spec, (), batch) if isinstance(entry, Extra))


def spec_nodes(specs: Sequence[Composite], batch: torch.Size) -> dict[Key, Node]:
    """The nested Composites with batch dimensions beyond the envs', or with a tensorclass."""
    nodes: dict[Key, Node] = {}
    for spec in specs:
        for name in spec.keys(include_nested=True, leaves_only=False):
            own = spec[name]
            if not isinstance(own, Composite):
                continue
            key, before = as_key(name), nodes.get(as_key(name), Node())
            shape = tuple(own.shape[len(batch) :])
            data_cls = getattr(own, "data_cls", None)
            node = Node(
                max(shape, before.shape, key=len),
                data_cls if is_tensorclass(data_cls) else before.data_cls,
            )
            if node != Node():
                nodes[key] = node
    return nodes


def _entries(spec: Composite, path: Key, batch: torch.Size) -> Iterator[Leaf | Extra]:
    for name in list(spec.keys()):
        key, own = (*path, name), spec[name]
        if isinstance(own, StackedComposite):
            yield Extra(key, Kind.NODE)
        elif isinstance(own, Composite):
            yield from _entries(own, key, batch)
        elif own is not None:
            yield _entry(key, own, batch)


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
    own = tuple(shape[len(batch) :])
    if any(extent < 0 for extent in own):
        return Extra(key, Kind.RAGGED, dtype, own)
    return Leaf(key, dtype_name(dtype), own)


def has_step_count(env: EnvBase) -> bool:
    """Whether steps are counted already, anywhere in what the env tells."""
    keys = env.output_spec.keys(include_nested=True, leaves_only=True)
    return any("step_count" in ((key,) if isinstance(key, str) else key) for key in keys)
