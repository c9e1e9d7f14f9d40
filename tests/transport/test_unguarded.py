"""A worker refuses to import a module that starts workers at import."""

from __future__ import annotations

import importlib
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collect_support import ACTORS, MULTI_ASYNC, MULTI_STACK, NEST_STACK, STACK, Way, marked
from envs_for_tests import CountingEnv
from scheme_support import RESOURCES, on_policy

from pycollect import AsyncBatchedCollector, Evaluator, MultiSyncDataCollector
from pycollect.scheme import CWorkerSet
from pycollect.scheme.gym import GymEnvs
from pycollect.transport import worker_process as guard

MODULE = "unguarded"
GUARD = "__main__"
LONG = 300.0

Start = Callable[[Any, Any, Any], None]


def collect(way: Way, env: Any, policy: Any, hook: Any, **arguments: Any) -> None:
    """Collect one batch with this collector."""
    entries = [[env]] * way.workers if way.name.endswith("nests") else [env] * way.workers
    with way.collector(entries, policy(), frames_per_batch=8, **arguments) as collector:
        collector.next()


def collect_elsewhere(env: Any, policy: Any, hook: Any) -> None:
    """Collect one batch with an environment from another module."""
    with MultiSyncDataCollector([CountingEnv], frames_per_batch=8) as collector:
        collector.next()


STARTS: list[Start] = [collect_elsewhere]
"""The last one starts workers when the module is imported; in a worker it is the only one."""


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(guard, "_is_worker", False)  # another test may have built a worker here
    yield
    sys.modules.pop(MODULE, None)
    del STARTS[1:]


def check_refused(start: Start) -> None:
    STARTS.append(start)
    with pytest.raises(Exception, match=GUARD) as caught:
        importlib.import_module(MODULE)
    assert MODULE in str(caught.value)


@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[1], STACK, NEST_STACK))
def test_a_module_that_is_imported_is_refused_by_its_workers(way: Way) -> None:
    check_refused(partial(collect, way))


@pytest.mark.slow
@pytest.mark.processes
def test_spawned_workers_refuse() -> None:
    check_refused(partial(collect, MULTI_STACK, start_method="spawn"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["policy_process", "policy_factory", "pre_collect_hook", "factory_of_envs"]
)
def test_a_module_imported_for_a_policy_hook_or_factory_is_refused(name: str) -> None:
    """The worker imports the module for a policy, a hook or a factory, not for its environment."""

    def start(env: Any, policy: Any, hook: Any) -> None:
        given: dict[str, dict[str, Any]] = {
            "policy_process": {"policy": policy(), "inference": "central", "prefetch": 1},
            "policy_factory": {"policy_factory": policy},
            "pre_collect_hook": {"pre_collect_hook": hook},
            "factory_of_envs": {},
        }
        way = MULTI_ASYNC[1] if name == "policy_process" else MULTI_STACK
        entry = ImportingEnv if name == "factory_of_envs" else CountingEnv
        arguments = given[name]
        with way.collector(
            [entry] * 2, arguments.pop("policy", None), frames_per_batch=8, **arguments
        ) as collector:
            collector.next()

    check_refused(start)


class ImportingEnv(CountingEnv):
    """An environment that imports the module in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module(MODULE)


class LateEnv(CountingEnv):
    """An environment that imports the module in its reset."""

    def reset(self, **arguments: Any) -> Any:
        importlib.import_module(MODULE)
        return super().reset(**arguments)


@pytest.mark.processes
def test_an_environment_that_imports_the_module_in_a_reset() -> None:
    check_refused(lambda *_: collect_in(LateEnv))


def collect_in(env: Any) -> None:
    with MultiSyncDataCollector([env], frames_per_batch=8) as collector:
        assert len(collector.next()) == 1


@pytest.mark.processes
@pytest.mark.slow
def test_a_hook_that_is_set_later() -> None:
    def start(env: Any, policy: Any, hook: Any) -> None:
        with MultiSyncDataCollector([CountingEnv], frames_per_batch=8) as collector:
            collector.pre_collect_hook = hook
            collector.next()

    check_refused(start)


@pytest.mark.processes
@pytest.mark.slow
def test_batches_of_single_frames() -> None:
    def start(env: Any, policy: Any, hook: Any) -> None:
        with AsyncBatchedCollector(
            [env] * 2, policy=policy(), frames_per_batch=8, env_backend="multiprocessing"
        ) as collector:
            next(iter(collector))

    check_refused(start)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("process", marks=pytest.mark.processes),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_an_evaluator(backend: str) -> None:
    def start(env: Any, policy: Any, hook: Any) -> None:
        options = {"ray_kwargs": {"num_cpus": 1, "memory": 1024**3}} if backend == "ray" else {}
        evaluator = Evaluator(env, policy(), num_trajectories=1, backend=backend, **options)
        evaluator.shutdown()

    check_refused(start)


def envs_of(env: Any, *place: Any) -> GymEnvs:
    return GymEnvs([env], *place)


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_the_scheme(ray_cluster: Any) -> None:
    def start(env: Any, policy: Any, hook: Any) -> None:
        components = {**on_policy(), "train_envs_factory": partial(envs_of, env)}
        CWorkerSet(2, 0, local_device="cpu", worker_remote_config=RESOURCES, **components).stop()

    check_refused(start)


class MakingEnv(CountingEnv):
    """An environment that runs a collector in its constructor, first reset and first step."""

    def __init__(self) -> None:
        super().__init__()
        self._collected: set[str] = set()
        self._collect_once("constructor")

    def _collect_once(self, where: str) -> None:
        if where not in self._collected:
            self._collected.add(where)
            collect_in(CountingEnv)

    def reset(self, **arguments: Any) -> Any:
        self._collect_once("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self._collect_once("step")
        return super().step(action)


@pytest.mark.processes
def test_an_environment_may_have_workers_of_its_own() -> None:
    collect_in(MakingEnv)


SCRIPT = """
import os, sys, threading
import psutil
from envs_for_tests import CountingEnv
from pycollect import MultiSyncDataCollector

class Env(CountingEnv):
    pass

def collect():
    MultiSyncDataCollector([Env, Env], frames_per_batch=8, start_method=sys.argv[1]).next()

if __name__ == "__main__":
    import train
elif __name__ == "train":
    with open("log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    if os.path.getsize("log") < 200:
        threading.Thread(target=collect).start() if "thread" in sys.argv else collect()
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_threads_that_its_import_starts_are_refused_in_workers(
    tmp_path: Path, start_method: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "train.py", start_method, "thread"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert result.returncode == 0
    assert len((tmp_path / "log").read_text().split()) <= 1 + ACTORS


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_launcher_ends_with_the_error(tmp_path: Path, start_method: str) -> None:
    """The launcher starts only its own two workers; a preloaded module starts none."""
    (tmp_path / "train.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "train.py", start_method],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert result.returncode == 1
    assert GUARD in result.stderr.strip().splitlines()[-1]
    assert len((tmp_path / "log").read_text().split()) <= 1 + ACTORS


@pytest.mark.processes
@pytest.mark.slow
def test_a_template_that_preloads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.forkserver._forkserver._preload_modules
    multiprocessing.set_forkserver_preload([*before, MODULE])
    try:
        check_refused(partial(collect, MULTI_STACK))
    finally:
        multiprocessing.set_forkserver_preload(before)
