"""The driver's end of actors: shared memory where they are on its node, the object store else."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pycollect._core import Bell, Mailbox, Memory, shared_memory_why_not
from pycollect.collectors.engine import Order, Rollout
from pycollect.collectors.mailbox_handle import LOOK_SECONDS, MailboxHandle, Rung
from pycollect.collectors.other_process import OtherProcess, has_pidfd
from pycollect.collectors.parcel import share
from pycollect.collectors.pickling import pickled_spec
from pycollect.collectors.process_worker import QUESTIONS
from pycollect.collectors.remote_worker import ErrorReport, WorkerInfo, WorkerSpec
from pycollect.errors import WorkerDied

_LOG_CHARACTERS = 2000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ACCOUNT_SECONDS = 2.0  # in which Ray tells how an actor's process ended
_KILL_SECONDS = 2.0  # in which Ray ends one


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


class ThreadBell:
    """What a Bell is, where memory cannot be shared: only threads of this process ring it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How often it was rung."""
        return self._count

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` is no longer `seen`; return whether it is not."""
        with self._condition:
            return self._condition.wait_for(lambda: self._count != seen, seconds)


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
            self._life = ActorLife(ray, actor, _ringing(serving, at.bell))
            self._way = MailboxHandle(spec, policy.memory, mailbox, at.bell, self._life)
        else:
            self._way = by_calls()
        # Also if nobody shuts the collector down: Ray would let it serve for ever.
        weakref.finalize(self, _kill_actor, ray, actor).atexit = False

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

    def kill(self) -> None:
        """End the actor's process. Where it shares memory with this one, it is gone then."""
        self._way.kill()


class StoreHandle:
    """The driver's end of an actor that is asked by calls of Ray, and answers the same way."""

    in_place: ClassVar[bool] = False

    def __init__(self, ray: Any, spec: WorkerSpec, policy: Any, actor: Any, bell: Rung) -> None:
        self.index = spec.index
        self.incarnation = spec.incarnation
        self._ray = ray
        self._actor = actor
        self._bell = bell
        self._assigned: tuple[int, int, Any] = (0, 0, None)
        self._sent_edition = 0
        self._steps_call: Any = None
        self._closing: Any = None
        self._pid: int | None = None
        self._calls: deque[Any] = deque([self.request("build", pickled_spec(spec), policy)])
        self._asked = 0  # rollouts
        self._stopped = 0  # up to which

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer, or can have none any more. Does not wait."""
        return bool(self._calls) and self._calls[0].done()

    @property
    def is_dead(self) -> bool:
        """Whether it was asked to close, and has, or cannot any more. Does not wait."""
        return self._closing is not None and self._closing.done()

    def read_info(self) -> WorkerInfo:
        """The answer to the building of the worker, its first call. Waits."""
        info: WorkerInfo = self.answer(self._calls[0])
        self.pop()
        self._pid = info.pid
        return info

    def submit(self, order: Order) -> None:
        """Queue one rollout; weights that were assigned since the last one travel with it."""
        edition, version, weights = self._assigned
        sent = edition <= self._sent_edition
        self._sent_edition = edition
        self._asked += 1
        asked = (self._asked, order.random, order.min_steps)
        weights = None if sent else weights
        self._calls.append(self.request("collect", *asked, edition, version, weights))

    def stop(self) -> None:
        """The oldest rollout is to end after its current step: one message, past the queue."""
        oldest = self._asked - len(self._calls) + 1
        if oldest > self._stopped:
            self._stopped = oldest
            self._past_the_queue("stop", oldest)

    def assign(self, edition: int, version: int, weights: Any, acknowledge: bool) -> Any:
        """Give the worker weights for the next rollout that it starts.

        They travel with the next rollout that is queued here. If some are queued already, or with
        `acknowledge`, they are also sent past these.

        Returns:
            What to wait for until the worker has them, or None if nothing was sent now.
        """
        self._assigned = (edition, version, weights)
        if not (self._calls or acknowledge):
            return None
        return self._past_the_queue("set_weights", edition, version, weights)

    def rollout(self) -> Rollout:
        """The oldest rollout, which stays the oldest until `pop`. Waits.

        An interrupt between the two loses nothing: the same rollout is given again.
        """
        note, buffer = self.answer(self._calls[0])
        return Rollout(self.index, self.incarnation, note, buffer)

    def pop(self) -> None:
        """The oldest call is done with."""
        self._calls.popleft()

    def drop_rollouts(self) -> None:
        """Forget the rollouts that were not read."""
        self._calls.clear()

    def request(self, method: str, *arguments: Any) -> Any:
        """Queue a call of one of RemoteWorker's methods behind what is queued already."""
        return _ringing(getattr(self._actor, method).remote(*arguments), self._bell)

    def _past_the_queue(self, method: str, *arguments: Any) -> Any:
        """Call a method that may run beside a rollout."""
        call = getattr(self._actor, method).options(concurrency_group="control")
        return _ringing(call.remote(*arguments), self._bell)

    def answer(self, call: Any) -> Any:
        """What a call returned; what went wrong in the worker is raised. Waits."""
        try:
            answer = call.result()
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(
                f"worker {self.index} died: {_end_of(error)}",
                self.index,
                self.incarnation,
                str(error),
            ) from error
        if isinstance(answer, ErrorReport):
            raise answer.rebuild(self.index, self.incarnation)
        return answer

    def steps(self) -> int | None:
        """Steps of the worker's life so far, None if no answer came yet. Does not wait."""
        if self._steps_call is None:
            self._steps_call = self._past_the_queue("steps")
        if not self._steps_call.done():
            return None
        call, self._steps_call = self._steps_call, None
        with contextlib.suppress(WorkerDied):  # who waits for its rollout will hear of it
            return int(self.answer(call))
        return None

    def last_words(self) -> str:
        """The end of what the actor's process logged, if it ran on this machine; else nothing."""
        return _log_lines(self._ray, self._pid)

    def ask_close(self) -> bool:
        """Ask it to close its environments, behind what is queued."""
        self._closing = self.request("close")
        return True

    def kill(self) -> None:
        """End the actor's process."""
        self._calls.clear()
        _kill_actor(self._ray, self._actor)


class ActorLife:
    """Of an actor on this node. Ray tells how it ended, its process whether it is gone.

    Args:
        serving: the actor's one long call.
    """

    def __init__(self, ray: Any, actor: Any, serving: Future[str]) -> None:
        self._ray = ray
        self._actor = actor
        self._serving = serving
        self._process: OtherProcess | None = None

    def watch(self, pid: int) -> None:
        """It has told the number of its process."""
        self._process = OtherProcess(pid)

    @property
    def refused(self) -> bool:
        """Whether it has said that it cannot share memory. Does not wait."""
        serving = self._serving
        return serving.done() and serving.exception() is None and serving.result() != ""

    @property
    def is_over(self) -> bool:
        """Whether the process is gone, or serves no more. Does not wait."""
        return self._serving.done() or (self._process is not None and self._process.is_gone)

    def end(self) -> tuple[str, str]:
        """How it ended, and all that Ray knows of it, for which it waits a little."""
        wait_futures([self._serving], _ACCOUNT_SECONDS)
        error = self._serving.exception() if self._serving.done() else None
        if error is not None:
            return _end_of(error), str(error)
        number = "" if self._process is None else f" {self._process.pid}"
        end = f"its process{number} is gone"
        return end, end

    def last_words(self) -> str:
        """The end of what the process logged."""
        return _log_lines(self._ray, self._process.pid) if self._process is not None else ""

    def kill(self) -> None:
        """End the actor and its process, and all that its environments started."""
        _kill_actor(self._ray, self._actor)
        if self._process is None:  # not built, so that no memory was named to it
            return
        self._process.wait_gone(_KILL_SECONDS)
        self._process.kill_group()
        self._process.wait_gone(None)


def _ringing(reference: Any, bell: Rung) -> Any:
    """A call's future, which rings once it is done, also where the actor has died."""
    future = reference.future()
    future.add_done_callback(lambda _: bell.ring())
    return future


def _kill_actor(ray: Any, actor: Any) -> None:
    with contextlib.suppress(Exception):  # it is gone already, or Ray is
        if ray.is_initialized():
            ray.kill(actor)


def _log_lines(ray: Any, pid: int | None) -> str:
    """The end of what a process logged, if it ran on this machine."""
    with contextlib.suppress(Exception):  # the place of the logs is not part of Ray's API
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        files = sorted(folder.glob(f"worker-*-{pid}.err"))
        return "".join(file.read_text(errors="replace") for file in files)[-_LOG_CHARACTERS:]
    return ""


def _end_of(error: BaseException) -> str:
    """The line of Ray's text that says how a process ended: its exit, or an exception. The last."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
