"""The report of a rollout: counts, times of its phases, and values that are pickled lazily."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import cloudpickle
import torch

from pycollect.data.extras import Extras
from pycollect.data.layout import Key
from pycollect.worker.generators import GeneratorState, NestState

T = TypeVar("T")


class Lazy(Generic[T]):
    """Either form of a value, each made once, when it is first asked for.

    Args:
        value: the value, or its pickled bytes.
        pickle: makes these of it.
    """

    def __init__(self, value: T | bytes, pickle: Callable[[T], bytes] = cloudpickle.dumps) -> None:
        if isinstance(value, bytes):
            self.pickled = value
        else:
            self.value = value
            self._pickle = pickle

    @cached_property
    def value(self) -> T:
        """The value."""
        value: T = cloudpickle.loads(self.pickled)
        return value

    @cached_property
    def pickled(self) -> bytes:
        """The value as it travels."""
        return self._pickle(self.value)


# Steps from one timed step to the next, in turn: no common period with episodes of fixed length.
# A timed step takes a few microseconds longer: of a step of 15 that is half a percent.
_GAPS = (37, 61, 43, 83, 47, 67)


class WorkerSeconds(NamedTuple):
    """Wall time of a worker since its first rollout began.

    Attributes:
        env: stepping and resetting environments.
        policy: choosing actions.
        record: writing into slabs, and what else a rollout takes.
        idle: between rollouts.
    """

    env: float = 0.0
    policy: float = 0.0
    record: float = 0.0
    idle: float = 0.0

    def report(self) -> dict[str, float]:
        """By name, JSON-able."""
        return self._asdict()


class StepTimer:
    """Measures whole rollouts, and splits their time as the sampled steps' is split.

    Reading the clock at every step would cost more than recording it does.

    Attributes:
        env: seconds of the sampled steps, likewise `policy` and `record`.
    """

    def __init__(self) -> None:
        self.env = self.policy = self.record = 0.0
        self._gaps = itertools.cycle(_GAPS)
        self._until = 1  # plain steps before the next timed one; the first ever is like no other
        self._rollouts = 0.0
        self._idle = 0.0
        self._began = 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        """A rollout begins."""
        self._began = time.perf_counter()
        if self._ended is not None:
            self._idle += self._began - self._ended

    def end(self) -> None:
        """The rollout has ended, in whatever way."""
        self._ended = time.perf_counter()
        self._rollouts += self._ended - self._began

    def stretches(self, steps: int) -> Iterator[tuple[int, bool]]:
        """Cut a rollout: (so many plain steps, whether a timed one follows), again and again."""
        while steps > self._until:
            yield self._until, True
            steps -= self._until + 1
            self._until = next(self._gaps)
        self._until -= steps
        yield steps, False

    @property
    def seconds(self) -> WorkerSeconds:
        """The split so far; its parts add up to the time since the first rollout began."""
        sampled = self.env + self.policy + self.record
        scale = self._rollouts / sampled if sampled else 0.0
        env, policy = self.env * scale, self.policy * scale
        return WorkerSeconds(env, policy, self._rollouts - env - policy, self._idle)


Episode = tuple[int, float | list[float], int]
"""(env, return, length in frames) of an episode that ended; for a vector reward, k returns."""

_NOTHING: Mapping[Key, torch.Tensor] = MappingProxyType({})


class RolloutReport(NamedTuple):
    """What comes back beside the frames of a rollout.

    Attributes:
        frames: that it really has; uncollected cells are not counted.
        policy_version: that it began with.
        seconds: where the worker's time went so far.
        stepped: steps of single envs since the worker was made, best effort.
        slow_paths: the names of those that the rollout took.
        extras: [P, T] each; None where there are none.
        generators: where the worker's own stand at its end; None if it has none, or nobody asked.
        sources: the numbers of those of its own processes whose parts follow each other along time;
            one number where all of them are environments side by side, or it collects itself.
        lost: frames that were asked of its processes since the last rollout and never came, by
            reason.
        restarts: how often one of these was replaced so far.
        on_device: what was recorded on the environments' device instead of in the slab, of the
            steps that the rollout really has, [*batch, T, *frame] each. Does not travel.
    """

    frames: int
    policy_version: int
    episodes: list[Episode]
    seconds: WorkerSeconds
    stepped: int
    slow_paths: tuple[str, ...]
    extras: Lazy[Extras] | None = None
    generators: Lazy[GeneratorState | NestState] | None = None
    sources: tuple[int, ...] = (0,)
    lost: Mapping[str, int] = MappingProxyType({})
    restarts: int = 0
    on_device: Mapping[Key, torch.Tensor] = _NOTHING
