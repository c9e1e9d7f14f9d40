"""A value that is pickled only where it leaves its process, and unpickled where it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

import cloudpickle

T = TypeVar("T")


class Packed(Generic[T]):
    """Either form of a value, each made once, when it is first asked for.

    Args:
        value: the value, or its pickled bytes.
        pickle: makes these of it.
    """

    def __init__(self, value: T | bytes, pickle: Callable[[T], bytes] = cloudpickle.dumps) -> None:
        if isinstance(value, bytes):
            self.pickled = value
        else:
            self.value = value
            self._pickle = pickle

    @cached_property
    def value(self) -> T:
        """The value."""
        value: T = cloudpickle.loads(self.pickled)
        return value

    @cached_property
    def pickled(self) -> bytes:
        """The value as it travels."""
        return self._pickle(self.value)
