"""What a worker with processes of its own shows of them to whoever asks it by name."""

from __future__ import annotations

from typing import Any

from pycollect.engines.face import Face
from pycollect.scheduler.asking import Asking
from pycollect.scheduler.scheduler import Scheduler
from pycollect.worker.hooks import POST


class TeamFace(Asking, Face):
    """The same of a worker with processes of its own, each of which answers."""

    def __init__(self, index: int, processes: Scheduler) -> None:
        self._source = processes
        self.worker_idx = index
        self.num_workers = len(processes.group.present)

    def set_post_collect_hook(self, hook: Any) -> None:
        """Of all its processes."""
        self._source.set_hook(POST, hook)

    def stats(self) -> dict[str, Any]:
        """Their counts together."""
        return {"frames": sum(own["frames"] for own in self.map_fn("stats"))}
