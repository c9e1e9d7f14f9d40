"""Three-step transitions of CartPole frames of one env, trajectories of 20 steps on average."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks.race import Side

GAMMA = 0.99
N_STEPS = 3
STEPS = 20


def make_batch(frames: int) -> TensorDict:
    """Return a collector's batch [frames], with a trajectory per 20 frames on average."""
    generator = np.random.default_rng(0)
    ends = np.zeros(frames, bool)
    ends[generator.choice(frames - 1, frames // STEPS - 1, replace=False)] = True
    ends[-1] = True
    done = torch.from_numpy(ends).unsqueeze(-1)
    false = torch.zeros_like(done)
    return TensorDict(
        {
            "observation": torch.rand(frames, 4),
            "action": torch.randint(2, (frames,)),
            "done": false,
            "terminated": false.clone(),
            "truncated": false.clone(),
            "next": {
                "observation": torch.rand(frames, 4),
                "reward": torch.rand(frames, 1),
                "done": done,
                "terminated": done.clone(),
                "truncated": false.clone(),
            },
            "collector": {"traj_ids": torch.from_numpy(np.cumsum(ends) - ends)},
        },
        batch_size=[frames],
        names=["time"],
    )


def last_frames(batch: TensorDictBase) -> torch.Tensor:
    """Return the index of the last frame of each frame's n-step window."""
    ids = batch["collector", "traj_ids"]
    ends = torch.bincount(ids).cumsum(0) - 1
    return torch.minimum(torch.arange(ids.numel()) + N_STEPS - 1, ends[ids])


def frame_bytes() -> int:
    """Return the bytes per frame of the "next" entries and of the entries added to the root."""
    batch = make_batch(STEPS)
    return sum(leaf.nbytes for leaf in batch["next"].values()) // batch.numel() + 8 + 4 + 1


def check(result: TensorDictBase, batch: TensorDictBase) -> None:
    """Check that next observations come from the ends of the windows."""
    wanted = batch["next", "observation"][last_frames(batch)]
    assert torch.equal(result["next", "observation"], wanted)


def ours(frames: int) -> Iterator[int]:
    """Compute with pycollect's MultiStep."""
    from pycollect import MultiStep

    step = MultiStep(GAMMA, N_STEPS)
    batch = make_batch(frames)
    check(step(batch), batch)
    while True:
        step(batch)
        yield frames


def torchrl(frames: int) -> Iterator[int]:
    """Compute with TorchRL's MultiStep; its result is checked at the start of the first turn."""
    from torchrl.data.postprocs import MultiStep

    step = MultiStep(GAMMA, N_STEPS)
    batch = make_batch(frames)
    while True:
        check(step(batch), batch)
        yield frames


def plain_index(frames: int) -> Iterator[int]:
    """Copy frames from known positions: only the memory traffic."""
    batch = make_batch(frames)
    places = last_frames(batch)
    leaves = list(batch["next"].values())
    flat = [torch.zeros(frames, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.bool)]
    while True:
        for leaf in leaves:
            leaf.index_select(0, places)
        for leaf in flat:
            leaf.clone()
        yield frames


@pytest.mark.parametrize("frames", [4_000, pytest.param(40_000, marks=pytest.mark.full)])
def test_multistep(compare: Callable[..., None], frames: int) -> None:
    """Compare with TorchRL, whose time grows with frames x trajectories."""
    work = {"frames": frames}
    compare(
        f"MultiStep, {frames:,} frames, {frames // STEPS:,} trajectories",
        [
            Side("pycollect", ours, work),
            Side("TorchRL", torchrl, work, needs="torchrl", slow=frames > 4_000),
            Side("index_select", plain_index, work),
        ],
        frame_bytes=frame_bytes(),
        wanted={"TorchRL": 500} if frames > 4_000 else {},
    )


def test_linear(compare: Callable[..., None]) -> None:
    """Compare a million frames, which do not fit into the caches."""
    small, large = {"frames": 40_000}, {"frames": 1_000_000}
    compare(
        "MultiStep, 25 times the size",
        [
            Side("pycollect, 1,000,000", ours, large),
            Side("pycollect, 40,000", ours, small),
            Side("index_select, 1,000,000", plain_index, large),
            Side("index_select, 40,000", plain_index, small),
        ],
        frame_bytes=frame_bytes(),
        wanted={"pycollect, 40,000": 0.67},
    )
