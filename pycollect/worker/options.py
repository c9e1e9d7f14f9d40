"""What a worker needs to know besides its environment and its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensordict.nn import InteractionType

from pycollect.batch.layout import Key
from pycollect.devices import Devices
from pycollect.policy import AS_IT_IS, Calling


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know besides its environment and its policy.

    Attributes:
        frames: its share of a batch; each of P envs steps ``ceil(frames / P)`` times.
        num_threads: torch threads while it collects; None leaves the caller's setting.
        mask: record ("collector", "mask") whatever the environment, since rollouts may be padded.
        compact_obs: leave out ("next", key) of observations and states.
        calling: whether the policy's modules are compiled or captured.
        devices: where environments and policy are to lie.
        stays: what is recorded on the environments' device has no place in the slab.
        init_fn: called before anything is built.
        pre_collect_hook: called before each rollout.
        post_collect_hook: called with each rollout, by whoever runs the worker.
    """

    frames: int
    autoreset_mode: Any = None
    info_keys: tuple[Key, ...] = ()
    max_frames_per_traj: int = 0
    reset_at_each_iter: bool = False
    set_truncated: bool = False
    policy_state: Mapping[Any, Any] | None = None
    exploration_type: InteractionType = InteractionType.RANDOM
    track_policy_version: bool = False
    num_threads: int | None = None
    mask: bool = False
    compact_obs: bool = False
    calling: Calling = AS_IT_IS
    devices: Devices = field(default_factory=Devices)
    stays: bool = False
    init_fn: Callable[[], Any] | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
