"""Random faults in a collector, and an oracle that follows every frame.

The environment has no torch: workers import this file by name.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium import spaces

EPISODE = 4
SILENCE = 120.0  # seconds within which a collector must deliver batches after a fault
FREED = 20.0  # seconds within which a closed collector's shared memory must be freed
TIMEOUT = 1.0  # worker_timeout
PAUSE = 0.3  # seconds between SIGSTOP and SIGCONT

# Kinds of faults, with the ledger's reasons for lost frames. Without memory, a process may die
# before it reports the error.
REASONS = {
    "interrupt": {"incomplete"},
    "raise": {"env_error"},
    "memory": {"env_error", "worker_died"},
    "exit": {"worker_died"},
    "segfault": {"worker_died"},
    "kill": {"worker_died"},
    "fork server": {"worker_died"},
    "policy process": {"server_died"},
    "hang": {"worker_timeout"},
    "stop": {"worker_timeout"},
    "pause": set[str](),
}
BY_ENVIRONMENT = ("raise", "memory", "exit", "segfault", "hang")


class BrokeOnRequestError(Exception):
    """Raised by a FaultyEnv on request."""


def commit(fault: str) -> None:
    """Break this process; one of BY_ENVIRONMENT."""
    if fault == "raise":
        raise BrokeOnRequestError("on request")
    if fault == "memory":  # not even the report of the error gets new pages
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        bytearray(1 << 40)
    if fault == "exit":
        os._exit(37)
    if fault == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    threading.Event().wait()


class FaultyEnv(gymnasium.Env):
    """Observation (life, count, episode, step); `life` is a random number per instance.

    `count` is the number of steps in this life, so it grows by one with every frame.

    A test requests a fault with a file, which the next step deletes.
    """

    observation_space = spaces.Box(0, 2**62, (4,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, request: Path) -> None:
        self.request = request
        self.life = int.from_bytes(os.urandom(7), "big")
        self.count = self.episode = self.steps = 0

    def observe(self) -> Any:
        return np.array([self.life, self.count, self.episode, self.steps], np.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        if self.request.exists():
            fault = self.request.read_text()
            self.request.unlink()
            commit(fault)
        self.count += 1
        self.steps += 1
        return self.observe(), 0.0, self.steps == EPISODE, False, {}


class Frames:
    """Follow every life of every environment: no frame is repeated or skipped.

    Attributes:
        seen: number of delivered frames.
        skipped: number of frames missing before a later delivered frame of the same life.
    """

    def __init__(self) -> None:
        self.seen = self.skipped = 0
        self._next: dict[int, int] = {}
        self._ids: dict[tuple[int, int], int] = {}

    def follow(self, td: Any) -> None:
        """Check one batch."""
        cells = td.reshape(-1)
        columns = (
            cells["observation"],
            cells["next", "observation"],
            cells["action"],
            cells["next", "done"].squeeze(-1),
            cells["collector", "traj_ids"],
        )
        for (life, count, episode, step), following, action, done, trajectory in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if trajectory < 0:  # an uncollected cell
                continue
            expected = self._next.get(life, 0)
            assert count >= expected, f"frame {count} of life {life} came twice"
            self.skipped += count - expected
            self._next[life] = count + 1
            self.seen += 1
            assert following == [life, count + 1, episode, step + 1]
            assert action == count % 2
            assert done == (step + 1 == EPISODE)
            own = self._ids.setdefault((life, episode), trajectory)
            assert own == trajectory

    def check_ids(self, gaps: bool) -> None:
        """Check that trajectories are numbered in the order of their first frames.

        Args:
            gaps: Whether an interrupt may have ended the delivery of a batch, with its ids.
        """
        ids = [*self._ids.values()]
        assert ids == (sorted({*ids}) if gaps else list(range(len(ids))))


class Interrupts:
    """Send SIGINT from another thread; only `collector.next()` raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.armed = self.came = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: Any) -> None:
        self.came = True
        if self.armed:
            raise KeyboardInterrupt

    def send(self, seconds: float) -> None:
        """Send SIGINT to this thread after this delay."""
        self.came = False
        main = threading.get_ident()
        threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)).start()


class Campaign:
    """Collect batches and commit one random fault after the other.

    Args:
        make: creates a collector of environments, given as one entry per worker.
        workers: number of workers.
        kinds: kinds of faults. Each is committed once before any is repeated.
        folder: directory for the files that request faults.
        seed: determines the kinds of faults, their order, victims and delays.
        held: returns the number of shared memory files, which a closed collector must not increase.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        workers: int,
        kinds: Sequence[str],
        folder: Path,
        seed: str,
        held: Callable[[], int],
    ) -> None:
        self._make, self._kinds, self._held = make, kinds, held
        self._remote = "kill" in kinds
        self._requests = [folder / f"fault of {worker}" for worker in range(workers)]
        self._random, self._lives = random.Random(seed), random.Random(f"{seed} lives")
        self._interrupts = Interrupts()
        self._missing = 0
        self._due: list[str] = []
        self._resumed = 0.0  # time of the last fault or batch
        self._pauses: dict[str, float] = {}
        self._checked = 0
        self.committed: list[str] = []

    def run(self, faults: int) -> None:
        """Commit this many faults; create a new collector after a fault that ends it."""
        with self._interrupts:
            while len(self.committed) < faults:
                before = self._held()
                self._run_one(faults)
                deadline = time.monotonic() + FREED
                while self._held() != before:  # ranks' threads may still hold some
                    assert time.monotonic() < deadline, self.committed
                    time.sleep(0.01)

    def report(self) -> str:
        """Return the faults by kind, the frames checked, and the longest pause after each kind."""
        kinds = sorted(Counter(self.committed).items())
        longest = max(self._pauses.values(), default=0.0)
        each = (f"{kind} {n} ({self._pauses.get(kind, 0.0):.2f} s)" for kind, n in kinds)
        head = (
            f"{len(self.committed)} faults, {self._checked} frames, longest pause {longest:.2f} s"
        )
        return f"{head}: {', '.join(each)}"

    def _run_one(self, faults: int) -> None:
        retries = self._remote and self._lives.random() < 0.8
        own = {"restart_on_error": retries, "worker_timeout": TIMEOUT} if self._remote else {}
        entries = [partial(FaultyEnv, request) for request in self._requests]
        self._frames, self._missing, over = Frames(), 0, False
        self._fault = ""
        with self._make(entries, **own, max_worker_restarts=1000) as collector:
            self._collector = collector
            self._collect(4)
            slabs = self._slabs()
            while len(self.committed) < faults and not over:
                before = self._ledger()["reasons"]
                over = self._commit(retries)
                if not over:
                    self._collect(4)
                    assert self._slabs() == slabs, self.committed
                self._check_reasons(before)
        self._check()
        assert collector.ledger()["total"]["in_flight"] == 0
        del self._collector
        self._checked += self._frames.seen
        for request in self._requests:
            request.unlink(missing_ok=True)

    def _slabs(self) -> int:
        """Return the number of shared slabs, which grows if a lent slab is never returned."""
        if not self._remote:
            return 0
        pools = self._collector._source.assembly._shared._pools.values()
        return sum(pool.stats().created for pool in pools)

    def _commit(self, retries: bool) -> bool:
        """Commit a fault; return whether the collector has ended."""
        if not self._due:
            self._due = self._random.sample(self._kinds, len(self._kinds))
        name, victim = self._due.pop(), self._random.randrange(len(self._requests))
        delay = self._random.random() * 0.02
        before = self._restarts(name)
        self.committed.append(name)
        self._fault, self._resumed = name, time.monotonic()
        if name == "interrupt":
            self._interrupts.send(delay)
            self._collect_until(lambda: self._interrupts.came)
        elif name in BY_ENVIRONMENT:
            self._request(name, victim)
            try:
                self._collect_until(lambda: self._restarts(name) > before)
            except (BrokeOnRequestError, MemoryError):
                assert not retries
                return True
            assert retries or name != "raise"
        else:
            thread = threading.Thread(target=self._signal, args=(name, victim, delay))
            thread.start()
            self._collect_until(
                lambda: not thread.is_alive() and (name == "pause" or self._restarts(name) > before)
            )
        return False

    def _signal(self, name: str, victim: int, delay: float) -> None:
        """Signal a process at a random moment."""
        time.sleep(delay)
        if name == "policy process":
            os.kill(self._collector.stats()["server"]["pid"], signal.SIGKILL)
            return
        if name == "fork server":
            from pycollect.transport.processes.fork_server import fork_servers

            assert fork_servers._current is not None
            fork_servers._current.process.kill()
        number = signal.SIGSTOP if name in ("stop", "pause") else signal.SIGKILL
        while True:
            pid = self._collector.stats()["workers"][victim]["pid"]
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                # Until a replacement is built, the pid is that of its predecessor.
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    os.kill(pid, number)
                    break
            time.sleep(0.01)
        if name == "pause":
            time.sleep(PAUSE)
            with suppress(ProcessLookupError):  # a busy machine: it was replaced meanwhile
                os.kill(pid, signal.SIGCONT)

    def _request(self, fault: str, victim: int) -> None:
        request = self._requests[victim]
        whole = request.with_suffix(".whole")
        whole.write_text(fault)
        whole.rename(request)

    def _restarts(self, name: str) -> int:
        stats = self._collector.stats()
        if name == "policy process":
            return int(stats["server"]["restarts"])
        return sum(own.get("restarts", 0) for own in stats["workers"].values())

    def _collect(self, batches: int) -> None:
        for _ in range(batches):
            self._next()
        self._check()

    def _collect_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SILENCE
        while not done():
            assert time.monotonic() < deadline, f"no effect of {self.committed[-1]}"
            self._next()

    def _next(self) -> None:
        td = None
        try:
            self._interrupts.armed = True
            td = self._collector.next()
        except KeyboardInterrupt:
            pass
        finally:
            self._interrupts.armed = False
        if td is not None:
            if self._fault:
                now = time.monotonic()
                pause = max(self._pauses.get(self._fault, 0.0), now - self._resumed)
                self._pauses[self._fault], self._resumed = pause, now
            self._frames.follow(td)
        else:  # in this process, the environments also counted discarded steps
            ledger = self._ledger()
            incomplete = ledger["reasons"].get("incomplete", 0)
            self._missing = incomplete if self._remote else ledger["lost"]

    def _ledger(self) -> dict[str, Any]:
        ledger: dict[str, Any] = self._collector.ledger()
        for account in (ledger["total"], *ledger["workers"].values()):
            delivered, in_flight, lost = (
                account[name] for name in ("delivered", "in_flight", "lost")
            )
            assert account["issued"] == delivered + in_flight + lost
            assert lost == sum(account["reasons"].values())
        total: dict[str, Any] = ledger["total"]
        return total

    def _check_reasons(self, before: dict[str, int]) -> None:
        """Check that the last fault lost frames only for its reasons; a busy worker times out."""
        after = self._ledger()["reasons"]
        lost = {reason for reason in after if after[reason] > before.get(reason, 0)}
        assert lost <= REASONS[self._fault] | {"worker_timeout"}, (lost, self.committed)

    def _check(self) -> None:
        """Check that all missing batches were delivered and then discarded by an interrupt."""
        taken = self._ledger()["delivered"] - self._frames.seen
        assert taken >= 0
        assert taken == 0 or "interrupt" in self.committed
        assert self._frames.skipped <= taken + self._missing
        if not taken:
            self._frames.check_ids(gaps="interrupt" in self.committed)
