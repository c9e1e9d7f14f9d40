"""Mailboxes between processes: questions, answers, the bell, and interrupted waits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
from raising import refused

from pycollect._core import Bell, Mailbox, WorkerMailbox

FORKING = multiprocessing.get_context("forkserver")
LONG = 60.0


def echo(mailbox: Any, bell: Any) -> None:
    """Answer each question with a copy of it, until an empty question arrives."""
    end = WorkerMailbox(mailbox, bell)
    while True:
        while not end.wait_ask(LONG):
            pass
        question = end.question()
        end.answer(question)
        if not question:
            return


def next_answer(bell: Bell, boxes: list[Mailbox]) -> tuple[int, bytes]:
    while True:
        seen = bell.count
        for index, box in enumerate(boxes):
            if box.has_answer:
                return index, box.take_answer()
        assert bell.wait_ring(seen, LONG) or bell.count == seen


def test_one_bell_for_all_workers() -> None:
    bell = Bell()
    boxes = [Mailbox(2) for _ in range(3)]
    processes = [
        FORKING.Process(target=echo, args=(box.address, bell.address), daemon=True) for box in boxes
    ]
    for process in processes:
        process.start()
    for round_ in range(50):
        for index, box in enumerate(boxes):
            assert box.ask(f"{round_} {index}".encode()) == round_ + 1
        answers = dict(next_answer(bell, boxes) for _ in boxes)
        assert answers == {i: f"{round_} {i}".encode() for i in range(3)}
    for box in boxes:
        box.ask(b"")
    assert {next_answer(bell, boxes) for _ in boxes} == {(i, b"") for i in range(3)}
    for process in processes:
        process.join(LONG)
        assert process.exitcode == 0


def test_a_worker_killed_during_a_wait_does_not_answer() -> None:
    bell, box = Bell(), Mailbox(1)
    process = FORKING.Process(target=echo, args=(box.address, bell.address), daemon=True)
    process.start()
    box.ask(b"are you there?")
    assert next_answer(bell, [box]) == (0, b"are you there?")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(LONG)
    box.ask(b"and now?")
    assert not bell.wait_ring(bell.count, 0.01)
    assert not box.has_answer


def test_a_bell_rings_when_a_process_is_gone() -> None:
    bell, box = Bell(), Mailbox(1)
    process = FORKING.Process(target=echo, args=(box.address, bell.address), daemon=True)
    process.start()
    assert process.pid is not None
    bell.ring_when_gone(process.pid)
    assert not bell.wait_ring(0, 0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert bell.wait_ring(0, LONG)
    process.join(LONG)
    bell.ring_when_gone(process.pid)  # it is gone already
    assert bell.count == 2


def interrupt(parent: int, mailbox: Any, bell: Any) -> None:
    end = WorkerMailbox(mailbox, bell)
    assert end.wait_ask(LONG)
    os.kill(parent, signal.SIGINT)
    os._exit(0)  # do not answer


def test_an_interrupt_ends_a_wait() -> None:
    bell, box = Bell(), Mailbox(1)
    process = FORKING.Process(
        target=interrupt, args=(os.getpid(), box.address, bell.address), daemon=True
    )
    process.start()

    def ask_and_wait() -> None:
        box.ask(b"")
        bell.wait_ring(bell.count, LONG)

    with pytest.raises(KeyboardInterrupt):
        ask_and_wait()
    process.join(LONG)


def test_sizes_and_counts_are_checked() -> None:
    bell, box = Bell(), Mailbox(1)
    end = WorkerMailbox(box.address, bell.address)
    with refused(ValueError, "message"):
        box.ask(b"x" * (Mailbox.ASK_BYTES + 1))
    assert box.ask(b"x" * Mailbox.ASK_BYTES) == 1
    with refused(RuntimeError, "ask"):
        box.ask(b"")
    with refused(ValueError, "message"):
        end.answer(b"x" * (Mailbox.ANSWER_BYTES + 1))
    end.answer(b"x" * Mailbox.ANSWER_BYTES)
    with refused(RuntimeError, "answer"):
        end.answer(b"")
    assert len(box.take_answer()) == Mailbox.ANSWER_BYTES
    with refused(RuntimeError, "take_answer"):
        box.take_answer()
    with refused(ValueError, "capacity"):
        Mailbox(0)
    with refused(ValueError, "mailbox"):
        WorkerMailbox(bell.address, bell.address)
