"""Ranks that are processes of this machine: the launcher "mp"."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.rank import run_child
from pycollect.engines.processes.child import ChildMonitor
from pycollect.engines.processes.log import Inherited, WorkerLog


class ChildRank(ChildMonitor):
    """Watches a child that is a rank."""

    def watch(self, pid: int) -> None:
        """Its number is known from its start."""


class ChildLauncher:
    """Starts ranks as children of this process."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")

    def check_number(self, new: int) -> None:
        """There is no end of them."""

    def launch(self, address: RankAddress, name: str, options: Mapping[str, Any]) -> ChildRank:
        """Start one.

        Args:
            options: none are known.
        """
        log = WorkerLog()
        process = self._context.Process(
            target=run_child,
            args=(address, Inherited(log.fileno())),
            name=name,
            daemon=False,  # a daemon may not have processes of its own, but environments do
        )
        process.start()
        return ChildRank(process, log)
