"""All who call the policy for the workers of one collector, in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycollect.errors import WorkerDied
from pycollect.scheduler.node_servers import NodeServers
from pycollect.scheduler.policy_process import PolicyProcess
from pycollect.scheduler.policy_server import PolicyServer
from pycollect.scheduler.records import WorkerRecord


class PolicyServers:
    """Who serves which worker, and who has died.

    Args:
        process: for workers of this machine; None: this process serves them, or they themselves.
        nodes: for those of other nodes; None: there are no such workers, or they are served here.
    """

    def __init__(
        self, process: PolicyProcess | None = None, nodes: NodeServers | None = None
    ) -> None:
        self.process, self.nodes = process, nodes
        self._dead: PolicyServer | None = None  # who was told of last

    @property
    def _all(self) -> list[PolicyServer]:
        here = [] if self.process is None else [self.process]
        return [*here, *(() if self.nodes is None else self.nodes.servers)]

    def start(self) -> None:
        """Start the process. Others are started once workers come to their nodes."""
        if self.process is not None:
            self.process.start()

    def dead(self) -> list[tuple[PolicyServer, WorkerDied]]:
        """Those that have died, and how; until they are told that they are replaced."""
        found = [(server, server.death()) for server in self._all]
        return [(server, death) for server, death in found if death is not None]

    def served_by(
        self, server: PolicyServer, workers: Sequence[WorkerRecord]
    ) -> list[WorkerRecord]:
        """Those of these workers to whom that server is all."""
        return [worker for worker in workers if self._server_of(worker) is server]

    def _server_of(self, worker: WorkerRecord) -> PolicyServer | None:
        nodes = () if self.nodes is None else self.nodes.servers
        return next((own for own in nodes if own.serves(worker)), self.process)

    def have_lost(self, worker: WorkerRecord) -> bool:
        """Whether whoever serves that worker has died. Waits a moment for the news of it."""
        server = self._server_of(worker)
        return server is not None and server.has_died()

    def death(self) -> WorkerDied | None:
        """How one of them ended; None: all serve."""
        for server, death in self.dead():
            self._dead = server
            return death
        return None

    def last_words(self) -> str:
        """The last lines that this one logged, as far as they can be had."""
        return "" if self._dead is None else self._dead.last_words()

    def end_idle(self, workers: Sequence[WorkerRecord]) -> None:
        """End those of nodes on which none of these workers is, which are all that there are."""
        if self.nodes is not None:
            self.nodes.end_idle(workers)

    def have_failed(self, failure: str | None) -> bool:
        """Whether that is why one of them was last replaced."""
        return failure is not None and any(own.record.failure == failure for own in self._all)

    def report(self) -> dict[str, Any]:
        """Of `stats`."""
        here = {} if self.process is None else {"server": self.process.report()}
        return here if self.nodes is None else {**here, "node_servers": self.nodes.report()}

    def close_nodes(self, timeout: float | None) -> None:
        """End those of other nodes, before the workers' engine is left. Idempotent."""
        if self.nodes is not None:
            self.nodes.close(timeout)

    def close_process(self, timeout: float | None) -> None:
        """End the process. Idempotent."""
        if self.process is not None:
            self.process.close(timeout)
