"""Split and n-step of batches on a GPU by the core's kernel: they equal the host's."""

from __future__ import annotations

import pytest
import torch
from gpu_support import DEVICE, needs_gpu
from tensordict import TensorDict

from pycollect import MultiStep, split_trajectories
from pycollect.data.gather_cuda import on_one_device

pytestmark = pytest.mark.cuda

SHAPES = [(64,), (5, 40), (2, 3, 30), (1, 1, 9)]


def batch(shape: tuple[int, ...]) -> TensorDict:
    generator = torch.Generator().manual_seed(1)

    def random(*frame: int) -> torch.Tensor:
        return torch.rand(*shape, *frame, generator=generator)

    done = random(1) < 0.15
    ids = torch.where(random() < 0.1, -1, 3)
    frames = {
        "observation": random(11),
        "pixels": (random(84, 84) * 255).to(torch.uint8),
        "half": random(3).to(torch.bfloat16),
        "action": (random() * 5).long(),
        "none": random(0),
    }
    reward = (random(1) * 8).round()  # sums are exact in any order
    after = {**{key: leaf.flip(0) for key, leaf in frames.items()}, "done": done, "reward": reward}
    return TensorDict(
        {**frames, "collector": {"traj_ids": ids}, "next": TensorDict(after, shape)}, shape
    )


def assert_equal(got: TensorDict, want: TensorDict) -> None:
    assert got.batch_size == want.batch_size
    for key in want.keys(include_nested=True, leaves_only=True):
        leaf, expected = got.get(key), want.get(key)
        assert leaf.dtype == expected.dtype, key
        assert torch.equal(leaf.cpu(), expected), key


def strided(td: TensorDict) -> TensorDict:
    """Return the same data on the device, in memory with gaps between steps."""
    steps = (*[slice(None)] * (td.ndim - 1), slice(None, None, 2))
    return td.apply(lambda leaf: leaf.to(DEVICE).repeat_interleave(2, td.ndim - 1)[steps])


@needs_gpu
def test_the_kernel_is_used() -> None:
    leaf = torch.zeros(3, device=DEVICE)
    assert on_one_device({("a",): leaf}).keys() == {("a",)}


@pytest.mark.parametrize("shape", SHAPES)
def test_split(shape: tuple[int, ...]) -> None:
    td = batch(shape)
    for there in (td.to(DEVICE), strided(td)):
        padded = split_trajectories(there)
        assert padded["observation"].device.type == DEVICE
        assert_equal(padded, split_trajectories(td))
        flat, expected = (split_trajectories(x, format="cat") for x in (there, td))
        assert_equal(flat.td, expected.td)
        assert torch.equal(flat.offsets, expected.offsets)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_steps", [1, 3, 100])
def test_n_step(shape: tuple[int, ...], n_steps: int) -> None:
    td = batch(shape)
    step = MultiStep(0.5, n_steps)
    for there in (td.to(DEVICE), strided(td)):
        assert_equal(step(there), step(td))


def test_gradients_go_through_torch() -> None:
    td = batch((5, 40)).to(DEVICE)
    td["observation"].requires_grad_()
    td["none"].requires_grad_()  # has no elements
    MultiStep(0.5, 3)(td)
    split_trajectories(td)["observation"].sum().backward()
    assert td["observation"].grad is not None


@needs_gpu
def test_another_stream() -> None:
    td = batch((5, 40))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = td.to("cuda", non_blocking=True)
        result = split_trajectories(there)
    stream.synchronize()
    assert_equal(result, split_trajectories(td))
