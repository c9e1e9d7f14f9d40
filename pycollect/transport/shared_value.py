"""Values in shared memory for several workers, and large messages that pass through it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import cloudpickle
import numpy as np

from pycollect._core import Memory, shared_memory_why_not
from pycollect.transport.limits import limits_named
from pycollect.transport.messages import Buffer

_HERE, _ELSEWHERE = b"\0", b"\1"


def pack(value: Any, most: int) -> tuple[bytes, Memory | None]:
    """A message of at most `most` bytes, and the memory to be kept until it was unpacked."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # it can more, but takes ten times as long
        data = cloudpickle.dumps(value)
    if len(data) < most:
        return _HERE + data, None
    memory = share(data)
    return _ELSEWHERE + pickle.dumps(memory.address), memory


def unpack(message: bytes) -> Any:
    """The value of a message.

    Raises:
        SharedMemoryError: whoever packed it has let its memory go.
    """
    value = pickle.loads(message[1:])
    if message[:1] == _HERE:
        return value
    return pickle.loads(Memory.attach(value).array().data)


def share(data: Any) -> Memory:
    """Shared memory with these bytes: what has the buffer protocol, of one dimension."""
    view = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    memory = new_shared(view.nbytes)
    memory.array()[:] = view
    return memory


def new_shared(size: int) -> Memory:
    """Shared memory of that many bytes."""
    with limits_named(f"shared memory of {size} bytes"):
        return Memory.share(size)


Shareable: TypeAlias = bytes | Buffer | Memory
"""Bytes for several workers, maybe in shared memory already."""


class SharedValue:
    """Bytes for several workers. Each form is made once, when the first worker needs it.

    Args:
        value: The bytes.
        store: puts a value where workers find it that share no memory with this process; None:
            all do.
    """

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
            del self._value  # there is no other form: one copy is enough
        return memory

    @cached_property
    def reference(self) -> Any:
        """What stands for the value in the store."""
        assert self._store is not None, "store: expected one, as not all workers share memory"
        value = self._value
        return self._store(value if isinstance(value, bytes) else array_of(value))


def new_memory(size: int) -> Memory | Buffer:
    """Return memory of that many bytes, shared if this process can share memory."""
    return np.empty(size, np.uint8) if shared_memory_why_not() else new_shared(size)


def array_of(value: Memory | Buffer) -> Buffer:
    """Return the bytes of a value, which are not copied."""
    return value.array() if isinstance(value, Memory) else value
