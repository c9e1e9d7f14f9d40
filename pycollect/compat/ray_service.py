"""Policies that run in a Ray actor of their own, of which each worker calls a client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn


def is_inference_service(policy: Any) -> bool:
    """Whether the policy is TorchRL's ``InferenceServer(service_backend="ray")``, or its like."""
    return getattr(policy, "service_backend", None) == "ray" and callable(
        getattr(policy, "client", None)
    )


def client_factories(
    service: Any, policy_factory: Any, workers: int
) -> list[Callable[[], ServedPolicy]]:
    """Return one policy factory per worker, each with its own client.

    Raises:
        ValueError: A `policy_factory` was also passed.
    """
    if policy_factory is not None:
        raise ValueError("policy_factory: expected None together with policy; pass one of the two")
    return [partial(ServedPolicy, service.client()) for _ in range(workers)]


class ServedPolicy:
    """A policy that sends each TensorDict to the service and returns the reply."""

    def __init__(self, client: Callable[[TensorDictBase], TensorDictBase]) -> None:
        self._client = client

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict with the policy's outputs."""
        return self._client(tensordict)


def update_service(service: Any, weights: Any) -> None:
    """Send new weights to the service's policy.

    Raises:
        ValueError: No weights were passed; the service has the only copy of the policy.
    """
    if weights is None:
        raise ValueError(
            "policy_or_weights: expected a module or weights, got None; the policy runs in "
            "another actor, so pass its new weights"
        )
    if isinstance(weights, nn.Module):
        weights = TensorDict.from_module(weights).data
    service.update_model_weights(weights)
