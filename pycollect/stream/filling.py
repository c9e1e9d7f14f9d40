"""Frames on their way into a replay buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from pycollect._core import Uninterrupted
from pycollect.stream.ledger import Ledger


class Filling:
    """One batch that goes into a replay buffer, piece by piece, as the ledger has it.

    At the end of the block, frames that were expected and did not come to the buffer are lost:
    something raised on their way there.

    Attributes:
        frames: that are in the buffer.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._expected: Counter[int] = Counter()
        self.frames = 0

    def expect(self, frames_of: Mapping[int, int]) -> None:
        """So many frames of each worker are to go there.

        They count as delivered from now on: the buffer may shut the collector down, or seed it,
        which loses what is in flight.
        """
        with Uninterrupted():
            for worker, frames in frames_of.items():
                self._expected[worker] += frames
                self._ledger.deliver(worker, frames)

    def count(self, frames_of: Mapping[int, int]) -> None:
        """So many of them are there."""
        with Uninterrupted():
            for worker, frames in frames_of.items():
                self._expected[worker] -= frames
                self.frames += frames

    def __enter__(self) -> Filling:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker, frames in self._expected.items():
            self._ledger.deliver(worker, -frames)
            self._ledger.lose(worker, frames, "replay_buffer")
