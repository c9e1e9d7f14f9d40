"""A batched simulator of torch tensors on the CPU, a loop by hand, and TorchRL."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from benchmarks.race import Side
from pycollect.bench import simulator

FRAME_BYTES = 2 * 17 * 4 + 6 * 4
"""Bytes of a frame: observations before and after the step, and the action."""


def batches(stream: Callable[..., Iterator[int]], envs: int) -> Iterator[int]:
    """Collect on the CPU."""
    return stream(envs, torch.device("cpu"))


@pytest.mark.parametrize("envs", simulator.SIZES)
def test_tensors_on_the_cpu(compare: Callable[..., None], envs: int) -> None:
    """Compare with loops into preallocated tensors [P, T] and [T, P]."""
    ways = {
        "pycollect": simulator.collector,
        "loop [P, T]": simulator.loop,
        "loop [T, P]": partial(simulator.loop, by_time=True),
        "nothing kept": simulator.alone,
    }
    sides = [Side(name, batches, {"stream": way, "envs": envs}) for name, way in ways.items()]
    theirs = {"stream": simulator.by_torchrl, "envs": envs}
    compare(
        f"{envs} environments of torch tensors, in process, {simulator.STEPS} steps",
        [*sides, Side("TorchRL", batches, theirs, needs="torchrl")],
        frame_bytes=FRAME_BYTES,
        wanted={"loop [P, T]": 1.0, "TorchRL": 2.0},
    )
