"""What a worker says of a rollout, beside its frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pycollect._core import RolloutHeader
from pycollect.batch.extras import Extras
from pycollect.batch.layout import Key
from pycollect.worker.step_timer import WorkerSeconds

Episode = tuple[int, float, int]
"""(env, return, length in frames) of an episode that ended."""


@dataclass(frozen=True)
class TeamReport:
    """What there is to know of a rollout that several processes collected as one worker.

    Attributes:
        sources: the numbers of those whose parts follow each other along time; one number where
            all of them are environments side by side.
        lost: frames that were asked of them since the last rollout and never came, by reason.
        restarts: how often one of them was replaced so far.
    """

    sources: tuple[int, ...]
    lost: Mapping[str, int]
    restarts: int


@dataclass(frozen=True)
class RolloutReport:
    """What comes back beside the frames of a rollout.

    Attributes:
        seconds: where the worker's time went so far.
        stepped: steps of single envs since the worker was made, best effort.
        slow_paths: the names of those that the rollout took.
        extras: [P, T] each; None where there are none.
        team: None where the worker collected it itself.
        there: what was recorded on the environments' device instead of in the slab, of the steps
            that the rollout really has, [*batch, T, *frame] each.
    """

    header: RolloutHeader
    episodes: list[Episode]
    seconds: WorkerSeconds
    stepped: int
    slow_paths: tuple[str, ...]
    extras: Extras | None = None
    team: TeamReport | None = None
    there: Mapping[Key, torch.Tensor] = field(default_factory=dict)
