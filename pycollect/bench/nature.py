"""Collectors with a Nature CNN on the device, beside TorchRL's: 1, 8 and 14 processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import MultiSyncDataCollector
from pycollect.bench.clock import seconds_of
from pycollect.bench.environment import FreeFrames
from pycollect.bench.rows import Row, missing
from pycollect.bench.wholes import lacks, torchrls_multi, wrapped

WORKERS = (1, 8, 14)
_STEPS = 128
"""Frames of one worker in a batch."""


class NatureCNN(nn.Module):
    """The network of Mnih et al., "Human-level control through deep reinforcement learning",
    Nature 518 (2015), on frames of 4x84x84 bytes.
    """

    def __init__(self, outputs: int) -> None:
        """Three convolutions, a hidden layer of 512, as many outputs."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, outputs),
        )
        self.outputs = outputs

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """[*lead, 4, 84, 84] uint8 to [*lead, outputs] float32."""
        lead = observation.shape[:-3]
        result: torch.Tensor = self.layers(observation.reshape(-1, 4, 84, 84).float() / 255)
        return result.reshape(*lead, self.outputs)


def nature_policy() -> TensorDictModule:
    """The network with one action in (-1, 1)."""
    net = nn.Sequential(NatureCNN(1), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def _ours(workers: int, device: torch.device, **arguments: Any) -> Any:
    return MultiSyncDataCollector(
        [FreeFrames] * workers,
        nature_policy(),
        frames_per_batch=_STEPS * workers,
        policy_device=device,
        storing_device=device,
        prefetch=1,
        **arguments,
    )


def _torchrls(workers: int, device: torch.device) -> Any:
    """Its batches go to the device by ``.to``, as its documentation does it."""
    make = partial(wrapped, FreeFrames)
    return torchrls_multi()(
        [make] * workers,
        nature_policy(),
        frames_per_batch=_STEPS * workers,
        total_frames=10**12,
        policy_device=device,
        env_device="cpu",
        storing_device="cpu",
    )


_TORCHRL = "TorchRL"
_SIDES: dict[str, Callable[[int, torch.device], Any]] = {
    "pycollect": _ours,
    "pycollect, captured": partial(_ours, cudagraph_policy=True),
    _TORCHRL: _torchrls,
}


def nature_rows(
    device: torch.device,
    why_not: str,
    *,
    quick: bool,
    workers: Sequence[int] = WORKERS,
    sides: Sequence[str] = tuple(_SIDES),
) -> list[Row]:
    """Rates, and times to the first batch, of both sides; each with a process per environment.

    Args:
        quick: three batches of each, else twenty.
    """
    rows: list[Row] = []
    for count in workers:
        for side in sides:
            name, make = f"{side}, Nature CNN, {count}", _SIDES[side]
            is_peer = side == _TORCHRL
            reason = why_not or (lacks("torchrl") if is_peer else "")
            try:
                pair = _measured(name, make, reason, count, device, quick)
            except Exception as error:  # whatever it is: the other sides are measured all the same
                pair = _missing(name, f"it failed: {type(error).__name__}: {error}")
            if not is_peer:
                pair = [replace(row, peer=row.name.replace(side, _TORCHRL)) for row in pair]
            rows += pair
    return rows


def _measured(
    name: str,
    make: Callable[[int, torch.device], Any],
    reason: str,
    workers: int,
    device: torch.device,
    quick: bool,
) -> list[Row]:
    if reason:
        return _missing(name, reason)
    start = time.perf_counter()
    collector = make(workers, device)
    try:
        stream = iter(collector)

        def batch() -> None:
            next(stream).to(device)

        batch()
        to_first = time.perf_counter() - start
        batch()
        batches = 3 if quick else 20

        def several() -> None:
            for _ in range(batches):
                batch()

        seconds = seconds_of(several, device) / batches
    finally:
        collector.shutdown()
    note = f"{workers} processes, policy and batch on {device}"
    return [
        Row(name, seconds=seconds, frames=_STEPS * workers, note=note),
        Row(_first(name), seconds=to_first, note="from the constructor on"),
    ]


def _first(name: str) -> str:
    return f"{name}, first batch"


def _missing(name: str, why: str) -> list[Row]:
    return [missing(name, why), missing(_first(name), why)]
