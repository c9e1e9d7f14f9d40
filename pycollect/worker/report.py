"""What a worker says of a rollout, beside its frames."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from pycollect.batch.extras import Extras
from pycollect.batch.layout import Key
from pycollect.worker.generators import GeneratorState, TeamState
from pycollect.worker.packed import Packed
from pycollect.worker.step_timer import WorkerSeconds

Episode = tuple[int, float | list[float], int]
"""(env, return, length in frames) of an episode that ended; for a vector reward, k returns."""

_NOTHING: Mapping[Key, torch.Tensor] = MappingProxyType({})


class RolloutReport(NamedTuple):
    """What comes back beside the frames of a rollout.

    Attributes:
        frames: that it really has; uncollected cells are not counted.
        policy_version: that it began with.
        seconds: where the worker's time went so far.
        stepped: steps of single envs since the worker was made, best effort.
        slow_paths: the names of those that the rollout took.
        extras: [P, T] each; None where there are none.
        generators: where the worker's own stand at its end; None if it has none, or nobody asked.
        sources: the numbers of those of its own processes whose parts follow each other along time;
            one number where all of them are environments side by side, or it collects itself.
        lost: frames that were asked of its processes since the last rollout and never came, by
            reason.
        restarts: how often one of these was replaced so far.
        on_device: what was recorded on the environments' device instead of in the slab, of the
            steps that the rollout really has, [*batch, T, *frame] each. Does not travel.
    """

    frames: int
    policy_version: int
    episodes: list[Episode]
    seconds: WorkerSeconds
    stepped: int
    slow_paths: tuple[str, ...]
    extras: Packed[Extras] | None = None
    generators: Packed[GeneratorState | TeamState] | None = None
    sources: tuple[int, ...] = (0,)
    lost: Mapping[str, int] = MappingProxyType({})
    restarts: int = 0
    on_device: Mapping[Key, torch.Tensor] = _NOTHING
