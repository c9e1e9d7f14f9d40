"""How the process of a worker ended."""

from __future__ import annotations

from dataclasses import dataclass

from pycollect.engines.messages import WorkerSpec
from pycollect.errors import WorkerDied


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a worker's process.

    Attributes:
        line: One line that describes the end.
        account: Everything that is known about the end.
        error: Exception that reported the end, or ``None`` if it is being raised right now: a
            stored one would keep its own frames alive.
    """

    line: str
    account: str
    error: BaseException | None = None

    def death_of(self, spec: WorkerSpec) -> WorkerDied:
        """Return the error for the worker that ran in the process."""
        text = f"{spec.name} died: {self.line}"
        death = WorkerDied(text, spec.index, spec.incarnation, self.account)
        death.__cause__ = self.error
        return death
