"""The driver's end of the fork server, and the process environment that its forks inherit."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from multiprocessing import forkserver, process, spawn, util
from pathlib import Path

from pycollect.errors import filters_import_warnings, is_interrupt, warn_user
from pycollect.transport.process import has_pidfd, waited
from pycollect.transport.processes.fork_server_main import MESSAGE_BYTES, MOST_DESCRIPTORS, NUMBER
from pycollect.transport.worker_process import children_of, cpu_ticks, kill_tree

# pytest sets it to the running test; no module reads it during import.
_CHANGES_ALWAYS = {"PYTEST_CURRENT_TEST"}

# Of /proc/<pid>/status; other fields change while a process runs.
_STATUS_FIELDS = (
    *("Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
)


def process_environment() -> Hashable:
    """Return everything that a child process inherits from this thread, to be compared later.

    It covers environment variables (libraries read them during import), credentials, capabilities,
    limits, CPU affinity, priority, control group and the interpreter. Raises OSError if the system
    does not report it.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _CHANGES_ALWAYS}
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        frozenset(environment.items()),
        tuple(line for line in status if line.partition(":")[0] in _STATUS_FIELDS),
        *(Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        spawn.get_executable(),
    )


# multiprocessing's own fork server is not used: it belongs to the program, outlives its workers,
# and reaps them at once, so that a worker's process id may be reused when its group is killed.

# The fork server always imports the first. It imports the others, and all modules of this package,
# if this program has imported them, and the modules of set_forkserver_preload. It leaves out
# modules that start threads or open a GPU when they are imported.
_ALWAYS = ("pycollect.transport.host",)
_IF_IMPORTED = ("gymnasium", "torchrl", "torchrl.envs")
_PACKAGE = "pycollect."

_STILL_SECONDS = 5.0  # timeout of a fork server that needs no CPU: it is stopped or blocked
_BUSY_SECONDS = 60.0  # timeout of a fork server that imports, without its waits for a CPU
_POLL_MILLISECONDS = 100
_MAX_TRIES = 4  # number of fork servers; the last one preloads only what is necessary
_IDLE_SECONDS = 60.0

_CODE = """import sys
sys.path[:] = {path!r}
from pycollect.transport.processes.fork_server_main import run
run({control}, {driver}, {idle}, {filters_warnings})
"""


class ForkServerError(RuntimeError):
    """The fork server is unavailable or cannot fork, so a process must be spawned instead."""

    def __init__(self, text: str, module: str = "") -> None:
        super().__init__(text)
        self.module = module  # the module whose import is the reason, or ""


class ForkServer:
    """A process that imports the modules workers need, and forks workers.

    It ends with this process, after `leave` once its workers have ended, and after a minute without
    workers.
    """

    def __init__(self, environment: Hashable) -> None:
        self.environment = environment
        self.why_not: ForkServerError | None = None
        self._modules: tuple[str, ...] = ()
        self._forked: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _CODE.format(
            path=_path(),
            control=theirs.fileno(),
            driver=os.getpid(),
            idle=_IDLE_SECONDS,
            filters_warnings=filters_import_warnings(),
        )
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined] # as spawn does
        with theirs:
            self.process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *flags, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a worker gets the driver's
            )

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def prepare(self, modules: tuple[str, ...]) -> None:
        """Import these modules in the fork server, and wait. The first time takes seconds.

        Raises ForkServerError if it is gone, or its forks could not do all that a new process can.
        """
        if modules != self._modules and self.why_not is None:
            with _os_errors_translated():
                self._control.send(pickle.dumps((modules, _path())))
            with self._killed_on_error():
                self._await(self._control)
                why_not, module = pickle.loads(_received(self._control))
            self._modules = modules
            if why_not:
                self.why_not = ForkServerError(str(why_not), str(module))
        if self.why_not is not None:
            raise ForkServerError(str(self.why_not), self.why_not.module)

    def fork(self, name: str, descriptors: Sequence[int]) -> tuple[int, socket.socket]:
        """Fork a worker; return its pid and the status socket that reports its exit.

        Closing the status socket releases the worker, which is killed if it still runs. For the
        descriptors see `fork_server_main`. Raises ForkServerError if the fork server is gone or
        there are too many descriptors, and OSError if no process can be forked or no descriptor is
        free.
        """
        ours, theirs = socket.socketpair()
        everything = [*descriptors, theirs.fileno()]
        try:
            with theirs, _os_errors_translated():
                if len(everything) > MOST_DESCRIPTORS:
                    raise OSError(f"one message cannot carry {len(everything)} file descriptors")
                socket.send_fds(self._control, [name.encode()], everything)
            pid = self.read_number(ours)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            self._forked.add(pid)
        except BaseException:
            ours.close()
            raise
        return pid, ours

    def read_number(self, status: socket.socket, flags: int = 0) -> int:
        """Return the next number of a status socket; raise ForkServerError if none comes."""
        with self._killed_on_error():
            self._await(status)
            number: int = NUMBER.unpack(_received(status, flags))[0]
        return number

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        """Kill the fork server if the block fails, because a later answer would be misread."""
        try:
            yield
        except Exception as error:  # unpickling raises almost anything
            self._kill()
            if is_interrupt(error):
                raise
            raise ForkServerError(f"the fork server failed: {error}") from error

    def _kill(self) -> None:
        """Kill the fork server and workers without a reported start; other workers go on."""
        pid = self.process.pid
        if not self.is_over:
            os.kill(pid, signal.SIGSTOP)
            for child in children_of(pid):
                if child not in self._forked:
                    kill_tree(child)
        self.process.kill()
        self.process.wait()

    def _await(self, message_of: socket.socket) -> None:
        """Wait until a message has arrived or the fork server has ended.

        Like a starting worker (`StartTimer`), it gets more time on a busy machine.
        """
        poll = select.poll()
        poll.register(message_of, select.POLLIN)
        began = moved = time.monotonic()
        used, delay = self._ticks(), waited(self.process.pid)
        limit = began + _BUSY_SECONDS - delay
        while not poll.poll(_POLL_MILLISECONDS):
            now, before = time.monotonic(), (used, delay)
            used, delay = self._ticks(), waited(self.process.pid)
            moved = moved if (used, delay) == before else now
            if now - moved > _STILL_SECONDS or now > limit + delay:
                warn_user(
                    f"the fork server (process {self.process.pid}) did not answer for "
                    f"{now - began:.0f} s and was killed; workers start from a new fork server or "
                    "are spawned"
                )
                raise TimeoutError(f"it did not answer for {now - began:.0f} s")

    def _ticks(self) -> int:
        """Return the CPU time of the fork server and its forks, one of which may count GPUs."""
        pid = self.process.pid
        return sum(map(cpu_ticks, (pid, *children_of(pid))))

    def leave(self) -> None:
        """Send no more requests: the fork server ends with its last worker. Idempotent."""
        self._control.close()


class ForkServers:
    """The fork server of this program, and earlier ones that still have workers."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._current: ForkServer | None = None
        self._left: list[ForkServer] = []
        self._tries = 0  # fork servers that were unusable because of a module
        self._left_out: set[str] = set()  # modules that cannot be imported before a fork
        # At exit, runs after the engines have ended their workers.
        self._at_exit = util.Finalize(None, self._end, exitpriority=50)

    def ready(self) -> ForkServer:
        """Return a fork server that is ready to fork, or raise a ForkServerError; see `prepare`."""
        if getattr(sys, "frozen", False):
            raise ForkServerError("this program is frozen into an executable")
        if not has_pidfd():
            raise ForkServerError("this system does not support process file descriptors (pidfd)")
        with self.lock, _os_errors_translated():
            self._left = [server for server in self._left if not server.is_over]
            environment = process_environment(), filters_import_warnings()
            current = self._current
            if current is not None and (
                current.environment != environment or (current.is_over and current.why_not is None)
            ):
                self.leave()
                current = None
            if current is None:
                current = self._current = ForkServer(environment)
            everything = (*_modules(), *_preloaded())
            modules = tuple(name for name in everything if name not in self._left_out)
            try:
                current.prepare(modules)
            except ForkServerError as error:
                if names := self._to_leave_out(error.module, modules):
                    return self._ready_without(names, error)
                current.why_not = error
                current.leave()
                raise
            except BaseException:  # interrupted: the pending answer would be misread
                self.leave()
                raise
            return current

    def _to_leave_out(self, module: str, modules: Sequence[str]) -> list[str]:
        """Return which of the `modules` of the old fork server the next one need not import.

        `module` made the old fork server unusable. If "", it is any module of
        set_forkserver_preload.
        """
        self._tries += 1
        if not module:
            return [name for name in _preloaded() if name in modules]
        package = _package(module) if self._tries < _MAX_TRIES else ""
        return _within(package, modules) if module not in _ALWAYS else []

    def _ready_without(self, names: Sequence[str], error: ForkServerError) -> ForkServer:
        self._left_out |= {*names}
        self.leave()
        server = self.ready()
        warn_user(
            f"{', '.join(names)}: not preloaded in the fork server, because workers could not be "
            f"forked afterwards: {error}. Each worker imports it itself, which may take seconds."
        )
        return server

    def leave(self) -> None:
        """Start a new fork server for the next worker."""
        with self.lock:
            if self._current is not None:
                self._current.leave()
                self._left.append(self._current)
                self._current = None

    def forget(self) -> None:
        """Leave the fork servers in a fork of this process: they belong to its parent."""
        self.lock = threading.RLock()  # a thread of the parent may hold the old one
        self.leave()

    def _end(self) -> None:
        self.leave()
        for server in self._left:
            server.process.kill()
            server.process.wait()


fork_servers = ForkServers()
"""Fork servers of this program."""

os.register_at_fork(after_in_child=fork_servers.forget)


@contextlib.contextmanager
def _os_errors_translated() -> Iterator[None]:
    """Raise a ForkServerError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise ForkServerError(str(error)) from error


def _received(of: socket.socket, flags: int = 0) -> bytes:
    data = of.recv(MESSAGE_BYTES, flags)
    if not data:
        raise ConnectionResetError("it has ended")
    return data


def _modules() -> tuple[str, ...]:
    """Return the modules that the fork server imports, so that no worker has to.

    It takes all modules of this package that the program has imported, because the script imports
    them again in each worker.
    """
    names = [*sys.modules]  # a copy: other threads may import
    ours = sorted(name for name in names if isinstance(name, str) and name.startswith(_PACKAGE))
    imported = (name for name in (*_IF_IMPORTED, *ours) if sys.modules.get(name) is not None)
    return (*_ALWAYS, *imported)


def _package(module: str) -> str:
    """Return the package whose modules may import `module`; in this package, the subpackage."""
    return module.rpartition(".")[0] if module.startswith(_PACKAGE) else module.partition(".")[0]


def _within(package: str, modules: Sequence[str]) -> list[str]:
    """Return the modules of a package, or all if it is "", without the one that is required."""
    return [
        name
        for name in dict.fromkeys(modules)
        if name not in _ALWAYS and (not package or f"{name}.".startswith(f"{package}."))
    ]


def _preloaded() -> tuple[str, ...]:
    """Return the modules that the program passed to set_forkserver_preload."""
    wanted = getattr(forkserver._forkserver, "_preload_modules", ())
    return tuple(name for name in wanted if name != "__main__")


def _path() -> list[str]:
    """Return the module search path of this process, with absolute entries."""
    start: str = process.ORIGINAL_DIR  # type: ignore[attr-defined] # as spawn does
    return [start if entry == "" else entry for entry in sys.path if isinstance(entry, str)]
