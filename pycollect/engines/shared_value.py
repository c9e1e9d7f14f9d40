"""A value for several workers, in each form that one of them takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from pycollect._core import Memory
from pycollect.engines.messages import Buffer
from pycollect.engines.processes.wire import share


class SharedValue:
    """Bytes for several workers. Each form is made once, when the first worker needs it.

    Args:
        store: puts a value where workers find it that share no memory with this process; None:
            all do.
    """

    def __init__(
        self, value: bytes | Buffer, store: Callable[[bytes | Buffer], Any] | None = None
    ) -> None:
        self._value = value
        self._store = store

    @cached_property
    def memory(self) -> Memory:
        """The value in shared memory."""
        memory = share(self._value)
        if self._store is None:
            del self._value  # there is no other form: one copy is enough
        return memory

    @cached_property
    def reference(self) -> Any:
        """What stands for the value in the store."""
        assert self._store is not None, "store: expected one, as not all workers share memory"
        return self._store(self._value)
