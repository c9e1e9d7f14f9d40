"""Check the outputs of a policy, and convert them to the form in which they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.data.extras import Kind
from pycollect.data.layout import Key, dtype_name, is_delivered, show, show_all, torch_dtype
from pycollect.envs.base import EnvSpec
from pycollect.envs.spaces import RESERVED_KEYS, action_cast
from pycollect.policy.program.compile import Act, Finishers
from pycollect.policy.program.steps import PolicyOutputError


class RawOutput(NamedTuple):
    """Properties of an output at the policy's first call."""

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool
    lazy: bool  # whether torch negates or conjugates the tensor only when it is read

    @classmethod
    def of(cls, value: torch.Tensor) -> RawOutput:
        return cls(value.dtype, value.shape, value.requires_grad, value.is_neg() or value.is_conj())


def finishers(
    outputs: Sequence[Leaf],
    carried: Mapping[Key, Key],
    raw: Mapping[Key, RawOutput],
    batch: tuple[int, ...],
) -> Finishers:
    """Return functions to apply to single outputs: reshape an action, detach a parameter.

    The outputs are leaves as they are recorded. The next values of states follow them; `carried`
    has their keys by the states' keys. A state that the policy does not write maps to its own key;
    it is copied, because the recorder overwrites its memory.
    """
    finish: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
    for place, leaf in enumerate(outputs):
        output = raw[leaf.key]
        if output.requires_grad:
            finish.append((place, torch.Tensor.detach))
        if output.lazy:
            finish.append((place, lambda value: value.resolve_conj().resolve_neg()))
        if output.shape[len(batch) :] != leaf.shape:
            finish.append((place, _shaper(leaf, output.shape, batch)))
    for place, (key, source) in enumerate(carried.items(), len(outputs)):
        if key == source:
            finish.append((place, torch.Tensor.clone))
        elif raw[source].requires_grad:
            finish.append((place, torch.Tensor.detach))
    return finish


def checking_dtypes(act: Act, keys: Sequence[Key], raw: Mapping[Key, RawOutput]) -> Act:
    """Return `act` with an error that names autocast if an output has a new dtype.

    Args:
        keys: Keys of the tensors that `act` returns.
    """
    expected = [(place, key, raw[key].dtype) for place, key in enumerate(keys) if key in raw]

    def act_and_check() -> tuple[torch.Tensor, ...]:
        outs = act()
        for place, key, dtype in expected:
            if outs[place].dtype is not dtype:
                raise PolicyOutputError(
                    f"policy: {show(key)}: expected {dtype}, as in its first call, got "
                    f"{outs[place].dtype}; torch.autocast was entered or left in between, so enter "
                    "it inside the policy, or around the collector's construction and all batches"
                )
        return outs

    return act_and_check


def casting(act: Act, outputs: Iterable[Leaf], raw: Mapping[Key, RawOutput]) -> Act:
    """Return `act` with its first outputs cast to the dtypes of these leaves, on the host."""
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
    is_numpy_dtype = raw is not torch.bfloat16
    cast = action_cast(leaf, np.dtype(dtype_name(raw if is_numpy_dtype else torch.float32)))

    def cast_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not raw:
            raise PolicyOutputError(
                f"policy: {show(leaf.key)}: expected {raw}, as in its first call, got "
                f"{tensor.dtype}"
            )
        host = (tensor if is_numpy_dtype else tensor.float()).cpu()
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


_RESERVED_ROOTS = RESERVED_KEYS - {"action", "reward"}


def check_inputs(keys: Iterable[Key], env: EnvSpec) -> None:
    """Raise ValueError if the environment does not return every key that the policy reads."""
    have = {leaf.key for leaf in env.observation}
    missing = [key for key in keys if key not in have]
    if missing:
        raise ValueError(
            f"policy: it reads {show_all(missing)}, but the keys of the environment's observation "
            f"are {show_all(have)}"
        )


def check_output_keys(keys: Iterable[Key], env: EnvSpec) -> None:
    """Check the policy's output keys before its first call.

    A policy may write observations, except flags. Raises ValueError if the collector writes a key,
    if the environment writes it under "next", or if one key is nested inside another.
    """
    delivered = [key for key in keys if is_delivered(key)]
    observation = {leaf.key for leaf in env.observation}
    extras = {extra.key for extra in env.extras if extra.kind is not Kind.NODE}
    taken = [key for key in delivered if _is_taken(key, observation | extras, extras, env)]
    if taken:
        raise ValueError(
            f"policy: the collector itself writes the output key(s) {show_all(taken)}; use other "
            "out_keys, or the prefix '_' for entries that only the policy reads"
        )
    observation |= extras
    everything = {*delivered, *observation}
    for key in delivered:
        parent = next((key[:n] for n in range(1, len(key)) if key[:n] in everything), None)
        inner = next((k for k in observation if k[: len(key)] == key != k), None)
        if parent or inner:
            raise ValueError(
                f"policy: the output key {show(key)} and the key {show(parent or inner or key)} "
                "cannot both be in a batch, because one is nested inside the other; rename one"
            )


def _is_taken(key: Key, observation: set[Key], extras: set[Key], env: EnvSpec) -> bool:
    """Return whether the collector or the environment writes this entry of a batch."""
    if key[0] == "next" and len(key) > 1:
        return key[1:] in observation or key[1] in RESERVED_KEYS - {"action"}
    return key in extras or key in env.ends or key[0] in _RESERVED_ROOTS


def output_leaves(
    values: Mapping[Key, torch.Tensor], env: EnvSpec, device: torch.device
) -> tuple[Leaf, ...]:
    """Return the leaves to record, in the order of `values`, the outputs of a first call.

    An action's leaf is the environment's, unless the environment takes the policy's dtype and
    shape. Raises ValueError for missing actions, wrong shapes and dtypes that cannot be recorded.
    """
    missing = [leaf.key for leaf in env.action if leaf.key not in values]
    if missing:
        raise ValueError(
            f"policy: expected the output(s) {show_all(missing)} for the environment, got "
            f"{show_all(values)}"
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
        raise ValueError(f"policy: {show(key)}: expected a dense tensor, got {tensor.layout}")
    if tensor.device != device:
        place = "the CPU" if device.type == "cpu" else device
        raise ValueError(
            f"policy: {show(key)}: expected a tensor on {place}, got one on {tensor.device}"
        )


def _leaf(key: Key, tensor: torch.Tensor, env: EnvSpec) -> Leaf:
    shape, batch = tuple(tensor.shape), env.batch_size
    if shape[: len(batch)] != batch:
        expected = ", ".join(map(str, batch))
        raise ValueError(
            f"policy: {show(key)}: expected shape [{expected}, ...], one row per environment, got "
            f"{list(shape)}"
        )
    try:
        name = dtype_name(tensor.dtype)
    except ValueError as error:
        raise ValueError(f"policy: {show(key)}: {error}") from error
    return Leaf(key, name, shape[len(batch) :])


def _action_leaf(leaf: Leaf, tensor: torch.Tensor, env: EnvSpec) -> Leaf:
    """Return the leaf with which an action is recorded.

    If the environment casts actions, this is the action space's leaf. Otherwise it has the policy's
    dtype and shape.
    """
    if tensor.is_complex() and not torch_dtype(leaf.dtype).is_complex:
        raise ValueError(f"policy: {show(leaf.key)}: expected {leaf.dtype}, got {tensor.dtype}")
    if not env.casts_actions:
        returned = _leaf(leaf.key, tensor, env)
        if tensor.dtype is torch.bfloat16 and not env.takes_tensors:  # numpy has no such dtype
            return Leaf(returned.key, leaf.dtype, returned.shape)
        return returned
    expected, shape = (*env.batch_size, *leaf.shape), tuple(tensor.shape)
    if shape == expected or fits(shape, leaf, env.batch_size):
        return leaf
    space = _space_at(env.action_space, leaf.key)
    if isinstance(space, spaces.Discrete) and shape == (*env.batch_size, int(space.n)):
        raise ValueError(
            f"policy: {show(leaf.key)}: expected an index of shape {list(expected)} for {space}, "
            f"got {list(shape)}; convert one-hot actions with argmax(-1)"
        )
    raise ValueError(
        f"policy: {show(leaf.key)}: expected shape {list(expected)}, got {list(shape)}"
    )


def fits(shape: tuple[int, ...], leaf: Leaf, batch: tuple[int, ...]) -> bool:
    """Return whether a shape is the batch shape and the leaf's, up to dimensions of size 1."""
    lead, frame = shape[: len(batch)], shape[len(batch) :]
    return lead == batch and _without_ones(frame) == _without_ones(leaf.shape)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [extent for extent in shape if extent != 1]


def _space_at(space: Any, key: Key) -> Any:
    """Return the part of the action space at the key ("action", ...)."""
    for part in key[1:]:
        if isinstance(space, spaces.Tuple):
            space = space[int(part)]
        elif isinstance(space, spaces.Dict):
            space = space[part]
    return space
