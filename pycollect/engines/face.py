"""Read-only attributes of a remote worker, which callers ask for by name."""

from __future__ import annotations

from typing import Any

import cloudpickle

# These advance or reset collection, so a worker may not run them without its collector.
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
    """Base of the readable attributes; explains names that it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _THE_COLLECTORS:
            raise AttributeError(
                f"{name}: not available on a single worker; call {name}() of the collector"
            )
        raise AttributeError(f"a worker has no attribute {name!r}")


def answered(face: Face, question: bytes) -> bytes:
    """Call a method of the face and return its pickled result.

    Args:
        question: The method's name, positional and keyword arguments, pickled.

    Raises:
        TypeError: The result cannot be pickled.
        Exception: Raised by the method.
    """
    method, args, kwargs = cloudpickle.loads(question)
    value = getattr(face, method)(*args, **kwargs)
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        asked = ", ".join(map(repr, args))
        raise TypeError(
            f"{method}({asked}): returned a {type(value).__name__} that cannot be pickled: {error}"
        ) from error
    return data
