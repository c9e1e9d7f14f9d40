"""The arguments that configure a worker, except its environment and policy."""

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
    """Return None or an autoreset mode, given as Gymnasium's enum or its name in any case."""
    parse_autoreset(value, name)
    return value


def _check_final(name: str, value: Any) -> Any:
    """Return None or "unknown"."""
    if value not in (None, "unknown"):
        raise ValueError(f"{name}: expected None or 'unknown', got {value!r}")
    return value


@dataclass(frozen=True)
class WorkerOptions:
    """The arguments that configure a worker, except its environment and policy.

    Attributes:
        frames: The worker's share of a batch; each of P environments makes ``ceil(frames / P)``
            steps.
        mask: Record ("collector", "mask") for any environment, because rollouts may be padded.
        devices: Devices of environments and policy.
        compress: Compress rollouts that leave the machine.
        stays: Entries recorded on the environments' device have no space in the slab.
    """

    frames: int
    mask: bool = False
    devices: Devices = field(default_factory=Devices)
    stays: bool = False
    compress: bool = False
    autoreset_mode: Any = argument(
        None, _check_autoreset, "Autoreset mode if the metadata has none."
    )
    final_observation: str | None = argument(
        None, _check_final, "Whether the last observation of an episode may be unknown."
    )
    env_groups: int = argument(
        1, check_env_groups, "Number of groups of environments that step independently."
    )
    info_keys: InfoKeys = made_of(
        check_info_keys, "Entries of Gymnasium's info to record.", info_keys=None
    )
    max_frames_per_traj: int = argument(
        None, check.check_count, "Maximum number of steps of a trajectory; 0 for no limit."
    )
    reset_at_each_iter: bool = flag(False, "Whether each rollout starts with a reset.")
    set_truncated: bool = flag(False, "Whether the last frame of rollouts is truncated.")
    policy_state: Mapping[Any, Any] | None = made_of(
        check_policy_state, "Shapes or first values of recurrent states.", policy_state=None
    )
    exploration_type: InteractionType = argument(
        InteractionType.RANDOM, check.check_exploration, "How actions are drawn."
    )
    track_policy_version: bool = flag(False, "Whether to record the policy version.")
    num_threads: int | None = argument(
        None, check.check_positive_or_none, "Number of torch threads; None leaves it unchanged."
    )
    cast: ObservationCast | None = made_of(
        ObservationCast.checked,
        "Cast of the policy's observations, or None.",
        observation_dtype=None,
        observation_scale=None,
    )
    compact: bool = flag(False, 'Whether ("next", observation) is omitted.', name="compact_obs")
    calling: Calling = made_of(
        Calling.checked,
        "How the policy's modules are called: compiled, captured or directly.",
        compile_policy=None,
        cudagraph_policy=None,
        trust_policy=None,
    )
    init_fn: Callable[[], Any] | None = argument(
        None, check.check_callable, "Function that is called before environments are made."
    )
    pre_collect_hook: Callable[[], Any] | None = argument(
        None, check.check_callable, "Function that is called before each rollout."
    )
    post_collect_hook: Callable[[Any], Any] | None = argument(
        None, check.check_callable, "Function that is called with each rollout."
    )
