"""TorchRL's RandomPolicy: random actions as a policy object."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase


class RandomPolicy:
    """Draw random actions from a spec.

    Without a spec, a collector draws actions from its environment's action space, as with
    ``policy=None``.

    Args:
        action_spec: A TorchRL spec, or any object with `rand()` and `clone()`. Defaults to
            ``None``: the action space of the collector's environment.
        action_key: Key of the action (default: "action").

    Raises:
        TypeError: `action_spec` is not a spec, for example a Gymnasium space.
    """

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        methods = (getattr(action_spec, name, None) for name in ("rand", "clone"))
        if action_spec is not None and not all(map(callable, methods)):
            raise TypeError(
                "action_spec: expected a TorchRL spec, or None for the environment's own actions, "
                f"got {type(action_spec).__name__}"
            )
        self.action_spec = None if action_spec is None else action_spec.clone()
        self.action_key = action_key

    def set_action_spec_from_env(self, env: Any) -> None:
        """Take the action spec of an environment, unless the policy already has one.

        Args:
            env: A TorchRL environment with a `full_action_spec`.
        """
        if self.action_spec is None:
            self.action_spec = env.full_action_spec.clone()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action into the TensorDict.

        Raises:
            RuntimeError: The policy has no spec.
        """
        if self.action_spec is None:
            raise RuntimeError(
                "action_spec: RandomPolicy has no spec to draw from; pass action_spec, or pass the "
                "policy to a collector"
            )
        drawn = self.action_spec.rand()
        if isinstance(drawn, TensorDictBase):  # a spec of several actions
            return td.update(drawn)
        return td.set(self.action_key, drawn)
