"""Rooms: what is written where, and what an uncollected cell shows."""

from __future__ import annotations

import pytest
import torch

from pycollect._core import Layout, Leaf, Placement
from pycollect.batch.room import Rooms

B, P, T = 2, 3, 4
LAYOUT = Layout([Leaf(("value",), "float32", (2,))])
FORMS = [
    ((), torch.bool),
    ((2,), torch.float32),
    ((1,), torch.bfloat16),
    ((2, 2), torch.complex64),
    ((3,), torch.uint16),
    ((0,), torch.int64),
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """All different, as far as the type can tell them, and none of them zero."""
    return whole_numbers(shape).to(dtype)


def whole_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).view(shape)


@pytest.mark.parametrize("order", ["stack", "time"])
@pytest.mark.parametrize(("frame", "dtype"), FORMS)
def test_each_step_has_its_cell(order: str, frame: tuple[int, ...], dtype: torch.dtype) -> None:
    rooms = Rooms(torch.device("cpu"))
    room = rooms.open(Placement(LAYOUT, B, P, T, order), order)
    assert rooms.get(room.number) is room
    expected = numbers((B, P, T, *frame), dtype)
    for step in range(T):
        room.write({("value",): expected[:, :2, step].contiguous()}, 0, 0, step)
        for row in range(B):  # the last environment is of another group
            room.write({("value",): expected[row : row + 1, 2:, step].contiguous()}, row, 2, step)
    ids = torch.arange(B * P * T).view(B, P, T)
    ids[1, 0, 2:] = ids[0, 2, 1] = -1
    collected = whole_numbers((B, P, T, *frame))
    collected[ids < 0] = 0
    expected = collected.to(dtype)
    shape = (P, B * T, *frame) if order == "time" else (B * P, T, *frame)
    if order == "time":
        ids, expected = (own.transpose(0, 1).contiguous() for own in (ids, expected))
    tensors = room.filled(ids.view(*shape[:2]))
    assert torch.equal(tensors["value",], expected.view(shape))
    assert tensors["value",].dtype is dtype

    own = torch.zeros_like(tensors["value",])
    room.copy_to({("value",): own}, [1])
    lead = (P, B, T) if order == "time" else (B, P, T)
    by_worker = own.view(*lead, *frame)
    at = 1 if order == "time" else 0
    assert not by_worker.select(at, 0).any()
    assert torch.equal(by_worker.select(at, 1), expected.select(at, 1))


def test_a_room_is_there_as_long_as_somebody_holds_it() -> None:
    rooms = Rooms(torch.device("cpu"))
    placement = Placement(LAYOUT, B, P, T)
    first, second = (rooms.open(placement, "stack") for _ in range(2))
    numbers = [first.number, second.number]
    assert 0 < numbers[0] < numbers[1]
    del first
    assert rooms.get(numbers[0]) is None
    assert rooms.get(numbers[1]) is second
