"""The form of a policy's weights: checking, loading and packing them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pycollect._core import Leaf
from pycollect.batch.layout import dtype_name, torch_dtype
from pycollect.batch.weights import (
    Weights,
    extra_state_key,
    named_weights,
    opened_extra_state,
    overrides,
)
from pycollect.one_copy import Packing


@dataclass(frozen=True)
class WeightForm:
    """Names and shapes of a policy's weights. Hashable; false for a policy without weights.

    Attributes:
        leaves: Names, dtypes and shapes of parameters and buffers.
        extra: Keys of the modules that take an extra state.
        modules: Names of all modules, which have training modes.
        tied: Further names of the same parameters, buffers or modules, each with the first name.
    """

    leaves: tuple[Leaf, ...] = ()
    extra: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, policy: Any) -> WeightForm:
        """Return the form of a policy's weights; ValueError for a lazy parameter."""
        if not isinstance(policy, nn.Module):
            return cls()
        tensors = named_weights(policy).items()
        modules = dict(policy.named_modules())
        return cls(
            tuple(Leaf((name,), dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors),
            tuple(
                extra_state_key(name)
                for name, module in modules.items()
                if overrides(module, "set_extra_state")
            ),
            tuple(modules),
            tuple(_tied(policy)),
        )

    def __bool__(self) -> bool:
        return bool(self.modules)

    def fitted(self, came: Weights) -> Weights:
        """Return weights under the first name of each; names may be missing.

        Raises:
            ValueError: A name or shape is not that of the policy.
        """
        tied = dict(self.tied)
        came = Weights(_renamed(came.tensors, tied), _renamed(came.extra, tied), came.modes)
        expected = {leaf.key[0]: list(leaf.shape) for leaf in self.leaves}
        known = expected.keys() | set(self.extra)
        names = came.tensors.keys() | came.extra.keys()
        if names - known or (expected and not names):
            raise _other_names(expected.keys(), known, names)
        for name, tensor in came.tensors.items():
            if expected[name] != list(tensor.shape):
                raise ValueError(
                    f"policy_or_weights: expected shape {expected[name]} for {name!r}, "
                    f"got {list(tensor.shape)}"
                )
        return came

    def holds(self, weights: Weights) -> bool:
        """Return whether no value of these changes in the dtypes of this form."""
        expected = {leaf.key[0]: leaf.dtype for leaf in self.leaves}
        tensors = self.fitted(weights).tensors
        return all(dtype_name(own.dtype) == expected[name] for name, own in tensors.items())

    def check_whole(self, came: Weights) -> None:
        """Raise ValueError unless these are all parameters and buffers, in their shapes."""
        expected = {leaf.key[0] for leaf in self.leaves}
        fitted = self.fitted(came)
        if expected != fitted.tensors.keys():
            raise _other_names(expected, expected, fitted.tensors.keys())


NO_FORM = WeightForm()


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _other_names(expected: Set[str], known: Set[str], came: Set[str]) -> ValueError:
    missing, unknown = sorted(expected - came), sorted(came - known)
    return ValueError(
        "policy_or_weights: expected the names of the policy's parameters and buffers; "
        f"missing: {missing or 'none'}, unknown: {unknown or 'none'}"
    )


def _tied(policy: nn.Module) -> list[tuple[str, str]]:
    """Return each further name of a shared parameter, buffer or extra state, with its first."""
    modules = policy.named_modules(remove_duplicate=False)
    named: list[tuple[str, Any]] = [
        *policy.named_parameters(remove_duplicate=False),
        *policy.named_buffers(remove_duplicate=False),
        *((extra_state_key(name), module) for name, module in modules),
    ]
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(value), name)) for name, value in named]
    return [(name, own) for name, own in names if name != own]


def load_weights(policy: Any, weights: Weights) -> None:
    """Write weights into a policy in place.

    Modes come first: a module's `train` may change its weights. Parents come before children, as
    `train` of a parent sets its children, too.

    Raises:
        ValueError: Names or shapes do not fit, and nothing was changed; or a module refused its
            extra state.
    """
    targets = named_weights(policy)
    if weights.extra or not _fits(targets, weights.tensors):
        weights = WeightForm.of(policy).fitted(weights)
    extra = {key: opened_extra_state(key, value) for key, value in weights.extra.items()}
    modules = dict(policy.named_modules()) if isinstance(policy, nn.Module) else {}
    for name, module in modules.items():
        mode = weights.modes.get(name, module.training)
        if module.training != mode:
            module.train(mode)
    with torch.no_grad():
        for name, value in weights.tensors.items():
            if targets[name].data_ptr() != value.data_ptr():
                targets[name].copy_(value)
    for name, module in modules.items() if extra else ():
        key = extra_state_key(name)
        if key in extra:
            _set_extra_state(module, key, extra[key])


def _set_extra_state(module: nn.Module, key: str, value: Any) -> None:
    try:
        module.set_extra_state(value)
    except Exception as error:
        raise ValueError(
            f"policy_or_weights: the policy could not load its extra state {key!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_loads(policy: Any, weights: Weights) -> None:
    """Raise ValueError unless these are all weights of the policy, and it takes their values."""
    WeightForm.of(policy).check_whole(weights)
    if weights.extra:  # only the module itself can check it
        load_weights(copy.deepcopy(policy), weights)


def _fits(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether names and shapes fit, without the cost of a WeightForm."""
    return bool(tensors) and all(
        name in targets and targets[name].shape == value.shape for name, value in tensors.items()
    )


_NOT_GIVEN = 2


def _pickled_extra(weights: Weights) -> bytes:
    return pickle.dumps(weights.extra) if weights.extra else b""


class WeightSlab:
    """Packs weights of one form, or some of them, into one buffer.

    A buffer holds the tensors, a byte for each (whether it is given), a byte for each module (its
    training mode, if given), and the extra state, pickled, if there is any.

    Args:
        form: The form of all weights, of a policy that is a module.
    """

    def __init__(self, form: WeightForm) -> None:
        self._form = form
        self._names = [leaf.key[0] for leaf in form.leaves]
        forms = [(torch_dtype(leaf.dtype), leaf.shape) for leaf in form.leaves]
        forms.append((torch.uint8, (len(form.leaves) + len(form.modules),)))
        self._packing = Packing(
            torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in forms
        )

    def bytes(self, weights: Weights) -> int:
        """Return the size of a buffer with these weights."""
        return self._packing.bytes + len(_pickled_extra(weights))

    def pack(self, weights: Weights, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy these weights into a buffer of the size that `bytes` returns."""
        weights = self._form.fitted(weights)
        given = [int(name in weights.tensors) for name in self._names]
        modes = [int(weights.modes.get(name, _NOT_GIVEN)) for name in self._form.modules]
        size = self._packing.bytes
        *tensors, flags = self._packing.views(torch.from_numpy(buffer[:size]))
        with torch.no_grad():
            flags.copy_(torch.tensor([*given, *modes], dtype=torch.uint8, device="cpu"))
            for name, target in zip(self._names, tensors, strict=True):
                if name in weights.tensors:
                    target.copy_(weights.tensors[name])
        buffer[size:] = np.frombuffer(_pickled_extra(weights), np.uint8)

    def unpack(self, buffer: npt.NDArray[np.uint8]) -> Weights:
        """Return the weights in the buffer, as views of it if it is writable.

        Raises:
            ValueError: The buffer is too short.
        """
        size = self._packing.bytes
        if buffer.nbytes < size:
            raise ValueError(f"buffer: expected at least {size} bytes, got {buffer.nbytes}")
        packed, extra = buffer[:size], buffer[size:]
        block = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
        *tensors, flags = self._packing.views(block)
        given, modes = flags[: len(tensors)].tolist(), flags[len(tensors) :].tolist()
        return Weights(
            {
                name: view
                for name, view, is_given in zip(self._names, tensors, given, strict=True)
                if is_given
            },
            pickle.loads(extra.tobytes()) if extra.nbytes else {},
            {
                name: bool(mode)
                for name, mode in zip(self._form.modules, modes, strict=True)
                if mode != _NOT_GIVEN
            },
        )
