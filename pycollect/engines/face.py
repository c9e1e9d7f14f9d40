"""What a worker elsewhere shows of itself to whoever asks it by name."""

from __future__ import annotations

from typing import Any

import cloudpickle

# What moves the stream: a worker that did it by itself would not be where the collector thinks.
_THE_COLLECTORS = frozenset(
    [
        "async_shutdown",
        "iterator",
        "load_state_dict",
        "next",
        "pause",
        "reset",
        "rollout",
        "set_seed",
        "shutdown",
        "start",
        "state_dict",
        "update_policy_weights_",
    ]
)


class Face:
    """Names that read. It says what is not there."""

    def __getattr__(self, name: str) -> Any:
        if name in _THE_COLLECTORS:
            raise AttributeError(f"not of one worker; call the collector's {name}()")
        raise AttributeError(f"a worker has no attribute {name!r}")


def answered(face: Face, question: bytes) -> bytes:
    """What a method of the face returns, pickled.

    Args:
        question: its name, positional and keyword arguments, pickled.

    Raises:
        TypeError: that does not pickle.
        Exception: what the method raises.
    """
    method, args, kwargs = cloudpickle.loads(question)
    value = getattr(face, method)(*args, **kwargs)
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        asked = ", ".join(map(repr, args))
        raise TypeError(
            f"{method}({asked}): expected a value that pickles, got {type(value).__name__}: {error}"
        ) from error
    return data
