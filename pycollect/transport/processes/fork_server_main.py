"""The fork server: a process that imports the modules workers need, and forks workers.

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
from pycollect.errors import filter_import_warnings
from pycollect.transport.worker_process import become_worker, begin_worker, children_of

NUMBER = struct.Struct("q")
"""Number on a status socket: the worker's pid or a negative error number, then its exit code."""

MOST_DESCRIPTORS = 253
"""Maximum number of descriptors in one message: SCM_MAX_FD of Linux."""

MESSAGE_BYTES = 1 << 16
"""Maximum size of a message."""

_NAME = "pycollect-fork-server"

_RARE_GC = 1_000_000

_ORPHANS_SECONDS = 0.02  # interval at which killed orphans are reaped

_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def run(control: int, driver: int, idle: float, filters_warnings: bool) -> None:
    """Serve until the driver ends or needs no more workers; the main function of the process.

    The driver sends requests on the socket `control`. This process ends with the pid `driver`, or
    after `idle` seconds without a worker and without a request. If `filters_warnings`, it and its
    forks hide import warnings, see `errors`.
    """
    # Ctrl-C in a terminal is meant for the driver. Forks restore the handler.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    filter_import_warnings(filters_warnings)
    become_worker()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel reaps forks at once
    os.setpgid(0, 0)
    adopt_orphans()
    name_process(_NAME)
    server = _ForkServer(socket.socket(fileno=control), driver, on_interrupt)
    server.serve(idle)  # its sockets stay open until the process ends, so none is warned about
    kill_descendants()
    os._exit(0)  # the teardown of an interpreter that has imported torch takes a second


def name_process(name: str) -> None:
    """Set the name that `ps` shows for this process, abbreviated to 15 characters."""
    Path("/proc/self/comm").write_text(name.replace("pycollect", "pyc", 1))


class _Worker:
    """A forked process. It is reaped only once the driver has closed its status socket.

    Until then its pid is not reused.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.status = status
        self.end = os.pidfd_open(pid)
        self.ended = self.released = False

    def report_end(self) -> None:
        """Send the exit code, because the process has ended."""
        self.ended = True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(OSError):  # the driver has closed the socket
            self.status.send(NUMBER.pack(code))

    def release(self) -> None:
        """Kill the process if it still runs, because the driver has closed its status socket."""
        self.released = True
        if not self.ended:
            for send in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    send(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors that belong to the process."""
        self.status.close()
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
        self._import_children: set[int] = set()  # started by imports; they are not killed
        self._has_orphans = False

    def serve(self, idle: float) -> None:
        """Handle requests and exits; return once no more can come."""
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
            worker.report_end()
            self._has_orphans = True
        if worker.status in found:
            self._selector.unregister(worker.status)
            worker.release()
        if worker.ended and worker.released:
            os.waitpid(worker.pid, 0)
            worker.close()
            self._workers.remove(worker)

    def _kill_orphans(self) -> bool:
        """Kill descendants of dead workers; return whether some may still be alive.

        Living workers adopt their own orphans, so those never become children of this process.
        """
        workers = {worker.pid for worker in self._workers}
        orphans = {*children_of(os.getpid())} - workers - self._import_children
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)  # an unreaped child keeps its pid
            except PermissionError:  # another user's process: leave it alone
                self._import_children.add(pid)
            os.waitpid(pid, os.WNOHANG)
        return bool(orphans - self._import_children)

    def _answer(self) -> None:
        """Handle one message: fork a worker if it carries descriptors, else import modules."""
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self._control, MESSAGE_BYTES, MOST_DESCRIPTORS
            )
        except ConnectionError:
            message, descriptors, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:  # too few free descriptors: the driver sees a closed socket
            for descriptor in descriptors:
                os.close(descriptor)
        elif descriptors:
            self._fork(message.decode(), descriptors)
        elif message:
            before = children_of(os.getpid())
            self._control.send(pickle.dumps(_import(*pickle.loads(message))))
            self._import_children |= {*children_of(os.getpid())}.difference(before)
        else:
            self._selector.unregister(self._control)
            self._is_wanted = False

    def _fork(self, name: str, descriptors: list[int]) -> None:
        status = socket.socket(fileno=descriptors.pop())
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(status, descriptors, error)
            return
        if pid == 0:
            code = 1
            try:
                status.close()
                self._forget()
                code = _work(name, descriptors, self._driver_pid)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(code)
        try:
            worker = _Worker(pid, status)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._refuse(status, descriptors, error)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers.add(worker)
        self._selector.register(worker.end, selectors.EVENT_READ)
        self._selector.register(worker.status, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the driver waits no longer
            status.send(NUMBER.pack(pid))

    def _refuse(self, status: socket.socket, descriptors: list[int], error: OSError) -> None:
        """Report why a worker cannot be forked."""
        for descriptor in descriptors:
            os.close(descriptor)
        with status, contextlib.suppress(OSError):
            status.send(NUMBER.pack(-(error.errno or errno.EAGAIN)))

    def _forget(self) -> None:
        """Release the fork server's resources in a fork."""
        self._selector.close()
        self._control.close()
        os.close(self._driver)
        for worker in self._workers:
            worker.close()
        signal.signal(signal.SIGINT, self._on_interrupt)  # type: ignore[arg-type] # as it was


def _import(modules: tuple[str, ...], path: list[str]) -> tuple[str, str]:
    """Import the modules; return why this process cannot be forked and by which, or "" and ""."""
    sys.path[:] = path
    thresholds = gc.get_threshold()
    # Full collections during imports would take a tenth of the time.
    rare = (*thresholds[:2], _RARE_GC)
    gc.set_threshold(*rare)
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
    name_process(_NAME)  # some versions of torch rename the process
    if gc.get_threshold() == rare:  # a module may have set its own thresholds
        gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()  # forks share these objects' memory as long as the collector does not visit them
    return _why_not(opened_by, started_by)


@contextlib.contextmanager
def _gpus_counted_in_forks() -> Iterator[None]:
    """Make torch count GPUs in forks of this process.

    To count them, torch initializes NVML, or CUDA if NVML is missing; for `is_available` always
    CUDA. Both open device files and may start threads, and no fork of a process that has
    initialized CUDA can use a GPU.
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
            if getattr(owner, name) is ours:  # an imported module may have replaced it too
                setattr(owner, name, count)


def _counted_in_fork(count: Callable[[], int]) -> int:
    """Call a function in a fork; return its result (at least -1), or -1 if it fails."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            code = count() + 1
        finally:
            os._exit(code)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 1, -1)


def _why_not(opened_by: dict[str, str], started_by: dict[str, str]) -> tuple[str, str]:
    pid = os.fork()  # OpenBLAS and other fork-aware libraries end their threads at the first fork
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
    """Return the names of this process's threads by id, without the main thread."""
    threads = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread just ended
            threads[thread] = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    threads.pop(str(os.getpid()), None)
    return threads


def _gpu_files() -> set[str]:
    """Return the GPU device files that this process has open."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.add(os.readlink(f"/proc/self/fd/{name}"))
    return {file for file in files if file.startswith(_GPUS)}


def _work(name: str, descriptors: list[int], driver: int) -> int:
    """Become the process that the driver describes; return its exit code.

    The process ends with the driver even while it imports the program's script, which may never
    return.
    """
    state, sentinel, stdout, stderr, tracker, *inherited = descriptors
    name_process(name)
    for descriptor, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream, descriptor)
        os.close(stream)
    with open(state, "rb", buffering=0, closefd=False) as file:
        environment = pickle.load(file)
    os.environb.clear()
    os.environb.update(environment)
    begin_worker(driver)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python seeds its own generator in a fork, and each worker torch's
    # As in multiprocessing's own fork server.
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    return spawn._main(state, sentinel)
