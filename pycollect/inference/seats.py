"""The slots of all workers that one policy is called for, in the driver."""

from __future__ import annotations

from pycollect._core import Bell, ServerSlots
from pycollect.inference.client import CentralPolicy


class Seats:
    """Slots, in memory of this process: they outlive workers, and a server in another process.

    Args:
        bell: that workers ring when they ask.

    Attributes:
        bell: this one.
        slots: one for each worker that there ever was, but for those that took another's place.
    """

    def __init__(self, bell: Bell) -> None:
        self.slots = ServerSlots()
        self.bell = bell

    def policies(self, count: int) -> list[CentralPolicy]:
        """What stands for the policy in so many more workers.

        Raises:
            ValueError: there were 1024 already.
        """
        return [
            CentralPolicy(self.slots.address, self.slots.add(), self.bell.address)
            for _ in range(count)
        ]
