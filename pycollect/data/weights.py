"""Weights of a policy: collect, check, pack and load them, and count their versions."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from pycollect._core import Leaf
from pycollect.data.layout import dtype_name
from pycollect.data.tensordicts import overwrite

_EXTRA_STATE = "_extra_state"  # the last part of such a key, as in `nn.Module.state_dict`


@dataclass(frozen=True)
class Weights:
    """The weights of a policy at one moment, or some of them."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name ("module.0.weight")
    extra: Mapping[str, bytes] = field(default_factory=dict)  # pickled, by "module.0._extra_state"
    modes: Mapping[str, bool] = field(default_factory=dict)  # by module; "" is the policy itself

    def __bool__(self) -> bool:
        return bool(self.tensors or self.extra or self.modes)

    def copied(self) -> Weights:
        """Return the same weights in new tensors."""
        tensors = {name: value.detach().clone() for name, value in self.tensors.items()}
        return replace(self, tensors=tensors)

    def updated(self, newer: Weights) -> Weights:
        """Return these weights, with newer ones in place of those with the same name."""
        return Weights(
            _updated(self.tensors, newer.tensors),
            _updated(self.extra, newer.extra),
            {**self.modes, **newer.modes},
        )

    def equal(self, other: Weights) -> bool:
        """Return whether `other` contains the same values."""
        return (
            all(other.extra.get(key) == value for key, value in self.extra.items())
            and all(other.modes.get(name) == mode for name, mode in self.modes.items())
            and all(
                name in other.tensors and torch.equal(tensor, other.tensors[name].to(tensor.device))
                for name, tensor in self.tensors.items()
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and extra state as `nn.Module.state_dict` does, as copies."""
        extra = {key: deserialized_extra(key, value) for key, value in self.extra.items()}
        return {**self.copied().tensors, **extra}


NO_WEIGHTS = Weights()


def _updated(old: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old entries, then the newer ones: values of tied parameters must come last."""
    return {**{name: value for name, value in old.items() if name not in newer}, **newer}


def weights_from(source: Any) -> Weights:
    """Return the weights in any accepted form; only a module has training modes.

    Args:
        source: An nn.Module; a TensorDict of parameters (``TensorDict.from_module``) or a
            TensorDictParams; a ``state_dict()``; or nested dicts of tensors.

    Raises:
        TypeError: `source` has another type, or contains a value that cannot be sent.
        ValueError: A tensor is sparse, or has no values.
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
        weights = weights_of(source, "policy_or_weights")
    elif isinstance(source, Mapping | TensorDictBase):
        tensors: dict[str, torch.Tensor] = {}
        extra: dict[str, bytes] = {}
        _gather(source, "", tensors, extra)
        weights = Weights(tensors, extra)
    else:
        raise TypeError(
            "policy_or_weights: expected an nn.Module, a TensorDict of parameters or a state dict, "
            f"got {type(source).__name__}"
        )
    for name, value in weights.tensors.items():
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"policy_or_weights: expected a dense tensor with values for {name!r}, got "
                f"{value.layout} on {value.device}"
            )
    return weights


def _gather(
    source: Any, prefix: str, tensors: dict[str, torch.Tensor], extra: dict[str, bytes]
) -> None:
    """Collect the entries of nested dicts by their full names."""
    for key, value in source.items():
        name = f"{prefix}{key}"
        if name.rpartition(".")[2] == _EXTRA_STATE:
            extra[name] = _serialized(name, value)
        elif isinstance(value, Mapping | TensorDictBase):
            _gather(value, f"{name}.", tensors, extra)
        elif isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
        else:
            raise TypeError(
                f"policy_or_weights: expected tensors, got {type(value).__name__} for {name!r}"
            )


def weights_of(policy: Any, argument: str = "policy") -> Weights:
    """Return the weights of a policy, sharing memory with it; none for a plain callable."""
    if not isinstance(policy, nn.Module):
        return Weights()
    modules = list(policy.named_modules())
    extra = {
        key: _serialized(key, module.get_extra_state())
        for name, module in modules
        if overrides(module, "get_extra_state") and overrides(module, "set_extra_state")
        for key in [extra_state_key(name)]
    }
    modes = {name: module.training for name, module in modules}
    return Weights(named_weights(policy, argument), extra, modes)


def extra_state_key(module: str) -> str:
    """Return the key of a module's extra state in a state dict."""
    return f"{module}.{_EXTRA_STATE}" if module else _EXTRA_STATE


def overrides(module: nn.Module, method: str) -> bool:
    """Return whether the module's class overrides `method`."""
    return getattr(type(module), method) is not getattr(nn.Module, method)


def _serialized(key: str, value: Any) -> bytes:
    """Return an extra state as bytes that are equal for equal tensors."""
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=cloudpickle)
    except Exception as error:
        raise TypeError(
            f"policy_or_weights: expected an extra state {key!r} that can be pickled, got "
            f"{type(value).__name__}: {error}"
        ) from error
    return file.getvalue()


def deserialized_extra(key: str, serialized: bytes) -> Any:
    """Return the value of an extra state, with tensors on the CPU."""
    try:
        return torch.load(io.BytesIO(serialized), map_location="cpu", weights_only=False)
    except Exception as error:
        raise ValueError(
            f"policy_or_weights: the extra state {key!r} cannot be unpickled: "
            f"{type(error).__name__}: {error}"
        ) from error


def named_weights(policy: Any, argument: str = "policy") -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a policy by name, detached, sharing the module's memory.

    A parameter used in two places appears once. The result is empty if the policy is not an
    nn.Module. Writing into a tensor changes the module, until it is replaced (`p.data = x`).

    Raises:
        ValueError: A lazy parameter has no shape yet, or a tensor is on the meta device.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(policy, argument):
        if is_lazy(tensor):
            raise ValueError(
                f"{argument}: expected initialized parameters, but {name!r} has no shape yet; "
                "call the policy once first"
            )
        weights[name] = tensor.detach()
    return weights


def device_of(policy: Any) -> torch.device | None:
    """Return the device of a policy's first parameter or buffer, or ``None`` if it has none."""
    return next((tensor.device for _, tensor in named_tensors(policy)), None)


def moved_to(policy: Any, device: torch.device) -> Any:
    """Return the policy if all its parameters and buffers are on a device, else a copy there."""
    if all(tensor.device == device for _, tensor in named_tensors(policy)):
        return policy
    return copy.deepcopy(policy).to(device)


def named_tensors(policy: Any, argument: str = "policy") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a policy; a ValueError for one without values."""
    if not isinstance(policy, nn.Module):
        return
    for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{argument}: expected parameters with values, but {name!r} is on the meta device; "
                "call its to_empty(device='cpu') and load weights"
            )
        yield name, tensor


@dataclass(frozen=True)
class WeightSpec:
    """Names and shapes of a policy's weights. Hashable; false for a policy that is no module."""

    leaves: tuple[Leaf, ...] = ()  # names, dtypes and shapes of parameters and buffers
    extra: tuple[str, ...] = ()  # keys of the modules that take an extra state
    modules: tuple[str, ...] = ()  # names of all modules, which have training modes
    tied: tuple[tuple[str, str], ...] = ()  # further names of the same, each with the first name

    @classmethod
    def of(cls, policy: Any) -> WeightSpec:
        """Return the spec of a policy's weights; raise a ValueError for a lazy parameter."""
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

    def fitted(self, weights: Weights) -> Weights:
        """Return weights under the first name of each, after a check of names and shapes."""
        tied = dict(self.tied)
        tensors = {tied.get(name, name): value for name, value in weights.tensors.items()}
        extra = {tied.get(name, name): value for name, value in weights.extra.items()}
        renamed = Weights(tensors, extra, weights.modes)
        expected = {leaf.key[0]: list(leaf.shape) for leaf in self.leaves}
        known = expected.keys() | set(self.extra)
        names = renamed.tensors.keys() | renamed.extra.keys()
        if names - known or (expected and not names):
            raise other_names(expected.keys(), known, names)
        for name, tensor in renamed.tensors.items():
            if expected[name] != list(tensor.shape):
                raise ValueError(
                    f"policy_or_weights: expected shape {expected[name]} for {name!r}, "
                    f"got {list(tensor.shape)}"
                )
        return renamed

    def holds(self, weights: Weights) -> bool:
        """Return whether the weights have the dtypes of this spec."""
        expected = {leaf.key[0]: leaf.dtype for leaf in self.leaves}
        tensors = self.fitted(weights).tensors
        return all(dtype_name(t.dtype) == expected[name] for name, t in tensors.items())


def other_names(expected: Set[str], known: Set[str], names: Set[str]) -> ValueError:
    """Return the error about weights with these names, of which only `known` are accepted."""
    missing, unknown = sorted(expected - names), sorted(names - known)
    return ValueError(
        "policy_or_weights: expected the names of the policy's parameters and buffers; "
        f"missing: {missing or 'none'}, unknown: {unknown or 'none'}"
    )


def _tied(policy: nn.Module) -> list[tuple[str, str]]:
    """Return each additional name of a shared parameter, buffer or module, with its first name."""
    modules = policy.named_modules(remove_duplicate=False)
    named: list[tuple[str, Any]] = [
        *policy.named_parameters(remove_duplicate=False),
        *policy.named_buffers(remove_duplicate=False),
        *((extra_state_key(name), module) for name, module in modules),
    ]
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(value), name)) for name, value in named]
    return [(name, first_name) for name, first_name in names if name != first_name]


def load_weights(policy: Any, weights: Weights) -> None:
    """Write weights into a policy in place.

    Training modes are set first, because a module's `train` may change its weights, and for parents
    before children, because `train` also sets the mode of children.

    Raises:
        ValueError: Names or shapes do not match, and nothing was changed; or a module could not
            load its extra state.
    """
    targets = named_weights(policy)
    fits = all(
        name in targets and targets[name].shape == value.shape
        for name, value in weights.tensors.items()
    )
    if weights.extra or not (weights.tensors and fits):  # a WeightSpec takes long to make
        weights = WeightSpec.of(policy).fitted(weights)
    extra = {key: deserialized_extra(key, value) for key, value in weights.extra.items()}
    modules = dict(policy.named_modules()) if isinstance(policy, nn.Module) else {}
    for name, module in modules.items():
        if module.training != (mode := weights.modes.get(name, module.training)):
            module.train(mode)
    with torch.no_grad():
        for name, value in weights.tensors.items():
            if targets[name].data_ptr() != value.data_ptr():
                overwrite(targets[name], value)
    for name, module in modules.items() if extra else ():
        key = extra_state_key(name)
        try:
            if key in extra:
                module.set_extra_state(extra[key])
        except Exception as error:
            raise ValueError(
                f"policy_or_weights: the policy could not load its extra state {key!r}: "
                f"{type(error).__name__}: {error}"
            ) from error


def check_loads(policy: Any, weights: Weights) -> None:
    """Raise a ValueError unless the weights are complete and the policy can load them."""
    spec = WeightSpec.of(policy)
    expected, names = {leaf.key[0] for leaf in spec.leaves}, spec.fitted(weights).tensors.keys()
    if expected != names:
        raise other_names(expected, expected, names)
    if weights.extra:  # only the module itself can check its extra state
        load_weights(copy.deepcopy(policy), weights)


class PolicyVersion:
    """Counts updates of the weights.

    Args:
        tracker: Second counter to increment, such as TorchRL's PolicyVersion, or ``None``.

    Attributes:
        number: Number of updates, starting from the tracker's version, or 0 without a tracker.
        first: The number with which this run began.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._tracker = tracker
        first = getattr(tracker, "version", 0)
        self.number = self.first = first if isinstance(first, int) else 0

    def resume(self, number: int) -> None:
        """Continue from the version of another run."""
        self.number = self.first = number

    def lag(self, version: int) -> int:
        """Return by how many versions weights of that version are behind.

        The weights that workers were made with count as the first version of this run.
        """
        return max(self.number - max(version, self.first), 0)

    def count(self) -> None:
        self.number += 1
        if self._tracker is not None:
            self._tracker.increment_version()
