"""Slabs that worker processes write into: made before the start, lent, delivered, recycled."""

from __future__ import annotations

from collections.abc import Collection

from pycollect._core import Placement, SharedSlabPool, Slab, SlabPool, copy
from pycollect.batch.slab_views import make_pool, make_shared_pool
from pycollect.batch.upload import MOST_IN_FLIGHT, DeviceUploader
from pycollect.engines.limits import limits_named

# The newest batch and the one before it, which a learner still reads.
_SPARE = 2
# Batches on their way to a device, and the one that is about to be.
_SPARE_BEFORE_A_DEVICE = MOST_IN_FLIGHT + 1

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
        self._staging: dict[_Kind, SlabPool] = {}  # where a device cannot read those themselves

    def prepare(
        self, workers: Group, placement: Placement, uploader: DeviceUploader | None = None
    ) -> SharedSlabPool:
        """Make the slabs of these workers, unless they are there.

        Args:
            uploader: to the device that their batches go to; None: they stay on the host.

        Raises:
            ValueError: memory cannot hold them; with both numbers.
            SharedMemoryError: processes cannot share memory here.
        """
        kind = _kind(workers, placement)
        if kind not in self._pools:
            spare = _SPARE if uploader is None else _SPARE_BEFORE_A_DEVICE
            with limits_named("the shared memory of batches"):
                pool = make_shared_pool(placement, self._working, spare)
            if uploader is not None and not uploader.pin(pool):
                self._staging[kind] = make_pool(
                    placement, _SPARE_BEFORE_A_DEVICE, uploader.allocate
                )
            self._pools[kind] = pool
        return self._pools[kind]

    def acquire(
        self, workers: Group, placement: Placement, uploader: DeviceUploader | None = None
    ) -> Slab:
        """Return a slab for these workers to write. Arguments and errors as for `prepare`.

        `working` slabs are enough: a worker is asked for another rollout once it has answered an
        older one, also a dropped one, or once its process is gone. The pool adds slabs if others
        are lent for longer, for example to the frames of exceptions that the caller keeps.
        """
        return self.prepare(workers, placement, uploader).acquire()

    def deliver(self, workers: Group, slab: Slab) -> Slab:
        """The slab for the user to keep, or a private copy where too few would remain.

        On its way to a device that cannot read the slab itself it is a copy in pinned memory.
        """
        kind = _kind(workers, slab.placement)
        if kind not in self._staging:
            return self._pools[kind].deliver(slab)
        staged = self._staging[kind].acquire()
        copy(staged.array(), slab.array())
        return staged

    def copies(self, slab: Slab) -> bool:
        """Whether the slab is copied on its way to a device, which cannot read it itself."""
        return bool(self._staging) and slab.memory.address is not None

    def keep(self, groups: Collection[Group]) -> None:
        """Let the memory of all other groups go, but for what the user still has."""
        self._pools = {kind: pool for kind, pool in self._pools.items() if kind[0] in groups}
        self._staging = {kind: own for kind, own in self._staging.items() if kind in self._pools}


def _kind(workers: Group, placement: Placement) -> _Kind:
    layout = placement.layout
    return workers, layout.fingerprint, placement.envs, placement.steps
