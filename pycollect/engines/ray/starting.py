"""The driver's end of an actor until it is known whether it shares memory with the driver."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

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
from pycollect.errors import result_of

PolicyAt = Callable[[str, WorkerSpec], "bytes | None"]
"""What stands for the policy in a worker on a node, as `NodePolicies.policy_at` tells it."""


def starting_actor(
    spec: WorkerSpec,
    policy: SharedValue,
    actor: Actor,
    driver: DriverAddress,
    policy_at: PolicyAt | None = None,
) -> StartingEitherWay:
    """An actor that is asked to serve a mailbox of this process, else by calls of Ray.

    Args:
        policy: the pickled policy or its factory.
        policy_at: what it gets instead on another node; None: the same.
    """
    served = None
    if not isinstance(driver.bell, ThreadBell):
        mailbox = Mailbox(QUESTIONS)
        serving = actor.serve(driver.node, mailbox.address, driver.bell.address)
        monitor = ActorMonitor(actor, serving)
        pickled = pickled_spec(spec)
        served = MailboxHandle(spec, pickled, policy, mailbox, driver.bell, monitor), monitor
    if policy_at is None or served is None:
        return StartingEitherWay(
            actor.handle, driver.bell, served, lambda: CallHandle(spec, policy, actor)
        )
    elsewhere = _Elsewhere(spec, policy, actor, driver.node, policy_at)
    return StartingEitherWay(actor.handle, driver.bell, served, elsewhere)


class _Elsewhere:
    """Asks an actor where it is, and makes its handle once its policy is there.

    Args:
        policy: that it gets where it is on the driver's node after all.
    """

    def __init__(
        self, spec: WorkerSpec, policy: SharedValue, actor: Actor, here: str, policy_at: PolicyAt
    ) -> None:
        self._spec, self._policy, self._actor = spec, policy, actor
        self._here, self._policy_at = here, policy_at
        self._located: Future[str] | None = None

    def __call__(self) -> CallHandle | None:
        """The handle; None: not yet."""
        if self._located is None:
            self._located = self._actor.node()
        if not self._located.done():
            return None
        node = self._node(self._located)
        if node == self._here:
            return CallHandle(self._spec, self._policy, self._actor)
        own = self._policy_at(node, self._spec)
        if own is None:
            return None
        return CallHandle(self._spec, SharedValue(own, lambda value: value), self._actor)

    def _node(self, located: Future[str]) -> str:
        try:
            return str(result_of(located))
        except Exception as error:
            loss = self._actor.loss(error)
            if loss is None:
                raise
            raise loss.death_of(self._spec) from error
