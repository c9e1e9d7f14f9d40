"""What a worker needs to know besides its environment and its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect.arguments import argument, flag, made_of
from pycollect.batch.cast import ObservationCast
from pycollect.devices import Devices
from pycollect.envs.groups import check_env_groups
from pycollect.envs.info import InfoKeys, check_info_keys
from pycollect.envs.vector_api import parse_autoreset
from pycollect.policy import Calling, check_policy_state


def _check_autoreset(name: str, value: Any) -> Any:
    """None, or NEXT_STEP, SAME_STEP or DISABLED: Gymnasium's enum or its name in any case."""
    parse_autoreset(value, name)
    return value


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know besides its environment and its policy.

    Attributes:
        frames: its share of a batch; each of P envs steps ``ceil(frames / P)`` times.
        mask: record ("collector", "mask") whatever the environment, since rollouts may be padded.
        devices: where environments and policy are to lie.
        compress: its rollouts are compressed where they travel.
        stays: what is recorded on the environments' device has no place in the slab.
    """

    frames: int
    mask: bool = False
    devices: Devices = field(default_factory=Devices)
    stays: bool = False
    compress: bool = False
    autoreset_mode: Any = argument(
        None, _check_autoreset, "of a vector environment that does not tell it"
    )
    env_groups: int = argument(
        1, check_env_groups, "how many parts of its environments step each for itself"
    )
    info_keys: InfoKeys = made_of(
        check_info_keys, "entries of Gymnasium's info to be recorded", info_keys=None
    )
    max_frames_per_traj: int = argument(
        None, check.check_count, "truncate and reset after so many steps; 0: never"
    )
    reset_at_each_iter: bool = flag(False, "reset all environments before each rollout")
    set_truncated: bool = flag(False, "flag the last frame of every rollout as truncated")
    policy_state: Mapping[Any, Any] | None = made_of(
        check_policy_state, "shapes or first values of recurrent states", policy_state=None
    )
    exploration_type: InteractionType = argument(
        InteractionType.RANDOM, check.check_exploration, "how actions are drawn"
    )
    track_policy_version: bool = flag(False, "record the version")
    num_threads: int | None = argument(
        None, check.check_positive_or_none, "of torch while it collects; None: the caller's setting"
    )
    cast: ObservationCast | None = made_of(
        ObservationCast.checked,
        "what the policy reads in place of observations; None: what the environment shows",
        observation_dtype=None,
        observation_scale=None,
    )
    compact: bool = flag(
        False, 'leave out ("next", key) of observations and states', name="compact_obs"
    )
    calling: Calling = made_of(
        Calling.checked,
        "whether the policy's modules are compiled or captured",
        compile_policy=None,
        cudagraph_policy=None,
        trust_policy=None,
    )
    init_fn: Callable[[], Any] | None = argument(
        None, check.check_callable, "is called before anything is built"
    )
    pre_collect_hook: Callable[[], Any] | None = argument(
        None, check.check_callable, "is called before each rollout"
    )
    post_collect_hook: Callable[[Any], Any] | None = argument(
        None, check.check_callable, "is called with each rollout, by whoever runs the worker"
    )
