"""What a scheduler asks of whoever has the policy's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pycollect.scheduler.records import WorkerRecord
from pycollect.stream.source import PolicyWeights


class WorkerWeights(PolicyWeights, Protocol):
    """The policy's weights, for workers that come and go."""

    def start(self) -> None:
        """The first workers are there."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless the newest weights fit workers that were added."""

    def served(self, worker: WorkerRecord) -> None:
        """Async: its rollout is the one that was delivered last."""

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Give one worker weights of its own."""
