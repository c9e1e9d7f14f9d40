"""Values and exceptions for other processes: pickled, in shared memory, or shared by workers."""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import queues, sharedctypes, synchronize
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch

from pycollect._core import Memory
from pycollect.data.layout import torch_dtype
from pycollect.data.upload import Packing
from pycollect.data.weights import Weights, WeightSpec
from pycollect.errors import (
    WorkerError,
    described,
    from_parts,
    has_own_reduce,
    limits_named,
    parts_of,
)
from pycollect.transport.messages import Buffer, WorkerSpec

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
    """Pickle a value for another process, or raise a TypeError that starts with `name`."""
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
    """Pickle a worker's spec for a child process; return the pickle and the inherited parts."""
    try:
        return pickle_with_inherited(spec)
    except Exception as error:
        raise _unsent("create_env_fn", error) from error


_INLINE, _IN_MEMORY = b"\0", b"\1"  # first byte of a message: how the value is passed


def pack(value: Any, max_bytes: int) -> tuple[bytes, Memory | None]:
    """Pickle a value into at most `max_bytes`, or into shared memory, to keep until it is read."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # cloudpickle can pickle more, but takes ten times as long
        data = cloudpickle.dumps(value)
    if len(data) < max_bytes:
        return _INLINE + data, None
    memory = share(data)
    return _IN_MEMORY + pickle.dumps(memory.address), memory


def unpack(message: bytes) -> Any:
    """Return the value of a message; raise SharedMemoryError if its sender has freed its memory."""
    value = pickle.loads(message[1:])
    if message[:1] == _INLINE:
        return value
    return pickle.loads(Memory.attach(value).array().data)


def share(data: bytes | Buffer) -> Memory:
    """Copy bytes into shared memory."""
    with limits_named(f"shared memory of {len(data)} bytes"):
        return Memory.share_copy(data)


Shareable: TypeAlias = bytes | Buffer | Memory
"""Bytes for several workers, possibly in shared memory already."""


class SharedValue:
    """Bytes for several workers. Each form is made once, when the first worker needs it.

    Args:
        store: Function that puts a value into a store, for workers that share no memory with this
            process. ``None`` if all workers share memory (default: ``None``).

    Attributes:
        elsewhere: Function that returns another value, for workers that share no memory with this
            process. ``None`` if they get the same bytes.
    """

    elsewhere: Callable[[], SharedValue] | None = None

    def __init__(
        self, value: Shareable, store: Callable[[bytes | Buffer], Any] | None = None
    ) -> None:
        self._value = value
        self._store = store

    @cached_property
    def memory(self) -> Memory:
        """The value in shared memory."""
        if isinstance(self._value, Memory):
            return self._value
        memory = share(self._value)
        if self._store is None:
            del self._value  # without a store, nothing else needs the original
        return memory

    @cached_property
    def reference(self) -> Any:
        """Reference to the value in the store, for workers that share no memory."""
        if self.elsewhere is not None:
            return self.elsewhere().reference
        assert self._store is not None, "store: expected one, as not all workers share memory"
        value = self._value
        return self._store(value if isinstance(value, bytes) else array_of(value))


def array_of(value: Memory | Buffer) -> Buffer:
    """Return the bytes of a value without a copy."""
    return value.array() if isinstance(value, Memory) else value


_MODE_MISSING = 2


def _pickled_extra(weights: Weights) -> bytes:
    return pickle.dumps(weights.extra) if weights.extra else b""


class WeightSlab:
    """Packs weights with one spec, or some of them, into one buffer.

    A buffer contains the tensors, one byte per tensor (whether it is present), one byte per module
    (its training mode, or that it is missing), and the pickled extra state if there is any.
    """

    def __init__(self, spec: WeightSpec) -> None:
        self._spec = spec
        self._names = [leaf.key[0] for leaf in spec.leaves]
        forms = [(torch_dtype(leaf.dtype), leaf.shape) for leaf in spec.leaves]
        forms.append((torch.uint8, (len(spec.leaves) + len(spec.modules),)))
        self._packing = Packing(
            torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in forms
        )

    def bytes(self, weights: Weights) -> int:
        """Return the size of a buffer with these weights."""
        return self._packing.bytes + len(_pickled_extra(weights))

    def pack(self, weights: Weights, buffer: Buffer) -> None:
        """Copy these weights into a buffer of the size that `bytes` returns."""
        weights = self._spec.fitted(weights)
        present = [int(name in weights.tensors) for name in self._names]
        modes = [int(weights.modes.get(name, _MODE_MISSING)) for name in self._spec.modules]
        size = self._packing.bytes
        *tensors, flags = self._packing.views(torch.from_numpy(buffer[:size]))
        with torch.no_grad():
            flags.copy_(torch.tensor([*present, *modes], dtype=torch.uint8, device="cpu"))
            for name, target in zip(self._names, tensors, strict=True):
                if name in weights.tensors:
                    target.copy_(weights.tensors[name])
        buffer[size:] = np.frombuffer(_pickled_extra(weights), np.uint8)

    def unpack(self, buffer: Buffer) -> Weights:
        """Return the weights in the buffer, as views of it if it is writable."""
        size = self._packing.bytes
        if buffer.nbytes < size:
            raise ValueError(f"buffer: expected at least {size} bytes, got {buffer.nbytes}")
        packed, extra = buffer[:size], buffer[size:]
        block = torch.from_numpy(packed if packed.flags.writeable else packed.copy())
        *tensors, flags = self._packing.views(block)
        present, modes = flags[: len(tensors)].tolist(), flags[len(tensors) :].tolist()
        return Weights(
            {
                name: view
                for name, view, is_present in zip(self._names, tensors, present, strict=True)
                if is_present
            },
            pickle.loads(extra.tobytes()) if extra.nbytes else {},
            {
                name: bool(mode)
                for name, mode in zip(self._spec.modules, modes, strict=True)
                if mode != _MODE_MISSING
            },
        )


class _ErrorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles exceptions, also in other exceptions, without passing `args` to their `__init__`.

    Args:
        own: Whether to call a `__reduce__` that an exception's class defines.
    """

    def __init__(self, file: io.BytesIO, own: bool) -> None:
        super().__init__(file)
        self._own = own

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, BaseException) and not (self._own and has_own_reduce(kind)):
            return from_parts, parts_of(value)
        return super().reducer_override(value)


@dataclass(frozen=True)
class ErrorReport:
    """An exception that is sent to the caller."""

    pickled: bytes | None  # the pickled exception, or ``None`` if it does not survive pickling
    text: str
    remote_traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Return the report of the exception that is being handled."""
        _explain_missing_name(error)
        text, remote_traceback = described(error), traceback.format_exc()
        for own in (True, False):
            with contextlib.suppress(Exception):  # a __reduce__ may raise anything
                file = io.BytesIO()
                _ErrorPickler(file, own).dump(error)
                cloudpickle.loads(file.getvalue())
                return cls(file.getvalue(), text, remote_traceback)
        return cls(None, text, remote_traceback)

    @property
    def original(self) -> BaseException:
        """The raised exception, or a RuntimeError with its text if it cannot be unpickled."""
        error = self._loaded() or RuntimeError(self.text)
        error.__cause__ = RuntimeError(f"raised in another process:\n{self.remote_traceback}")
        return error

    def _loaded(self) -> BaseException | None:
        if self.pickled is None:
            return None
        try:
            error: BaseException = cloudpickle.loads(self.pickled)
        except Exception:  # its class exists only in the other process
            return None
        return error

    def rebuild(self, spec: WorkerSpec) -> BaseException:
        """Return the exception with a WorkerError as its cause, or that WorkerError itself."""
        failure = WorkerError(
            f"{spec.name} raised {self.text}\n{self.remote_traceback}",
            spec.index,
            spec.incarnation,
            self.remote_traceback,
        )
        error = self._loaded()
        if error is None:
            return failure
        error.__cause__ = failure
        return error


def _explain_missing_name(error: BaseException) -> None:
    """Explain a NameError that was raised in a function pickled without its module."""
    if type(error) is not NameError or error.__traceback__ is None:
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if "__spec__" not in frame.f_globals:  # a module has it, also one whose import failed
        error.args = (
            f"{error}: the class or function that uses this name is defined in the script or "
            "inside a function, so it was pickled without the name. Define it at the top level "
            "of a module that workers can import, or import the name inside the method",
        )
