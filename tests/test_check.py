"""The environment checker finds each fault in a faulty environment and reports no others."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from raising import refused

from pycollect import check_env
from pycollect.__main__ import main
from pycollect.check import calls, single, vector
from pycollect.check.report import FIXES, Report

SECONDS = 5.0  # more than needed: the number of steps ends a check


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MAX_STEPS", 300)
    monkeypatch.setattr(vector, "MAX_STEPS", 150)


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
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-5.0, 5.0, (1,), np.float32)

    def step(self, action: Any) -> Any:
        assert abs(action[0]) < 4.99, "too much force"
        return super().step(action[0] * 0.1 + 1)


class BothFlags(Sound):
    def flags(self, terminated: bool) -> tuple[Any, Any]:
        done = self.steps >= 7 and (terminated or self.steps >= 30)
        return done, done


class LimitTerminates(Sound):
    max_steps = 12

    def flags(self, terminated: bool) -> tuple[Any, Any]:
        return self.steps >= self.max_steps, False


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


class TakesNoSeed(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class UnseededSteps(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(np.random.uniform()), *rest


class SurvivesReset(Sound):
    total = 0

    def reward(self) -> Any:
        self.total += 1
        return float(self.total)


class GrowingInfo(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def info(self) -> dict[str, Any]:
        self.history.append(0.5)
        return {"history": list(self.history)}


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


class SharedInfo(Sound):
    constant = np.zeros(2)

    def info(self) -> dict[str, Any]:
        return {"constant": self.constant}


class HasLock(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (ReusedBuffer, "reused-buffer"),
    (ChangedLater, "changed-later"),
    (WrongDtype, "observation-dtype"),
    (WrongShape, "observation-shape"),
    (OutOfBounds, "observation-bounds"),
    (MissingEntry, "observation-space"),
    (NotANumber, "not-finite"),
    (InfiniteReward, "not-finite"),
    (TextReward, "reward-type"),
    (VectorReward, "reward-type"),
    (FlagsByAgent, "flag-type"),
    (RefusesAction, "action-space"),
    (RefusesBound, "action-space"),
    (BothFlags, "merged-flags"),
    (LimitTerminates, "merged-flags"),
    (LimitInInfo, "merged-flags"),
    (IgnoresSeed, "ignored-seed"),
    (TakesNoSeed, "ignored-seed"),
    (UnseededSteps, "non-deterministic"),
    (SurvivesReset, "non-deterministic"),
    (GrowingInfo, "growing-info"),
    (StartsThread, "starts-process"),
    (StartsProcess, "starts-process"),
    (Crashes, "crashes"),
    (OldInterface, "interface"),
    (OldReset, "interface"),
    (ReservedKey, "refused"),
]
WARNINGS: list[tuple[Callable[[], Any], str]] = [
    (IntFlags, "flag-type"),
    (EqualLengths, "merged-flags"),
    (StepsBeforeReset, "step-before-reset"),
    (SlowSteps, "slow-steps"),
    (SlowResets, "slow-reset"),
    (SharedInfo, "shared-object"),
]


def checked(env: Any, seconds: float = SECONDS, **arguments: Any) -> Report:
    report = check_env(env, seconds=seconds, **arguments)
    hangs = any(own.code == "hangs" for own in report.errors)
    assert report.skipped == [] or hangs, report
    return report


def codes(report: Report) -> tuple[list[str], list[str]]:
    return [own.code for own in report.errors], [own.code for own in report.warnings]


def test_an_environment_without_a_fault() -> None:
    report = checked(Sound)
    assert codes(report) == ([], [])
    assert report.ok
    assert report.facts["time per step"].startswith("median ")


def test_episodes_that_are_equally_long_by_chance() -> None:
    assert codes(checked(EndsAtAnObstacle)) == ([], [])


@pytest.mark.parametrize(("make", "code"), ERRORS, ids=lambda own: getattr(own, "__name__", own))
def test_a_fault_is_the_only_error(make: Callable[[], Any], code: str) -> None:
    report = checked(make)
    assert {own.code for own in report.errors} == {code}, report
    assert not report.ok
    assert all(own.fix for own in report.findings)


@pytest.mark.parametrize(("make", "code"), WARNINGS, ids=lambda own: getattr(own, "__name__", own))
def test_what_may_be_intended_is_a_warning(make: Callable[[], Any], code: str) -> None:
    assert codes(checked(make)) == ([], [code])


def test_episodes_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MAX_STEPS", 1000)
    assert codes(checked(NeverEnds)) == ([], ["no-end"])


class SlowToReset(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(0.15)
        return super().reset(seed=seed)


def test_a_slow_environment_is_checked_in_bounded_time() -> None:
    began = time.monotonic()
    report = check_env(SlowToReset, seconds=0.2)
    assert report.ok
    assert any("increase seconds" in text for text in report.skipped)
    assert time.monotonic() - began < 20


class IsNoEnvWithin(Sound):
    """Like a wrapper around an environment with a foreign interface."""

    @property
    def unwrapped(self) -> Any:
        return object()


def test_an_error_within_gymnasiums_checker_is_no_fault() -> None:
    report = check_env(IsNoEnvWithin, seconds=SECONDS)
    assert codes(report) == ([], [])
    assert [text.partition(":")[0] for text in report.skipped] == [
        "the rest of Gymnasium's check_env"
    ]


def test_a_call_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.5)
    report = checked(Hangs)
    assert codes(report)[0] == ["hangs"]
    assert "test_check.py:" in report.errors[0].message


def test_the_line_of_an_exception_is_named() -> None:
    (crash,) = checked(Crashes).errors
    line = (
        Path(__file__)
        .read_text()
        .splitlines()
        .index('            raise ZeroDivisionError("in the third step")')
    )
    assert f"test_check.py:{line + 1}" in crash.message
    assert "ZeroDivisionError: in the third step" in crash.message


def test_the_global_generator_is_named() -> None:
    (found,) = checked(UnseededSteps).errors
    assert "global generator np.random" in found.message


class Rows(VectorEnv):
    """Random walks with autoreset mode as a class attribute; each row has its own generator."""

    mode: Any = AutoresetMode.NEXT_STEP
    declared: Any = AutoresetMode.NEXT_STEP

    def __init__(self, num_envs: int = 3) -> None:
        self.metadata = {"autoreset_mode": self.declared} if self.declared else {}
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators = [np.random.default_rng(i) for i in range(num_envs)]
        self.places = np.zeros((num_envs, 2), np.float32)
        self.ended = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.generators = [np.random.default_rng(own) for own in seed]
        self.start(self.mask(options))
        return self.places.copy(), {}

    def mask(self, options: Any) -> Any:
        masked = options is not None and "reset_mask" in options
        return options["reset_mask"] if masked else np.ones(self.num_envs, bool)

    def start(self, rows: Any) -> None:
        for row in np.flatnonzero(rows):
            self.places[row] = self.generators[row].normal(size=2)
        self.ended = self.ended & ~rows

    def step(self, actions: Any) -> Any:
        resets = (
            self.ended if self.mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        )
        moved = self.places + 0.5 * actions
        self.places = np.where(resets[:, None], self.places, moved).astype(np.float32)
        self.start(resets)
        rolls = np.array([own.random() for own in self.generators]) < 0.2
        terminated, info = rolls & ~resets, {}
        self.ended = terminated
        reward = np.where(resets, 0.0, self.places.sum(1))
        if self.mode is AutoresetMode.SAME_STEP and terminated.any():
            info = self.final(self.places.copy())
            self.start(terminated)
        return self.places.copy(), reward, terminated, np.zeros(self.num_envs, bool), info

    def final(self, places: Any) -> dict[str, Any]:
        return {"final_obs": places}


class SameStepRows(Rows):
    mode = declared = AutoresetMode.SAME_STEP


class DisabledRows(Rows):
    mode = declared = AutoresetMode.DISABLED


class UndeclaredMode(Rows):
    declared = None


class SaysNextStep(SameStepRows):
    declared = AutoresetMode.NEXT_STEP


class SaysNextStepInSilence(SaysNextStep):
    def final(self, places: Any) -> dict[str, Any]:
        return {}


class SaysDisabled(SameStepRows):
    declared = AutoresetMode.DISABLED


class NeverResets(DisabledRows):
    declared = AutoresetMode.NEXT_STEP


class NoFinal(SameStepRows):
    def final(self, places: Any) -> dict[str, Any]:
        return {}


class IgnoresMask(DisabledRows):
    def mask(self, options: Any) -> Any:
        return np.ones(self.num_envs, bool)


class ColumnRewards(Rows):
    def step(self, actions: Any) -> Any:
        observation, reward, *rest = super().step(actions)
        return observation, reward[:2], *rest


class ReturnsItsBuffer(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros((3, 2), np.float32)

    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        self.buffer[:] = observation
        return self.buffer, *rest


class EqualRows(Rows):
    def step(self, actions: Any) -> Any:
        return super().step(np.repeat(actions[:1], self.num_envs, 0))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=[0] * self.num_envs, options=None)


class IgnoresSeeds(Rows):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(options=options)


class TwiceTheSame(SyncVectorEnv):
    def __init__(self) -> None:
        env = Sound()
        super().__init__([lambda: env] * 2)


@pytest.mark.parametrize("make", [Rows, SameStepRows, DisabledRows])
def test_vector_environments_without_a_fault(make: Callable[[], Any]) -> None:
    assert codes(checked(make)) == ([], [])


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (UndeclaredMode, "autoreset-mode"),
        (SaysNextStep, "autoreset-mode"),
        (SaysNextStepInSilence, "autoreset-mode"),
        (SaysDisabled, "autoreset-mode"),
        (NeverResets, "autoreset-mode"),
        (NoFinal, "final-observation"),
        (IgnoresMask, "reset-mask"),
        (ColumnRewards, "reward-type"),
        (EqualRows, "same-rows"),
        (IgnoresSeeds, "ignored-seed"),
        (TwiceTheSame, "same-instance"),
    ],
)
def test_a_fault_of_a_vector_environment(make: Callable[[], Any], code: str) -> None:
    report = checked(make)
    assert {own.code for own in report.errors} == {code}, report


def test_a_vector_environment_may_reuse_its_buffer() -> None:
    assert codes(checked(ReturnsItsBuffer)) == ([], ["reused-buffer"])


def test_a_mode_that_is_passed_need_not_be_declared() -> None:
    assert checked(UndeclaredMode, autoreset_mode="NextStep").ok


class TensorRows(SameStepRows):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return torch.from_numpy(observation), info

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        observation, *rest, info = super().step(actions.numpy())
        final = {key: torch.from_numpy(own) for key, own in info.items()}
        return torch.from_numpy(observation), *map(torch.from_numpy, rest), final


class TensorsWithNaN(TensorRows):
    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        observation[1, 0] = torch.nan
        return observation, *rest


def test_environments_of_tensors() -> None:
    assert codes(checked(TensorRows)) == ([], [])
    assert {own.code for own in checked(TensorsWithNaN).errors} == {"not-finite"}


def test_environments_of_torchrl() -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    assert codes(checked(partial(GymEnv, "CartPole-v1"))) == ([], [])


def test_specs_of_torchrl_that_are_wrong() -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    class WrongSpec(GymEnv):
        def _step(self, tensordict: Any) -> Any:
            result = super()._step(tensordict)
            result["observation"] = result["observation"].double()
            return result

    assert codes(checked(partial(WrongSpec, "CartPole-v1")))[0] == ["specs"]


class DependsOnProcess(Sound):
    def reward(self) -> Any:
        return float(os.getpid())


@pytest.mark.processes
def test_a_worker_process() -> None:
    assert codes(checked(Sound, worker=True)) == ([], [])
    assert codes(checked(DependsOnProcess, worker=True))[0] == ["differs-in-worker"]


class CrashesInWorker(Sound):
    def step(self, action: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            raise ZeroDivisionError("in a worker")
        return super().step(action)


@pytest.mark.processes
def test_an_exception_in_a_worker_process() -> None:
    (crash,) = checked(CrashesInWorker, worker=True).errors
    assert crash.code == "crashes"
    assert "in a worker process" in crash.message
    assert "test_check.py:" in crash.message


def test_an_instance() -> None:
    assert codes(checked(Sound())) == ([], [])
    (found,) = checked(HasLock()).findings
    assert (found.code, found.severity) == ("not-picklable", "warning")
    assert "environment.lock" in found.message


def test_a_factory_that_cannot_be_pickled() -> None:
    lock = threading.Lock()

    def make() -> Any:
        with lock:
            return Sound()

    (found,) = checked(make).findings
    assert (found.code, found.severity) == ("not-picklable", "error")
    assert "variable 'lock'" in found.message


def test_a_factory_of_one_instance() -> None:
    env = Sound()
    report = checked(lambda: env)
    assert codes(report)[0] == ["same-instance"]


def test_a_list_is_stepped_as_a_batch() -> None:
    assert checked([Sound, Sound]).ok
    env = Sound()
    assert codes(checked([lambda: env, lambda: env]))[0] == ["same-instance"]
    assert codes(checked([Sound, ReservedKey]))[0] == ["refused"]


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "Acrobot-v1",
        "MountainCar-v0",
        "MountainCarContinuous-v0",
        "FrozenLake-v1",
        "Taxi-v4",
        "Blackjack-v1",
        "CliffWalking-v1",
    ],
)
def test_no_false_alarm(name: str) -> None:
    if name not in gymnasium.registry:
        pytest.skip("another version of Gymnasium")
    assert codes(checked(name)) == ([], [])


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("how", ["sync", "vector_entry_point"])
def test_no_false_alarm_for_vector_environments(mode: AutoresetMode, how: str) -> None:
    kwargs = {"vector_kwargs": {"autoreset_mode": mode}}
    if how == "vector_entry_point":
        if mode is not AutoresetMode.NEXT_STEP:
            pytest.skip("CartPoleVectorEnv has one mode")
        kwargs = {}
    make = partial(gymnasium.make_vec, "CartPole-v1", 3, vectorization_mode=how, **kwargs)
    assert codes(checked(make)) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "LunarLander-v3", "CarRacing-v3"]
)
def test_no_false_alarm_with_more_packages(name: str) -> None:
    try:
        gymnasium.make(name).close()
    except gymnasium.error.DependencyNotInstalled as error:
        pytest.skip(str(error))
    assert codes(checked(name)) == ([], [])


@pytest.mark.slow
@pytest.mark.processes
def test_no_false_alarm_for_vector_environments_of_processes() -> None:
    make = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="async")
    assert codes(checked(make)) == ([], [])


def test_arguments() -> None:
    with refused(TypeError, "env"):
        check_env(3)
    with refused(ValueError, "env"):
        check_env("NoSuchEnvironment-v0")
    with refused(TypeError, "seconds"):
        check_env(Sound, seconds="1")  # type: ignore[arg-type]
    with refused(ValueError, "seconds"):
        check_env(Sound, seconds=0)
    with refused(ValueError, "autoreset_mode"):
        check_env(Sound, autoreset_mode="sometimes")
    with refused(TypeError, "ignore"):
        check_env(Sound, ignore="crashes")
    with refused(ValueError, "ignore"):
        check_env(Sound, ignore=["crash"])


def test_findings_can_be_ignored() -> None:
    assert checked(LimitTerminates, ignore=["merged-flags"]).ok


def test_the_report_is_readable() -> None:
    text = str(checked(OutOfBounds))
    assert text.startswith("OutOfBounds: 1 error\n")
    assert "\n    fix: Clip the observation, or widen low and high of the space.\n" in text
    assert "at [0], which is above the space's 10.0" in " ".join(text.split())


def test_every_code_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "check.md").read_text()
    assert [code for code in FIXES if f"| `{code}` |" not in page] == []


MODULE = """
import gymnasium, test_check
gymnasium.register("PycollectTests/Sound-v0", test_check.Sound)
gymnasium.register("PycollectTests/WrongDtype-v0", test_check.WrongDtype)
"""


@pytest.mark.parametrize(
    ("name", "more", "code"),
    [
        ("Sound", [], 0),
        ("Sound", ["--vector", "2"], 0),
        ("WrongDtype", [], 1),
        ("WrongDtype", ["--ignore", "observation-dtype"], 0),
    ],
)
def test_the_command(
    name: str,
    more: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "registers_for_check.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    arguments = [f"PycollectTests/{name}-v0", "--module", "registers_for_check", "--seconds", "5"]
    try:
        assert main(["check", *arguments, *more]) == code
    finally:
        for own in ("Sound", "WrongDtype"):
            gymnasium.registry.pop(f"PycollectTests/{own}-v0", None)
        sys.modules.pop("registers_for_check", None)
    text = capsys.readouterr().out
    assert f"PycollectTests/{name}-v0: {'1 error' if code else ''}" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["NoSuchEnvironment-v0"], "env: "),
        (["CartPole-v1", "--module", "no_such_module"], "--module: "),
        (["CartPole-v1", "--vector", "0"], "--vector: "),
        (["CartPole-v1", "--seconds", "-1"], "seconds: "),
    ],
)
def test_arguments_of_the_command(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


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


def test_an_action_mask_is_no_fault() -> None:
    report = check_env(MaskedEnv, seconds=1)
    assert report.ok
    assert report.skipped


class ExitingEnv(MaskedEnv):
    def step(self, action: Any) -> Any:
        raise SystemExit(0)


def test_an_environment_that_ends_the_program_crashes() -> None:
    report = check_env(ExitingEnv, seconds=1)
    assert [finding.code for finding in report.errors] == ["crashes"]
