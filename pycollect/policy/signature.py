"""Keys that a policy reads and writes, and the action specs that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gymnasium import spaces
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect.data.layout import Key
from pycollect.envs.base import EnvSpec
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.outputs import check_inputs, check_output_keys
from pycollect.policy.program.callables import wants_tensordict, wrap
from pycollect.policy.program.plan import chain_of
from pycollect.policy.program.steps import CallStep, CannotUnwrapError, Program, as_key
from pycollect.policy.program.tensordict_modules import unwrap
from pycollect.policy.states import IS_INIT, StateForm, StateFormFinder

Forms: TypeAlias = dict[Key, Sequence[StateForm]]
"""The states of a policy by key, with the forms that each may have."""


def to_program(
    policy: Any, env: EnvSpec, trusted: bool = False, states: Iterable[Any] = ()
) -> Program | None:
    """Return the policy as a program, or ``None`` if it has to be called with a TensorDict.

    Args:
        policy: Policy in any of the accepted forms.
        env: Environment whose observation the policy reads.
        trusted: Value of `trust_policy`: the policy takes a TensorDict (default: ``False``).
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

    Raises:
        ValueError: The policy reads or writes a key that it cannot; the message names it.
    """
    env, entries = inputs.env, inputs.collector_entries
    read, written = _keys_of(policy, program)
    forms = StateFormFinder(policy, env, policy_state).find(read, written, env)
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
    return any(key[: len(other)] == other[: len(key)] for other in others)


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


_ENV_BASE = ("torchrl.envs.common", "EnvBase")
_NOISE = ("torchrl.modules.tensordict_module.exploration", "AdditiveGaussianModule")


def with_action_spec(policy: Any, env: EnvSpec, specs: Any = None) -> Any:
    """Set the environment's action spec in a policy that needs it, and return the policy.

    A `RandomPolicy` without a spec gets the spec of a TorchRL environment. For other environments,
    ``None`` is returned, the policy of random actions. Modules that add noise get the bounds of the
    action. The method `rand_step` of a TorchRL environment becomes its `rand_action`, because the
    collector itself makes the step.
    """
    if getattr(policy, "__name__", "") == "rand_step":
        owner: Any = getattr(policy, "__self__", None)
        if any(_name(kind) == _ENV_BASE for kind in type(owner).__mro__):
            policy = owner.rand_action
    set_spec = getattr(policy, "set_action_spec_from_env", None)
    if set_spec is not None and policy.action_spec is None:
        if specs is None:
            return None
        set_spec(specs)
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if any(_name(kind) == _NOISE for kind in type(module).__mro__) and module._spec is None:
            spec = _action_spec(env, specs)
            if spec is not None:
                module.spec = spec
    return policy


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _action_spec(env: EnvSpec, specs: Any) -> Any:
    """Return TorchRL's spec of one environment's action; ``None`` for a space other than Box."""
    if specs is not None:
        return specs.action_spec_unbatched
    if not isinstance(env.action_space, spaces.Box):
        return None
    from pycollect.envs.torchrl.specs import bounded  # the module is TorchRL's: it is installed

    return bounded(env.action_space, env.action[0])
