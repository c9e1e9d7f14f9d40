"""What TorchRL's collectors have under names of their own, for its trainers and for programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase

from pycollect import checks as check
from pycollect.arguments import tells
from pycollect.docstrings import completed_by
from pycollect.stream.background import Background
from pycollect.stream.flow import Flow
from pycollect.stream.options import StreamOptions
from pycollect.stream.source import Source


@tells(StreamOptions, "_flow.options")
class TorchRLNames(ABC):
    """Other names of what a stream is and does; each says which."""

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
        """The policy that the collector was made with, None without one.

        In process it is the one that is called, on its device; a `policy_factory`'s too.
        """
        return self._source.policy

    @property
    def requested_frames_per_batch(self) -> int:
        """The frames of a batch, in this process after rounding up; elsewhere as asked for."""
        return self._flow.options.frames_per_batch

    @property
    def postproc(self) -> Callable[[TensorDictBase], TensorDictBase] | None:
        """What each batch goes through before it is delivered; None: nothing.

        Another may be set, for batches that are delivered from then on; a TypeError where it is not
        to be called.
        """
        return self._flow.options.postproc

    @postproc.setter
    def postproc(self, function: Callable[[TensorDictBase], TensorDictBase] | None) -> None:
        function = check.check_callable("postproc", function)
        self._flow.options = replace(self._flow.options, postproc=function)

    @property
    def trajs_per_batch(self) -> int | None:
        """Complete trajectories in one batch, an int; None: batches are of frames."""
        return self._flow.options.trajs_per_batch or None

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._flow.closed

    @property
    def worker_idx(self) -> int | None:
        """As which of somebody's workers it collects; None: nobody told."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, index: int | None) -> None:
        self._worker_idx = index

    def is_running(self) -> bool:
        """Whether `start` began something that goes on."""
        return self._background.running

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """The stream itself, which ``iter()`` gives, too.

        Returns:
            The collector. It yields batches of the shape that its class tells, or None for each
            that goes into a replay buffer.
        """
        return iter(self)

    def get_policy_version(self) -> int:
        """How many weight updates there were, an int: `policy_version` by TorchRL's name."""
        return self.policy_version

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer.

        Args:
            attr: its name.

        Returns:
            The attribute itself.

        Raises:
            AttributeError: there is none of that name, or no replay buffer.
        """
        return getattr(self.replay_buffer, attr)

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """0 at first, one more with each weight update."""

    @abstractmethod
    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close environments and end workers; what is in flight is lost. Idempotent.

        Where another thread is collecting, it gets its batch before, if that is collected in this
        process; otherwise the batch is lost, and what waits for it raises a RuntimeError.

        Args:
            timeout: seconds that workers elsewhere have to close their environments, before their
                processes are ended; None: half a minute, and five seconds for those that do not
                hear of it, since they hang in a step or were stopped.
            close_env: False: environments in this process stay open.
            raise_on_error: False: what goes wrong then is not raised.

        Raises:
            RuntimeError: `close_env` is False, and environments end with the processes they are in.
            ValueError: a negative time-out.
        """

    @completed_by(shutdown)
    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> Any:
        """Do what `shutdown` does, which ends also what `start` began; return when it is done.

        Args:
            ...: those of `shutdown`.

        Returns:
            None; Ray's collector returns what can be awaited.
        """
        self.shutdown(timeout, close_env)

    @abstractmethod
    def __iter__(self) -> Iterator[TensorDictBase | None]: ...
