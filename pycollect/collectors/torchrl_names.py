"""What TorchRL's collectors have under names of their own, for its trainers and for programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from pycollect.collectors.options import StreamOptions


class TorchRLNames(ABC):
    """Other names of what a collector is and does; each says which."""

    _options: StreamOptions
    _policy: Any
    _closed: bool

    @property
    def policy(self) -> Any:
        """The policy that the collector was made with, None without one.

        In process it is the one that is called, on its device; a `policy_factory`'s too.
        """
        return self._policy

    @property
    def replay_buffer(self) -> Any:
        """The buffer that batches go to, None without one."""
        return self._options.replay_buffer

    @property
    def init_random_frames(self) -> int:
        """The argument, 0 where it is off."""
        return self._options.init_random_frames

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._closed

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """The stream itself, as ``iter()``."""
        return iter(self)

    def get_policy_version(self) -> int:
        """`policy_version`."""
        return self.policy_version

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """As `shutdown`, which ends what `start` began.

        Args:
            timeout, close_env: TorchRL's; without effect. Environments are always closed.
        """
        self.shutdown()

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """0 at first, one more with each weight update."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close environments and end workers."""

    @abstractmethod
    def __iter__(self) -> Iterator[TensorDictBase | None]: ...
