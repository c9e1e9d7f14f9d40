"""The arguments of `update_policy_weights_`, in all the forms that TorchRL has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

_POLICY = "policy"


def source_of(given: Mapping[str, Any], model_id: Any, weights_dict: Any) -> Any:
    """Where an update has its weights from; None: from the collector's policy.

    Args:
        given: arguments of which one at most may be there, by name.
        model_id: which model they are of.
        weights_dict: sources by model, instead of both.

    Raises:
        ValueError: several of them, or another model than the policy.
        TypeError: `weights_dict` is no dict.
    """
    several = {name: value for name, value in given.items() if value is not None}
    if weights_dict is not None:
        if not isinstance(weights_dict, Mapping):
            raise TypeError(f"weights_dict: expected a dict, got {type(weights_dict).__name__}")
        if model_id is not None or several:
            others = [*several, *(["model_id"] if model_id is not None else [])]
            raise ValueError(f"weights_dict: expected None together with {', '.join(others)}")
        if list(weights_dict) != [_POLICY]:
            raise ValueError(f"weights_dict: expected 'policy' alone, got {list(weights_dict)}")
        return weights_dict[_POLICY]
    if model_id not in (None, _POLICY):
        raise ValueError(f"model_id: expected 'policy', got {model_id!r}")
    if len(several) > 1:
        raise ValueError(f"{list(several)[-1]}: expected None together with {next(iter(several))}")
    return next(iter(several.values()), None)


def by_worker(source: Any) -> dict[int, Any] | None:
    """A dict by worker id as such; None for any other source of weights."""
    if isinstance(source, TensorDictBase) or not isinstance(source, Mapping) or not source:
        return None
    ids = [key for key in source if isinstance(key, int) and not isinstance(key, bool)]
    return dict(source) if len(ids) == len(source) else None
