"""The fork server: a process that imports the modules that workers need, and forks workers.

The driver sends requests through a socket (`fork_server`). The process has neither threads nor an
open GPU, so that its forks can do everything that a new process can.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Container, Iterator
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any

from pycollect._core import adopt_orphans, kill_descendants
from pycollect.transport.descendants import begin_worker, children_of
from pycollect.transport.import_warnings import filter_import_warnings
from pycollect.transport.unguarded import become_worker

NUMBER = struct.Struct("q")
"""Sent on a worker's line: its process id, or a negative error number; then its exit code."""

MOST_DESCRIPTORS = 253
"""How many one message can carry: SCM_MAX_FD of Linux."""

MESSAGE_BYTES = 1 << 16
"""No message is longer."""

_NAME = "pycollect-fork-server"

_SELDOM = 1_000_000

_ORPHANS_SECONDS = 0.02  # between two looks for orphans that have been killed

_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def run(control: int, driver: int, idle: float, filters_warnings: bool) -> None:
    """Serve until the driver is gone or wants nothing more; the main function of a template.

    Args:
        control: the descriptor of the socket on which the driver asks.
        driver: its process id. When it ends, so does this process.
        idle: seconds without a worker, and without being asked, after which this process ends.
        filters_warnings: see `import_warnings`; so do its forks.
    """
    # Ctrl-C in a terminal is for the driver. A fork has it back.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    filter_import_warnings(filters_warnings)
    become_worker()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, nobody could wait for a fork
    os.setpgid(0, 0)
    adopt_orphans()
    call_process(_NAME)
    _ForkServer(socket.socket(fileno=control), driver, on_interrupt).serve(idle)
    kill_descendants()
    os._exit(0)  # to take down an interpreter that has torch in it takes a second


def call_process(name: str) -> None:
    """Have this process shown by that name, abbreviated to the 15 characters that there are."""
    Path("/proc/self/comm").write_text(name.replace("pycollect", "pyc", 1))


class _Worker:
    """A process that was forked: it is waited for only once its driver has let go of its line.

    Until then its number is nobody else's.
    """

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self.end = os.pidfd_open(pid)
        self.ended = self.released = False

    def tell_end(self) -> None:
        """It has ended: say how."""
        self.ended = True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(OSError):  # nobody wants to know
            self.line.send(NUMBER.pack(code))

    def release(self) -> None:
        """Its driver has let go of it; if it still runs, nobody can ask it anything any more."""
        self.released = True
        if not self.ended:
            for send in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    send(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close what was opened for it here."""
        self.line.close()
        os.close(self.end)


class _ForkServer:
    def __init__(self, control: socket.socket, driver: int, on_interrupt: object) -> None:
        self._control = control
        self._on_interrupt = on_interrupt
        self._driver_pid, self._driver = driver, os.pidfd_open(driver)
        self._workers: set[_Worker] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._driver, selectors.EVENT_READ)
        self._is_wanted = True
        self._own: set[int] = set()  # children that stay: imports have started them
        self._has_orphans = False

    def serve(self, idle: float) -> None:
        """Do what is asked; return once nothing more can be."""
        while self._is_wanted or self._workers:
            seconds = _ORPHANS_SECONDS if self._has_orphans else None if self._workers else idle
            found = {key.fileobj for key, _ in self._selector.select(seconds)}
            if self._driver in found or not (found or self._has_orphans):
                return
            for worker in [*self._workers]:
                self._look_after(worker, found)
            self._has_orphans = self._has_orphans and self._kill_orphans()
            if self._control in found:
                self._answer()

    def _look_after(self, worker: _Worker, found: Container[object]) -> None:
        if worker.end in found:
            self._selector.unregister(worker.end)
            worker.tell_end()
            self._has_orphans = True
        if worker.line in found:
            self._selector.unregister(worker.line)
            worker.release()
        if worker.ended and worker.released:
            os.waitpid(worker.pid, 0)
            worker.close()
            self._workers.remove(worker)

    def _kill_orphans(self) -> bool:
        """Kill descendants of dead workers; return whether some may still be alive.

        Living workers adopt their own orphans, so that none of them becomes a child of this
        process.
        """
        orphans = {*children_of(os.getpid())} - {own.pid for own in self._workers} - self._own
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)  # at least a zombie: its number is its own
            except PermissionError:  # of another user: it stays
                self._own.add(pid)
            os.waitpid(pid, os.WNOHANG)
        return bool(orphans - self._own)

    def _answer(self) -> None:
        """One message: with descriptors a worker to be forked, without any what to import."""
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self._control, MESSAGE_BYTES, MOST_DESCRIPTORS
            )
        except ConnectionError:
            message, descriptors, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:  # too few descriptors are free: the driver sees the end
            for descriptor in descriptors:
                os.close(descriptor)
        elif descriptors:
            self._fork(message.decode(), descriptors)
        elif message:
            before = children_of(os.getpid())
            self._control.send(pickle.dumps(_import(*pickle.loads(message))))
            self._own |= {*children_of(os.getpid())}.difference(before)
        else:
            self._selector.unregister(self._control)
            self._is_wanted = False

    def _fork(self, name: str, descriptors: list[int]) -> None:
        line = socket.socket(fileno=descriptors.pop())
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(line, descriptors, error)
            return
        if pid == 0:
            code = 1
            try:
                line.close()
                self._forget()
                code = _work(name, descriptors, self._driver_pid)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(code)
        try:
            worker = _Worker(pid, line)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._refuse(line, descriptors, error)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers.add(worker)
        self._selector.register(worker.end, selectors.EVENT_READ)
        self._selector.register(worker.line, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the driver has gone on
            line.send(NUMBER.pack(pid))

    def _refuse(self, line: socket.socket, descriptors: list[int], error: OSError) -> None:
        """Report why a worker cannot be forked."""
        for descriptor in descriptors:
            os.close(descriptor)
        with line, contextlib.suppress(OSError):
            line.send(NUMBER.pack(-(error.errno or errno.EAGAIN)))

    def _forget(self) -> None:
        """In a fork: be no template any more."""
        self._selector.close()
        self._control.close()
        os.close(self._driver)
        for worker in self._workers:
            worker.close()
        signal.signal(signal.SIGINT, self._on_interrupt)  # type: ignore[arg-type] # as it was


def _import(modules: tuple[str, ...], path: list[str]) -> tuple[str, str]:
    """Import the modules that can be imported.

    Returns why this process cannot be forked and the module that is the reason; or "" and "".
    """
    sys.path[:] = path
    thresholds = gc.get_threshold()
    # To look at all that is there, again and again, would take a tenth of the time.
    seldom = (*thresholds[:2], _SELDOM)
    gc.set_threshold(*seldom)
    opened_by: dict[str, str] = {}
    started_by: dict[str, str] = {}
    for name in modules:
        # A module that cannot be imported raises the same error in the worker that needs it.
        with contextlib.suppress(Exception, SystemExit), _gpus_counted_in_forks():
            importlib.import_module(name)
        for file in _gpu_files():
            opened_by.setdefault(file, name)
        for thread in _threads():
            started_by.setdefault(thread, name)
    call_process(_NAME)  # some versions of torch have called it otherwise
    if gc.get_threshold() == seldom:  # else a module has set its own
        gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()  # whatever is there stays: forks share it as long as nobody counts it again
    return _why_not(opened_by, started_by)


@contextlib.contextmanager
def _gpus_counted_in_forks() -> Iterator[None]:
    """Have torch count GPUs in forks of this process.

    To count them, torch initializes NVML, or CUDA without NVML; for `is_available` always CUDA.
    Both open device files and may start threads, and no fork of a process that has initialized CUDA
    can use a GPU.
    """
    torch: Any = sys.modules.get("torch")  # None: not imported yet
    cuda, core = getattr(torch, "cuda", None), getattr(torch, "_C", None)
    replaced = []
    for owner, name in ((cuda, "_device_count_nvml"), (core, "_cuda_getDeviceCount")):
        if hasattr(owner, name):  # torch may have been built without CUDA
            count = getattr(owner, name)
            ours = functools.partial(_counted_in_fork, count)
            setattr(owner, name, ours)
            replaced.append((owner, name, count, ours))
    try:
        yield
    finally:
        for owner, name, count, ours in replaced:
            if getattr(owner, name) is ours:  # the module may have replaced it, too
                setattr(owner, name, count)


def _counted_in_fork(count: Callable[[], int]) -> int:
    """Call it in a fork and return its result (at least -1), or -1 if it fails."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            code = count() + 1
        finally:
            os._exit(code)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 1, -1)


def _why_not(opened_by: dict[str, str], started_by: dict[str, str]) -> tuple[str, str]:
    pid = os.fork()  # threads of libraries that know of forks, OpenBLAS's, end with the first one
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for file in sorted(_gpu_files()):
        module = opened_by.get(file, "")
        return f"{_import_of(module)} opened {file}, and a fork cannot use an opened GPU", module
    for thread, name in _threads().items():
        module = started_by.get(thread, "")
        return f"{_import_of(module)} started a thread ({name!r}), which forks would lack", module
    return "", ""


def _import_of(module: str) -> str:
    return f"importing {module or 'the modules that workers need'}"


def _threads() -> dict[str, str]:
    """Return the names of this process's threads by their ids, without the main thread."""
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            threads[thread] = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    threads.pop(str(os.getpid()), None)
    return threads


def _gpu_files() -> set[str]:
    """Return the opened device files of GPUs."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            files.add(os.readlink(f"/proc/self/fd/{name}"))
    return {file for file in files if file.startswith(_GPUS)}


def _work(name: str, descriptors: list[int], driver: int) -> int:
    """Be the process that the driver describes; return its exit code.

    It ends with the driver before it imports the program's script, which can take for ever.
    """
    state, sentinel, stdout, stderr, tracker, *inherited = descriptors
    call_process(name)
    for own, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream, own)
        os.close(stream)
    with open(state, "rb", buffering=0, closefd=False) as file:
        environment = pickle.load(file)
    os.environb.clear()
    os.environb.update(environment)
    begin_worker(driver)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own is seeded anew by each fork, torch's by each worker
    # As multiprocessing's own fork server has it.
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    return spawn._main(state, sentinel)
