"""Environments with one fault each, and correct ones, for tests of the environment checker."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class Sound(gymnasium.Env):
    """A correct random walk that terminates; the environments below override one method."""

    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.place = self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        return self.observe(), self.info()

    def step(self, action: Any) -> Any:
        self.steps += 1
        noise = self.np_random.uniform(-0.5, 0.5, 3)
        self.place = (0.9 * self.place + noise + (int(action) - 1)).astype(np.float32) * 0.5
        terminated = self.steps > 3 and bool(self.np_random.random() < 0.1)
        return self.observe(), self.reward(), *self.flags(terminated), self.info()

    def observe(self) -> Any:
        return self.place.copy()

    def reward(self) -> Any:
        return float(self.place[0])

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return terminated, self.steps >= 30 and not terminated

    def info(self) -> dict[str, Any]:
        return {}


class ReusedBuffer(Sound):
    buffer = np.zeros(3, np.float32)

    def observe(self) -> Any:
        self.buffer[:] = self.place
        return self.buffer


class ReusedBuffers(Sound):
    """Returns two buffers in turn."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.buffers = np.zeros((2, 3), np.float32)

    def observe(self) -> Any:
        self.calls += 1
        buffer = self.buffers[self.calls % 2]
        buffer[:] = self.place
        return buffer


class ChangedLater(Sound):
    def observe(self) -> Any:
        self.shown = self.place.copy()
        return self.shown

    def __repr__(self) -> str:
        self.shown += 1.0
        return "ChangedLater()"


class WrongDtype(Sound):
    def observe(self) -> Any:
        return self.place.astype(np.float64)


class WrongShape(Sound):
    def observe(self) -> Any:
        return self.place[None]


class OutOfBounds(Sound):
    def observe(self) -> Any:
        return self.place + np.float32(20.0) * (self.steps == 2)


class MissingEntry(Sound):
    def __init__(self) -> None:
        super().__init__()
        box = self.observation_space
        self.observation_space = spaces.Dict({"place": box, "speed": box})

    def observe(self) -> Any:
        return {"place": self.place.copy()}


class NotANumber(Sound):
    def observe(self) -> Any:
        return self.place if self.steps != 2 else np.full(3, np.nan, np.float32)


class InfiniteReward(Sound):
    def reward(self) -> Any:
        return float("inf") if self.steps == 3 else 0.0


class TextReward(Sound):
    def reward(self) -> Any:
        return "much"


class NoReward(Sound):
    def reward(self) -> Any:
        return None


class VectorReward(Sound):
    def reward(self) -> Any:
        return np.zeros(2)


class IntFlags(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return int(terminated), False


class FlagsByAgent(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return {"left": terminated}, {"left": False}


class RefusesAction(Sound):
    def step(self, action: Any) -> Any:
        if action == 2:
            raise ValueError("no such action")
        return super().step(action)


class RefusesBound(Sound):
    limit = 4.99

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-5.0, 5.0, (1,), np.float32)

    def step(self, action: Any) -> Any:
        assert abs(action[0]) < self.limit, "too much force"
        return super().step(action[0] * 0.1 + 1)


class RefusesHalf(RefusesBound):
    limit = 2.5


class BothFlags(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        done = self.steps >= 7 and (terminated or self.steps >= 30)
        return done, done


class LimitTerminates(Sound):
    max_steps = 12

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return self.steps >= self.max_steps, False


class LimitAndGoalTerminate(Sound):
    max_episode_steps = 12

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return terminated or self.steps >= self.max_episode_steps, False


class EqualLengths(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return self.steps >= 12, False


class EndsAtAnObstacle(Sound):
    """Random actions end all episodes after 20 steps; a repeated action ends them earlier."""

    def step(self, action: Any) -> Any:
        self.seen = {int(action)} if self.steps == 0 else self.seen | {int(action)}
        return super().step(action)

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return self.steps >= (20 if len(self.seen) > 1 else 15), False


class EndsWithOneAction(Sound):
    """All episodes end after 20 steps, except those with action 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(2)

    def step(self, action: Any) -> Any:
        self.acted = bool(action) or (self.steps > 0 and self.acted)
        return super().step(action)

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return self.steps >= (20 if self.acted else 15), False


class LimitInInfo(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return terminated or self.steps >= 5, False

    def info(self) -> dict[str, Any]:
        return {"TimeLimit.truncated": self.steps >= 5}


class IgnoresSeed(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.place = np.random.uniform(-1.0, 1.0, 3).astype(np.float32)
        return self.observe(), {}


class IgnoresSeedZero(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed or None, options=options)


class SeedsWithConstant(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=42, options=options)


class HasOwnGenerator(Sound):
    """Draws from a generator of its own; only `__init__` draws from `np_random`."""

    def __init__(self) -> None:
        super().__init__()
        gymnasium.Env.reset(self, seed=42)
        self.np_random.random()
        self.own = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.own = np.random.default_rng(seed) if seed is not None else self.own
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 0.0, *self.flags(bool(self.own.random() < 0.1)), {}

    def observe(self) -> Any:
        return self.own.uniform(-1.0, 1.0, 3).astype(np.float32)


class TakesNoSeed(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class TakesAnyKeyword(Sound):
    def reset(self, **kw: Any) -> Any:
        return super().reset(**kw)


class UnseededSteps(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(np.random.uniform()), *rest


class SurvivesReset(Sound):
    total = 0

    def reward(self) -> Any:
        self.total += 1
        return float(self.total)


class SharesState(Sound):
    """Keeps its state in the class."""

    def step(self, action: Any) -> Any:
        if "place" in vars(self):
            SharesState.place = vars(self).pop("place")
        result = super().step(action)
        SharesState.place = vars(self).pop("place")
        return result


class GrowingInfo(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def info(self) -> dict[str, Any]:
        self.history.append(0.5)
        return {"history": list(self.history)}


class GrowingInfoInEpisodes(GrowingInfo):
    """Starts a new list in each episode. The first episode after a seed is short."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.limit = 60 if seed is None else 15
        self.history = []
        return super().reset(seed=seed)

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return False, self.steps >= self.limit


class StartsThread(Sound):
    def step(self, action: Any) -> Any:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        return super().step(action)


class StartsProcess(Sound):
    def step(self, action: Any) -> Any:
        if self.steps % 10 == 0:
            subprocess.run(["true"], check=True)
        return super().step(action)


class EndsProcess(Sound):
    """Starts a program and a process in the constructor, and ends both."""

    def __init__(self) -> None:
        super().__init__()
        self.program = subprocess.Popen(["sleep", "60"])
        self.process = multiprocessing.Process(target=time.sleep, args=(60,), daemon=True)
        self.process.start()

    def close(self) -> None:
        self.program.kill()
        self.process.kill()
        self.program.wait()


class LeavesProgram(EndsProcess):
    """Adds each process that it leaves to `left`; the test ends it."""

    left: ClassVar[list[Any]] = []

    def close(self) -> None:
        self.left.append(self.program)
        self.process.kill()


class LeavesProcess(LeavesProgram):
    def close(self) -> None:
        self.left.append(self.process)
        self.program.kill()


class Crashes(Sound):
    def step(self, action: Any) -> Any:
        if self.steps == 3:
            raise ZeroDivisionError("in the third step")
        return super().step(action)


class OldInterface(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class OldReset(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class Hangs(Sound):
    def step(self, action: Any) -> Any:
        if self.steps == 3:
            time.sleep(60)
        return super().step(action)


class ReservedKey(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"reward": self.observation_space})

    def observe(self) -> Any:
        return {"reward": self.place.copy()}


class StepsBeforeReset(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.place = 0, np.zeros(3, np.float32)


class NeverEnds(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return False, False


class SlowSteps(Sound):
    def step(self, action: Any) -> Any:
        if self.steps == 25:
            time.sleep(0.03)
        return super().step(action)


class SlowResets(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(0.008)
        return super().reset(seed=seed)


class ShortEpisodes(Sound):
    """Resets take longer than all steps together, because episodes have two steps on average."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        end = time.perf_counter() + 0.0008
        while time.perf_counter() < end:
            pass
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, bool(self.np_random.random() < 0.5), truncated, info


class SharedInfo(Sound):
    constant = np.zeros(2)

    def info(self) -> dict[str, Any]:
        return {"constant": self.constant}


class HasLock(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class SlowToReset(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(0.15)
        return super().reset(seed=seed)


class IsNoEnvWithin(Sound):
    """Like a wrapper around an environment with a foreign interface."""

    @property
    def unwrapped(self) -> Any:
        return object()


class DependsOnProcess(Sound):
    def reward(self) -> Any:
        return float(os.getpid())


class CrashesInWorker(Sound):
    def step(self, action: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            raise ZeroDivisionError("in a worker")
        return super().step(action)


class LimitAndCrash(Crashes, LimitTerminates):
    """Two faults."""


class LimitAndCrashInWorker(CrashesInWorker, LimitTerminates):
    """Two faults, of which the second is in worker processes."""


class MaskedEnv(gymnasium.Env[Any, Any]):
    """Raises for actions that its mask forbids."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(4)

    def info(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(4) == self.time % 4).astype(np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), self.info()

    def step(self, action: Any) -> Any:
        if action != self.time % 4:
            raise ValueError("illegal")
        self.time += 1
        ended = self.time >= 10 + self.np_random.integers(5)
        return np.array([self.time], np.float32), 1.0, ended, False, self.info()


class IsNoMaskedEnvWithin(MaskedEnv):
    """As `IsNoEnvWithin`, with an action mask."""

    unwrapped = IsNoEnvWithin.unwrapped


class MaskedSharedInfo(MaskedEnv):
    """Allows every action, and returns the same mask in each call."""

    mask = np.ones(4, np.int8)

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask}

    def step(self, action: Any) -> Any:
        return super().step(self.time % 4)


class ExitingEnv(Sound):
    def step(self, action: Any) -> Any:
        raise SystemExit(0)


class Prints(Sound):
    def step(self, action: Any) -> Any:
        print("a step")
        return super().step(action)
