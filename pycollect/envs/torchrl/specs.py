"""TorchRL's specs as leaves."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs import EnvBase

from pycollect._core import Leaf
from pycollect.layout import Key, dotted, dtype_name

_COLLECTORS = ("collector", "next")


def as_key(key: Any) -> Key:
    """TorchRL's nested key (a string or a tuple of strings) as a key path."""
    return (key,) if isinstance(key, str) else tuple(key)


def check_device(env: EnvBase) -> None:
    """Raise NotImplementedError for an env that is not on the CPU."""
    if env.device is not None and env.device.type != "cpu":
        raise NotImplementedError(
            f"create_env_fn: expected a TorchRL environment on the CPU, got one on {env.device}; "
            "other devices are not supported yet"
        )


def check_root(td: TensorDictBase, leaves: tuple[Leaf, ...]) -> None:
    """Raise ValueError for a leaf that the env's reset does not give as its spec says."""
    for leaf in leaves:
        value = td.get(leaf.key, None)
        shape = (*td.batch_size, *leaf.shape)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
            came = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"create_env_fn: expected {dotted(leaf.key)!r} of shape {list(shape)}, as the "
                f"environment's spec says, its reset gave {came}"
            )


def observation_leaves(env: EnvBase) -> tuple[Leaf, ...]:
    """What the env shows after a reset and after a step: observations, then its flags.

    Raises:
        ValueError: a key that belongs to the collector.
        NotImplementedError: as `spec_leaves`.
    """
    batch = env.batch_size
    leaves = (*spec_leaves(env.observation_spec, batch), *spec_leaves(env.full_done_spec, batch))
    for leaf in leaves:
        if leaf.key[0] in _COLLECTORS:
            raise ValueError(
                f"create_env_fn: the key {leaf.key[0]!r} belongs to the collector, got "
                f"{dotted(leaf.key)!r} among the observations of {type(env).__name__}; rename it "
                "with torchrl.envs.RenameTransform"
            )
    return leaves


def spec_leaves(spec: Composite, batch: torch.Size) -> tuple[Leaf, ...]:
    """The leaves below a Composite of a batch of envs, each for one env.

    Raises:
        NotImplementedError: an entry without a fixed shape and numeric dtype.
    """
    return tuple(
        _leaf(as_key(key), spec[key], batch)
        for key in spec.keys(include_nested=True, leaves_only=True)
    )


def _leaf(key: Key, spec: Any, batch: torch.Size) -> Leaf:
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    numeric = None if isinstance(spec, NonTensor) or not isinstance(dtype, torch.dtype) else dtype
    if numeric is None or shape is None or any(extent < 0 for extent in shape):
        raise NotImplementedError(
            f"create_env_fn: {dotted(key)!r} has no fixed shape and numeric dtype ({spec}); such "
            "entries are not supported yet. Leave it out with torchrl.envs.ExcludeTransform"
        )
    if shape[: len(batch)] != batch:
        raise ValueError(
            f"create_env_fn: expected the spec of {dotted(key)!r} to begin with the environment's "
            f"batch size {list(batch)}, got the shape {list(shape)}"
        )
    return Leaf(key, dtype_name(numeric), tuple(shape[len(batch) :]))
