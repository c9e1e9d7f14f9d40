"""Match the parameters of a policy over tensors with the keys of the observation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect.data.layout import Key
from pycollect.policy.program.steps import CallStep, Program, show_all
from pycollect.policy.states import IS_INIT

_TENSORDICT_NAMES = ("td", "tensordict")
# TorchRL's wording, because programs may search for it.
_MISFIT = "policy: Arguments to policy.forward are incompatible with entries in the observation"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class PolicyInputError(TypeError, ValueError):
    """A policy's parameters do not fit the observation; also a TypeError, as in TorchRL."""


def wants_tensordict(policy: Any) -> bool:
    """Return whether a policy is called with the TensorDict itself.

    These are every TensorDictModuleBase, compiled or not; every other object with `in_keys` and
    `out_keys`; and callables whose only parameter without a default is named `td` or `tensordict`,
    or annotated as a TensorDict. If all parameters have defaults, the first one decides.
    """
    if isinstance(_inside(policy), TensorDictModuleBase):
        return True
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        return True
    positional = [p for p in _parameters(policy) or () if p.kind in _POSITIONAL]
    passed = [p for p in positional if p.default is p.empty] or positional[:1]
    if len(passed) != 1:
        return False
    return passed[0].name in _TENSORDICT_NAMES or _is_tensordict_type(passed[0].annotation)


def wrap(
    policy: Any, observation: Sequence[Key], action: Sequence[Key], extras: Sequence[Key] = ()
) -> Program:
    """Return a program with one call of a module or callable over tensors.

    Its outputs are the actions. Further outputs get names after the first call, see
    `Program.with_outputs`.

    Parameters are matched with the observation keys by name (`camera_rgb` for ("camera", "rgb")).
    If no name matches, they are matched by position, in the order of the keys. A parameter named
    `is_init` gets that entry of the collector, unless the observation has this key.

    Args:
        policy: The module or callable.
        observation: Keys of observations that are tensors.
        action: Keys of the actions.
        extras: Keys of other observations, such as texts, for errors.

    Raises:
        PolicyInputError: Parameters and keys do not fit; the message names them.
    """
    keys, names = _match(policy, tuple(observation), extras)
    step = CallStep(policy, keys, tuple(action), names=names, lenient=True)
    return Program((step,))


def _match(
    policy: Any, observation: tuple[Key, ...], extras: Sequence[Key]
) -> tuple[tuple[Key, ...], tuple[str, ...] | None]:
    parameters = _parameters(policy)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return observation, None
    by_name = {"_".join(key): key for key in observation}
    if any(p.name == IS_INIT[0] for p in parameters):
        by_name.setdefault(IS_INIT[0], IS_INIT)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    required = [p.name for p in named if p.default is p.empty]
    unknown = [name for name in required if name not in by_name]
    matched = tuple(by_name) if takes_any else tuple(p.name for p in named if p.name in by_name)
    if matched and not unknown:
        keys = tuple(by_name[name] for name in matched)
        leading = tuple(p.name for p in named if p.kind in _POSITIONAL)[: len(matched)]
        return keys, None if leading == matched else matched
    positional = [p for p in named if p.kind in _POSITIONAL]
    if len(unknown) < len(required):
        raise PolicyInputError(
            f"{_MISFIT}: {', '.join(map(repr, unknown))} not found among the keys "
            f"{show_all(observation)}. Bind other arguments with functools.partial, or in a "
            f"policy_factory{_extras_hint(extras)}"
        )
    if len(required) <= len(observation) <= len(positional) and all(
        p.kind in _POSITIONAL for p in named if p.default is p.empty
    ):
        return observation, None
    raise PolicyInputError(
        f"{_MISFIT}: the parameters ({', '.join(p.name for p in named) or 'none'}) match the "
        f"{len(observation)} key(s) {show_all(observation)} neither by name nor by position. Name "
        "the parameters after the keys, or use a TensorDictModule with in_keys; pass a function or "
        f"class that makes the policy as policy_factory{_extras_hint(extras)}"
    )


def _extras_hint(extras: Sequence[Key]) -> str:
    if not extras:
        return ""
    return (
        f". Only a policy that takes the TensorDict can read {show_all(extras)}, because it is "
        "not a tensor"
    )


def _parameters(policy: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of the call, without `self`; ``None`` if Python does not know them."""
    target: Callable[..., Any] = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None


def _inside(policy: Any) -> Any:
    """Return the module inside a wrapper of `torch.compile` or TorchRL's CloudpickleWrapper."""
    if isinstance(policy, nn.Module):
        return getattr(policy, "_orig_mod", policy)
    return policy.fn if type(policy).__name__ == "CloudpickleWrapper" else policy


def _is_tensordict_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        name = annotation.strip("'\" ").split(".")[-1]
        return name in ("TensorDict", "TensorDictBase", "LazyStackedTensorDict")
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, TensorDictBase) or is_tensor_collection(annotation)
