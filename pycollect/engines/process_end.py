"""How the process of a worker ended, as its collector tells it."""

from __future__ import annotations

from dataclasses import dataclass

from pycollect.engines.messages import WorkerSpec
from pycollect.errors import WorkerDied


@dataclass(frozen=True)
class ProcessEnd:
    """How it ended.

    Attributes:
        line: in a line.
        account: all that is known of it.
        error: by which that is known, unless it was just raised: it would be kept by what it keeps.
    """

    line: str
    account: str
    error: BaseException | None = None

    def death_of(self, spec: WorkerSpec) -> WorkerDied:
        """The death of the worker that was there."""
        text = f"{spec.name} died: {self.line}"
        death = WorkerDied(text, spec.index, spec.incarnation, self.account)
        death.__cause__ = self.error
        return death
