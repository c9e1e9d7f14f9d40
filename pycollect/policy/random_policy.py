"""Random actions as a policy that a program can hold, as TorchRL's."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase


class RandomPolicy:
    """Draws actions from a spec; without one, a collector draws them as it does for None.

    Args:
        action_spec: a TorchRL spec, or anything with `rand()` and `clone()`; None: the
            environment's own actions, which only a collector knows.
        action_key: where the action is written.

    Raises:
        TypeError: no spec, as a space of Gymnasium's.
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
        """Take the spec of an environment, unless there is one already.

        Args:
            env: one of TorchRL's, which has a `full_action_spec`.
        """
        if self.action_spec is None:
            self.action_spec = env.full_action_spec.clone()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action.

        Raises:
            RuntimeError: there is no spec.
        """
        if self.action_spec is None:
            raise RuntimeError(
                "action_spec: expected a TorchRL spec, or a collector that knows the environment, "
                "got neither"
            )
        drawn = self.action_spec.rand()
        if isinstance(drawn, TensorDictBase):  # of a whole environment
            return td.update(drawn)
        return td.set(self.action_key, drawn)
