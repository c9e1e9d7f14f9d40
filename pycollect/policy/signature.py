"""Keys that a policy reads and writes, and the action specs that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gymnasium import spaces
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect.data.layout import Key
from pycollect.envs.base import EnvBatch
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.outputs import check_inputs, check_output_keys
from pycollect.policy.program.callables import wants_tensordict, wrap
from pycollect.policy.program.plan import chain_of
from pycollect.policy.program.steps import CallStep, CannotUnwrapError, Program, as_key
from pycollect.policy.program.tensordict_modules import unwrap
from pycollect.policy.states import IS_INIT, Form, StateForms

Forms: TypeAlias = dict[Key, Sequence[Form]]
"""The states of a policy by key, with the forms that each may have."""


def take_apart(
    policy: Any, env: EnvBatch, trusted: bool = False, states: Iterable[Any] = ()
) -> Program | None:
    """The policy as a program; None where it is to be called with a TensorDict.

    Args:
        trusted: whoever gives it says that it takes one.
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
        return None  # it reads a part of the TensorDict that is no leaf
    if any(key in program.written and key not in observation for key in program.read):
        return None  # what it wrote before, and at its first call nothing
    extras = _extra_keys(env)
    if any(overlaps(key, extras) for key in (*program.read, *program.written)):
        return None
    return program


def announced_states(
    policy: Any,
    program: Program | None,
    inputs: PolicyInputs,
    policy_state: Mapping[Any, Any] | None,
) -> Forms:
    """The states that the policy announces, after a check of all its keys.

    Gives it those of the collector's own entries that it asks for.

    Raises ValueError that names a key that it cannot read or write.
    """
    env, own = inputs.env, inputs.own
    read, written = _keys_of(policy, program)
    forms = StateForms(policy, env, policy_state).find(read, written, env)
    nexts = {("next", *key) for key in forms}
    check_output_keys((key for key in written if key not in nexts and not is_envs(key, env)), env)
    known = (*inputs.observation, *forms)
    for key in (*(read or ()), *([IS_INIT] if _asks_for_is_init(policy) else [])):
        if own.offers(key) and not overlaps(key, known):
            inputs.give_own(key)
    if program is None:  # what it reads may be a part of the TensorDict, or its own output
        read = [key for key in read or () if not overlaps(key, (*known, *written))]
    others = (key for key in read or () if not overlaps(key, _extra_keys(env)))
    check_inputs((key for key in others if key not in (*forms, *own.given)), env)
    return forms


def is_envs(key: Key, env: EnvBatch) -> bool:
    """True for the next value of a state that the env itself passes on."""
    if not env.passes_states_on or key[0] != "next":
        return False
    return any(key[1:] == leaf.key for leaf in env.observation)


def overlaps(key: Key, others: Iterable[Key]) -> bool:
    """True if the key is one of the others, or if one lies inside the other."""
    return any(key[: len(other)] == other[: len(key)] for other in others)


def watched_modules(program: Program) -> tuple[nn.Module, ...]:
    """The wrappers that were taken off, and the layers of what is, or might be, planned."""
    modules = list(program.watched)
    for step in program.steps:
        module = step.module if isinstance(step, CallStep) else None
        if module is not None and chain_of(module) is not None:
            modules.extend(module.modules())
    return tuple(dict.fromkeys(modules))


def called_modules(program: Program) -> tuple[nn.Module, ...]:
    """The modules that are called for themselves."""
    functions = [step.function for step in program.steps if isinstance(step, CallStep)]
    return tuple(function for function in functions if isinstance(function, nn.Module))


def _keys_of(policy: Any, program: Program | None) -> tuple[Sequence[Key] | None, Sequence[Key]]:
    """What the policy reads and writes; a policy that does not say what it reads: None."""
    if program is not None:
        return program.read, program.written
    if not (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        return None, ()
    return [as_key(key) for key in policy.in_keys], [as_key(key) for key in policy.out_keys]


def _extra_keys(env: EnvBatch) -> list[Key]:
    return [extra.key for extra in (*env.extras, *env.action_extras)]


def _holds(key: Key, leaves: Iterable[Key]) -> bool:
    """True if a leaf lies inside the key."""
    return any(len(leaf) > len(key) and leaf[: len(key)] == key for leaf in leaves)


def _asks_for_is_init(policy: Any) -> bool:
    """True if a module names it apart from its in_keys, as TorchRL's noise processes do."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(getattr(module, "is_init_key", None) == IS_INIT[0] for module in modules)


_NOISE = ("torchrl.modules.tensordict_module.exploration", "AdditiveGaussianModule")


def told_of_actions(policy: Any, env: EnvBatch) -> Any:
    """The policy, told of the env's actions where it waits for that.

    A `RandomPolicy` without a spec gets that of a TorchRL environment; for any other it is None,
    which is what draws random actions there. Modules that add noise get the action's bounds.
    """
    tell = getattr(policy, "set_action_spec_from_env", None)
    if tell is not None and policy.action_spec is None:
        if env.specs is None:
            return None
        tell(env.specs)
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if any(_name(kind) == _NOISE for kind in type(module).__mro__) and module._spec is None:
            spec = _action_spec(env)
            if spec is not None:
                module.spec = spec
    return policy


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _action_spec(env: EnvBatch) -> Any:
    """TorchRL's spec of one env's action; None where there is none that noise could be added to."""
    if env.specs is not None:
        return env.specs.action_spec_unbatched
    if not isinstance(env.action_space, spaces.Box):
        return None
    from pycollect.envs.torchrl.specs import bounded  # whoever made the module has TorchRL

    return bounded(env.action_space, env.action[0])
