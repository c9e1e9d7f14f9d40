"""Slots between processes: many workers ask one server and sleep until it answers."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
from raising import refused

from pycollect._core import Bell, ServerSlots, WorkerSlot

FORKING = multiprocessing.get_context("forkserver")
LONG = 60.0
TIMES = 50


def asks(slots: Any, slot: int, bell: Any) -> None:
    """Ask TIMES questions and check each answer."""
    end = WorkerSlot(slots, slot, bell)
    for number in range(TIMES):
        end.ask(str(number).encode())
        while not end.wait_answer(LONG):
            pass
        assert (end.answer(), end.note) == (str(number).encode(), number)


def test_one_server_for_all_workers() -> None:
    bell, slots = Bell(), ServerSlots()
    arguments = [(slots.address, slots.add(), bell.address) for _ in range(3)]
    processes = [FORKING.Process(target=asks, args=own, daemon=True) for own in arguments]
    for process in processes:
        process.start()
    left = TIMES * len(slots)
    while left:
        heard = bell.knocks
        for slot in slots.asking():
            question = slots.question(slot)
            slots.answer(slot, question, int(question))
            left -= 1
        if left:
            bell.wait_knock(heard, LONG)
    for process in processes:
        process.join(LONG)
        assert process.exitcode == 0


def test_sizes_and_turns_are_checked() -> None:
    bell, slots = Bell(), ServerSlots()
    slot = slots.add()
    end = WorkerSlot(slots.address, slot, bell.address)
    with refused(ValueError, "message"):
        end.ask(b"x" * (ServerSlots.BYTES + 1))
    with pytest.raises(RuntimeError, match=f"slot {slot}"):
        slots.question(slot)
    before = time.monotonic()
    end.ask()
    assert slots.asking() == [slot]
    assert before <= slots.asked_at(slot) <= time.monotonic()
    assert not end.wait_answer(0.0)
    with refused(RuntimeError, "ask"):
        end.ask()
    with refused(RuntimeError, "answer"):
        end.answer()
    assert slots.asking() == [slot]
    with refused(ValueError, "message"):
        slots.answer(slot, b"x" * (ServerSlots.BYTES + 1))
    slots.answer(slot, b"x" * ServerSlots.BYTES, 3)
    with pytest.raises(RuntimeError, match=f"slot {slot}"):
        slots.answer(slot)
    assert (len(end.answer()), end.note) == (ServerSlots.BYTES, 3)
    with refused(ValueError, "slots"):
        WorkerSlot(bell.address, 0, bell.address)
    for wrong in (1, 2000):
        with refused(IndexError, "slot"):
            WorkerSlot(slots.address, wrong, bell.address)
    with refused(ValueError, "slots"):
        ServerSlots(bell.address)
