"""TorchRL's names of one worker: in this process, or as seen from within the worker's process."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType

from pycollect.arguments import completed_by, exposes
from pycollect.checks import check_callable
from pycollect.data.devices import Devices
from pycollect.policy.remote import RemotePolicy
from pycollect.transport.host import SingleWorker
from pycollect.worker.options import POST, PRE, WorkerOptions
from pycollect.worker.worker import Worker

_PART = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")


@exposes(WorkerOptions, "_worker_options")
class WorkerNames(ABC):
    """The arguments that configure a worker; if there are several workers, the first."""

    max_frames_per_traj: int
    exploration_type: InteractionType
    reset_at_each_iter: bool
    set_truncated: bool
    compact_obs: bool

    @property
    @abstractmethod
    def _worker_options(self) -> WorkerOptions:
        """Options of the worker."""

    @property
    def compiled_policy(self) -> bool:
        """Whether `compile_policy` was requested."""
        return self._worker_options.call_options.compiled is not None

    @property
    def compiled_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments of ``torch.compile`` in `compile_policy`, by name."""
        return dict(self._worker_options.call_options.compiled or {})

    @property
    def cudagraphed_policy(self) -> bool:
        """Whether `cudagraph_policy` was requested."""
        return self._worker_options.call_options.graphed is not None

    @property
    def cudagraphed_policy_kwargs(self) -> Mapping[str, Any]:
        """Arguments in `cudagraph_policy`, by name."""
        return dict(self._worker_options.call_options.graphed or {})


class Paths:
    """Attributes by path, as TorchRL writes them."""

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
            ValueError: Arguments are given, but the object is not callable.
        """
        value = resolved(self, attr_path)
        if callable(value):
            return value(*args, **kwargs)
        if args or kwargs:
            raise ValueError(f"{attr_path}: expected a callable, got {type(value).__name__}")
        return value

    def get_model(self, model_id: str) -> Any:
        """Return the policy for "policy", or the object at another path.

        Args:
            model_id: "policy", or a path of names and indices that starts at the collector.

        Returns:
            The object in this process.

        Raises:
            AttributeError: No object exists at that path.
        """
        return resolved(self, model_id)


class OneWorker(Paths, WorkerNames):
    """The worker's environment and policy, and attributes of both by path.

    A device is ``None`` if it was not specified.
    """

    _worker: Worker

    @property
    def _devices(self) -> Devices:
        return self._worker_options.devices

    @property
    def device(self) -> torch.device | None:
        """Default for the three other devices, or ``None`` if not specified."""
        return self._devices.default

    @property
    def storing_device(self) -> torch.device | None:
        """Value of ``td.device`` of a batch."""
        return self._devices.reported

    @property
    def policy_device(self) -> torch.device | None:
        """Requested device of the policy, or ``None``."""
        return self._devices.policy_device

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
        return self._worker.num_envs

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


# Paths of attributes, as TorchRL writes them


def resolved(start: Any, path: str) -> Any:
    """Return the value at a path from `start`, for example "policy.module[0].weight".

    Raises:
        AttributeError: An attribute is missing; the message starts with the path up to it.
        KeyError, IndexError: An entry is missing.
        TypeError: `path` is not a non-empty string.
    """
    if not isinstance(path, str) or not path:
        raise TypeError(f"attr: expected a path like 'env.action_spec', got {path!r}")
    value = start
    for match in _PART.finditer(path):
        entry, name = match.groups()
        try:
            value = value[_index(entry)] if name is None else getattr(value, name)
        except (AttributeError, IndexError, KeyError) as error:
            known = (AttributeError, IndexError, KeyError)
            kind = next(kind for kind in known if isinstance(error, kind))
            raise kind(f"{path[: match.end()]}: {error}") from error
    return value


def _index(entry: str) -> int | str:
    try:
        return int(entry)
    except ValueError:
        return entry.strip("'\"")


def calls(
    list_of_args: Sequence[Sequence[Any]] | None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    workers: int | None,
) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Return the arguments of each call of `map_fn`.

    Args:
        workers: Number of calls. ``None`` means the length of the lists, or 1 without lists.

    Raises:
        ValueError: The lengths of the lists differ from each other or from `workers`.
    """
    given = [entries for entries in (list_of_args, list_of_kwargs) if entries is not None]
    count = len(given[0]) if given else workers or 1
    args = [()] * count if list_of_args is None else list(list_of_args)
    kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
    if len(args) != len(kwargs):
        raise ValueError(
            "list_of_args, list_of_kwargs: expected lists of the same length, got "
            f"{len(args)} and {len(kwargs)}"
        )
    if workers is not None and count != workers:
        raise ValueError(
            f"list_of_args, list_of_kwargs: Expected {workers} argument entries, one per worker, "
            f"got {count}"
        )
    return list(zip(args, kwargs, strict=True))


def mapped(
    start: Any, path: str, each: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> list[Any]:
    """Call the function at a path with each of these arguments, and return the results."""
    function: Callable[..., Any] = resolved(start, path)
    if not callable(function):
        raise AttributeError(f"{path}: expected a method, got {type(function).__name__}")
    return [function(*args, **kwargs) for args, kwargs in each]


# These advance or reset collection, so a worker may not run them without its collector.
_THE_COLLECTORS = frozenset(
    [
        "async_shutdown",
        "iterator",
        "load_state_dict",
        "next",
        "pause",
        "reset",
        "rollout",
        "set_seed",
        "shutdown",
        "start",
        "state_dict",
        "update_policy_weights_",
    ]
)


class View:
    """Base of the views of a worker, whose AttributeErrors explain missing names."""

    def __getattr__(self, name: str) -> Any:
        if name in _THE_COLLECTORS:
            raise AttributeError(
                f"not available on a single worker; call {name}() of the collector"
            )
        raise AttributeError(f"a worker has no attribute {name!r}")


class WorkerView(View, OneWorker):
    """TorchRL's names of the collector in a worker, except those that advance or reset it."""

    def __init__(self, worker: SingleWorker) -> None:
        self._worker: SingleWorker = worker
        self.worker_idx = worker.index
        self.total_frames = math.inf
        self.closed = False

    @property
    def _worker_options(self) -> WorkerOptions:
        return self._worker.options

    @property
    def policy(self) -> Any:
        """The worker's copy; None for random actions."""
        return self._worker.policy

    @property
    def frames_per_batch(self) -> int:
        """Frames of one rollout."""
        frames: int = self._worker.steps * self._worker.num_envs
        return frames

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int | None:
        """Version of the worker's weights; None if an inference server has them."""
        return None if isinstance(self._worker.policy, RemotePolicy) else self._worker.version

    def get_policy_version(self) -> int | None:
        """`policy_version`."""
        return self.policy_version

    @property
    def pre_collect_hook(self) -> Any:
        """Called before each rollout."""
        return self._worker.pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._worker.pre_collect_hook = check_callable(PRE, hook)

    @property
    def post_collect_hook(self) -> Any:
        """Called with each rollout."""
        return self._worker.post_collect_hook

    def set_post_collect_hook(self, hook: Any) -> None:
        """Set `post_collect_hook` of this worker alone, until it is replaced."""
        self._worker.post_collect_hook = check_callable(POST, hook)

    def stats(self) -> dict[str, Any]:
        """Its own counts."""
        return {
            "frames": self._worker.stepped,
            "requested_frames_per_batch": self.frames_per_batch,
            "policy_version": self.policy_version,
        }
