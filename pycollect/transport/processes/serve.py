"""Run a worker host in a worker process and answer requests from a mailbox."""

from __future__ import annotations

import os
import pickle
from collections import deque
from typing import Any

from pycollect._core import Mailbox, Memory, RolloutControl, SharedMemoryError, WorkerMailbox
from pycollect.data.slabs import MappedSlabs, MemoryAddress, RowsAddress
from pycollect.transport.descendants import begin_worker, end_worker
from pycollect.transport.host import WorkerHost, answer_by, end_fork_of
from pycollect.transport.hosted import HostedServer
from pycollect.transport.messages import Buffer, ErrorReport, Hosted, WorkerInfo
from pycollect.transport.processes.child import log_to
from pycollect.transport.shared_value import pack, unpack

MAX_REQUESTS = 64
"""Maximum number of unanswered requests in a worker's mailbox."""

_WAIT_SECONDS = 10.0


def serve(
    mailbox: MemoryAddress, bell: MemoryAddress, driver: int, inherited: tuple[Any, ...], log: int
) -> None:
    """Answer requests from a mailbox until `close`; the main function of a worker process.

    Args:
        mailbox: Address of the mailbox.
        bell: Address of the driver's bell.
        driver: Pid of the driver. When it ends, this process and its descendants are killed.
        inherited: Objects that the worker's spec refers to; see `messages`.
        log: Descriptor of the file that becomes this process's standard error.
    """
    begin_worker(driver)
    log_to(log)
    answer_all(WorkerMailbox(mailbox, bell), inherited)
    end_worker()


def answer_all(end: WorkerMailbox, inherited: tuple[Any, ...] = ()) -> None:
    """Answer all requests to a worker, from `build` until `close`."""
    process = os.getpid()
    try:
        _answer_until_closed(end, inherited)
    finally:
        end_fork_of(process)


def _answer_until_closed(end: WorkerMailbox, inherited: tuple[Any, ...]) -> None:
    worker = MailboxHost(end, inherited)
    # A driver that sends a request this far ahead has read all earlier answers.
    long_answers: deque[Memory] = deque(maxlen=MAX_REQUESTS)
    method = ""
    while method != "close":
        while not worker.wait_ask():
            pass
        method, arguments = unpack(end.question())
        message, memory = pack(answer_by(worker, method, arguments), Mailbox.ANSWER_BYTES)
        if memory is not None:
            long_answers.append(memory)
        end.answer(message)


class MailboxHost(WorkerHost):
    """A host whose worker writes into the driver's slabs and finds its weights in shared memory."""

    def __init__(self, mailbox: WorkerMailbox, inherited: tuple[Any, ...] = ()) -> None:
        super().__init__(inherited)
        self._mailbox = mailbox
        self._slabs = MappedSlabs()

    def wait_ask(self) -> bool:
        """Wait for a request, and serve inference clients meanwhile; return whether one came."""
        worker, mailbox = self._worker, self._mailbox
        if not isinstance(worker, HostedServer):
            return mailbox.wait_ask(_WAIT_SECONDS)
        worker.wait()
        self._take_weights(worker)
        worker.serve(self._version)
        mailbox.steps.value += 1
        return mailbox.wait_ask(0.0)

    def attach(
        self, filters_warnings: bool, spec: bytes, policy: MemoryAddress
    ) -> WorkerInfo | ErrorReport:
        """Build the worker with a policy in shared memory."""
        return self.build(filters_warnings, spec, Memory.attach(policy).array().tobytes())

    def write(
        self, random: bool, min_steps: int, rows: RowsAddress | None
    ) -> tuple[tuple[Any, ...], Buffer | None]:
        """Collect one rollout into the driver's slab; return its plain report.

        Args:
            random: Take random actions instead of the policy's.
            min_steps: Minimum number of steps, even if the rollout is stopped.
            rows: Rows to write into. ``None``: the bytes of a slab of its own are returned.
        """
        mailbox = self._mailbox
        control = RolloutControl(mailbox.stop, mailbox.number, min_steps, mailbox.steps)
        if rows is None:
            report, slab = self._collect(random, control)
            return report, slab.array()
        mapped = self._slabs.rows(rows, self._built.placement)
        return self._collect_into(mapped, random, control), None

    def _take_weights(self, worker: Hosted) -> None:
        """Load the weights and install the hooks that were published last, if they are new."""
        while message := self._mailbox.published():
            serial, version, address, hooks = pickle.loads(message)
            new = [name for name, (number, _) in hooks if number > self._hooks_taken.get(name, 0)]
            if serial <= self._weights_serial and not new:
                return
            try:
                packed = Memory.attach(address).array() if serial > self._weights_serial else None
                pickled = {
                    name: (number, Memory.attach(place).array())
                    for name, (number, place) in hooks
                    if name in new
                }
            except SharedMemoryError:
                if self._mailbox.published() == message:
                    raise
                continue  # newer ones were published meanwhile
            if packed is not None:
                if self._weight_slab is not None:
                    worker.load_weights(self._weight_slab.unpack(packed))
                self._weights_serial, self._version = serial, version
            self._take_hooks(worker, pickled)
