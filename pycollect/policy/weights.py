"""The tensors that make up a policy's state."""

from __future__ import annotations

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
    for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"policy: expected initialised parameters, but {name!r} has no shape yet; "
                "call the policy once first"
            )
        weights[name] = tensor.detach()
    return weights


def check_on_cpu(policy: Any) -> None:
    """Raise NotImplementedError that names the first parameter or buffer that is not on the CPU."""
    if not isinstance(policy, nn.Module):
        return
    for name, tensor in chain(policy.named_parameters(), policy.named_buffers()):
        if tensor.device.type != "cpu":
            raise NotImplementedError(
                f"policy: expected parameters on the CPU, but {name!r} is on {tensor.device}; "
                "policies on other devices are not supported yet, use policy.to('cpu')"
            )
