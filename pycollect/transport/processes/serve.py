"""Run a worker in its process, and answer requests from a mailbox."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from pycollect._core import Mailbox, Memory, WorkerMailbox
from pycollect.data.slabs import MemoryAddress
from pycollect.transport.channel import MAX_REQUESTS, MailboxEnd
from pycollect.transport.descendants import begin_worker, end_worker
from pycollect.transport.host import WorkerHost, end_fork_of
from pycollect.transport.messages import Close, Request
from pycollect.transport.processes.child import log_to
from pycollect.transport.shared_value import pack, unpack

_WAIT_SECONDS = 10.0


def serve(
    mailbox: MemoryAddress, bell: MemoryAddress, driver: int, inherited: tuple[Any, ...], log: int
) -> None:
    """Answer requests from a mailbox until `Close`; the main function of a worker process.

    Args:
        mailbox: Address of the mailbox.
        bell: Address of the driver's bell.
        driver: Pid of the driver. When it ends, this process and its descendants are killed.
        inherited: Objects that the worker's spec refers to; see `pickling`.
        log: Descriptor of the file that becomes this process's standard error.
    """
    begin_worker(driver)
    log_to(log)
    answer_all(WorkerMailbox(mailbox, bell), inherited)
    end_worker()


def answer_all(mailbox: WorkerMailbox, inherited: tuple[Any, ...] = ()) -> None:
    """Answer all requests to a worker, from `Build` until `Close`."""
    process = os.getpid()
    try:
        _answer_until_closed(mailbox, inherited)
    finally:
        end_fork_of(process)


def _answer_until_closed(mailbox: WorkerMailbox, inherited: tuple[Any, ...]) -> None:
    host = WorkerHost(MailboxEnd(mailbox), inherited)
    # A driver that sends a request this far ahead has read all earlier answers.
    long_answers: deque[Memory] = deque(maxlen=MAX_REQUESTS)
    request: Request | None = None
    while not isinstance(request, Close):
        while not _wait_ask(mailbox, host):
            pass
        request = unpack(mailbox.question())
        message, memory = pack(host.answer(request), Mailbox.ANSWER_BYTES)
        if memory is not None:
            long_answers.append(memory)
        mailbox.answer(message)


def _wait_ask(mailbox: WorkerMailbox, host: WorkerHost) -> bool:
    """Wait for a request, and serve inference clients meanwhile; return whether one came."""
    if not host.serve_clients():
        return mailbox.wait_ask(_WAIT_SECONDS)
    mailbox.steps.value += 1
    return mailbox.wait_ask(0.0)
