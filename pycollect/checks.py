"""Checks of arguments; each error names the argument, the expected value and the given one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
from tensordict.nn import InteractionType
from torch import nn


def check_integer(name: str, value: Any) -> int:
    """Return a Python or NumPy integer as an int; raise TypeError for other values and bools."""
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
    """Return an integer >= 1, also from a float like 1e6."""
    return _check_at_least(1, name, value)


def check_not_negative(name: str, value: Any) -> int:
    """Return an integer >= 0, also from a float like 1e6."""
    return _check_at_least(0, name, value)


def _check_at_least(least: int, name: str, value: Any) -> int:
    number = check_integer(name, _without_point(value))
    if number < least:
        raise ValueError(f"{name}: expected an int >= {least}, got {number}")
    return number


def check_count(name: str, value: Any) -> int:
    """Return a count, also from a float like 1e6; 0 for None and for negative numbers."""
    return 0 if value is None else max(check_integer(name, _without_point(value)), 0)


def _without_point(value: Any) -> Any:
    """Return a float without a fraction as an int, and other values unchanged."""
    is_float = isinstance(value, float | np.floating)
    return int(value) if is_float and float(value).is_integer() else value


def check_seconds(name: str, value: Any) -> float:
    """Return a number of seconds > 0."""
    seconds = _real(value)
    if seconds is None or not seconds > 0:
        raise ValueError(f"{name}: expected a number of seconds > 0, got {value!r}")
    return seconds


def check_fraction(name: str, value: Any) -> float:
    """Return a number from 0 to 1."""
    fraction = _real(value)
    if fraction is None or not 0 <= fraction <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, or None, got {value!r}")
    return fraction


def _real(value: Any) -> float | None:
    """Return a real number as a float; None for other values, and if it is too large."""
    try:
        return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return None


def check_form(name: str, value: Any, trajs_per_batch: Any) -> str:
    """Return the layout of whole trajectories: "cat", or "padded", also for None."""
    if not is_one_of(value, (None, "padded", "cat")):
        raise ValueError(f"{name}: must be 'padded' or 'cat', got {value!r}")
    form: str = "padded" if value is None else value
    if form == "cat" and not check_count("trajs_per_batch", trajs_per_batch):
        raise ValueError(
            f"{name}: 'cat' requires trajs_per_batch, got trajs_per_batch={trajs_per_batch!r}; "
            "pass it, or use 'padded'"
        )
    return form


def check_drop(name: str, value: Any, split_trajs: Any, trajs: Any, mode: Any) -> bool:
    """Return a flag; raise ValueError if it is set with batches of trajectories."""
    if value and (split_trajs or mode == "trajectory" or check_count("trajs_per_batch", trajs)):
        other = (
            "split_trajs" if split_trajs else "trajs_per_batch" if trajs else "replay_write_mode"
        )
        raise ValueError(
            f"{name}: expected False with {other}, got {value!r}; batches of trajectories already "
            "leave out uncollected cells"
        )
    return bool(value)


def check_trajs_per_write(
    name: str, value: Any, replay_buffer: Any, trajs_per_batch: Any, mode: Any
) -> int:
    """Return a count, which must be 0 unless complete trajectories go to a replay buffer."""
    count = check_count(name, value)
    if not count:
        return 0
    whole = mode == "trajectory" or check_count("trajs_per_batch", trajs_per_batch)
    if replay_buffer is None or not whole:
        raise ValueError(
            f"{name}: expected None, got {value!r}; it needs a replay_buffer, and trajs_per_batch "
            "or replay_write_mode='trajectory'"
        )
    return count


def check_write_mode(name: str, value: Any, replay_buffer: Any, trajs_per_batch: Any) -> str | None:
    """Return "rollout" or "trajectory", the default for None, or None without a buffer."""
    check_choice(name, value, (None, "rollout", "trajectory"))
    whole = bool(check_count("trajs_per_batch", trajs_per_batch))
    if value is None:
        return None if replay_buffer is None else "trajectory" if whole else "rollout"
    if replay_buffer is None:
        raise ValueError(f"{name}: expected None without replay_buffer, got {value!r}")
    if whole:
        raise ValueError(
            f"{name}: expected None with trajs_per_batch, got {value!r}; with a replay buffer, "
            "trajs_per_batch already means 'trajectory'"
        )
    mode: str = value
    return mode


def check_policy_lag(name: str, value: Any, trajs_per_batch: Any, mode: Any) -> int | None:
    """Return None, or a number of policy versions >= 0; refuse it for batches of trajectories."""
    if value is None:
        return None
    if trajs_per_batch or mode == "trajectory":
        other = "trajs_per_batch" if trajs_per_batch else "replay_write_mode='trajectory'"
        raise ValueError(
            f"{name}: expected None with {other}, got {value!r}; frames wait until their "
            "trajectory ends, whatever their policy version"
        )
    return check_not_negative(name, value)


AUTOMATIC = ("update_after_each_batch", "update_at_each_batch", "max_weight_update_interval")
"""Arguments that send weights without a call of `update_policy_weights_`."""


def check_pace(name: str, value: Any, replay_buffer: Any, receivers: Any, *each: Any) -> int | None:
    """Return None, or a number of frames >= 1, which needs a replay buffer and explicit updates.

    `receivers` is the value of weight_recv_schemes; `each` has the values of AUTOMATIC.
    """
    if value is None:
        return None
    if replay_buffer is None:
        raise ValueError(
            f"{name}: expected None without replay_buffer, got {value!r}; it limits start(), which "
            "fills the buffer"
        )
    given = dict(zip(AUTOMATIC, each, strict=True))
    automatic = [other for other, own in given.items() if isinstance(own, int) and own > 0]
    if receivers:
        automatic.append("weight_recv_schemes")
    if automatic:
        raise ValueError(
            f"{name}: expected None with {automatic[0]}, got {value!r}; only calls of "
            "update_policy_weights_() allow more frames"
        )
    return check_positive(name, value)


def check_total_frames(name: str, value: Any) -> int | None:
    """Return a number of frames, also from a float like 1e6; None for no end."""
    number = -1 if value is None else check_integer(name, _without_point(value))
    return None if number < 0 else number


def check_callable(name: str, value: Any) -> Any:
    """Return None or a callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a callable or None, got {type(value).__name__}")
    return value


def check_policy(value: Any) -> Any:
    """Return None, a module or a callable."""
    if isinstance(value, type):
        raise TypeError(
            f"policy: expected a module or a callable, got the class {value.__name__}; pass an "
            "instance, or a callable that makes one as policy_factory"
        )
    return check_callable("policy", value)


def check_replay_buffer(name: str, value: Any) -> Any:
    """Return None, or an object with a method `extend`."""
    if value is not None and not callable(getattr(value, "extend", None)):
        raise TypeError(f"{name}: expected an object with extend(), got {type(value).__name__}")
    return value


def check_factory(value: Any, policy: Any) -> Any:
    """Return None or a callable that builds a policy; raise ValueError if a policy is given."""
    if value is not None and policy is not None:
        raise ValueError(
            "policy_factory: expected None because policy is given; pass one of the two"
        )
    if isinstance(value, nn.Module):
        raise TypeError(
            f"policy_factory: expected a function that returns a policy, got a module "
            f"({type(value).__name__}); pass the module as policy"
        )
    return check_callable("policy_factory", value)


def built_policy(factory: Any) -> Any:
    """Call a policy factory; TypeError if it does not return a policy."""
    policy = factory()
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"policy_factory: expected a function that returns a module or a callable, but it "
            f"returned {policy!r}"
        )
    return policy


def check_env_groups(name: str, value: Any) -> int:
    """Return the number of groups of a worker's environments, 1 or 2."""
    number = check_positive(name, value)
    if number > 2:
        raise ValueError(
            f"{name}: expected 1, or 2 to step one group while the policy runs for the other, got "
            f"{number}"
        )
    return number


def check_positive_or_none(name: str, value: Any) -> int | None:
    """Return None, or an integer >= 1, also from a float like 1e6."""
    return None if value is None else check_positive(name, value)


def check_seed(value: Any) -> int:
    """Return an integer >= 0."""
    seed = check_integer("seed", value)
    if seed < 0:
        raise ValueError(f"seed: expected an int >= 0, got {seed}")
    return seed


def check_exploration(name: str, value: Any) -> InteractionType:
    """Return a member of the enum, from a member or its name in any case."""
    allowed = ("DETERMINISTIC", "RANDOM", "MODE", "MEAN")
    kind = value if isinstance(value, str) else getattr(value, "name", None)
    if value is None:
        kind = "RANDOM"
    if not isinstance(kind, str) or kind.upper() not in allowed:
        raise ValueError(
            f"{name}: expected {', '.join(allowed[:-1])} or {allowed[-1]}, as a string or a member "
            f"of ExplorationType, got {value!r}"
        )
    return InteractionType[kind.upper()]


def check_named(name: str, value: Any) -> dict[str, Any]:
    """Return a new dict from a dict with strings as keys, or from None."""
    if not isinstance(value, Mapping | None):
        raise TypeError(f"{name}: expected a dict or None, got {type(value).__name__}")
    if unnamed := [key for key in value or () if not isinstance(key, str)]:
        raise TypeError(f"{name}: expected strings as keys, got {unnamed}")
    return dict(value or {})


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Return one of a few values."""
    choices = list(allowed)
    if not is_one_of(value, choices):
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    return value


def is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Return whether a value is one of the choices, and of its type; arrays are not compared."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def check_open(closed: bool) -> None:
    """Raise RuntimeError if the collector was shut down."""
    if closed:
        raise RuntimeError("the collector was shut down; create a new one")


def no_weights_given() -> ValueError:
    """Return the error for an update without weights if the collector has no policy to read."""
    return ValueError(
        "policy_or_weights: expected a module or weights, got None; policy_factory built the "
        "policy, so the collector has no module of yours to read weights from"
    )


def check_worker_ids(
    worker_ids: int | Sequence[int] | None, known: Sequence[int], name: str = "worker_ids"
) -> list[int]:
    """Return the ids as a list, all of `known` for None; raise ValueError for an unknown one."""
    if worker_ids is None:
        return list(known)
    if not isinstance(worker_ids, int | Sequence) or isinstance(worker_ids, str):
        raise TypeError(f"{name}: expected an int, a sequence of ints or None, got {worker_ids!r}")
    ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
    unknown = [index for index in ids if isinstance(index, bool) or index not in known]
    if unknown:
        raise ValueError(f"{name}: expected ids among {list(known)}, got {unknown}")
    return ids
