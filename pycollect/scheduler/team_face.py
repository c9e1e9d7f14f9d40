"""What a worker with processes of its own shows of them to whoever asks it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pycollect.engines.face import Face
from pycollect.scheduler.scheduler import RemoteCollector


class TeamFace(Face):
    """The same of a worker with processes of its own, each of which answers."""

    def __init__(self, index: int, processes: RemoteCollector) -> None:
        self._processes = processes
        self.worker_idx = index
        self.num_workers = processes.num_workers

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the first process's environment."""
        return self._processes.getattr_env(attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the first process's policy."""
        return self._processes.getattr_policy(attr)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What each process has at that path."""
        return self._processes.get_distant_attr(attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """What a method of each process returns."""
        return self._processes.map_fn(method_name, list_of_args, list_of_kwargs)

    def set_post_collect_hook(self, hook: Any) -> None:
        """Of all its processes."""
        self._processes.post_collect_hook = hook

    def stats(self) -> dict[str, Any]:
        """Their counts together."""
        return {"frames": sum(own["frames"] for own in self._processes.map_fn("stats"))}

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of these."""
        return getattr(self, attr_path)(*args, **kwargs)
