"""The driver's end of an actor until it is known whether it shares memory with the driver."""

from __future__ import annotations

from pycollect._core import Mailbox
from pycollect.engines.call_handle import CallHandle
from pycollect.engines.messages import WorkerSpec, pickled_spec
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.serve import QUESTIONS
from pycollect.engines.ray.actor import Actor
from pycollect.engines.ray.driver import DriverAddress
from pycollect.engines.ray.monitor import ActorMonitor
from pycollect.engines.shared_value import SharedValue
from pycollect.engines.starting import StartingEitherWay
from pycollect.engines.waiting import ThreadBell


def starting_actor(
    spec: WorkerSpec, policy: SharedValue, actor: Actor, driver: DriverAddress
) -> StartingEitherWay:
    """An actor that is asked to serve a mailbox of this process, else by calls of Ray."""
    served = None
    if not isinstance(driver.bell, ThreadBell):
        mailbox = Mailbox(QUESTIONS)
        serving = actor.serve(driver.node, mailbox.address, driver.bell.address)
        monitor = ActorMonitor(actor, serving)
        pickled = pickled_spec(spec)
        served = MailboxHandle(spec, pickled, policy, mailbox, driver.bell, monitor), monitor
    return StartingEitherWay(
        actor.handle, driver.bell, served, lambda: CallHandle(spec, policy, actor)
    )
