"""The driver's end of an actor until it is known whether it shares memory with the driver."""

from __future__ import annotations

from typing import Any

from pycollect._core import Bell, Mailbox
from pycollect.engines.messages import WorkerInfo, WorkerSpec, pickled_spec
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.serve import QUESTIONS
from pycollect.engines.ray.actor import Actor
from pycollect.engines.ray.driver import DriverAddress
from pycollect.engines.ray.monitor import ActorMonitor
from pycollect.engines.ray.store_handle import StoreHandle
from pycollect.engines.shared_value import SharedValue
from pycollect.engines.waiting import LOOK_SECONDS


class StartingActor:
    """An actor that is asked to serve a mailbox, which is to build its worker.

    Where it can it does so to its end; where it cannot it says so at once, and is asked by calls
    of Ray. Whoever waits sees the handle of the way that is known so far.
    """

    def __init__(
        self, spec: WorkerSpec, policy: SharedValue, actor: Actor, driver: DriverAddress
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._actor = actor
        self._bell = driver.bell
        self._monitor: ActorMonitor | None = None  # of one that serves, as far as is known
        self._handle: MailboxHandle | StoreHandle
        if isinstance(driver.bell, Bell):
            mailbox = Mailbox(QUESTIONS)
            serving = actor.serve(driver.node, mailbox.address, driver.bell.address)
            self._monitor = ActorMonitor(actor, serving)
            self._handle = MailboxHandle(
                spec, pickled_spec(spec), policy, mailbox, driver.bell, self._monitor
            )
        else:
            self._handle = StoreHandle(spec, policy, actor)

    def _settled(self) -> MailboxHandle | StoreHandle:
        """Its handle, another one if it has said that it cannot share memory."""
        if self._monitor is not None and self._monitor.refused:
            self._monitor = None
            self._handle = StoreHandle(self._spec, self._policy, self._actor)
        return self._handle

    def built(self) -> tuple[WorkerInfo, MailboxHandle | StoreHandle]:
        """What the worker is, and its handle from now on. Waits."""
        while True:
            seen = self._bell.count
            if self.has_answer or self.is_dead:
                break
            self._bell.wait_ring(seen, LOOK_SECONDS)
        info = self._handle.read_info()
        if self._monitor is not None:
            self._monitor.watch(info.pid)
        return info, self._handle

    @property
    def native(self) -> Any:
        """The actor's handle, Ray's own."""
        return self._actor.handle

    @property
    def has_answer(self) -> bool:
        """Whether the worker is built, or cannot be. Does not wait."""
        return self._settled().has_answer

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from it. Does not wait."""
        # To serve no more may be to have refused just now.
        return self._handle.is_dead and self._settled().is_dead

    def last_words(self) -> str:
        """Nothing: its process is not known yet, whose log could be looked for."""
        return ""

    def ask_close(self) -> bool:
        """Ask it to close its environments; return whether it can still do so."""
        return self._settled().ask_close()

    @property
    def is_closing(self) -> bool:
        """Whether it was asked to close and has nothing else to do any more. Does not wait."""
        return self._settled().is_closing

    def kill(self) -> None:
        """End the actor's process."""
        self._handle.kill()
