"""What runs in a rank's process."""

from __future__ import annotations

import contextlib
import os
from contextlib import closing

from pycollect._core import SharedMemoryError, WorkerMailbox, adopt_orphans
from pycollect.engines.descendants import begin_worker, end_worker
from pycollect.engines.distributed.address import Invitation, RankAddress, this_node
from pycollect.engines.distributed.interrupts import heard_again
from pycollect.engines.distributed.meeting import REFUSAL, meet
from pycollect.engines.distributed.serve import answer_calls
from pycollect.engines.processes.log import log_to
from pycollect.engines.processes.serve import answer_all


def run_child(address: RankAddress, log: int) -> None:
    """The main function of a rank that the driver started itself.

    Args:
        log: the descriptor of what is to be its standard error.
    """
    log_to(log)
    run_rank(address)
    end_worker()


def run_rank(address: RankAddress) -> None:
    """Do what the driver asks, until it asks to close, or is gone: then this process is killed.

    The process leads a group of its own from now on, with all that its environments start.
    """
    adopt_orphans()
    with contextlib.suppress(OSError):  # it leads one, or a session
        os.setpgid(0, 0)
    heard_again()
    meeting, invitation = meet(address)
    served = _mailbox(invitation)
    if isinstance(served, WorkerMailbox):
        meeting.close()
        answer_all(served)
        return
    meeting.publish(REFUSAL, served)
    with closing(invitation.carrier.rank_end(meeting)) as link:
        answer_calls(link)


def _mailbox(invitation: Invitation) -> WorkerMailbox | str:
    """Its end of the driver's mailbox, or why it has none."""
    if invitation.mailbox is None:
        return "the driver shares memory with no other process"
    if this_node() != invitation.node:
        return "it is on another node"
    try:
        end = WorkerMailbox(*invitation.mailbox)
        begin_worker(invitation.driver)
    except (SharedMemoryError, ValueError, RuntimeError) as error:
        # A container, or another user's process, for one.
        return str(error)
    return end
