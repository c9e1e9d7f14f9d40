"""A batched simulator of torch tensors on the CPU, beside a loop by hand and TorchRL."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.race import Side
from pycollect.bench import simulator

FRAME_BYTES = 2 * 17 * 4 + 6 * 4
"""Observation before and after the step, and action."""


def batches(way: str, envs: int) -> Iterator[int]:
    """Batches of one way to collect; see `pycollect.bench.simulator`."""
    torch.set_num_threads(1)
    ways: dict[str, Any] = {
        "pycollect": simulator.collector,
        "loop [P, T]": simulator.loop,
        "loop [T, P]": partial(simulator.loop, by_time=True),
        "alone": simulator.alone,
        "TorchRL": simulator.torchrls,
    }
    with ways[way](envs, torch.device("cpu")) as batch:
        while True:
            batch()
            yield envs * simulator.STEPS


@pytest.mark.parametrize("envs", simulator.SIZES)
def test_tensors_on_the_cpu(compare: Callable[..., None], envs: int) -> None:
    """Compare with loops into preallocated tensors [P, T] and [T, P]."""
    compare(
        f"{envs} environments of torch tensors, in process, {simulator.STEPS} steps",
        [
            Side("pycollect", batches, {"way": "pycollect", "envs": envs}),
            Side("loop [P, T]", batches, {"way": "loop [P, T]", "envs": envs}),
            Side("loop [T, P]", batches, {"way": "loop [T, P]", "envs": envs}),
            Side("nothing kept", batches, {"way": "alone", "envs": envs}),
            Side("TorchRL", batches, {"way": "TorchRL", "envs": envs}, needs="torchrl"),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"loop [P, T]": 1.0, "TorchRL": 2.0},
    )
