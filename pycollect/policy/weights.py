"""The tensors that make up a policy's state."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def named_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a policy by name, detached, sharing memory with the module.

    A parameter used in two places appears once. Empty for what is not an nn.Module: a callable
    object that holds one is not searched. Writing into a tensor changes the module; a module whose
    parameters are exchanged (`p.data = x`) has to be asked again.

    Raises ValueError for a lazy parameter that no call has given a shape yet.
    """
    if not isinstance(policy, nn.Module):
        return {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(policy):
        if is_lazy(tensor):
            raise ValueError(
                f"policy: expected initialised parameters, but {name!r} has no shape yet; "
                "call the policy once first"
            )
        weights[name] = tensor.detach()
    return weights


def device_of(policy: Any) -> torch.device | None:
    """Where a policy's first parameter or buffer lies; None for one that has none."""
    return next((tensor.device for _, tensor in _tensors(policy)), None)


def check_on_device(policy: Any, device: torch.device) -> None:
    """Raise ValueError that names the first parameter or buffer that lies elsewhere."""
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
