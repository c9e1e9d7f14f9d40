"""What is sent to workers, pickled; what cannot be is refused by the argument's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from pycollect.collectors.inheritance import pickled_apart
from pycollect.collectors.remote_worker import WorkerSpec
from pycollect.devices import CPU
from pycollect.policy import placed


def pickled(name: str, value: Any) -> bytes:
    """The value, pickled for another process; TypeError that names the argument if it cannot."""
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise _unsent(name, error) from error
    return data


def _unsent(name: str, error: Exception) -> TypeError:
    text = f"{name}: expected something that can be pickled, to be sent to a worker: {error}"
    if "through inheritance" in str(error):
        text += (
            "; values and locks of multiprocessing reach processes of this machine alone: use "
            "MultiSyncDataCollector or MultiaSyncDataCollector for environments that share them"
        )
    return TypeError(text)


def pickled_policies(sources: Sequence[Any], are_factories: bool) -> list[bytes]:
    """Each actor's policy or factory, pickled; those that are the same object share their bytes."""
    name = "policy_factory" if are_factories else "policy"
    known = {id(source): source for source in sources}
    if not are_factories:  # a worker may lack the device that the caller's lies on
        known = {key: placed(source, CPU) for key, source in known.items()}
    data = {key: pickled(name, source) for key, source in known.items()}
    return [data[id(source)] for source in sources]


def pickled_spec(spec: WorkerSpec) -> bytes:
    """A worker's spec, pickled for a process that runs already."""
    return pickled("create_env_fn", spec)


def pickled_for_child(spec: WorkerSpec) -> tuple[bytes, tuple[Any, ...]]:
    """A worker's spec, pickled for a process that is about to be started, and what that inherits.

    Raises TypeError as `pickled`.
    """
    try:
        return pickled_apart(spec)
    except Exception as error:
        raise _unsent("create_env_fn", error) from error
