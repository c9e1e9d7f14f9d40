"""Accounts of a stream: the ledger of frames, counts and times."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from pycollect.worker.report import Episode

REASONS = (
    "worker_died",
    "worker_timeout",
    "server_died",
    "env_error",
    "set_seed",
    "reset",
    "load_state_dict",
    "shutdown",
    "incomplete",
    "replay_buffer",
    "max_policy_lag",
)

PROGRESS = (
    "stepped_frames",
    "trajectory_completed_frames",
    "replay_written_frames",
    "completed_trajectories",
)
"""TorchRL's counters of progress; `trajectory_pending_frames` is a gauge and not counted."""


@dataclass
class Account:
    """Frames of one worker. Every issued frame is delivered, lost or in flight."""

    issued: int = 0
    delivered: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Number of frames that will never be delivered."""
        return sum(self.reasons.values())

    @property
    def in_flight(self) -> int:
        """Number of frames that were issued and are neither delivered nor lost."""
        return self.issued - self.delivered - self.lost

    def report(self) -> dict[str, Any]:
        """Return the numbers as ints, ready for JSON."""
        return {
            "issued": self.issued,
            "delivered": self.delivered,
            "in_flight": self.in_flight,
            "lost": self.lost,
            "reasons": dict(self.reasons),
        }


class Ledger:
    """The accounts of all workers, former ones included. Any thread may call the methods."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}
        self._writing = threading.RLock()  # a report must be consistent

    def issue(self, worker: int, frames: int) -> None:
        """Count the frames of a rollout that was requested from a worker."""
        with self._writing:
            self._of(worker).issued += frames

    def take_back(self, worker: int, frames: int) -> None:
        """Subtract issued frames, because a rollout contained fewer than requested."""
        with self._writing:
            self._of(worker).issued -= frames

    def deliver(self, worker: int, frames: int) -> None:
        """Count frames that the caller gets."""
        with self._writing:
            self._of(worker).delivered += frames

    def lose(self, worker: int, frames: int, reason: str) -> None:
        """Count frames that will never be delivered, for one of REASONS."""
        with self._writing:
            if frames:
                self._of(worker).reasons[reason] += frames

    def lose_in_flight(self, reason: str) -> None:
        """Count all frames in flight, of any worker, as lost."""
        with self._writing:
            for worker, account in self._accounts.items():
                self.lose(worker, account.in_flight, reason)

    def in_flight_of_each(self) -> dict[int, int]:
        """Return the number of frames in flight by worker."""
        with self._writing:
            return {worker: account.in_flight for worker, account in self._accounts.items()}

    @property
    def delivered(self) -> int:
        """Number of delivered frames of all workers."""
        with self._writing:
            return sum(account.delivered for account in self._accounts.values())

    @property
    def in_flight(self) -> int:
        """Number of frames in flight of all workers."""
        return sum(self.in_flight_of_each().values())

    def report(self) -> dict[str, Any]:
        """Return ``{"total": ..., "workers": {id: ...}}``; the total is the sum over workers."""
        total = Account()
        with self._writing:
            for account in self._accounts.values():
                total.issued += account.issued
                total.delivered += account.delivered
                total.reasons.update(account.reasons)
            workers = {
                worker: account.report() for worker, account in sorted(self._accounts.items())
            }
        return {"total": total.report(), "workers": workers}

    def state(self) -> dict[str, Any]:
        """Return the state from which `restore` continues after the last delivered batch.

        Frames in flight are not included, because a resumed run issues them again.
        """
        with self._writing:
            return {
                str(worker): {"delivered": account.delivered, "reasons": dict(account.reasons)}
                for worker, account in self._accounts.items()
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        accounts = {
            int(worker): Account(
                issued=account["delivered"] + sum(account["reasons"].values()),
                delivered=account["delivered"],
                reasons=Counter(account["reasons"]),
            )
            for worker, account in state.items()
        }
        with self._writing:
            self._accounts = accounts

    def _of(self, worker: int) -> Account:
        return self._accounts.setdefault(worker, Account())


RECENT_EPISODES = 100


class Statistics:
    """Counts of frames, batches and recent episodes, and the seconds spent in each phase.

    One thread counts; any thread may read.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.batches = 0
        self.episodes = 0
        self.progress = Counter(dict.fromkeys(PROGRESS, 0))
        self._recent: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        self._lags: Counter[int] = Counter()
        self._seconds: dict[str, float] = {}
        self._restored = 0  # frames delivered by an earlier run
        self._started: float | None = None
        self._returned: float | None = None

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager that adds its duration to a phase."""
        return _Timed(self, phase)

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def entered(self) -> None:
        """Start a call for a batch; the time since the last call was the user's."""
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        if self._returned is not None:
            self.add_seconds("user", now - self._returned)
        self._returned = None

    def left(self) -> None:
        """End a call for a batch, which returned or raised."""
        self._returned = time.perf_counter()

    def count_batch(self, frames: int) -> None:
        self.frames += frames
        self.batches += 1

    def count_lag(self, lag: int, frames: int) -> None:
        """Count frames that are delivered that many policy versions late."""
        self._lags[lag] += frames

    def count_episodes(self, episodes: Sequence[Episode]) -> None:
        self.episodes += len(episodes)
        self._recent.extend(episodes)

    def restore(
        self, frames: int, batches: int, episodes: int, progress: Mapping[str, int]
    ) -> None:
        """Continue from the counts of another run, with new times."""
        self.frames, self.batches, self.episodes = frames, batches, episodes
        self.progress = Counter({name: progress.get(name, 0) for name in PROGRESS})
        self._restored = frames
        self._recent.clear()
        self._lags.clear()
        self._seconds.clear()
        self._started = self._returned = None

    @property
    def has_begun(self) -> bool:
        """Whether a batch was requested."""
        return self._started is not None

    @property
    def episode_return(self) -> float | list[float] | None:
        """Mean return of the last 100 episodes; ``None`` before the first one has ended.

        For a vector reward, it is a list with the mean of each objective.
        """
        returns: list[Any] = [value for _, value, _ in self._recent.copy()]
        if returns and isinstance(returns[0], list):
            return [sum(objective) / len(returns) for objective in zip(*returns, strict=True)]
        return mean(returns)

    def report(self) -> dict[str, Any]:
        """Return all counts and times, ready for JSON."""
        now = time.perf_counter()
        elapsed = 0.0 if self._started is None else now - self._started
        seconds = dict(self._seconds)
        if (returned := self._returned) is not None:  # the user has been running since then
            seconds["user"] = seconds.get("user", 0.0) + now - returned
        return {
            "frames": self.frames,
            "batches": self.batches,
            "frames_per_second": (self.frames - self._restored) / elapsed if elapsed else 0.0,
            "episodes": self.episodes,
            "episode_return": self.episode_return,
            "episode_length": mean(float(length) for _, _, length in self._recent.copy()),
            "policy_lag": dict(sorted(self._lags.copy().items())),
            "seconds": {**seconds, "elapsed": elapsed},
        }


class _Timed:
    """A phase that is being timed; a generator would take three times as long."""

    __slots__ = ("_phase", "_start", "_statistics")

    def __init__(self, statistics: Statistics, phase: str) -> None:
        self._statistics, self._phase = statistics, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self._statistics.add_seconds(self._phase, time.perf_counter() - self._start)


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or ``None`` if there are no values."""
    collected = list(values)
    return sum(collected) / len(collected) if collected else None


def count_slow_paths(workers: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return how many workers use each slow path.

    "policy_tensordict" and "env_tensordict": one TensorDict per step for the policy, or for a
    TorchRL environment. "extras": entries without a fixed shape and numeric dtype, which stay
    Python objects.
    """
    counts = {"policy_tensordict": 0, "env_tensordict": 0, "extras": 0}
    for names in workers:
        for name in names:
            counts[name] += 1
    return counts


def flat(
    counts: Mapping[str, Any], report: Mapping[str, Any], workers: str
) -> dict[str, int | float | bool]:
    """Return statistics under TorchRL's names; `workers`: "aggregate", "per_worker" or "both"."""
    each: Mapping[Any, Mapping[str, Any]] = report["workers"]
    numbers: dict[str, Any] = {}
    if workers != "per_worker":
        numbers = {"frames": report["frames"], "batches": report["batches"], **counts}
        numbers["worker_frames"] = sum(worker["frames"] for worker in each.values())
    numbers["workers"] = len(each)
    numbers["workers_alive"] = report["workers_alive"]
    if workers != "aggregate":
        numbers |= {
            f"worker_{index}/{name}": value
            for index, worker in each.items()
            for name, value in worker.items()
            if isinstance(value, int | float)
        }
    return numbers


class Progress:
    """A progress bar of delivered frames, with the episode return and the policy lag."""

    def __init__(self, total_frames: int | None) -> None:
        self._bar = tqdm(total=total_frames, unit="frames", unit_scale=True, dynamic_ncols=True)

    def update(self, frames: int, episode_return: float | list[float] | None, lag: int) -> None:
        """Add frames and show the current return and lag."""
        postfix = {}
        if episode_return is not None:
            returns = episode_return if isinstance(episode_return, list) else [episode_return]
            postfix = {"return": " ".join(f"{value:.1f}" for value in returns)}
        self._bar.set_postfix({**postfix, "lag": lag}, refresh=False)
        self._bar.update(frames)

    def close(self) -> None:
        """Close the bar and leave it visible. Idempotent."""
        self._bar.close()
