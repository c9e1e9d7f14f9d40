"""Python values in the short messages of a mailbox; long ones in shared memory beside it."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np

from pycollect._core import Memory
from pycollect.engines.limits import limits_named

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
