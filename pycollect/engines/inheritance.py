"""What a process can only be given at its start: pickled apart from the rest, which may come later.

Shared values and locks of multiprocessing are such, and TorchRL's `EnvCreator`, whose tensors all
its environments share. They are arguments of the process; the rest names them by their place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing import queues, sharedctypes, synchronize
from typing import Any

import cloudpickle

_SHARED = (
    sharedctypes.SynchronizedBase,
    synchronize.SemLock,
    synchronize.Condition,
    synchronize.Event,
    queues.Queue,
    queues.SimpleQueue,
)


def is_inherited(value: Any) -> bool:
    """Whether it is to be shared with a process, not copied into it."""
    return isinstance(value, _SHARED) or any(
        kind.__name__ == "EnvCreator" and kind.__module__ == "torchrl.envs.env_creator"
        for kind in type(value).__mro__
    )


def pickled_apart(value: Any) -> tuple[bytes, tuple[Any, ...]]:
    """The value, pickled, and what of it is inherited: to be arguments of the process."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), tuple(pickler.inherited)


def unpickled(data: bytes, inherited: Sequence[Any] = ()) -> Any:
    """The value again, from what `pickled_apart` or cloudpickle gave."""
    return _Unpickler(io.BytesIO(data), inherited).load()


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc] # has no types
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.inherited: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if not is_inherited(value):
            return None
        for place, other in enumerate(self.inherited):
            if other is value:
                return place
        self.inherited.append(value)
        return len(self.inherited) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, inherited: Sequence[Any]) -> None:
        super().__init__(file)
        self._inherited = inherited

    def persistent_load(self, place: int) -> Any:
        return self._inherited[place]
