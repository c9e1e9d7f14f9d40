"""The ledger: what became of every frame that a worker was asked for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

REASONS = (
    "worker_died",
    "worker_timeout",
    "server_died",
    "env_error",
    "set_seed",
    "reset",
    "load_state_dict",
    "shutdown",
    "incomplete",
    "replay_buffer",
)


@dataclass
class Account:
    """One worker's frames. What was issued is delivered, lost, or in flight: there is no fourth."""

    issued: int = 0
    delivered: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Frames that nobody will see."""
        return sum(self.reasons.values())

    @property
    def in_flight(self) -> int:
        """Frames that are being collected, or are collected and not delivered yet."""
        return self.issued - self.delivered - self.lost

    def report(self) -> dict[str, Any]:
        """As ints, JSON-able."""
        return {
            "issued": self.issued,
            "delivered": self.delivered,
            "in_flight": self.in_flight,
            "lost": self.lost,
            "reasons": dict(self.reasons),
        }


class Ledger:
    """The accounts of all workers that there ever were. Any thread may call the methods."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}
        self._writing = threading.RLock()  # a report is of one moment

    def issue(self, worker: int, frames: int) -> None:
        """A rollout of so many frames was handed to a worker."""
        with self._writing:
            self._of(worker).issued += frames

    def take_back(self, worker: int, frames: int) -> None:
        """A rollout came back with so many frames fewer than were issued: there never were any."""
        with self._writing:
            self._of(worker).issued -= frames

    def deliver(self, worker: int, frames: int) -> None:
        """The caller gets so many frames."""
        with self._writing:
            self._of(worker).delivered += frames

    def lose(self, worker: int, frames: int, reason: str) -> None:
        """So many frames will never be delivered, for one of REASONS."""
        with self._writing:
            if frames:
                reasons = self._of(worker).reasons
                reasons[reason] = reasons.get(reason, 0) + frames

    def lose_in_flight(self, reason: str) -> None:
        """Whatever is under way, of any worker, is given up."""
        with self._writing:
            for worker, account in self._accounts.items():
                self.lose(worker, account.in_flight, reason)

    def in_flight_of_each(self) -> dict[int, int]:
        """Frames in flight by worker."""
        with self._writing:
            return {worker: account.in_flight for worker, account in self._accounts.items()}

    @property
    def delivered(self) -> int:
        """Frames delivered, over all workers."""
        with self._writing:
            return sum(account.delivered for account in self._accounts.values())

    @property
    def in_flight(self) -> int:
        """Frames in flight, over all workers."""
        return sum(self.in_flight_of_each().values())

    def report(self) -> dict[str, Any]:
        """``{"total": ..., "workers": {id: ...}}``, the total being the workers' sum."""
        total = Account()
        with self._writing:
            for account in self._accounts.values():
                total.issued += account.issued
                total.delivered += account.delivered
                for reason, frames in account.reasons.items():
                    total.reasons[reason] = total.reasons.get(reason, 0) + frames
            workers = {worker: own.report() for worker, own in sorted(self._accounts.items())}
        return {"total": total.report(), "workers": workers}

    def state(self) -> dict[str, Any]:
        """What has to be kept to go on from the last delivered batch: see `restore`.

        What is in flight is not part of it: a run that is resumed has to issue it again.
        """
        with self._writing:
            return {
                str(worker): {
                    "delivered": account.delivered,
                    "reasons": dict(account.reasons),
                }
                for worker, account in self._accounts.items()
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        accounts = {
            int(worker): Account(
                issued=kept["delivered"] + sum(kept["reasons"].values()),
                delivered=kept["delivered"],
                reasons=dict(kept["reasons"]),
            )
            for worker, kept in state.items()
        }
        with self._writing:
            self._accounts = accounts

    def _of(self, worker: int) -> Account:
        """A worker's account; a new one if it has none."""
        return self._accounts.setdefault(worker, Account())
