"""A Worker behind calls from another process: its hooks come from there, and questions about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from pycollect.engines.messages import WorkerSpec
from pycollect.policy import build
from pycollect.worker.options import PRE
from pycollect.worker.worker import Worker


class SingleWorker(Worker):
    """A Worker that collects in a process of its own.

    Args:
        spec: what it is made from.
        policy: pickled, or its factory.

    Attributes:
        version: of the weights that it has, when it is asked.
    """

    version = 0

    def __init__(self, spec: WorkerSpec, policy: bytes) -> None:
        given = cloudpickle.loads(policy)
        self.post_collect_hook: Callable[[Any], Any] | None = spec.options.post_collect_hook
        super().__init__(
            spec.index,
            spec.entry,
            spec.env_kwargs,
            build(given) if spec.builds_policy else given,
            spec.options,
            spec.incarnation,
        )

    @property
    def processes(self) -> int:
        """None of its own."""
        return 0

    @property
    def beside(self) -> bool:
        """There are none."""
        return False

    def set_hook(self, name: str, hook: Any) -> None:
        """A hook, from the next rollout on."""
        if name == PRE:
            self.pre_collect_hook = hook
        else:
            self.post_collect_hook = hook

    def close(self) -> None:
        """Close the hook and the environments."""
        close = getattr(self.post_collect_hook, "close", None)
        try:
            if close is not None:
                close()
        finally:
            super().close()
