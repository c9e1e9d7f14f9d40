"""What a policy may return, and what of it is recorded: checked once, at construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.batch.extras import Kind
from pycollect.batch.layout import Key, dtype_name, is_delivered, torch_dtype
from pycollect.devices import CPU
from pycollect.envs.base import EnvBatch
from pycollect.envs.spaces import RESERVED_KEYS
from pycollect.policy.program.steps import show, show_all

_RESERVED_ROOTS = RESERVED_KEYS - {"action", "reward"}


def check_inputs(keys: Iterable[Key], env: EnvBatch) -> None:
    """Check that the environment gives every key that the policy reads.

    Raises ValueError that names what is not there.
    """
    have = {leaf.key for leaf in env.observation}
    missing = [key for key in keys if key not in have]
    if missing:
        raise ValueError(
            f"policy: it reads {show_all(missing)}, but the environment's observation has the "
            f"key(s) {show_all(have)}"
        )


def check_output_keys(keys: Iterable[Key], env: EnvBatch) -> None:
    """Check names only, before any call. An observation may be written, but for the flags.

    Raises ValueError for keys that the collector writes, or the environment under "next", and for
    keys of which one lies inside another.
    """
    delivered = [key for key in keys if is_delivered(key)]
    observation = {leaf.key for leaf in env.observation}
    extras = {extra.key for extra in env.extras if extra.kind is not Kind.NODE}
    taken = [key for key in delivered if _is_taken(key, observation | extras, extras, env)]
    if taken:
        raise ValueError(
            f"policy: the output key(s) {show_all(taken)} are written by the collector; "
            "use other out_keys, or names that start with '_' for what only the policy reads"
        )
    observation |= extras
    everything = {*delivered, *observation}
    for key in delivered:
        parent = next((key[:n] for n in range(1, len(key)) if key[:n] in everything), None)
        inner = next((k for k in observation if k[: len(key)] == key != k), None)
        if parent or inner:
            raise ValueError(
                f"policy: the output key {show(key)} and the key {show(parent or inner or key)} "
                "cannot both be in a batch, as one lies inside the other"
            )


def _is_taken(key: Key, shown: set[Key], extras: set[Key], env: EnvBatch) -> bool:
    """True for a key of the batch that the policy does not write, at the root or under "next"."""
    if key[0] == "next" and len(key) > 1:
        return key[1:] in shown or key[1] in RESERVED_KEYS - {"action"}
    return key in extras or key in env.ends or key[0] in _RESERVED_ROOTS


def output_leaves(
    values: Mapping[Key, torch.Tensor], env: EnvBatch, device: torch.device = CPU
) -> tuple[Leaf, ...]:
    """The leaves to record, in the order of `values`: what a first call of the policy returned.

    An action's leaf is the environment's own, but of the policy's dtype where the environment says
    so. Raises ValueError naming the key, what was expected
    and what came, for missing actions, wrong shapes, and dtypes that cannot be recorded.
    """
    missing = [leaf.key for leaf in env.action if leaf.key not in values]
    if missing:
        raise ValueError(
            f"policy: it returns no {show_all(missing)}, which the environment needs; "
            f"it returns {show_all(values)}"
        )
    actions = {leaf.key: leaf for leaf in env.action}
    leaves = []
    for key, tensor in values.items():
        _check_kind(key, tensor, device)
        if key in actions:
            leaves.append(_action_leaf(actions[key], tensor, env))
        else:
            leaves.append(_leaf(key, tensor, env))
    return tuple(leaves)


def _check_kind(key: Key, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"policy: {show(key)}: expected a dense tensor, but {tensor.layout} came")
    if tensor.device != device:
        raise ValueError(
            f"policy: {show(key)}: expected a tensor on {_name(device)}, but one on "
            f"{tensor.device} came"
        )


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _leaf(key: Key, tensor: torch.Tensor, env: EnvBatch) -> Leaf:
    shape, batch = tuple(tensor.shape), env.batch_size
    if shape[: len(batch)] != batch:
        expected = ", ".join(map(str, batch))
        raise ValueError(
            f"policy: {show(key)}: expected the shape [{expected}, ...], one row per env, "
            f"but {list(shape)} came"
        )
    try:
        name = dtype_name(tensor.dtype)
    except ValueError as error:
        raise ValueError(f"policy: {show(key)}: {error}") from error
    return Leaf(key, name, shape[len(batch) :])


def _action_leaf(leaf: Leaf, tensor: torch.Tensor, env: EnvBatch) -> Leaf:
    """How an action is recorded: where the environment casts actions, as its space has it, else as
    it came, which the environment makes out itself.
    """
    if tensor.is_complex() and not torch_dtype(leaf.dtype).is_complex:
        raise ValueError(
            f"policy: {show(leaf.key)}: expected {leaf.dtype}, but {tensor.dtype} came"
        )
    if not env.casts_actions:
        own = _leaf(leaf.key, tensor, env)
        return Leaf(own.key, leaf.dtype, own.shape) if _is_unknown_to_arrays(tensor, env) else own
    expected, came = (*env.batch_size, *leaf.shape), tuple(tensor.shape)
    if came == expected or fits(came, leaf, env.batch_size):
        return leaf
    space = _space_at(env.action_space, leaf.key)
    if isinstance(space, spaces.Discrete) and came == (*env.batch_size, int(space.n)):
        raise ValueError(
            f"policy: {show(leaf.key)}: expected an index of shape {list(expected)} for "
            f"{space}, but {list(came)} came; Gymnasium's Discrete does not take one-hot "
            "actions, use argmax(-1)"
        )
    raise ValueError(
        f"policy: {show(leaf.key)}: expected the shape {list(expected)}, but {list(came)} came"
    )


def fits(came: tuple[int, ...], leaf: Leaf, batch: tuple[int, ...]) -> bool:
    """Whether actions of that shape are the leaf's but for dimensions of one."""
    lead, frame = came[: len(batch)], came[len(batch) :]
    return lead == batch and _without_ones(frame) == _without_ones(leaf.shape)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [extent for extent in shape if extent != 1]


def _is_unknown_to_arrays(action: torch.Tensor, env: EnvBatch) -> bool:
    return action.dtype is torch.bfloat16 and not env.takes_tensors


def _space_at(space: Any, key: Key) -> Any:
    """The part of the action space that belongs to ("action", ...)."""
    for part in key[1:]:
        if isinstance(space, spaces.Tuple):
            space = space[int(part)]
        elif isinstance(space, spaces.Dict):
            space = space[part]
    return space
