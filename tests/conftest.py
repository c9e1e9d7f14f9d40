"""Start one Ray for the session and fail tests that leave something behind."""

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
HERE = Path(__file__).parent
# Support code, and tests that others import from.
FOLDERS = sorted({str(path.parent) for path in HERE.glob("*/*.py")} - {str(HERE / "embed")})
_PR_SET_CHILD_SUBREAPER = 36
_LEAK_SECONDS = 15.0
_SHARED = Path("/dev/shm")
_seen: dict[str, set[int]] = {}  # descendants by the system's last pid; at most one entry
_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()

# Ray starts and ends its own processes at any time. An actor of ours that remains is called
# ray::RayWorker or, after a fork, has none of Ray's titles.
_RAYS_OWN = ("ray::IDLE", "ray::Dashboard", "ray::RuntimeEnv", "default_worker.py", "/ray/")

# Python's helper process ends with the test process. tqdm's lock starts it if TorchRL's import has
# changed the start method.
_PYTHONS_OWN = ("multiprocessing.resource_tracker",)

# The fork server of multiprocessing also ends with this process. Its forks share its title but have
# another parent.
_FORK_SERVER = "multiprocessing.forkserver"

# Our fork server ends with this process, or after a minute without workers.
_TEMPLATE = "pyc-fork-server"

# Threads that live as long as this process: Ray's, multiprocessing's (passes file descriptors) and
# tqdm's.
_LASTING_THREADS = ("PythonGCThread", "ray_", "(_serve)", "tqdm_monitor")

# Ray's store; semaphores of multiprocessing in other programs; files that CUDA removes at process
# exit.
_OTHERS_NAMES = ("plasma", "sem.mp-", "cuda.shm.")


# tensordict tries to import pandas for each new dictionary. If pandas is missing, the search of the
# whole path takes a sixth of the time of tests that step TorchRL's environments.
if find_spec("pandas") is None:
    sys.modules["pandas"] = None  # type: ignore[assignment] # marks a missing module


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of test_fault_campaign.py."""
    group = parser.getgroup("pycollect chaos")
    group.addoption("--faults", type=int, default=5, help="faults per way to collect (default 5)")
    group.addoption("--seed", type=int, default=0, help="selects the faults (default 0)")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the faults that were survived in each way to collect."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "chaos":
                    terminalreporter.write_line(f"{outcome}: {value}")


def pytest_configure(config: pytest.Config) -> None:
    # Adopt orphaned descendants, so that the leak check finds them.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Processes of Gymnasium and TorchRL: a fork of this process can block Ray's threads in it for
    # good, and a spawned process spends seconds on imports. A fork server imports everything once.
    multiprocessing.set_start_method("forkserver")
    # Our fork servers also import all modules that a worker needs to find a test's functions.
    preload = ["gymnasium", "torchrl.collectors", "hypothesis", "pytest"]
    multiprocessing.set_forkserver_preload(preload)
    if HAS_TORCH:
        import torch

        # On small tensors, several threads take five times as long as one.
        torch.set_num_threads(1)
        from pycollect.transport.processes import fork_server as forking

        forking._IDLE_SECONDS = 600.0  # minutes can pass between tests with workers
    # Inductor's compile processes would outlive the test that started them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Recycled memory is filled with 0xA5, so that tests notice stale views.
    os.environ.setdefault("PYCOLLECT_POISON", "1")
    # Ray lowers the priority of its workers; they would wait for all parallel tests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A shell that runs pytest in the background ignores SIGINT, but tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers import the tests' environments by name.
    sys.path[:0] = FOLDERS
    paths = [*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze all objects from test collection, so that the garbage collector never scans them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore all tests except the core's if torch is missing."""
    is_own = collection_path.is_dir() or collection_path.name.startswith("test_core_")
    return None if HAS_TORCH or is_own else True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker per core, from 2 to 8; the tests' own workers share the cores."""
    return min(max(2, len(os.sched_getaffinity(0))), 8)


@pytest.hookimpl(tryfirst=True)  # before the marker expression selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run one case of each test with remote workers; mark its other cases slow.

    Remote workers take seconds to start. Local Ray and processes share all code except for worker
    startup and shutdown. The test's name selects the case, so that most ways run in some test.
    `ray(usual=n)` and `processes(usual=n)` request more cases. `sample(usual=n)` selects some cases
    of a test without remote workers.

    Every actor imports torch itself, while processes are forked. Of the tests with cases of both
    kinds, every sixteenth therefore runs one with actors. One case with ranks of torch.distributed
    is selected separately.
    """
    tests: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("ray"):  # one pytest worker, so one Ray
            item.add_marker(pytest.mark.xdist_group("ray"))
        if _sampling(item) and not item.get_closest_marker("slow"):
            ranks = item.get_closest_marker("ranks") is not None
            tests.setdefault((_function(item), ranks), []).append(item)
    for (name, ranks), cases in tests.items():
        marker = None if ranks else _sampling(cases[0])
        first = zlib.crc32(name.encode())
        apt = _of_one_kind(cases, actors=first % 16 == 0)
        count = min(marker.kwargs.get("usual", 1) if marker else 1, len(apt))
        usual = {apt[(first + n * len(apt) // count) % len(apt)] for n in range(count)}
        for case in cases:
            if case not in usual:
                case.add_marker(pytest.mark.slow)


def _function(item: pytest.Item) -> str:
    """Return the name of a test's function, which does not depend on the folder of its file."""
    return f"tests/{item.path.name}::{item.nodeid.partition('[')[0].partition('::')[2]}"


def _of_one_kind(cases: list[pytest.Item], *, actors: bool) -> list[pytest.Item]:
    """Return the cases with actors, or those without; return all cases if none match."""
    kind = [case for case in cases if actors == bool(case.get_closest_marker("ray"))]
    return kind or cases


def _sampling(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker of a test of which only some cases run by default."""
    markers = map(item.get_closest_marker, ("ray", "processes", "sample"))
    return next(filter(None, markers), None)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Start one Ray for the session, always with four logical CPUs."""
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


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Ray after the last test with it if pytest-xdist runs all of them in sequence.

    Otherwise Ray's processes use the CPU, and each check for leaks reads their threads' lists.
    """
    if item.get_closest_marker("ray") and getattr(item.config.option, "loadgroup", False):
        ray = sys.modules.get("ray")
        if ray and not (nextitem and nextitem.get_closest_marker("ray")):
            ray.shutdown()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make "cuda" available as a FakeDevice."""
    from fake_device import FakeDevice

    device = FakeDevice()
    monkeypatch.setattr("pycollect.data.devices.why_not", lambda _: "")
    monkeypatch.setattr("pycollect.api.arguments.with_index", lambda own: own)
    monkeypatch.setattr("pycollect.data.upload.accelerator", lambda _: device)
    return device


@pytest.fixture
def time_limit() -> Iterator[None]:
    """Make SIGUSR1 raise TimeoutError, as programs do with SIGALRM."""

    def raise_limit(number: int, frame: Any) -> None:
        raise TimeoutError("the program's time limit")

    before = signal.signal(signal.SIGUSR1, raise_limit)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, so that a reference cycle survives until the test ends."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a thread or named shared memory behind."""
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
    """Return the pids of all descendants of this process.

    Ray's processes have hundreds of threads, each with a list of children. The lists are read again
    only if any process or thread was started since; otherwise, some of the result may have ended.
    """
    if _KERNEL_LISTS_CHILDREN:
        last_pid = Path("/proc/loadavg").read_text().split()[-1]
        if last_pid not in _seen:
            found = _listed_below("self")
            _seen.clear()
            _seen[last_pid] = found
        return _seen[last_pid]
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _listed_below(pid: int | str) -> set[int]:
    """Return all descendants from the kernel's lists; scanning all processes is slow."""
    children: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        for thread in [*Path(f"/proc/{pid}/task").iterdir()]:
            with contextlib.suppress(OSError):  # the thread has ended
                children.update(map(int, (thread / "children").read_text().split()))
    return children.union(*map(_listed_below, children))


def _ours(pids: Iterable[int]) -> dict[int, str]:
    """Return pids and titles, without zombies, fork servers, and processes of Ray and Python."""
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
    """Remove the names that unrelated programs have mapped."""
    ours = {os.getpid(), *_descendants()}
    for pid in psutil.pids() if names else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text() if pid not in ours else ""
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return names


def _shared_memory() -> set[str]:
    names = (path.name for path in _SHARED.iterdir()) if _SHARED.is_dir() else ()
    return {name for name in names if not name.startswith(_OTHERS_NAMES)}
