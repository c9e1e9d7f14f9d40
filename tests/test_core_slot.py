"""Slots between processes: many workers ask one server, and sleep until they are answered."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from pycollect._core import Bell, ServerSlot, WorkerSlot

SPAWN = multiprocessing.get_context("spawn")
LONG = 60.0
TIMES = 50


def asks(slot: Any, bell: Any) -> None:
    """Ask so often, and look at each answer."""
    end = WorkerSlot(slot, bell)
    for number in range(TIMES):
        end.ask(str(number).encode())
        while not end.wait_answer(LONG):
            pass
        assert (end.answer(), end.note) == (str(number).encode(), number)


def test_one_server_for_all_workers() -> None:
    bell = Bell()
    slots = [ServerSlot() for _ in range(3)]
    processes = [
        SPAWN.Process(target=asks, args=(slot.address, bell.address), daemon=True) for slot in slots
    ]
    for process in processes:
        process.start()
    left = TIMES * len(slots)
    while left:
        seen = bell.count
        for slot in slots:
            if slot.has_question:
                question = slot.question()
                slot.answer(question, int(question))
                left -= 1
        if left:
            bell.wait_ring(seen, LONG)
    for process in processes:
        process.join(LONG)
        assert process.exitcode == 0


def test_sizes_and_turns_are_checked() -> None:
    bell, slot = Bell(), ServerSlot()
    end = WorkerSlot(slot.address, bell.address)
    with pytest.raises(ValueError, match="expected at most 496 bytes, got 497"):
        end.ask(b"x" * (ServerSlot.BYTES + 1))
    with pytest.raises(RuntimeError, match="expected one, there is none"):
        slot.question()
    end.ask()
    assert not end.wait_answer(0.0)
    with pytest.raises(RuntimeError, match="expected the question before to be answered"):
        end.ask()
    with pytest.raises(RuntimeError, match="expected one to the last question"):
        end.answer()
    with pytest.raises(ValueError, match="expected at most 496 bytes, got 497"):
        slot.answer(b"x" * (ServerSlot.BYTES + 1))
    slot.answer(b"x" * ServerSlot.BYTES, 3)
    assert (len(end.answer()), end.note) == (ServerSlot.BYTES, 3)
    with pytest.raises(ValueError, match="expected the address of one"):
        WorkerSlot(bell.address, bell.address)
