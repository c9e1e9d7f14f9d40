"""A policy's weights: parameters, buffers, extra state and training modes, found by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

_EXTRA_STATE = "_extra_state"  # the last part of such a key, as in `nn.Module.state_dict`


@dataclass(frozen=True)
class Weights:
    """The weights of a policy at one moment, or some of them.

    Attributes:
        tensors: Parameters and buffers by name ("module.0.weight").
        extra: Serialized extra state by key ("module.0._extra_state").
        modes: Training mode by module name ("module.0"); the policy itself has the name "".
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Mapping[str, bytes] = field(default_factory=dict)
    modes: Mapping[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.extra or self.modes)

    def copied(self) -> Weights:
        """Return the same weights in tensors of their own."""
        tensors = {name: value.detach().clone() for name, value in self.tensors.items()}
        return replace(self, tensors=tensors)

    def updated(self, newer: Weights) -> Weights:
        """Return these weights, replaced by newer ones of the same name."""
        return Weights(
            {**_without(self.tensors, newer.tensors), **newer.tensors},
            {**_without(self.extra, newer.extra), **newer.extra},
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
        extra = {key: opened_extra_state(key, value) for key, value in self.extra.items()}
        return {**self.copied().tensors, **extra}


NO_WEIGHTS = Weights()


def _without(old: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with other names; newer values of tied parameters must come last."""
    return {name: value for name, value in old.items() if name not in newer}


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
    weights = _weights_from(source)
    for name, value in weights.tensors.items():
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"policy_or_weights: expected a dense tensor with values for {name!r}, got "
                f"{value.layout} on {value.device}"
            )
    return weights


def _weights_from(source: Any) -> Weights:
    if isinstance(source, nn.Module) and not isinstance(source, TensorDictBase):
        return weights_of(source)
    if not isinstance(source, Mapping | TensorDictBase):
        raise TypeError(
            "policy_or_weights: expected an nn.Module, a TensorDict of parameters or a state dict, "
            f"got {type(source).__name__}"
        )
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, bytes] = {}
    _gather(source, "", tensors, extra)
    return Weights(tensors, extra)


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


def weights_of(policy: Any) -> Weights:
    """Return the weights of a policy, sharing memory with it; none for a plain callable.

    Raises:
        TypeError: An extra state cannot be pickled.
        ValueError: A lazy parameter has no shape yet.
    """
    if not isinstance(policy, nn.Module):
        return Weights()
    modules = list(policy.named_modules())
    extra = {
        key: _serialized(key, module.get_extra_state())
        for name, module in modules
        if overrides(module, "get_extra_state") and overrides(module, "set_extra_state")
        for key in [extra_state_key(name)]
    }
    return Weights(named_weights(policy), extra, {name: own.training for name, own in modules})


def extra_state_key(module: str) -> str:
    """Return the key of a module's extra state in a state dict."""
    return f"{module}.{_EXTRA_STATE}" if module else _EXTRA_STATE


def overrides(module: nn.Module, method: str) -> bool:
    """Return whether the module's class has its own `method`."""
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


def opened_extra_state(key: str, serialized: bytes) -> Any:
    """Return the value of an extra state, its tensors on the CPU."""
    try:
        return torch.load(io.BytesIO(serialized), map_location="cpu", weights_only=False)
    except Exception as error:
        raise ValueError(
            f"policy_or_weights: the extra state {key!r} cannot be unpickled here: "
            f"{type(error).__name__}: {error}"
        ) from error


def named_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a policy by name, detached, sharing the module's memory.

    A parameter used in two places appears once. The result is empty if the policy is not an
    nn.Module; the attributes of a callable object are not searched. Writing into a tensor changes
    the module. After a replacement of a tensor (`p.data = x`), call this again.

    Raises ValueError for a lazy parameter that has no shape yet.
    """
    if not isinstance(policy, nn.Module):
        return {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(policy):
        if is_lazy(tensor):
            raise ValueError(
                f"policy: expected initialized parameters, but {name!r} has no shape yet; "
                "call the policy once first"
            )
        weights[name] = tensor.detach()
    return weights


def device_of(policy: Any) -> torch.device | None:
    """Where a policy's first parameter or buffer lies; None for one that has none."""
    return next((tensor.device for _, tensor in _tensors(policy)), None)


def check_on_device(policy: Any, device: torch.device) -> None:
    """Raise ValueError that names the first parameter or buffer on another device."""
    for name, tensor in _tensors(policy):
        if tensor.device != device:
            raise ValueError(
                f"policy: expected its parameters on {device}, but {name!r} is on "
                f"{tensor.device}; pass policy_device"
            )


def placed(policy: Any, device: torch.device) -> Any:
    """The policy with all of its parameters and buffers on that device.

    That is the policy itself where they are, else a copy of it.
    """
    if all(tensor.device == device for _, tensor in _tensors(policy)):
        return policy
    return copy.deepcopy(policy).to(device)


def _tensors(policy: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if not isinstance(policy, nn.Module):
        return ()
    return chain(policy.named_parameters(), policy.named_buffers())
