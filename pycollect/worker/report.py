"""The report of a rollout: counts, times, and values that are pickled lazily."""

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
from pycollect.data.generators import GeneratorState, NestState
from pycollect.data.layout import Key, dotted
from pycollect.data.objects import pickled_tensors

T = TypeVar("T")


class Lazy(Generic[T]):
    """A value, or its pickled bytes, that is pickled or unpickled on first use."""

    def __init__(self, value: T | bytes, pickle: Callable[[T], bytes] = cloudpickle.dumps) -> None:
        if isinstance(value, bytes):
            self.pickled = value
        else:
            self.value = value
            self._pickle = pickle

    @cached_property
    def value(self) -> T:
        value: T = cloudpickle.loads(self.pickled)
        return value

    @cached_property
    def pickled(self) -> bytes:
        return self._pickle(self.value)


# Numbers of steps between timed steps. They vary, so that they do not follow episodes of a fixed
# length. A timed step takes a few microseconds longer: half a percent if a step takes 15 us.
_GAPS = (37, 61, 43, 83, 47, 67)


class WorkerSeconds(NamedTuple):
    """Seconds of wall time of a worker since its first rollout began."""

    env: float = 0.0  # stepping and resetting environments
    policy: float = 0.0  # calling the policy
    record: float = 0.0  # writing into slabs, and all other parts of a rollout
    idle: float = 0.0  # between rollouts

    def report(self) -> dict[str, float]:
        return self._asdict()


class StepTimer:
    """Measure rollouts, and split their time in the proportions of a sample of steps.

    Reading the clock in every step would take longer than recording the step.
    """

    def __init__(self) -> None:
        self.env = self.policy = self.record = 0.0
        self._gaps = itertools.cycle(_GAPS)
        self._until = 1  # plain steps before the next timed one; the first step is not typical
        self._rollouts = 0.0
        self._idle = 0.0
        self._began = 0.0
        self._ended: float | None = None

    def begin(self) -> None:
        self._began = time.perf_counter()
        if self._ended is not None:
            self._idle += self._began - self._ended

    def end(self) -> None:
        """End the rollout, whether it is complete or not."""
        self._ended = time.perf_counter()
        self._rollouts += self._ended - self._began

    def stretches(self, steps: int) -> Iterator[tuple[int, bool]]:
        """Split a rollout: yield numbers of plain steps, and whether a timed step follows."""
        while steps > self._until:
            yield self._until, True
            steps -= self._until + 1
            self._until = next(self._gaps)
        self._until -= steps
        yield steps, False

    @property
    def seconds(self) -> WorkerSeconds:
        """Seconds so far; they add up to the time since the first rollout began."""
        sampled = self.env + self.policy + self.record
        scale = self._rollouts / sampled if sampled else 0.0
        env, policy = self.env * scale, self.policy * scale
        return WorkerSeconds(env, policy, self._rollouts - env - policy, self._idle)


Episode = tuple[int, float | list[float], int]
"""Environment, return and length in frames of an ended episode; k returns for a vector reward."""

_NOTHING: Mapping[Key, torch.Tensor] = MappingProxyType({})


class RolloutReport(NamedTuple):
    """A worker's report of a rollout, in addition to the frames in the slab.

    Attributes:
        frames: Number of frames, without uncollected cells.
        policy_version: Policy version at the start of the rollout.
        seconds: The worker's times so far.
        stepped: Steps of single environments since the worker was created, best effort.
        slow_paths: Names of the slow paths that the rollout took.
        extras: Extras, [P, T] each; ``None`` if there are none.
        generators: States of the worker's random generators after the rollout. ``None`` if it has
            no generators of its own, or the request did not ask for them.
        sources: For a worker with several processes that are joined along time: the numbers of
            these processes, in order. Otherwise a single number.
        lost: Frames that were requested from its processes since the last rollout and lost, by
            reason.
        restarts: Number of replacements of its processes so far.
        on_device: Entries that were recorded on the environments' device instead of in the slab,
            [*batch, T, *frame] each, with the steps that the rollout has. Not sent to other
            processes.
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


def pickled_extras(extras: Extras) -> bytes:
    """Return the pickled extras of a rollout; raise a TypeError for one that cannot be pickled."""
    try:
        return pickled_tensors(extras)
    except Exception:
        for key, cells in extras.items():
            try:
                pickled_tensors(cells)
            except Exception as error:
                raise TypeError(
                    f"{dotted(key)}: expected values that can be pickled, because they are sent to "
                    f"another process: {error}"
                ) from error
        raise
