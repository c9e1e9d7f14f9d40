"""Ranks that are processes of this machine: the launcher "mp"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollect.engines.distributed.address import RankAddress
from pycollect.engines.distributed.rank import run_child
from pycollect.engines.processes.child import ChildMonitor
from pycollect.engines.processes.start import start_child


class ChildRank(ChildMonitor):
    """Watches a child that is a rank."""

    def watch(self, pid: int) -> None:
        """Its number is known from its start."""


class ChildLauncher:
    """Starts ranks as children of this process.

    Args:
        start_method: see :func:`start_child`.
    """

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method

    def check_number(self, new: int) -> None:
        """There is no end of them."""

    def launch(self, address: RankAddress, name: str, options: Mapping[str, Any]) -> ChildRank:
        """Start one.

        Args:
            options: none are known.
        """
        return ChildRank(*start_child(run_child, (address,), name, self._start_method))
