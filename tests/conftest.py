"""One Ray for the whole session, and a watch over what each test leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

HAS_TORCH = find_spec("torch") is not None
HERE = str(Path(__file__).parent)
_PR_SET_CHILD_SUBREAPER = 36
_LEAK_SECONDS = 15.0
_SHARED = Path("/dev/shm")
_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

# Ray's processes come and go by themselves; an actor of ours that stays is called ray::RayWorker
# or, after a fork, has no title of Ray's own.
_RAYS_OWN = ("ray::IDLE", "ray::Dashboard", "ray::RuntimeEnv", "default_worker.py", "/ray/")

# Python's own helper, which ends with this process: tqdm's lock starts it where TorchRL's import
# has changed the start method.
_PYTHONS_OWN = ("multiprocessing.resource_tracker",)

# Of multiprocessing, likewise; who was forked from it has its title, and another parent.
_FORK_SERVER = "multiprocessing.forkserver"

# What worker processes are forks of, which ends with this process, or has no worker for a minute.
_TEMPLATE = "pyc-fork-server"

# Threads that live as long as this process: of Ray, of multiprocessing (hands files over), of tqdm.
_LASTING_THREADS = ("PythonGCThread", "ray_", "(_serve)", "tqdm_monitor")

# Ray's store; semaphores of other programs' multiprocessing; files that CUDA removes when a process
# ends.
_OTHERS_NAMES = ("plasma", "sem.mp-", "cuda.shm.")


# tensordict looks for pandas with each dictionary that it takes, on all of the path where there is
# none: a sixth of the time of tests that step TorchRL's environments.
if find_spec("pandas") is None:
    sys.modules["pandas"] = None  # type: ignore[assignment] # as Python says: there is none


def pytest_configure(config: pytest.Config) -> None:
    # A descendant whose parent has died stays our descendant, so that it is found.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # For processes of Gymnasium and TorchRL: a fork of this one can stop the threads of Ray in it
    # for good, and what is spawned imports for seconds. A server that has imported all is forked.
    multiprocessing.set_start_method("forkserver")
    # So do templates of ours import all that a worker needs to find a test's functions.
    preload = ["gymnasium", "torchrl.collectors", "hypothesis", "pytest"]
    multiprocessing.set_forkserver_preload(preload)
    if HAS_TORCH:
        import torch

        # Threads that wait for each other over a few numbers take five times the time of one.
        torch.set_num_threads(1)
        from pycollect.transport.processes import fork_server as forking

        forking._IDLE_SECONDS = 600.0  # between tests with workers there are minutes of others
    # Inductor's processes that compile beside this one would outlive the test that started them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Ray's workers are nice, so that they would wait for all tests that run beside theirs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A shell that starts this in its background has SIGINT ignored, which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers import the tests' environments by name.
    paths = [HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What all tests import stays: nothing looks for garbage in it, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where there is no torch, the core's tests alone."""
    is_own = collection_path == Path(HERE) or collection_path.name.startswith("test_core_")
    return None if HAS_TORCH or is_own else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: as many as there are cores, of which the tests' workers take their part."""
    return min(max(2, len(os.sched_getaffinity(0))), 8)


@pytest.hookimpl(tryfirst=True)  # before the marker expression chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test's cases with workers elsewhere one runs in the usual run, the others are slow.

    Such workers take seconds to start, and what goes through Ray on this node and through processes
    is the same but for their life and death. Which case it is depends on the test's name, so that
    most ways are met by some test; `ray(usual=n)` and `processes(usual=n)` ask for more of them.
    An actor imports torch for itself, which a process does not: of the tests that have cases with
    both every sixteenth takes one with actors. Ranks of torch.distributed count apart: one of their
    cases runs, too.
    """
    tests: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("ray"):  # side by side, they share one Ray in one process
            item.add_marker(pytest.mark.xdist_group("ray"))
        if _elsewhere(item) and not item.get_closest_marker("slow"):
            ranks = item.get_closest_marker("ranks") is not None
            tests.setdefault((item.nodeid.partition("[")[0], ranks), []).append(item)
    for (name, ranks), cases in tests.items():
        marker = None if ranks else _elsewhere(cases[0])
        first = zlib.crc32(name.encode())
        apt = _of_one_kind(cases, actors=first % 16 == 0)
        count = min(marker.kwargs.get("usual", 1) if marker else 1, len(apt))
        usual = {apt[(first + n * len(apt) // count) % len(apt)] for n in range(count)}
        for case in cases:
            if case not in usual:
                case.add_marker(pytest.mark.slow)


def _of_one_kind(cases: list[pytest.Item], *, actors: bool) -> list[pytest.Item]:
    """The cases with actors, or those without; all, where none is of that kind."""
    kind = [case for case in cases if actors == bool(case.get_closest_marker("ray"))]
    return kind or cases


def _elsewhere(item: pytest.Item) -> pytest.Mark | None:
    """The marker of a test whose workers are not in this process."""
    return item.get_closest_marker("ray") or item.get_closest_marker("processes")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The Ray of this session: four logical CPUs, whatever the machine has."""
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=500 * 1024**2,
        _memory=16 * 1024**3,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ "cuda" is there, and is this FakeDevice."""
    from fake_device import FakeDevice

    device = FakeDevice()
    monkeypatch.setattr("pycollect.data.devices.why_not", lambda _: "")
    monkeypatch.setattr("pycollect.api.arguments.with_index", lambda own: own)
    monkeypatch.setattr("pycollect.data.upload.accelerator", lambda _: device)
    return device


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: a reference cycle is not freed before the test is over."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process, a thread or named shared memory is still there."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_cluster")
    processes, shared, threads = _descendants(), _shared_memory(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + _LEAK_SECONDS
    while True:
        left = _ours(_descendants() - processes)
        names = _not_of_others(_shared_memory() - shared)
        running = [thread.name for thread in threading.enumerate() if thread not in threads]
        running = [name for name in running if not any(part in name for part in _LASTING_THREADS)]
        if not left and not names and not running:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left: processes {left}, threads {running}, shared memory {sorted(names)}")
        time.sleep(0.05)


def _descendants() -> set[int]:
    """All processes below this one."""
    if _KERNEL_LISTS_CHILDREN:
        return _listed_below("self")
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _listed_below(pid: int | str) -> set[int]:
    """The same, without a look at all processes that there are: each test asks twice."""
    children: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        for thread in [*Path(f"/proc/{pid}/task").iterdir()]:
            with contextlib.suppress(OSError):  # the thread has
                children.update(map(int, (thread / "children").read_text().split()))
    return children.union(*map(_listed_below, children))


def _ours(pids: Iterable[int]) -> dict[int, str]:
    """Those by pid, without zombies, templates, Ray's own and Python's own."""
    known = (*_RAYS_OWN, *_PYTHONS_OWN)
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            name = process.name()
            title = " ".join([name, *process.cmdline()])
            if name == _TEMPLATE or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if _FORK_SERVER in title and process.ppid() == os.getpid():
                continue
            if not any(s in title for s in known):
                found[pid] = title
    return found


def _not_of_others(names: set[str]) -> set[str]:
    """Without the names that programs beside this one have mapped."""
    ours = {os.getpid(), *_descendants()}
    for pid in psutil.pids() if names else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text() if pid not in ours else ""
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return names


def _shared_memory() -> set[str]:
    names = (path.name for path in _SHARED.iterdir()) if _SHARED.is_dir() else ()
    return {name for name in names if not name.startswith(_OTHERS_NAMES)}
