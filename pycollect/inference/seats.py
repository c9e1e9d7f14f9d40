"""The slots of all workers that one policy is called for, in the process that owns them."""

from __future__ import annotations

from pycollect._core import Bell, ServerSlots
from pycollect.inference.client import CentralPolicy


class Seats:
    """Slots, in memory of this process: they outlive workers, and a server in another process.

    It is the driver, or, on another node, who calls the policy there.

    Args:
        bell: at which workers knock when they ask.
        groups: of each worker's environments.

    Attributes:
        bell, groups: these.
        slots: one for each group of each worker that there ever was, but for those that took
            another's place; a worker's follow each other.
    """

    def __init__(self, bell: Bell, groups: int) -> None:
        self.slots = ServerSlots()
        self.bell, self.groups = bell, groups
        self._by_worker: dict[int, CentralPolicy] = {}

    def policies(self, count: int) -> list[CentralPolicy]:
        """What stands for the policy in so many more workers.

        Raises:
            ValueError: there are 1024 slots already.
        """
        each = [[self.slots.add() for _ in range(self.groups)] for _ in range(count)]
        return [CentralPolicy(self.slots.address, own[0], self.bell.address) for own in each]

    def policy_of(self, worker: int) -> CentralPolicy:
        """What stands for it in the worker of that id, and in whoever takes its place.

        Raises as `policies`.
        """
        if worker not in self._by_worker:
            (self._by_worker[worker],) = self.policies(1)
        return self._by_worker[worker]
