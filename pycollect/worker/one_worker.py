"""Properties and methods of a collector that runs in this process."""

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
    """The worker's environment and policy, and attributes of both by path."""

    _worker: Worker

    @property
    def env(self) -> Any:
        """The environment that was passed or that `create_env_fn` returned, on its device.

        A list if a list of Gymnasium environments was given. Do not step or reset it: that changes
        the collected trajectories.
        """
        return self._worker.env.original

    @property
    def env_device(self) -> torch.device | None:
        """Device of the environment: the requested one, else the environment's own."""
        return self._devices.env_device or getattr(self.env, "device", None)

    @property
    def n_env(self) -> int:
        """Number of environments that are stepped as a batch."""
        return self._worker.env.num_envs

    @property
    @abstractmethod
    def policy(self) -> Any:
        """The policy that acts, or ``None`` for random actions."""

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment.

        Args:
            attr: Name of the attribute.

        Returns:
            The attribute itself.

        Raises:
            AttributeError: The attribute does not exist.
        """
        return getattr(self.env, attr)

    @completed_by(getattr_env)
    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy.

        Args:
            ...: See getattr_env.
        """
        return getattr(self.policy, attr)

    def get_distant_attr(self, attr: str) -> Any:
        """Return the object at a path that starts at the collector.

        Args:
            attr: Path of names and indices, such as "env.action_spec" or "policy.module[0]".

        Returns:
            The object itself.

        Raises:
            AttributeError: No object exists at that path.
        """
        return resolved(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once for each set of arguments.

        Args:
            method_name: Path of the method, starting at the collector, such as "env.reset".
            list_of_args, list_of_kwargs: Arguments and keyword arguments, one entry per call.
                ``None`` means no arguments (default: ``None``).

        Returns:
            The return value of each call.

        Raises:
            ValueError: The two lists differ in length.
            AttributeError: The method does not exist.
        """
        return mapped(self, method_name, calls(list_of_args, list_of_kwargs, None))

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call the object at a path, or return it if it is not callable.

        Args:
            attr_path: Path of names and indices that starts at the collector, such as "env.reset"
                or "policy.module[0]".
            args, kwargs: Arguments of the call.

        Returns:
            The return value of the call, or the object.

        Raises:
            AttributeError: No object exists at that path.
        """
        return called(self, attr_path, *args, **kwargs)

    def get_model(self, model_id: str) -> Any:
        """Return the policy for "policy", or the object at another path.

        Args:
            model_id: "policy", or a path of names and indices that starts at the collector.

        Returns:
            The object itself.

        Raises:
            AttributeError: No object exists at that path.
        """
        return resolved(self, model_id)
