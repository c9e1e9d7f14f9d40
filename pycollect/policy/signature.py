"""Keys that a policy reads and writes, matched with its parameters; action specs that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gymnasium import spaces
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect.data.layout import Key, as_key, overlap, show_all
from pycollect.envs.base import EnvSpec
from pycollect.envs.make import is_torchrl_env
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.outputs import check_inputs, check_output_keys
from pycollect.policy.program.plan import chain_of
from pycollect.policy.program.steps import CallStep, CannotUnwrapError, Program
from pycollect.policy.program.tensordict_modules import unwrap
from pycollect.policy.states import IS_INIT, StateForm, find_states

Forms: TypeAlias = dict[Key, Sequence[StateForm]]
"""The states of a policy by key, with the forms that each may have."""


def to_program(policy: Any, env: EnvSpec, trusted: bool, states: Iterable[Any]) -> Program | None:
    """Return the policy as a program, or ``None`` if it has to be called with a TensorDict.

    Args:
        trusted: Value of `trust_policy`: the policy takes a TensorDict.
        states: Keys of `policy_state`; a policy over tensors reads them as it reads observations.
    """
    observation = [leaf.key for leaf in env.observation]
    if not (trusted or wants_tensordict(policy)):
        read = [*observation, *map(as_key, states)]
        extras = [extra.key for extra in env.extras]
        return wrap(policy, read, [leaf.key for leaf in env.action], extras)
    if not isinstance(policy, TensorDictModuleBase):
        return None
    try:
        program = unwrap(policy, env.batch_size)
    except CannotUnwrapError:
        return None
    if any(_holds(key, observation) for key in program.read):
        return None  # it reads a nested TensorDict
    if any(key in program.written and key not in observation for key in program.read):
        return None  # it reads its own earlier outputs, which are missing at its first call
    extras = _extra_keys(env)
    if any(overlaps(key, extras) for key in (*program.read, *program.written)):
        return None
    return program


def declared_states(
    policy: Any,
    program: Program | None,
    inputs: PolicyInputs,
    policy_state: Mapping[Any, Any] | None,
) -> Forms:
    """Return the states that the policy declares, after a check of all its keys.

    Also adds the collector entries that the policy reads to `inputs`.
    """
    env, entries = inputs.env, inputs.collector_entries
    read, written = _keys_of(policy, program)
    forms = find_states(policy, env, policy_state, read, written)
    nexts = {("next", *key) for key in forms}
    check_output_keys(
        (key for key in written if key not in nexts and not is_env_state(key, env)), env
    )
    known = (*inputs.observation, *forms)
    for key in (*(read or ()), *([IS_INIT] if _has_is_init_key(policy) else [])):
        if entries.offers(key) and not overlaps(key, known):
            inputs.add_collector_entry(key)
    if program is None:  # the policy may read a nested TensorDict, or its own output
        read = [key for key in read or () if not overlaps(key, (*known, *written))]
    others = (key for key in read or () if not overlaps(key, _extra_keys(env)))
    check_inputs((key for key in others if key not in (*forms, *entries.tensors)), env)
    return forms


def is_env_state(key: Key, env: EnvSpec) -> bool:
    """Return whether the key is the next value of a state that the environment passes on."""
    if not env.passes_states_on or key[0] != "next":
        return False
    return any(key[1:] == leaf.key for leaf in env.observation)


def overlaps(key: Key, others: Iterable[Key]) -> bool:
    """Return whether the key equals one of the others, contains it, or is inside it."""
    return any(overlap(key, other) for other in others)


def watched_modules(program: Program) -> tuple[nn.Module, ...]:
    """Return the unwrapped modules, and the layers of modules that a plan may replace."""
    modules = list(program.watched)
    for step in program.steps:
        module = step.module if isinstance(step, CallStep) else None
        if module is not None and chain_of(module) is not None:
            modules.extend(module.modules())
    return tuple(dict.fromkeys(modules))


def called_modules(program: Program) -> tuple[nn.Module, ...]:
    """Return the modules that the program calls directly."""
    functions = [step.function for step in program.steps if isinstance(step, CallStep)]
    return tuple(function for function in functions if isinstance(function, nn.Module))


def _keys_of(policy: Any, program: Program | None) -> tuple[Sequence[Key] | None, Sequence[Key]]:
    """Return the keys that the policy reads, ``None`` if undeclared, and those that it writes."""
    if program is not None:
        return program.read, program.written
    if not (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        return None, ()
    return [as_key(key) for key in policy.in_keys], [as_key(key) for key in policy.out_keys]


def _extra_keys(env: EnvSpec) -> list[Key]:
    return [extra.key for extra in (*env.extras, *env.action_extras)]


def _holds(key: Key, leaves: Iterable[Key]) -> bool:
    """Return whether a leaf is inside the key."""
    return any(len(leaf) > len(key) and leaf[: len(key)] == key for leaf in leaves)


def _has_is_init_key(policy: Any) -> bool:
    """Return whether a module has `is_init_key` besides its in_keys, as TorchRL's noise has."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(getattr(module, "is_init_key", None) == IS_INIT[0] for module in modules)


_NOISE = ("torchrl.modules.tensordict_module.exploration", "AdditiveGaussianModule")


def with_action_spec(policy: Any, env: EnvSpec, specs: Any = None) -> Any:
    """Set the environment's action spec in a policy that needs it, and return the policy.

    A `RandomPolicy` without a spec gets the spec of a TorchRL environment. For other environments,
    ``None`` is returned, the policy of random actions. Modules that add noise get the bounds of the
    action. The method `rand_step` of a TorchRL environment becomes its `rand_action`, because the
    collector itself makes the step.
    """
    owner: Any = getattr(policy, "__self__", None)
    if getattr(policy, "__name__", "") == "rand_step" and is_torchrl_env(owner):
        policy = owner.rand_action
    set_spec = getattr(policy, "set_action_spec_from_env", None)
    if set_spec is not None and policy.action_spec is None:
        if specs is None:
            return None
        set_spec(specs)
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        kinds = [(kind.__module__, kind.__qualname__) for kind in type(module).__mro__]
        if _NOISE in kinds and module._spec is None:
            spec = _action_spec(env, specs)
            if spec is not None:
                module.spec = spec
    return policy


def _action_spec(env: EnvSpec, specs: Any) -> Any:
    """Return TorchRL's spec of one environment's action; ``None`` for a space other than Box."""
    if specs is not None:
        return specs.action_spec_unbatched
    if not isinstance(env.action_space, spaces.Box):
        return None
    from pycollect.envs.torchrl.specs import bounded  # the module is TorchRL's: it is installed

    return bounded(env.action_space, env.action[0])


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
        observation: Keys of observations that are tensors.
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
