"""A value for several workers, in each form that one of them takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from pycollect._core import Memory, shared_memory_why_not
from pycollect.engines.messages import Buffer
from pycollect.engines.processes.wire import new_shared, share

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
