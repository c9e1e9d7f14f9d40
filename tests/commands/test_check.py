"""The environment checker finds each fault in a faulty environment and reports no others."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import faulty_envs as envs
import faulty_vector_envs as vectors
import gymnasium
import pytest
import torch
from faulty_envs import LimitTerminates, Sound
from gymnasium.vector import AutoresetMode
from raising import refused

from pycollect import check_env
from pycollect.__main__ import main
from pycollect.check import calls, collecting, single, vector, walk
from pycollect.check.report import FIXES, Report

SECONDS = 5.0  # more than needed: the number of steps ends a check


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MAX_STEPS", 300)
    monkeypatch.setattr(vector, "MAX_STEPS", 150)


def checked(env: Any, seconds: float = SECONDS, **arguments: Any) -> Report:
    report = check_env(env, seconds=seconds, **arguments)
    hangs = any(own.code == "hangs" for own in report.errors)
    assert report.skipped == [] or hangs, report
    return report


def codes(report: Report) -> tuple[list[str], list[str]]:
    return [own.code for own in report.errors], [own.code for own in report.warnings]


def gym_env() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


def wrong_spec() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    class WrongSpec(GymEnv):
        def _step(self, tensordict: Any) -> Any:
            result = super()._step(tensordict)
            result["observation"] = result["observation"].double()
            return result

    return WrongSpec("CartPole-v1")


def vec(mode: AutoresetMode, how: str = "sync") -> Any:
    kwargs = {"vector_kwargs": {"autoreset_mode": mode}} if how != "vector_entry_point" else {}
    return partial(gymnasium.make_vec, "CartPole-v1", 3, vectorization_mode=how, **kwargs)


SOUND: dict[str, Any] = {
    "env": Sound,
    "instance": Sound(),
    "list": [Sound, Sound],
    "equal lengths by chance": envs.EndsAtAnObstacle,
    "equal lengths with most actions": envs.EndsWithOneAction,
    "keywords": envs.TakesAnyKeyword,
    "ends its processes": envs.EndsProcess,
    "next-step": vectors.Rows,
    "costs of actions": vectors.CostsOfActions,
    "same-step": vectors.SameStepRows,
    "disabled": vectors.DisabledRows,
    "tensors": vectors.TensorRows,
    "torchrl": gym_env,
    "CartPoleVectorEnv": vec(AutoresetMode.NEXT_STEP, "vector_entry_point"),
    **{f"sync {mode.value}": vec(mode) for mode in AutoresetMode},
}
IDS = [
    *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"),
    *("FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"),
]
SLOW_IDS = ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "LunarLander-v3", "CarRacing-v3"]
ERRORS: dict[str, Sequence[Any]] = {
    "action-space": [envs.RefusesAction, envs.RefusesBound, envs.RefusesHalf],
    "autoreset-mode": [
        vectors.UndeclaredMode,
        vectors.SaysNextStep,
        vectors.SaysNextStepInSilence,
        vectors.SaysNextStepAndShowsNothing,
        vectors.SaysDisabled,
        vectors.NeverResets,
    ],
    "changed-later": [envs.ChangedLater],
    "crashes": [envs.Crashes, envs.ExitingEnv],
    "final-observation": [vectors.NoFinal],
    "flag-type": [envs.FlagsByAgent],
    "growing-info": [envs.GrowingInfo, envs.GrowingInfoInEpisodes],
    "ignored-seed": [
        envs.IgnoresSeed,
        envs.IgnoresSeedZero,
        envs.SeedsWithConstant,
        envs.TakesNoSeed,
        vectors.IgnoresSeeds,
    ],
    "interface": [envs.OldInterface, envs.OldReset],
    "merged-flags": [envs.BothFlags, LimitTerminates, envs.LimitAndGoalTerminate, envs.LimitInInfo],
    "non-deterministic": [
        envs.UnseededSteps,
        envs.SurvivesReset,
        envs.SharesState,
        vectors.KeepsEnds,
    ],
    "not-finite": [envs.NotANumber, envs.InfiniteReward, vectors.TensorsWithNaN],
    "observation-bounds": [envs.OutOfBounds],
    "observation-dtype": [envs.WrongDtype],
    "observation-shape": [envs.WrongShape],
    "observation-space": [envs.MissingEntry],
    "refused": [envs.ReservedKey, [Sound, envs.ReservedKey]],
    "reset-mask": [vectors.IgnoresMask],
    "reused-buffer": [envs.ReusedBuffer, envs.ReusedBuffers],
    "reward-type": [envs.TextReward, envs.NoReward, envs.VectorReward, vectors.ColumnRewards],
    "same-instance": [vectors.TwiceTheSame],
    "same-rows": [vectors.EqualRows],
    "specs": [wrong_spec],
    "starts-process": [envs.StartsThread, envs.StartsProcess],
}
WARNINGS: dict[str, Sequence[Any]] = {
    "flag-type": [envs.IntFlags],
    "merged-flags": [envs.EqualLengths],
    "reused-buffer": [vectors.ReturnsItsBuffer],
    "shared-object": [envs.SharedInfo],
    "slow-reset": [envs.SlowResets],
    "slow-steps": [envs.SlowSteps],
    "step-before-reset": [envs.StepsBeforeReset],
}


def cases(makers: Mapping[str, Sequence[Any]]) -> Any:
    return pytest.mark.parametrize(
        ("make", "code"),
        [(make, code) for code, several in makers.items() for make in several],
        ids=lambda own: getattr(own, "__name__", own if isinstance(own, str) else "list"),
    )


def test_an_environment_may_have_its_own_generator() -> None:
    assert codes(checked(envs.HasOwnGenerator))[0] == []


@pytest.mark.parametrize("env", SOUND.values(), ids=SOUND)
def test_no_false_alarm(env: Any) -> None:
    report = checked(env)
    assert codes(report) == ([], [])
    assert report.ok


@pytest.mark.parametrize(
    "name", [*IDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_IDS)]
)
def test_no_false_alarm_for_an_id(name: str) -> None:
    try:
        gymnasium.make(name).close()
    except gymnasium.error.Error as error:  # another version, or a package is not installed
        pytest.skip(str(error))
    assert codes(checked(name)) == ([], [])


def test_no_false_alarm_for_many_quick_resets() -> None:
    assert codes(checked(envs.ShortEpisodes)) == ([], [])


@pytest.mark.slow
@pytest.mark.processes
def test_no_false_alarm_for_vector_environments_of_processes() -> None:
    assert codes(checked(vec(AutoresetMode.NEXT_STEP, "async"))) == ([], [])


@cases(ERRORS)
def test_a_fault_is_the_only_error(make: Any, code: str) -> None:
    report = checked(make)
    assert {own.code for own in report.errors} == {code}, report
    assert not report.ok
    assert all(own.fix for own in report.findings)


@pytest.mark.parametrize(
    ("make", "code"), [(envs.ReusedBuffer, "reused-buffer"), (envs.OldInterface, "interface")]
)
def test_a_fault_of_a_registered_environment(make: Any, code: str) -> None:
    name = "PycollectTests/Faulty-v0"
    gymnasium.register(name, make, max_episode_steps=20)
    try:
        report = check_env(name, seconds=SECONDS)
    finally:
        del gymnasium.registry[name]
    assert [own.code for own in report.errors] == [code]


@cases(WARNINGS)
def test_a_possibly_intended_behavior_is_a_warning(make: Any, code: str) -> None:
    assert codes(checked(make)) == ([], [code])


@pytest.mark.parametrize("make", [envs.LeavesProgram, envs.LeavesProcess])
def test_processes_that_still_run_after_close(make: Any) -> None:
    try:
        (found,) = checked(make).findings
    finally:
        for process in envs.LeavesProgram.left:
            process.kill()
        envs.LeavesProgram.left.clear()
    assert (found.code, found.severity) == ("leaves-process", "warning")
    assert "faulty_envs.py:" in found.message


def test_times_are_facts() -> None:
    assert checked(Sound).facts["time per step"].startswith("median ")


def test_episodes_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MAX_STEPS", 1000)
    assert codes(checked(envs.NeverEnds)) == ([], ["no-end"])


def test_a_slow_environment_is_checked_in_bounded_time() -> None:
    began = time.monotonic()
    report = check_env(envs.SlowToReset, seconds=0.2)
    assert report.ok
    assert any("increase seconds" in text for text in report.skipped)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("make", [envs.IsNoEnvWithin, envs.IsNoMaskedEnvWithin])
def test_an_error_within_gymnasiums_checker_is_not_a_fault(make: Any) -> None:
    report = check_env(make, seconds=SECONDS)
    assert codes(report) == ([], [])
    skipped = [text.partition(":")[0] for text in report.skipped]
    assert [name for name in skipped if name != "collecting"] == [
        "the rest of Gymnasium's check_env"
    ]


def test_a_package_that_only_gymnasiums_checker_needs_is_not_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs_package(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'array_api_compat'")

    monkeypatch.setattr(collecting, "check_env", needs_package)
    report = check_env(Sound, seconds=SECONDS)
    assert codes(report) == ([], [])
    (skipped,) = report.skipped
    assert skipped.startswith("the rest of Gymnasium's check_env:")
    assert "'array_api_compat'" in skipped


def test_a_call_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.5)
    report = checked(envs.Hangs)
    assert codes(report)[0] == ["hangs"]
    assert "faulty_envs.py:" in report.errors[0].message


def test_the_line_of_an_exception_is_named() -> None:
    (crash,) = checked(envs.Crashes).errors
    line = (
        Path(envs.__file__)
        .read_text()
        .splitlines()
        .index('            raise ZeroDivisionError("in the third step")')
    )
    assert f"faulty_envs.py:{line + 1}" in crash.message
    assert "ZeroDivisionError: in the third step" in crash.message


def test_the_global_generator_is_named() -> None:
    (found,) = checked(envs.UnseededSteps).errors
    assert "global generator np.random" in found.message


def test_a_mode_that_is_passed_need_not_be_declared() -> None:
    assert checked(vectors.UndeclaredMode, autoreset_mode="NextStep").ok


@pytest.mark.processes
def test_equal_batches_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    assert codes(checked(Sound, worker=True)) == ([], [])


@pytest.mark.processes
def test_a_worker_process() -> None:
    assert codes(checked(Sound, worker=True)) == ([], [])
    assert codes(checked(envs.DependsOnProcess, worker=True))[0] == ["differs-in-worker"]


@pytest.mark.processes
def test_an_exception_in_a_worker_process() -> None:
    (crash,) = checked(envs.CrashesInWorker, worker=True).errors
    assert crash.code == "crashes"
    assert "in a worker process" in crash.message
    assert "faulty_envs.py:" in crash.message


def test_an_instance_that_cannot_be_pickled() -> None:
    (found,) = checked(envs.HasLock()).findings
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


@pytest.mark.parametrize("is_list", [False, True])
def test_a_factory_of_one_instance(is_list: bool) -> None:
    env = Sound()
    report = checked([lambda: env] * 2 if is_list else lambda: env)
    assert codes(report)[0] == ["same-instance"]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TypeError, "env", 3),
        (ValueError, "env", "NoSuchEnvironment-v0"),
        (TypeError, "seconds", "1"),
        (ValueError, "seconds", 0),
        (ValueError, "autoreset_mode", "sometimes"),
        (TypeError, "ignore", "crashes"),
        (ValueError, "ignore", ["crash"]),
    ],
)
def test_arguments(kind: type[Exception], name: str, value: Any) -> None:
    with refused(kind, name):
        check_env(**{"env": Sound, name: value})


def test_an_ignored_finding_is_left_out_and_nothing_else_changes() -> None:
    report, shorter = checked(LimitTerminates), checked(LimitTerminates, ignore=["merged-flags"])
    assert shorter.ok
    assert shorter.findings == [own for own in report.findings if own.code != "merged-flags"]
    assert shorter.facts.keys() == report.facts.keys()


def test_a_crash_in_the_collector_is_found_despite_an_ignored_error() -> None:
    made = itertools.count()

    def make() -> Any:  # the third instance is the collector's
        return LimitTerminates() if next(made) < 2 else envs.LimitAndCrash()

    assert codes(checked(make, ignore=["merged-flags"]))[0] == ["crashes"]


@pytest.mark.processes
def test_a_crash_in_a_worker_is_found_despite_an_ignored_error() -> None:
    report = checked(envs.LimitAndCrashInWorker, worker=True, ignore=["merged-flags"])
    assert codes(report)[0] == ["crashes"]


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (envs.Crashes, "crashes"),
        (envs.RefusesHalf, "action-space"),
        (envs.ReservedKey, "refused"),
        ([Sound, envs.ReservedKey], "refused"),
        (lambda: 3, "refused"),
    ],
)
def test_checks_that_an_ignored_error_ended_are_noted(make: Any, code: str) -> None:
    # `RefusesHalf` has the ignored error only if there is time to try the ends of its action space.
    report = check_env(make, seconds=100 * SECONDS, ignore=[code])
    assert report.ok
    assert report.skipped
    assert all("an ignored error" in text for text in report.skipped)


@pytest.mark.parametrize("env", [LimitTerminates, Sound(), [Sound, Sound]])
def test_a_worker_that_cannot_be_checked_is_noted(env: Any) -> None:
    (text,) = check_env(env, seconds=SECONDS, worker=True).skipped
    assert text.startswith("a worker process: ")


def test_steps_may_take_no_measurable_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the time without CPU may be as long as the step."""

    def timed(seconds: list[float], call: Callable[[], Any]) -> Any:
        seconds.append(0.0)
        return call()

    monkeypatch.setattr(walk, "timed", timed)
    assert checked(Sound).ok


def test_the_report_is_readable() -> None:
    text = str(checked(envs.OutOfBounds))
    assert text.startswith("OutOfBounds: 1 error\n")
    assert "\n    fix: Clip the observation, or widen low and high of the space.\n" in text
    assert "at [0], which is above the space's 10.0" in " ".join(text.split())


def test_every_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    assert [code for code in FIXES if f"| `{code}` |" not in page] == []


@pytest.fixture
def registered() -> Iterator[None]:
    """Ids of environments that the command can check."""
    makers = (Sound, LimitTerminates, envs.WrongDtype, envs.Prints)
    for make in makers:
        gymnasium.register(f"PycollectTests/{make.__name__}-v0", make)
    yield
    for make in makers:
        del gymnasium.registry[f"PycollectTests/{make.__name__}-v0"]


def test_the_command_imports_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    name = "PycollectTests/OfModule-v0"
    (tmp_path / "registers_for_check.py").write_text(
        f"import gymnasium\ngymnasium.register({name!r}, 'made_for_check:Made')\n"
    )
    (tmp_path / "made_for_check.py").write_text(
        "import sys, faulty_envs\n"
        "assert 'registers_for_check' in sys.modules  # also in the worker process\n"
        "class Made(faulty_envs.Sound): ...\n"
    )
    try:
        assert main(["check", name, "--module", "registers_for_check"]) == 0
    finally:
        gymnasium.registry.pop(name, None)
        for module in ("registers_for_check", "made_for_check"):
            sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("name", "before", "after", "code"),
    [
        ("Sound", [], [], 0),
        ("Sound", [], ["--vector", "2"], 0),
        ("WrongDtype", [], [], 1),
        ("WrongDtype", [], ["--ignore", "observation-dtype"], 0),
        ("WrongDtype", ["--ignore", "observation-dtype"], [], 0),
        ("WrongDtype", ["--ignore", "crashes"], ["--ignore", "observation-dtype"], 0),
        ("WrongDtype", [], ["--ignore", "crashes"], 1),
    ],
)
@pytest.mark.usefixtures("registered")
def test_the_command(
    name: str, before: list[str], after: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    env = f"PycollectTests/{name}-v0"
    assert main(["check", *before, env, *after]) == code
    assert f"{env}: {'1 error' if code else ''}" in capsys.readouterr().out


@pytest.mark.usefixtures("registered")
def test_the_command_writes_json(capfd: pytest.CaptureFixture[str]) -> None:
    main(["check", "PycollectTests/Prints-v0", "--json", "--vector", "2"])
    main(["check", "PycollectTests/WrongDtype-v0", "--json"])
    alone, several, wrong = map(json.loads, capfd.readouterr().out.splitlines())
    assert alone == {"environment": "PycollectTests/Prints-v0", "findings": [], "not_checked": []}
    assert several["environment"] == "PycollectTests/Prints-v0, 2 environments"
    (found,) = wrong["findings"]
    assert (found["code"], found["severity"]) == ("observation-dtype", "error")
    assert found.keys() == {"code", "severity", "message", "fix"}


@pytest.mark.parametrize(
    "end", ["os._exit(0)", pytest.param("os.kill(os.getpid(), 11)", marks=pytest.mark.slow)]
)
def test_an_environment_that_ends_the_process(end: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import gymnasium, os\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Ends(CartPoleEnv):\n"
        f"    def step(self, action): {end}\n"
        "gymnasium.register('PycollectTests/Ends-v0', Ends)\n"
    )
    command = [sys.executable, "-m", "pycollect", "check", "PycollectTests/Ends-v0", "--json"]
    ended = subprocess.run(
        [*command, "--module", "ends"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    (found,) = json.loads(ended.stdout)["findings"]
    assert (found["code"], found["severity"]) == ("crashes", "error")
    assert ("ends.py" in ended.stderr) == ("kill" in end)  # the line of a fatal signal


@pytest.mark.slow  # a new process imports torch
def test_a_report_that_cannot_be_printed_is_not_a_fault_of_the_environment() -> None:
    command = [sys.executable, "-m", "pycollect", "check", "CartPole-v1", "--seconds", "0.1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["NoSuchEnvironment-v0"], "env: "),
        (["CartPole-v1", "--module", "no_such_module"], "--module: "),
        (["CartPole-v1", "--module", "exits"], "--module: "),
        (["CartPole-v1", "--vector", "0"], "--vector: "),
        (["CartPole-v1", "--seconds", "-1"], "seconds: "),
        (["--ignore", "no-such-code", "CartPole-v1"], "ignore: "),
    ],
)
def test_arguments_of_the_command(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_an_action_mask_is_not_a_fault() -> None:
    report = check_env(envs.MaskedEnv, seconds=1)
    assert report.ok
    assert report.skipped
    shared = check_env(envs.MaskedSharedInfo, seconds=1)
    assert codes(shared) == ([], ["shared-object"])
