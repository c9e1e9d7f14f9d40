"""Send weights and hooks to workers, and keep them for replacements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from pycollect._core import Memory, shared_memory_why_not
from pycollect.data.weights import NO_WEIGHTS, Weights, WeightSpec
from pycollect.driver.records import WorkerRecord
from pycollect.transport.messages import Buffer
from pycollect.transport.pickling import SharedValue, WeightSlab, array_of, share

_Sent = dict[str, tuple[int, SharedValue]]


class PolicyCopy:
    """The policy for workers that share no memory with this process, if others use a server.

    It is pickled for each of them, because its weights may have changed.
    """

    def __init__(self, put: Callable[[bytes], SharedValue], pickle: Callable[[], bytes]) -> None:
        self._put, self._pickle = put, pickle
        self._pickled = b""
        self._value: SharedValue | None = None

    def __call__(self) -> SharedValue:
        """Return the policy, which is shared anew only if it has changed."""
        pickled = self._pickle()
        if self._value is None or pickled != self._pickled:
            self._pickled, self._value = pickled, self._put(pickled)
        return self._value


class HookSender:
    """Sends hooks to workers, and keeps the newest for workers that start later."""

    def __init__(self, put: Callable[[bytes], SharedValue]) -> None:
        self._put = put
        self._serial = 0
        self._of_all: _Sent = {}
        self._of_one: dict[int, _Sent] = {}  # hooks of single workers, by id

    def send(
        self, name: str, hook: Any, workers: Sequence[WorkerRecord], alone: bool = False
    ) -> None:
        """Send a hook to these workers; unless `alone`, also to workers that start later."""
        try:
            pickled = cloudpickle.dumps(hook)
        except Exception as error:
            raise TypeError(
                f"{name}: cannot be pickled to be sent to the workers: {error}"
            ) from error
        self._serial += 1
        sent = {name: (self._serial, self._put(pickled))}
        if not alone:
            self._of_all.update(sent)
        for worker in workers:
            if alone:
                self._of_one.setdefault(worker.index, {}).update(sent)
            else:
                self._of_one.get(worker.index, {}).pop(name, None)
            if not worker.starting:
                worker.handle.set_hooks(sent)

    def send_kept(self, worker: WorkerRecord) -> None:
        """Send a new worker its own hooks and the hooks of all workers."""
        newest = {**self._of_all, **self._of_one.get(worker.index, {})}
        if newest:
            worker.handle.set_hooks(newest)


@dataclass(frozen=True)
class Assignment:
    """All weights of a worker, because a later update may contain only some names."""

    serial: int = 0  # number of the update; 0 before the first one
    version: int = 0
    weights: Weights = NO_WEIGHTS
    packed: dict[WeightSpec, SharedValue] = field(default_factory=dict)  # weights as one buffer


_NOTHING = Assignment()


class WeightSender:
    """Sends weights to workers, and keeps them for replacements."""

    def __init__(self, put: Callable[[Memory | Buffer], SharedValue]) -> None:
        self._put = put
        self._shares_memory = not shared_memory_why_not()
        self._slabs: dict[WeightSpec, WeightSlab] = {}
        self._newest = _NOTHING
        self._of: dict[int, Assignment] = {}
        self._individual: set[int] = set()
        self._built = NO_WEIGHTS

    @property
    def individual(self) -> dict[int, tuple[Weights, int]]:
        """Weights and policy version of workers with individual weights, by id."""
        built = Assignment(weights=self._built)
        each = {index: self._of.get(index, built) for index in sorted(self._individual)}
        return {index: (own.weights, own.version) for index, own in each.items()}

    def skip(self, workers: Sequence[WorkerRecord], built: Weights) -> None:
        """Record that the next weights are not sent to these workers, built with `built`."""
        self._built = built
        self._individual.update(worker.index for worker in workers)

    @property
    def newest(self) -> Weights:
        """The weights that were sent last, which new workers get; empty before the first update."""
        return self._newest.weights

    def check(self, weights: Weights, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError unless names and shapes match the workers' policies."""
        for worker in workers:
            worker.info.weights.fitted(weights)

    def send(
        self,
        weights: Weights,
        workers: Sequence[WorkerRecord],
        version: int,
        acknowledge: bool = False,
        individual: bool = False,
    ) -> list[tuple[WorkerRecord, Any]]:
        """Send weights of all or some names; return the workers and calls that can be awaited.

        If `acknowledge`, the workers must confirm them. If `individual`, each of them has its own.
        """
        serial = self._newest.serial + 1
        previous = [self._of.get(worker.index, _NOTHING) for worker in workers]
        forms: dict[int, set[WeightSpec]] = {}
        for worker, old in zip(workers, previous, strict=True):
            if not worker.starting:
                forms.setdefault(id(old), set()).add(worker.info.weights)
        distinct = {id(old): old for old in (self._newest, *previous)}
        following = {  # workers that shared an assignment share the next one
            key: self._assignment(serial, version, old.weights, weights, forms.get(key, ()))
            for key, old in distinct.items()
        }
        self._newest = following[id(self._newest)]
        for worker, old in zip(workers, previous, strict=True):
            self._of[worker.index] = following[id(old)]
            (self._individual.add if individual else self._individual.discard)(worker.index)
        sent = [(worker, self.send_kept(worker, acknowledge)) for worker in workers]
        return [(worker, call) for worker, call in sent if call is not None]

    def send_newest(self, worker: WorkerRecord) -> None:
        """Send a new worker the newest weights, if there are any."""
        self._of[worker.index] = self._newest
        self.send_kept(worker)

    def send_kept(self, worker: WorkerRecord, acknowledge: bool = False) -> Any:
        """Send a built worker all weights that were kept for it; return the call, or None."""
        assignment = self._of.get(worker.index, _NOTHING)
        if assignment.serial == 0:
            return None
        worker.since_update = 0
        if worker.starting:
            return None
        form = worker.info.weights
        if form not in assignment.packed:
            assignment.packed[form] = self._put(self._packed(form, assignment.weights))
        packed = assignment.packed[form]
        return worker.handle.assign(assignment.serial, assignment.version, packed, acknowledge)

    def _assignment(
        self,
        serial: int,
        version: int,
        before: Weights,
        newer: Weights,
        forms: Iterable[WeightSpec],
    ) -> Assignment:
        """Update weights and pack them for workers with these layouts.

        The caller may change the values of `newer` afterwards, because the result holds views of
        the packed buffer, or copies.
        """
        weights = before.updated(newer)
        packed: dict[WeightSpec, SharedValue] = {}
        kept: Weights | None = None
        for form in forms:
            value = self._packed(form, weights)
            packed[form] = self._put(value)
            if form and form.holds(weights):
                kept = self._slabs[form].unpack(array_of(value))
        return Assignment(serial, version, kept or before.updated(newer.copied()), packed)

    def _packed(self, form: WeightSpec, weights: Weights) -> Memory | Buffer:
        """Pack the weights in the dtypes of a worker's policy, into shared memory if possible."""
        if not form:
            return np.empty(0, np.uint8)
        if form not in self._slabs:
            self._slabs[form] = WeightSlab(form)
        slab = self._slabs[form]
        buffer = np.empty(slab.bytes(weights), np.uint8)
        slab.pack(weights, buffer)
        return share(buffer) if self._shares_memory else buffer
