"""Weights and hooks that are sent to workers, and remembered for their replacements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from pycollect._core import Memory
from pycollect.data.weights import NO_WEIGHTS, Weights, WeightSlab, WeightSpec
from pycollect.driver.records import WorkerRecord
from pycollect.transport.messages import Buffer
from pycollect.transport.shared_value import SharedValue, array_of, new_memory

_Sent = dict[str, tuple[int, SharedValue]]


class HookSender:
    """Sends hooks to workers, and remembers the newest for those that are to come.

    Args:
        put: of the engine: makes bytes a value for several workers.
    """

    def __init__(self, put: Callable[[bytes], SharedValue]) -> None:
        self._put = put
        self._serial = 0
        self._of_all: _Sent = {}
        self._of_one: dict[int, _Sent] = {}  # what a worker was given alone, by its id

    def send(
        self, name: str, hook: Any, workers: Sequence[WorkerRecord], alone: bool = False
    ) -> None:
        """Give a hook to workers.

        Args:
            alone: to these only; else also to those that are to come.

        Raises:
            TypeError: The hook cannot be pickled.
        """
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

    def give(self, worker: WorkerRecord) -> None:
        """Give a new worker what the one before it had, or all others have."""
        newest = {**self._of_all, **self._of_one.get(worker.index, {})}
        if newest:
            worker.handle.set_hooks(newest)


@dataclass(frozen=True)
class Assignment:
    """What workers were given, all of it: later weights may be some of the names only.

    Attributes:
        serial: counts what was sent; 0: nothing yet.
        version: the policy version that they make.
        packed: for the workers, by the form of a worker's weights.
    """

    serial: int = 0
    version: int = 0
    weights: Weights = NO_WEIGHTS
    packed: dict[WeightSpec, SharedValue] = field(default_factory=dict)


_NOTHING = Assignment()


class WeightSender:
    """Sends weights to workers, and remembers them for those that take a worker's place.

    Args:
        put: of the engine: makes a buffer a value for several workers.
    """

    def __init__(self, put: Callable[[Memory | Buffer], SharedValue]) -> None:
        self._put = put
        self._slabs: dict[WeightSpec, WeightSlab] = {}
        self._newest = _NOTHING
        self._of: dict[int, Assignment] = {}
        self._own: set[int] = set()

    @property
    def own(self) -> dict[int, Weights]:
        """Of workers that were given weights of their own: these, by id."""
        return {index: self._of[index].weights for index in sorted(self._own)}

    @property
    def newest(self) -> Weights:
        """The weights that were sent last, which a new worker gets; none before the first time."""
        return self._newest.weights

    def check(self, weights: Weights, workers: Sequence[WorkerRecord]) -> None:
        """Raise ValueError if names or shapes are not those of the workers' policies."""
        for worker in workers:
            worker.info.weights.fitted(weights)

    def send(
        self,
        weights: Weights,
        workers: Sequence[WorkerRecord],
        version: int,
        acknowledge: bool = False,
        own: bool = False,
    ) -> list[tuple[WorkerRecord, Any]]:
        """Give weights to these workers; the calls that can be waited for.

        Args:
            own: others are to have others.
        """
        serial = self._newest.serial + 1
        before = [self._of.get(worker.index, _NOTHING) for worker in workers]
        forms: dict[int, set[WeightSpec]] = {}
        for worker, had in zip(workers, before, strict=True):
            if not worker.starting:
                forms.setdefault(id(had), set()).add(worker.info.weights)
        distinct = {id(had): had for had in (self._newest, *before)}
        following = {  # workers that had the same have the same again
            key: self._assignment(serial, version, had.weights, weights, forms.get(key, ()))
            for key, had in distinct.items()
        }
        self._newest = following[id(self._newest)]
        for worker, had in zip(workers, before, strict=True):
            self._of[worker.index] = following[id(had)]
            (self._own.add if own else self._own.discard)(worker.index)
        sent = [(worker, self.give(worker, acknowledge)) for worker in workers]
        return [(worker, call) for worker, call in sent if call is not None]

    def give_newest(self, worker: WorkerRecord) -> None:
        """Give a new worker the newest weights, if there are any."""
        self._of[worker.index] = self._newest
        self.give(worker)

    def give(self, worker: WorkerRecord, acknowledge: bool = False) -> Any:
        """Give a worker all that it was given before, if there is anything; once it is built."""
        own = self._of.get(worker.index, _NOTHING)
        if own.serial == 0:
            return None
        worker.since_update = 0
        if worker.starting:
            return None
        form = worker.info.weights
        if form not in own.packed:
            own.packed[form] = self._put(self._packed(form, own.weights))
        return worker.handle.assign(own.serial, own.version, own.packed[form], acknowledge)

    def _assignment(
        self,
        serial: int,
        version: int,
        before: Weights,
        newer: Weights,
        forms: Iterable[WeightSpec],
    ) -> Assignment:
        """Pack weights for workers of these forms.

        The values of `newer` may change afterwards: views of what was packed replace them.
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
        """Pack the weights, into shared memory if possible, in the dtypes of a worker's policy."""
        if not form:
            return np.empty(0, np.uint8)
        if form not in self._slabs:
            self._slabs[form] = WeightSlab(form)
        slab = self._slabs[form]
        value = new_memory(slab.bytes(weights))
        slab.pack(weights, array_of(value))
        return value
