"""What is read of a collector whose worker is in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycollect.docstrings import completed_by
from pycollect.worker.names import DeviceNames
from pycollect.worker.paths import called, calls, mapped, resolved
from pycollect.worker.worker import Worker


class OneWorker(DeviceNames):
    """Its environment, its policy, and attributes of both by their path."""

    _worker: Worker

    @property
    def env(self) -> Any:
        """The environment that was passed, or that `create_env_fn` returned, on its device.

        A list where Gymnasium's were given as a list. Whoever steps or resets it disturbs what is
        collected.
        """
        return self._worker.env.original

    @property
    def env_device(self) -> torch.device | None:
        """Where the environment lies: where it was told to, else where it says itself."""
        return self._devices.env_device or getattr(self.env, "device", None)

    @property
    def n_env(self) -> int:
        """How many environments are stepped as a batch."""
        return self._worker.env.num_envs

    @property
    @abstractmethod
    def policy(self) -> Any:
        """The policy that is called, None for random actions."""

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment.

        Args:
            attr: its name.

        Returns:
            The attribute itself.

        Raises:
            AttributeError: there is none of that name.
        """
        return getattr(self.env, attr)

    @completed_by(getattr_env)
    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy.

        Args:
            ...: that of `getattr_env`.
        """
        return getattr(self.policy, attr)

    def get_distant_attr(self, attr: str) -> Any:
        """What stands at a path from the collector on.

        Args:
            attr: names and indices: "env.action_spec", "policy.module[0]".

        Returns:
            What stands there.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return resolved(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What a method returns for each of these arguments.

        Args:
            method_name: its path from the collector on.
            list_of_args, list_of_kwargs: of each call; None: none.

        Returns:
            What each call returned.

        Raises:
            ValueError: the two lists differ in length.
            AttributeError: there is no such method.
        """
        return mapped(self, method_name, calls(list_of_args, list_of_kwargs, None))

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what stands at a path from the collector on; return it, where it is no function.

        Args:
            attr_path: names and indices from the collector on: "env.reset", "policy.module[0]".
            args, kwargs: of the call.

        Returns:
            What the call returned, or what stands there.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return called(self, attr_path, *args, **kwargs)

    def get_model(self, model_id: str) -> Any:
        """The policy for "policy"; for anything else what stands at that path.

        Args:
            model_id: "policy", or names and indices from the collector on.

        Returns:
            What stands there.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return resolved(self, model_id)
