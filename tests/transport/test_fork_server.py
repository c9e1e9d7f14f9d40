"""The fork server of worker processes: its forks equal new processes, and all are cleaned up."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.forkserver
import operator
import os
import pkgutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from echo_envs import wait_until
from envs_for_tests import CountingEnv
from test_process_engine import LONG, Started, await_gone, started

import pycollect
from pycollect.errors import WorkerDied
from pycollect.transport.engine import AnswerWaiter
from pycollect.transport.messages import set_seed
from pycollect.transport.processes import engine as start
from pycollect.transport.processes import fork_server as forking
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.transport.processes.fork_server import ForkServer, fork_servers


class NotingEnv(CountingEnv):
    """Write a function's result in this process to a file."""

    def __init__(self, note: Path, says: Callable[[], Any]) -> None:
        super().__init__()
        note.write_text(str(says()))


@pytest.fixture
def _own_template(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a small fork server for this test alone, so that changes to it affect no other test."""
    monkeypatch.setattr(forking, "_modules", lambda: forking._ALWAYS)
    monkeypatch.setattr(multiprocessing.forkserver._forkserver, "_preload_modules", [])
    monkeypatch.setattr(start, "_reported", set())
    others, fork_servers._current = fork_servers._current, None
    yield
    fork_servers.leave()
    fork_servers._current, fork_servers._left_out, fork_servers._tries = others, set(), 0


own_template = pytest.mark.usefixtures("_own_template")


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    engine = ProcessEngine()
    yield engine
    engine.leave()


def parent(worker: Started) -> psutil.Process:
    found = psutil.Process(worker.info.pid).parent()
    assert found is not None
    return found


def is_collecting(worker: Started) -> bool:
    worker.ask()
    worker.handle.rollout()
    worker.handle.pop()
    return True


def said(engine: ProcessEngine, note: Path, says: Callable[[], Any]) -> str:
    """Return a function's result in a new worker."""
    worker = started(engine, lambda: NotingEnv(note, says))
    AnswerWaiter(engine.bell).wait_closed([worker.handle])
    return note.read_text()


def test_workers_of_all_engines_are_forks_of_one_process(engine: ProcessEngine) -> None:
    first = [started(engine, CountingEnv, index) for index in range(2)]
    AnswerWaiter(engine.bell).wait_closed([worker.handle for worker in first])
    other = ProcessEngine()
    last = started(other, CountingEnv)
    template = parent(last)
    assert template.name() == "pyc-fork-server"
    assert template.parent() == psutil.Process()
    assert psutil.Process(last.info.pid).name() == "pyc-worker-0"
    assert template.children() == [psutil.Process(last.info.pid)]  # no zombies are left
    other.leave()
    wait_until(lambda: not template.children())


@pytest.mark.slow  # test_hints.py shows that spawned workers are spawned
def test_spawn_can_be_selected() -> None:
    engine = ProcessEngine("spawn")
    assert parent(started(engine, CountingEnv)) == psutil.Process()
    engine.leave()


def test_a_forked_worker_has_the_state_of_a_new_process(
    engine: ProcessEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    note, before = tmp_path / "note", started(engine, CountingEnv)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said(engine, note, os.getcwd) == str(tmp_path)
    assert said(engine, note, lambda: sys.path[0]) == str(tmp_path)
    on_interrupt = str(signal.default_int_handler)
    assert said(engine, note, lambda: signal.getsignal(signal.SIGINT)) == on_interrupt
    assert said(engine, note, lambda: multiprocessing.parent_process().pid) == str(os.getpid())
    how = multiprocessing.get_start_method()
    assert said(engine, note, multiprocessing.get_start_method) == how
    said(engine, note, lambda: os.write(1, b"told\n"))
    assert capfd.readouterr().out == "told\n"
    assert len({said(engine, note, lambda: np.random.rand()) for _ in range(3)}) == 3

    # Values that a library may read at import, or that cannot be changed later.
    monkeypatch.setenv("PYCOLLECT_TEST_VARIABLE", "new")
    umask = os.umask(0o077)
    try:
        after = started(engine, CountingEnv, 1)
        assert parent(after) != parent(before)
        assert said(engine, note, lambda: os.environ["PYCOLLECT_TEST_VARIABLE"]) == "new"
        assert said(engine, note, lambda: os.umask(0)) == str(0o077)
    finally:
        os.umask(umask)
    assert is_collecting(before)
    assert is_collecting(after)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loaded_modules_of_pycollect_are_imported_once(
    engine: ProcessEngine, tmp_path: Path, every: bool
) -> None:
    started(engine, CountingEnv)
    if every:
        for module in pkgutil.walk_packages(pycollect.__path__, "pycollect."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    names = {name for name in sys.modules if name.startswith("pycollect.")}
    note = tmp_path / "note"
    assert said(engine, note, lambda: names - {*sys.modules}) == "set()"
    worker = started(engine, CountingEnv, 1)
    assert parent(worker).name() == "pyc-fork-server"  # imports start no threads and open no GPU


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("threads", "import os; os._exit(3)")),
    ],
)
@own_template
def test_unsuitable_modules_are_not_imported(
    code: str, engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awkward.py").write_text(THREADS if code == "threads" else code)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = multiprocessing.forkserver._forkserver
    monkeypatch.setattr(server, "_preload_modules", ["awkward"])
    if code == "raise SystemExit":  # no warning: a later import raises it
        worker = started(engine, CountingEnv)
    else:
        with pytest.warns(UserWarning, match="awkward"):
            worker = started(engine, CountingEnv)
    assert parent(worker).name() == "pyc-fork-server"
    # the warning is not repeated
    assert parent(started(engine, CountingEnv)).name() == "pyc-fork-server"


def test_blocked_modules_and_unusual_keys_of_sys_modules_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.setitem(sys.modules, "pycollect.blocked", None)
    monkeypatch.setitem(sys.modules, 3, sys)  # some programs do so
    modules = forking._modules()
    assert "pycollect.transport.processes.fork_server" in modules
    assert not {"gymnasium", "pycollect.blocked", 3}.intersection(modules)


def test_preload_modules_of_multiprocessing_are_imported_once(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dear.py").write_text("import os\nimported_by = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    server = multiprocessing.forkserver._forkserver
    monkeypatch.setattr(server, "_preload_modules", server._preload_modules)
    multiprocessing.set_forkserver_preload(["__main__", "dear"])
    note = tmp_path / "note"
    assert said(engine, note, lambda: sys.modules["dear"].imported_by == os.getppid()) == "True"


@own_template
def test_workers_continue_without_their_fork_server_until_they_are_ended(
    engine: ProcessEngine,
) -> None:
    worker, killed = (started(engine, CountingEnv, index) for index in range(2))
    template = parent(worker)
    template.kill()
    await_gone(template.pid)
    assert is_collecting(worker)
    other = started(engine, CountingEnv, 2)
    assert parent(other).name() == "pyc-fork-server"
    os.kill(worker.info.pid, signal.SIGKILL)
    call = worker.handle.run(set_seed, [1], 1)
    with pytest.raises(WorkerDied, match=str(worker.info.pid)):
        worker.handle.answer(call)
    worker.handle.kill()
    killed.handle.kill()
    await_gone(killed.info.pid)
    AnswerWaiter(engine.bell).wait_closed([other.handle])


def test_an_unregistered_worker_is_ended(engine: ProcessEngine) -> None:
    """An interrupt may arrive before the driver has registered the worker."""
    with fork_servers.lock:
        null = os.open(os.devnull, os.O_RDONLY)
        read, write = os.pipe()  # its state, which never comes
        pid, line = fork_servers.ready().fork("pycollect-worker-0", [read, null, null, null, null])
        os.close(read)
        os.close(null)
    wait_until(lambda: psutil.Process(pid).name() == "pyc-worker-0")
    line.close()
    await_gone(pid)
    os.close(write)


@pytest.mark.slow
@own_template
def test_a_fork_server_ends_after_a_time_without_workers(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_IDLE_SECONDS", 0.1)
    worker = started(engine, CountingEnv)
    template = parent(worker)
    assert is_collecting(worker)
    AnswerWaiter(engine.bell).wait_closed([worker.handle])
    await_gone(template.pid)
    again = started(engine, CountingEnv)
    assert parent(again) not in (template, psutil.Process())


THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@own_template
def test_forks_lack_a_module_whose_import_starts_threads(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_threads.py").write_text(THREADS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forking, "_modules", lambda: (*forking._ALWAYS, "with_threads"))
    with pytest.warns(UserWarning, match="with_threads"):
        worker = started(engine, CountingEnv)
    assert parent(worker).name() == "pyc-fork-server"
    assert is_collecting(worker)


OPENS_A_GPU = """
import operator
import os
file = os.open({device!r}, os.O_RDONLY)
"""

# Like a torch built with CUDA; on some machines NVML initializes CUDA, too.
TORCH_WITH_CUDA = """
import os, torch
def count():
    global file
    file = os.open({device!r}, os.O_RDONLY)
    return 3
torch.{function} = count
"""

ASKS_TORCH = """
import torch
counted = torch.{function}()
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _own_template: None) -> Path:
    """A file that the fork server treats as a GPU."""
    device = tmp_path / "nvidia"
    device.touch()
    head = "import pycollect.transport.processes.fork_server_main as template\n"
    head += f"template._GPUS = ({str(device)!r},)\n"
    monkeypatch.setattr(
        forking, "_CODE", forking._CODE.replace("from pycollect", head + "from pycollect")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return device


def opened(device: Path) -> bool:
    files = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return str(device) in [os.path.realpath(file) for file in files]


@pytest.mark.parametrize(
    "function",
    ["_C._cuda_getDeviceCount", pytest.param("cuda._device_count_nvml", marks=pytest.mark.slow)],
)
def test_torch_counts_gpus_in_a_fork(
    engine: ProcessEngine,
    device: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
) -> None:
    with_cuda = TORCH_WITH_CUDA.format(device=str(device), function=function)
    (tmp_path / "with_cuda.py").write_text(with_cuda)
    (tmp_path / "asks_torch.py").write_text(ASKS_TORCH.format(function=function))
    modules = (*forking._ALWAYS, "with_cuda", "asks_torch")
    monkeypatch.setattr(forking, "_modules", lambda: modules)
    note = tmp_path / "note"
    worker = started(engine, lambda: NotingEnv(note, lambda: opened(device)))
    assert parent(worker).name() == "pyc-fork-server"
    assert note.read_text() == "False"
    assert said(engine, note, lambda: sys.modules["asks_torch"].counted) == "3"
    count = operator.attrgetter(function)
    counted = said(engine, note, lambda: (count(sys.modules["torch"])(), opened(device)))
    assert counted == "(3, True)"  # a worker counts by itself


@pytest.mark.slow  # counts for seconds
def test_a_count_that_takes_long_is_awaited(
    engine: ProcessEngine, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = "_C._cuda_getDeviceCount"
    slow = TORCH_WITH_CUDA.replace("global file", "sum(range(60_000_000)); global file")
    (tmp_path / "with_cuda.py").write_text(slow.format(device=str(device), function=function))
    (tmp_path / "asks_torch.py").write_text(ASKS_TORCH.format(function=function))
    modules = (*forking._ALWAYS, "with_cuda", "asks_torch")
    monkeypatch.setattr(forking, "_modules", lambda: modules)
    monkeypatch.setattr(forking, "_STILL_SECONDS", 1.0)
    assert parent(started(engine, CountingEnv)).name() == "pyc-fork-server"


@own_template
def test_imports_get_more_time_if_other_programs_use_the_cpu(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_BUSY_SECONDS", 0.5)
    monkeypatch.setattr(forking, "waited", lambda pid: time.monotonic())
    assert parent(started(engine, CountingEnv)).name() == "pyc-fork-server"


@pytest.mark.slow
@own_template
def test_the_number_of_fork_servers_is_limited(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_threads.py").write_text(THREADS)
    names = [f"needs_threads_{number}" for number in range(9)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("import with_threads")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forking, "_modules", lambda: (*forking._ALWAYS, *names))
    made: list[ForkServer] = []

    def noted(process_environment: Any) -> ForkServer:
        made.append(ForkServer(process_environment))
        return made[-1]

    monkeypatch.setattr(forking, "ForkServer", noted)
    with pytest.warns(UserWarning, match="needs_threads"):
        worker = started(engine, CountingEnv)
    assert parent(worker).name() == "pyc-fork-server"
    assert len(made) == forking._MAX_TRIES + 1


@pytest.mark.slow
def test_an_import_that_opens_a_gpu_is_reported_once(
    engine: ProcessEngine, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opens_a_gpu.py").write_text(OPENS_A_GPU.format(device=str(device)))
    monkeypatch.setattr(forking, "_modules", lambda: (*forking._ALWAYS, "opens_a_gpu", "json"))
    with pytest.warns(UserWarning, match=str(device)):
        worker = started(engine, CountingEnv)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = started(engine, CountingEnv, 1)
    assert parent(worker) == parent(other)
    assert parent(worker).name() == "pyc-fork-server"
    assert is_collecting(worker)


@own_template
@pytest.mark.parametrize(
    "what", ["imports", *(pytest.param(w, marks=pytest.mark.slow) for w in ("many", "pidfd"))]
)
def test_workers_are_spawned_if_forking_is_impossible(
    engine: ProcessEngine, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "imports":
        monkeypatch.setattr(forking, "_CODE", "import sys; sys.exit(3)")
    elif what == "pidfd":
        monkeypatch.setattr(forking, "has_pidfd", lambda: False)
    else:
        monkeypatch.setattr(forking, "MOST_DESCRIPTORS", 3)
    with pytest.warns(UserWarning, match="spawned"):
        worker = started(engine, CountingEnv)
    assert parent(worker) == psutil.Process()
    assert is_collecting(worker)


@own_template
def test_an_interrupted_request_to_a_fork_server_mixes_up_no_answers(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(of: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forking, "_received", interrupted)
        patched.setattr(forking, "_modules", lambda: ("json",))  # makes its reply fast
        with pytest.raises(KeyboardInterrupt):
            started(engine, CountingEnv)
    assert parent(started(engine, CountingEnv)).name() == "pyc-fork-server"


@pytest.mark.slow  # two fork servers; the next test needs one
@own_template
def test_a_stopped_fork_server_is_abandoned(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_STILL_SECONDS", 0.5)
    first = started(engine, CountingEnv)
    template = parent(first)
    os.kill(template.pid, signal.SIGSTOP)
    with pytest.warns(UserWarning, match=f"process {template.pid}"):
        second = started(engine, CountingEnv, 1)
    await_gone(template.pid)
    assert parent(second).name() == "pyc-fork-server"
    assert is_collecting(first)
    assert is_collecting(second)


@own_template
def test_a_stopped_fork_server_is_abandoned_if_its_worker_dies(
    engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_STILL_SECONDS", 0.5)
    worker = started(engine, CountingEnv)
    template = parent(worker)
    os.kill(template.pid, signal.SIGSTOP)
    os.kill(worker.info.pid, signal.SIGKILL)
    wait_until(lambda: worker.handle.is_dead)
    with pytest.warns(UserWarning, match=f"process {template.pid}"):
        end = worker.handle.process.end()
    assert "is gone" in end.summary
    await_gone(template.pid)


@pytest.mark.slow
@own_template
@pytest.mark.parametrize("answer", [b"garbage", b"too long for a number", b""])
def test_a_fork_server_with_wrong_answers_is_ended(
    engine: ProcessEngine, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, received = parent(started(engine, CountingEnv)), forking._received
    answers = [answer]
    monkeypatch.setattr(
        forking, "_received", lambda *of: answers.pop() if answers else received(*of)
    )
    worker = started(engine, CountingEnv, 1)
    await_gone(template.pid)
    assert is_collecting(worker)
    assert parent(worker).name() == "pyc-fork-server"


NO_FORK = """
import errno, os
fork = os.fork
def refused():
    if os.path.exists({flag!r}):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = refused
"""


@pytest.mark.slow
@own_template
def test_an_os_error_of_a_fork_server_is_raised_in_the_driver(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "refuse"
    (tmp_path / "refusing.py").write_text(NO_FORK.format(flag=str(flag)))
    monkeypatch.syspath_prepend(str(tmp_path))
    server = multiprocessing.forkserver._forkserver
    monkeypatch.setattr(server, "_preload_modules", ["refusing"])
    template = parent(started(engine, CountingEnv))
    flag.touch()
    with pytest.raises(BlockingIOError):
        started(engine, CountingEnv, 1)
    flag.unlink()
    assert parent(started(engine, CountingEnv, 1)) == template


DRIVER = """
import os, sys, psutil
from pathlib import Path
from pycollect.transport.processes.engine import ProcessEngine
from test_process_engine import CountingEnv, started
def main():
    engine = ProcessEngine()
    worker = started(engine, CountingEnv)
    print(psutil.Process(worker.info.pid).ppid(), flush=True)
    if sys.argv[1] == "fork" and os.fork() == 0:
        engine = ProcessEngine()
        worker = started(engine, CountingEnv)
        template = psutil.Process(worker.info.pid).parent()
        print(template.pid, template.ppid() == os.getpid(), flush=True)
        engine.leave()
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow  # test_process_engine.py kills a program with a fork server
@pytest.mark.parametrize("end", ["exit", "fork"])
def test_a_fork_server_ends_with_its_program(end: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, "-X", "dev", str(script), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline())]
    if end == "fork":  # a fork of a process with a fork server starts its own
        pid, is_its_own = driver.stdout.readline().split()
        assert is_its_own == "True"
        assert int(pid) not in pids
        pids.append(int(pid))
    _, errors = driver.communicate(timeout=LONG)
    assert driver.returncode == 0
    assert end == "fork" or "ResourceWarning" not in errors
    for pid in pids:
        await_gone(pid)


UNGUARDED = """
import os, threading
from pycollect import MultiSyncDataCollector
from envs_for_tests import CountingEnv
if __name__ == "__mp_main__":
    os.write(1, b"%d\\n" % os.getpid())  # whole lines: there are two of them
    threading.Event().wait()
MultiSyncDataCollector([CountingEnv] * 2, None, frames_per_batch=10)
"""


@pytest.mark.slow
def test_workers_end_with_a_program_that_they_are_still_importing(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(UNGUARDED)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline()) for _ in range(2)]
    template = psutil.Process(pids[0]).parent()
    assert template is not None
    template.kill()  # it would end workers if it saw the driver exit
    await_gone(template.pid)
    driver.kill()
    for pid in pids:
        await_gone(pid)
    driver.communicate(timeout=LONG)


ON_STANDARD_INPUT = """
import sys
from pycollect import MultiSyncDataCollector
from envs_for_tests import CountingEnv
with MultiSyncDataCollector(
    [lambda: CountingEnv()] * 2, None, frames_per_batch=10, total_frames=10,
    start_method=sys.argv[1],
) as collector:
    print([tuple(batch.shape) for batch in collector])
"""


def collected_on_standard_input(start_method: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-", start_method],
        input=ON_STANDARD_INPUT,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_a_program_on_standard_input_has_workers() -> None:
    ended = collected_on_standard_input("forkserver")
    assert ended.stdout == "[(2, 5)]\n", ended.stderr


def test_a_program_on_standard_input_has_none_that_are_spawned() -> None:
    ended = collected_on_standard_input("spawn")
    assert "ValueError: start_method: " in ended.stderr
    assert "<stdin>" in ended.stderr


@pytest.mark.slow
def test_the_fork_server_of_multiprocessing_is_not_affected(
    engine: ProcessEngine, tmp_path: Path
) -> None:
    started(engine, CountingEnv)
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    process = multiprocessing.get_context("forkserver").Process(target=queue.put, args=(3,))
    process.start()
    assert queue.get() == 3
    process.join(LONG)
    server = multiprocessing.forkserver._forkserver
    server._stop()
    wait_until(lambda: server._forkserver_pid is None)
