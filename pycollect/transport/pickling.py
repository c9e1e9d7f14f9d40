"""Pickle environments, policies and calls for other processes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing import queues, sharedctypes, synchronize
from typing import Any

import cloudpickle

from pycollect.transport.spec import WorkerSpec

_SHARED = (
    sharedctypes.SynchronizedBase,
    synchronize.SemLock,
    synchronize.Condition,
    synchronize.Event,
    queues.Queue,
    queues.SimpleQueue,
)


def is_inherited(value: Any) -> bool:
    """Return whether a value is shared with a child process instead of copied into it."""
    return isinstance(value, _SHARED) or any(
        kind.__name__ == "EnvCreator" and kind.__module__ == "torchrl.envs.env_creator"
        for kind in type(value).__mro__
    )


def pickle_with_inherited(value: Any) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle a value; return the pickle and the parts that a process must get as arguments."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), tuple(pickler.inherited)


def unpickle(data: bytes, inherited: Sequence[Any] = ()) -> Any:
    """Unpickle data from `pickle_with_inherited` or cloudpickle."""
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


def pickled(name: str, value: Any) -> bytes:
    """Pickle a value for another process.

    Raises:
        TypeError: The value does not pickle; the error starts with `name`.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise _unsent(name, error) from error
    return data


def _unsent(name: str, error: Exception) -> TypeError:
    text = f"{name}: cannot be pickled to be sent to a worker: {error}"
    if "through inheritance" in str(error):
        text += (
            "; only processes of one machine can share multiprocessing's values and locks; use "
            "MultiSyncDataCollector or MultiaSyncDataCollector"
        )
    return TypeError(text)


def pickled_spec(spec: WorkerSpec) -> bytes:
    """Pickle a worker's spec for a process that is already running."""
    return pickled("create_env_fn", spec)


def pickled_for_child(spec: WorkerSpec) -> tuple[bytes, tuple[Any, ...]]:
    """Pickle a worker's spec for a child process; return the pickle and the inherited parts.

    Raises:
        TypeError: The spec does not pickle.
    """
    try:
        return pickle_with_inherited(spec)
    except Exception as error:
        raise _unsent("create_env_fn", error) from error
