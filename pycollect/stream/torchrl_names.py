"""Names that TorchRL's trainers and programs expect on a collector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import exposes
from pycollect.docstrings import completed_by
from pycollect.stream.background import Background
from pycollect.stream.flow import Flow
from pycollect.stream.options import StreamOptions
from pycollect.stream.source import Source


@exposes(StreamOptions, "_flow.options")
class TorchRLNames(ABC):
    """TorchRL's names for the properties and methods of a stream."""

    replay_buffer: Any
    extend_buffer: bool
    init_random_frames: int
    split_trajs: bool
    traj_format: str
    track_traj_ids: bool

    _flow: Flow
    _source: Source
    _background: Background
    _worker_idx: int | None = None

    @property
    def policy(self) -> Any:
        """The policy that the collector was made with, or ``None``.

        In-process collectors return the policy that acts, on its device, also if a `policy_factory`
        built it.
        """
        return self._source.policy

    @property
    def requested_frames_per_batch(self) -> int:
        """Number of frames in a batch as requested; in-process collectors round it up."""
        return self._flow.options.frames_per_batch

    @property
    def postproc(self) -> Callable[[TensorDictBase], TensorDictBase] | None:
        """Function that is called with each batch before it is returned, or ``None``.

        It may be set; the new function applies to later batches. A value that is neither callable
        nor ``None`` raises a TypeError.
        """
        return self._flow.options.postproc

    @postproc.setter
    def postproc(self, function: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        function = check.check_callable("postproc", function)
        self._flow.options = replace(self._flow.options, postproc=function)

    @property
    def trajs_per_batch(self) -> int | None:
        """Number of complete trajectories per batch; ``None`` if batches count frames."""
        return self._flow.options.trajs_per_batch or None

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._flow.closed

    @property
    def worker_idx(self) -> int | None:
        """Index of this collector if it is a worker of another one, else ``None``."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int | None) -> None:
        self._worker_idx = index

    def is_running(self) -> bool:
        """Return whether background collection runs."""
        return self._background.running

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Return the stream itself, like ``iter()``.

        Returns:
            The collector. It yields batches of the shape listed under "Yields" of the class, or
            ``None`` for each batch that goes to a replay buffer.
        """
        return iter(self)

    def get_policy_version(self) -> int:
        """Return `policy_version`, the number of weight updates, by TorchRL's name."""
        return self.policy_version

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer.

        Args:
            attr: Name of the attribute.

        Returns:
            The attribute itself.

        Raises:
            AttributeError: The replay buffer has no such attribute, or the collector has none.
        """
        return getattr(self.replay_buffer, attr)

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Number of weight updates so far."""

    @abstractmethod
    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close environments and end workers; rollouts in flight are lost. Idempotent.

        If another thread is collecting in this process, it still gets its batch. If workers collect
        for that thread, its batch is lost and the thread raises a RuntimeError.

        Args:
            timeout: Seconds in which workers must close their environments before their processes
                are ended. ``None`` means 30, but 5 for workers that do not respond because they
                hang in a step or were stopped (default: ``None``).
            close_env: If ``False``, environments in this process stay open (default: ``True``).
            raise_on_error: If ``False``, errors during the shutdown are ignored (default:
                ``True``).

        Raises:
            RuntimeError: `close_env` is ``False``, but the environments are in worker processes,
                which end.
            ValueError: `timeout` is negative.
        """

    @completed_by(shutdown)
    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> Any:
        """Shut the collector down, including background collection, and wait until that is done.

        Args:
            ...: See shutdown.

        Returns:
            ``None``. RayCollector returns an awaitable.
        """
        self.shutdown(timeout, close_env)

    @abstractmethod
    def __iter__(self) -> Iterator[TensorDictBase | None]: ...
