"""Policies that wait for the environment to tell them which actions there are.

TorchRL's collectors tell them; its classes are recognised without importing it.
"""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from torch import nn

from pycollect.envs.base import EnvBatch

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
