"""Arguments of the collectors: what is known, and how each value is checked."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensordict.nn import InteractionType

# TorchRL's arguments that only hint at how to go about it.
HINTS = frozenset(
    {
        "use_buffers",
        "return_same_td",
        "no_cuda_sync",
        "use_env_creator",
        "worker_idx",
        "auto_register_policy_transforms",
    }
)

_STRAGGLERS = "use MultiSyncDataCollector or RayCollector(sync=True): only they wait for stragglers"

# TorchRL's arguments that have no meaning here, and what to use.
REFUSED = {
    "interruptor": "use preemptive_threshold",
    "backend": "the collector's class says where it runs",
    "num_collectors": "use a list, one entry per worker, and a collector that has several",
    "sync": "use MultiSyncDataCollector or MultiaSyncDataCollector: the class says it",
    "backend_options": "use ray_init_config and remote_configs",
    "cat_results": "it joins the rollouts of several workers",
    "preemptive_threshold": _STRAGGLERS,
    "min_fraction": _STRAGGLERS,
}


def check_others(cls: type, others: Mapping[str, Any]) -> None:
    """Check the keyword arguments that are not in the signature of `cls`.

    Raises:
        ValueError: one of TorchRL's that has no meaning here; the text says what to use.
        TypeError: an unknown one; the text names the nearest known one.
    """
    for name, value in others.items():
        if name in HINTS or (name == "reset_when_done" and value in (None, True)):
            continue
        if name == "reset_when_done":
            raise ValueError(
                "reset_when_done: expected True, got False; finished environments are always reset"
            )
        if name in REFUSED:
            if value is not None:
                raise ValueError(f"{name}: not an argument of {cls.__name__}; {REFUSED[name]}")
        else:
            raise TypeError(_unknown(cls, name))


def _unknown(cls: type, name: str) -> str:
    known = [known for known in inspect.signature(cls).parameters if known != "others"]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if name == "num_workers" and "num_collectors" in known:  # the word of the Multi classes
        nearest = ["num_collectors"]
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}"


def check_integer(name: str, value: Any) -> int:
    """A Python or numpy integer as an int; TypeError for anything else, bools included."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an int of at most 64 bits, got {number}")
    return number


def check_positive(name: str, value: Any) -> int:
    """An integer >= 1."""
    number = check_integer(name, value)
    if number < 1:
        raise ValueError(f"{name}: expected an int >= 1, got {number}")
    return number


def check_count(name: str, value: Any) -> int:
    """A count that None, 0 and negative numbers switch off: 0 then. Also a float like 1e6."""
    return 0 if value is None else max(check_integer(name, _without_point(value)), 0)


def _without_point(value: Any) -> Any:
    """A float without a fraction as the int that it is, all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_seconds(name: str, value: Any) -> float:
    """A number of seconds > 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}: expected a number of seconds > 0, got {value!r}")
    return float(value)


def check_traj_format(value: Any, trajs_per_batch: Any) -> str:
    """How whole trajectories are put together: "padded", also for None, or "cat"."""
    form: str = check_choice("traj_format", "padded" if value is None else value, ("padded", "cat"))
    if form == "cat" and not check_count("trajs_per_batch", trajs_per_batch):
        raise ValueError(
            "traj_format: expected 'cat' with trajs_per_batch only, which is not given"
        )
    return form


def check_total_frames(value: Any) -> int | None:
    """None for a collector without an end; 0 means that nothing is collected. Also 1e6."""
    number = -1 if value is None else check_integer("total_frames", _without_point(value))
    return None if number < 0 else number


def check_callable(name: str, value: Any) -> Any:
    """None or a callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a callable or None, got {type(value).__name__}")
    return value


def check_policy(value: Any) -> Any:
    """None, a module or a callable."""
    if isinstance(value, type):
        raise TypeError(f"policy: expected a module or a callable, got the class {value.__name__}")
    return check_callable("policy", value)


def check_replay_buffer(value: Any) -> Any:
    """None, or something with a method `extend`."""
    if value is not None and not callable(getattr(value, "extend", None)):
        raise TypeError(
            f"replay_buffer: expected an object with extend(), got {type(value).__name__}"
        )
    return value


def check_factories(value: Any, policy: Any, workers: int) -> list[Callable[[], Any]] | None:
    """None, or one callable per worker that builds its policy.

    Raises:
        ValueError: together with `policy`, or a list of another length than `workers`.
        TypeError: something that cannot be called.
    """
    if value is None:
        return None
    if policy is not None:
        raise ValueError("policy_factory: expected None together with policy; pass one of the two")
    if not isinstance(value, (list, tuple)):
        return [check_callable("policy_factory", value)] * workers
    if len(value) != workers:
        raise ValueError(
            f"policy_factory: expected one callable per worker ({workers}), got {len(value)}"
        )
    for factory in value:
        if not callable(factory):
            raise TypeError(
                f"policy_factory: expected callables in the list, got {type(factory).__name__}"
            )
    return list(value)


def check_threads(value: Any) -> int | None:
    """None or a number of threads."""
    return None if value is None else check_positive("num_threads", value)


def check_seed(value: Any) -> int:
    """An integer >= 0."""
    seed = check_integer("seed", value)
    if seed < 0:
        raise ValueError(f"seed: expected an int >= 0, got {seed}")
    return seed


def check_exploration(value: Any) -> InteractionType:
    """One of DETERMINISTIC, RANDOM, MODE, MEAN: the enum's member or its name in any case."""
    allowed = ("DETERMINISTIC", "RANDOM", "MODE", "MEAN")
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if value is None:
        name = "RANDOM"
    if not isinstance(name, str) or name.upper() not in allowed:
        raise ValueError(
            f"exploration_type: expected one of {', '.join(allowed)} or ExplorationType's member, "
            f"got {value!r}"
        )
    return InteractionType[name.upper()]


def check_env_kwargs(value: Any, workers: int | None = None) -> Any:
    """None, a dict, or a list with one dict per worker."""
    if isinstance(value, (list, tuple)):
        if workers is not None and len(value) != workers:
            raise ValueError(
                f"create_env_kwargs: expected one dict per worker ({workers}), got {len(value)}"
            )
        for item in value:
            check_env_kwargs(item)
        return list(value)
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(
            f"create_env_kwargs: expected a dict or one per worker, got {type(value).__name__}"
        )
    return value


def check_entry(entry: Any) -> Any:
    """One entry of create_env_fn: a callable, a list of callables, or an environment."""
    if isinstance(entry, (list, tuple)):
        if not entry:
            raise ValueError("create_env_fn: expected at least one env callable, got an empty list")
        for item in entry:
            if not callable(item):
                raise TypeError(
                    f"create_env_fn: expected env callables in a list, got {type(item).__name__}"
                )
        return list(entry)
    if not callable(entry) and not hasattr(entry, "step"):
        raise TypeError(
            "create_env_fn: expected a callable, a list of callables or an environment, got "
            f"{type(entry).__name__}"
        )
    return entry


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """One of a few values."""
    choices = list(allowed)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    return value


def remembers_passed(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the names of the arguments that the caller really gave in `_passed`."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self._passed = set(kwargs)
        init(self, *args, **kwargs)

    return wrapper
