"""The driver's end of actors: shared memory where they are on its node, the object store else."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pycollect._core import Bell, Mailbox, Memory, shared_memory_why_not
from pycollect.engines.messages import Order, Rollout, WorkerInfo, WorkerSpec, pickled_spec
from pycollect.engines.processes.handle import MailboxHandle
from pycollect.engines.processes.serve import QUESTIONS
from pycollect.engines.processes.wire import share
from pycollect.engines.ray.actor import ActorLife, has_pidfd, kill_actor, ringing
from pycollect.engines.ray.store_handle import StoreHandle
from pycollect.engines.waiting import LOOK_SECONDS, Rung, ThreadBell


class Shipment:
    """A value for several workers, made ready for either way once it is sent that way."""

    def __init__(self, ray: Any, value: Any) -> None:
        self._ray = ray
        self._value = value

    @cached_property
    def memory(self) -> Memory:
        """It in shared memory."""
        return share(self._value)

    @cached_property
    def reference(self) -> Any:
        """It in the object store."""
        return self._ray.put(self._value)


@dataclass(frozen=True)
class Here:
    """Where the driver is.

    Attributes:
        node: Ray's id of its node.
        bell: what workers ring that share memory with it, and Ray for what it has to say. A Bell,
            unless this process cannot share memory with any other.
    """

    node: str
    bell: Rung


def here(ray: Any) -> Here:
    """Where this process is."""
    shares = not shared_memory_why_not() and has_pidfd()
    bell = Bell() if shares else ThreadBell()
    return Here(ray.get_runtime_context().get_node_id(), bell)


class RayHandle:
    """The driver's end of one actor, which tells by itself whether it shares memory with it.

    It is asked to serve a mailbox. Where it can it does so to its end; where it cannot it says so
    at once, and is asked by calls of Ray.
    """

    def __init__(self, ray: Any, spec: WorkerSpec, policy: Shipment, actor: Any, at: Here) -> None:
        self.actor = actor
        self.index = spec.index
        self.incarnation = spec.incarnation
        self._bell = at.bell

        def by_calls() -> StoreHandle:
            return StoreHandle(ray, spec, policy.reference, actor, at.bell)

        self._by_calls = by_calls
        self._life: ActorLife | None = None
        self._way: MailboxHandle | StoreHandle
        if isinstance(at.bell, Bell):
            mailbox = Mailbox(QUESTIONS)
            serving = actor.serve.remote(at.node, mailbox.address, at.bell.address, os.getpid())
            self._life = ActorLife(ray, actor, ringing(serving, at.bell))
            self._way = MailboxHandle(
                spec, pickled_spec(spec), policy.memory, mailbox, at.bell, self._life
            )
        else:
            self._way = by_calls()
        # Also if nobody shuts the collector down: Ray would let it serve for ever.
        weakref.finalize(self, kill_actor, ray, actor).atexit = False

    def _settle(self) -> MailboxHandle | StoreHandle:
        """The way that it is asked."""
        if self._life is not None and self._life.refused:
            self._life = None
            self._way = self._by_calls()
        return self._way

    @property
    def in_place(self) -> bool:
        """Whether it shares memory with this process. Known once the worker is built."""
        return self._way.in_place

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""
        return self._settle().has_answer

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from it. Does not wait."""
        return self._settle().is_dead

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        while True:
            seen = self._bell.count
            if self.has_answer or self.is_dead:
                break
            self._bell.wait_ring(seen, LOOK_SECONDS)
        info = self._way.read_info()
        if self._life is not None:
            self._life.watch(info.pid)
        return info

    def submit(self, order: Order) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""
        self._way.submit(order)

    def stop(self) -> None:
        """The oldest rollout is to end after its current step. Does not wait; may come again."""
        self._way.stop()

    def assign(self, edition: int, version: int, weights: Shipment, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts, also one that is queued."""
        if isinstance(self._way, MailboxHandle):
            return self._way.assign(edition, version, weights.memory, acknowledge)
        return self._way.assign(edition, version, weights.reference, acknowledge)

    def set_hooks(self, hooks: Mapping[str, tuple[int, Shipment]]) -> None:
        """Give the worker hooks for the next rollout that it starts, also one that is queued."""
        if isinstance(self._way, MailboxHandle):
            self._way.set_hooks({name: (n, hook.memory) for name, (n, hook) in hooks.items()})
        else:
            self._way.set_hooks({name: (n, hook.reference) for name, (n, hook) in hooks.items()})

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits."""
        return self._way.rollout()

    def pop(self) -> None:
        """The oldest rollout is done with."""
        self._way.pop()

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read."""
        self._way.drop_rollouts()

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""
        return self._way.request(method, *arguments)

    def await_answer(self, call: Any, seconds: float) -> bool:
        """Sleep until a call of `request` has an answer, or can have none; return whether it is so.

        It ends after that time.
        """
        return self._way.await_answer(call, seconds)

    def answer(self, call: Any) -> Any:
        """What a call of `request` or `assign` returned. Waits."""
        return self._way.answer(call)

    def steps(self) -> int | None:
        """Steps of its life so far, None if that is not known now. Does not wait."""
        return self._way.steps()

    def last_words(self) -> str:
        """The end of what the actor's process logged, if it ran on this machine; else nothing."""
        return self._way.last_words()

    def ask_close(self) -> bool:
        """Ask it to close its environments; return whether it can still do so."""
        return self._settle().ask_close()

    @property
    def is_closing(self) -> bool:
        """Whether it was asked to close and has nothing else to do any more. Does not wait."""
        return self._settle().is_closing

    def kill(self) -> None:
        """End the actor's process. Where it shares memory with this one, it is gone then."""
        self._way.kill()
