"""Cutting [64, 1000] frames of CartPole into their 2,560 trajectories, padded."""

from collections.abc import Callable, Iterator
from importlib import import_module

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks.race import Side

STEPS = 1000
OURS, THEIRS = "pycollect", "torchrl.collectors.utils"
PER_ROW = 40
"""Trajectories in one row, 25 steps long on average."""


def even_lengths(generator: np.random.Generator) -> np.ndarray:
    """Return 40 lengths between 10 and 40 that add up to 1000."""
    offsets = generator.integers(-15, 16, PER_ROW // 2)
    return generator.permutation(np.concatenate([25 + offsets, 25 - offsets]))


def uneven_lengths(generator: np.random.Generator) -> np.ndarray:
    """Return 40 lengths from 39 random cuts of 1000 steps; the long tail causes much padding."""
    cuts = np.sort(generator.choice(np.arange(1, STEPS), PER_ROW - 1, replace=False))
    return np.diff(cuts, prepend=0, append=STEPS)


LENGTHS = {"even": even_lengths, "uneven": uneven_lengths}


def make_batch(rows: int, lengths: str) -> TensorDict:
    """Return a collector's batch [rows, 1000] whose rows end with done."""
    generator = np.random.default_rng(0)
    ends = np.zeros((rows, STEPS), bool)
    for row in ends:
        row[np.cumsum(LENGTHS[lengths](generator)) - 1] = True
    ids = torch.from_numpy(np.cumsum(ends).reshape(rows, STEPS) - ends)
    done = torch.from_numpy(ends).unsqueeze(-1)
    false = torch.zeros_like(done)
    shape = (rows, STEPS)
    return TensorDict(
        {
            "observation": torch.rand(*shape, 4),
            "action": torch.randint(2, shape),
            "done": false,
            "terminated": false.clone(),
            "truncated": false.clone(),
            "next": {
                "observation": torch.rand(*shape, 4),
                "reward": torch.ones(*shape, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": false.clone(),
            },
            "collector": {"traj_ids": ids},
        },
        batch_size=shape,
        names=[None, "time"],
    )


def frame_bytes() -> int:
    """Return the bytes of one frame with all leaves."""
    batch = make_batch(1, "even")
    return sum(leaf.nbytes for leaf in batch.values(True, True)) // batch.numel()


def check(padded: TensorDictBase, batch: TensorDictBase) -> None:
    """Check that the result has every frame at its position."""
    mask = padded["collector", "mask"]
    assert padded.shape[0] == batch.shape[0] * PER_ROW
    assert torch.equal(padded["observation"][mask], batch["observation"].flatten(0, 1))


def split_by(module: str, rows: int, lengths: str) -> Iterator[int]:
    """Call a module's `split_trajectories`."""
    split = import_module(module).split_trajectories
    batch = make_batch(rows, lengths)
    check(split(batch), batch)
    while True:
        split(batch)
        yield batch.numel()


def plain_index(rows: int, lengths: str) -> Iterator[int]:
    """Write zeros, and frames at known positions: only the memory traffic."""
    batch = make_batch(rows, lengths)
    ids = batch["collector", "traj_ids"].flatten()
    counts = torch.bincount(ids)
    longest = int(counts.max())
    starts = torch.cumsum(counts, 0) - counts
    places = ids * longest + torch.arange(ids.numel()) - starts[ids]
    leaves = [leaf.flatten(0, 1) for leaf in batch.values(True, True)]
    leaves.append(torch.ones(batch.numel(), dtype=torch.bool))
    while True:
        for leaf in leaves:
            padded = leaf.new_zeros(counts.numel() * longest, *leaf.shape[1:])
            padded.index_copy_(0, places, leaf)
        yield batch.numel()


@pytest.mark.parametrize("lengths", ["even", pytest.param("uneven", marks=pytest.mark.full)])
def test_split(compare: Callable[..., None], lengths: str) -> None:
    """Compare with TorchRL."""
    work = {"rows": 64, "lengths": lengths}
    compare(
        f"split [64, 1000], 2,560 trajectories, {lengths}",
        [
            Side("pycollect", split_by, {"module": OURS, **work}),
            Side("TorchRL", split_by, {"module": THEIRS, **work}, needs="torchrl"),
            Side("index_copy_ into zeros", plain_index, work),
        ],
        frame_bytes=frame_bytes(),
        wanted={"TorchRL": 100},
    )


def test_linear(compare: Callable[..., None]) -> None:
    """Compare a million frames in 40,000 trajectories, which do not fit into the caches."""
    small = {"rows": 64, "lengths": "even"}
    large = {"rows": 1000, "lengths": "even"}
    compare(
        "split, a million frames",
        [
            Side("pycollect, [1000, 1000]", split_by, {"module": OURS, **large}),
            Side("pycollect, [64, 1000]", split_by, {"module": OURS, **small}),
            Side("index_copy_ into zeros, [1000, 1000]", plain_index, large),
            Side("index_copy_ into zeros, [64, 1000]", plain_index, small),
        ],
        frame_bytes=frame_bytes(),
        wanted={"pycollect, [64, 1000]": 0.67},
    )
