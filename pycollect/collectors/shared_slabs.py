"""Slabs that worker processes write into: made before the start, lent, delivered, recycled."""

from __future__ import annotations

from collections.abc import Collection

from pycollect._core import Placement, SharedSlabPool, Slab
from pycollect.batch import make_shared_pool

# The newest batch and the one before it, which a learner still reads.
_SPARE = 2

Group = tuple[int, ...]
"""The ids of the workers whose rollouts become one batch, in its order."""

_Kind = tuple[Group, int, int, int]


class SharedSlabs:
    """The slabs of each group of workers whose rollouts become one batch.

    A group that comes back with another layout has slabs of its own.

    Args:
        working: how many batches of one group are written, or wait, at a time.
    """

    def __init__(self, working: int) -> None:
        self._working = working
        self._pools: dict[_Kind, SharedSlabPool] = {}

    def prepare(self, workers: Group, placement: Placement) -> SharedSlabPool:
        """Make the slabs of these workers, unless they are there.

        Raises:
            ValueError: memory cannot hold them; with both numbers.
            SharedMemoryError: processes cannot share memory here.
        """
        kind = _kind(workers, placement)
        if kind not in self._pools:
            self._pools[kind] = make_shared_pool(placement, self._working, _SPARE)
        return self._pools[kind]

    def acquire(self, workers: Group, placement: Placement) -> Slab:
        """A slab for these workers to write.

        There always is one: a worker has answered whatever it was asked before it is asked for
        more than `working` rollouts, also for rollouts that were dropped, or its process is gone.
        """
        slab = self.prepare(workers, placement).acquire()
        if slab is None:
            raise RuntimeError(
                f"workers {list(workers)} hold {self._working} slabs, one more is needed; please "
                "report this"
            )
        return slab

    def deliver(self, workers: Group, slab: Slab) -> Slab:
        """The slab for the user to keep, or a private copy where too few would remain."""
        return self._pools[_kind(workers, slab.placement)].deliver(slab)

    def keep(self, groups: Collection[Group]) -> None:
        """Let the memory of all other groups go, but for what the user still has."""
        self._pools = {kind: pool for kind, pool in self._pools.items() if kind[0] in groups}


def _kind(workers: Group, placement: Placement) -> _Kind:
    layout = placement.layout
    return workers, layout.fingerprint, placement.envs, placement.steps
