"""The driver's end of the fork server, and the settings that its forks inherit."""

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

from pycollect.errors import is_interrupt, warn_user
from pycollect.transport.descendants import children_of, cpu_ticks, kill_tree
from pycollect.transport.import_warnings import filters_import_warnings
from pycollect.transport.process import has_pidfd
from pycollect.transport.processes.fork_server_main import MESSAGE_BYTES, MOST_DESCRIPTORS, NUMBER

# pytest tells there which test runs; nothing reads it while it is imported.
_CHANGES_ALWAYS = {"PYTEST_CURRENT_TEST"}

_OF_STATUS = (  # of proc(5): the rest of that file says what the process has done so far
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed",
    "Mems_allowed",
)


def process_environment() -> Hashable:
    """What a process that this thread starts would have from it; equal where nothing has changed.

    Environment variables, which libraries read while they are imported; credentials and
    capabilities, limits, the CPUs that it may use, its priority and control group; the
    interpreter.

    Raises:
        OSError: this system does not tell.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _CHANGES_ALWAYS}
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        frozenset(environment.items()),
        tuple(line for line in status if line.partition(":")[0] in _OF_STATUS),
        *(Path(f"/proc/self/{name}").read_text() for name in ("limits", "cgroup", "oom_score_adj")),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        spawn.get_executable(),
    )


# multiprocessing's own fork server is not used: it belongs to the program, outlives its workers,
# and reaps them at once, so that a worker's process id may be reused when its group is killed.

# A template always imports the first. It imports the others, and all modules of this package, if
# this program has imported them, and the modules of set_forkserver_preload. It leaves out modules
# that start threads or open a GPU when they are imported.
_ALWAYS = ("pycollect.transport.processes.serve",)
_IF_HERE = ("gymnasium", "torchrl", "torchrl.envs")
_PACKAGE = "pycollect."

_STILL_SECONDS = 5.0  # without any CPU time: it is stopped, or waits for something
_BUSY_SECONDS = 60.0  # while it imports
_LOOK_MILLISECONDS = 100
_MOST_TRIES = 4  # fork_servers; the last one imports nothing beforehand that is not needed
_IDLE_SECONDS = 60.0

_CODE = """import sys
sys.path[:] = {path!r}
from pycollect.transport.processes.fork_server_main import run
run({control}, {driver}, {idle}, {filters_warnings})
"""


class ForkServerError(RuntimeError):
    """There is no template, or no fork of it: the process has to be started in another way.

    Attributes:
        module: The module whose import is the reason, or "".
    """

    def __init__(self, text: str, module: str = "") -> None:
        super().__init__(text)
        self.module = module


class ForkServer:
    """A process that imports what workers need, and forks them.

    It ends with this process, when this lets go of it, and when it had no worker for a minute.

    Args:
        process_environment: those that it has from this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, process_environment: Hashable) -> None:
        self.process_environment = process_environment
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
                stdout=subprocess.DEVNULL,  # a worker has the driver's
            )

    @property
    def is_over(self) -> bool:
        """Whether its process is gone."""
        return self.process.poll() is not None

    def prepare(self, modules: tuple[str, ...]) -> None:
        """Have it import these modules, and wait for it. The first time this takes seconds.

        Raises:
            ForkServerError: its forks could not do what a new process can, or it is gone.
        """
        if modules != self._modules and self.why_not is None:
            with _no_template():
                self._control.send(pickle.dumps((modules, _path())))
            with self._given_up_if_wrong():
                self._await(self._control)
                why_not, module = pickle.loads(_received(self._control))
            self._modules = modules
            if why_not:
                self.why_not = ForkServerError(str(why_not), str(module))
        if self.why_not is not None:
            raise ForkServerError(str(self.why_not), self.why_not.module)

    def fork(self, name: str, descriptors: Sequence[int]) -> tuple[int, socket.socket]:
        """Fork a worker; its process id and the line on which its end is told.

        To close the line is to let go of the worker, which is killed if it still runs.

        Args:
            name: by which its process is shown.
            descriptors: what it gets, see `fork_server_main`.

        Raises:
            ForkServerError: the template is gone, or they are too many.
            OSError: no process can be forked, or no descriptor is free.
        """
        ours, theirs = socket.socketpair()
        everything = [*descriptors, theirs.fileno()]
        try:
            with theirs, _no_template():
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

    def read_number(self, line: socket.socket, flags: int = 0) -> int:
        """Read from a worker's line; waits.

        Args:
            flags: Those of ``recv``.

        Raises:
            ForkServerError: The template is gone, or was killed because it does not answer.
        """
        with self._given_up_if_wrong():
            self._await(line)
            number: int = NUMBER.unpack(_received(line, flags))[0]
        return number

    @contextlib.contextmanager
    def _given_up_if_wrong(self) -> Iterator[None]:
        """Kill the template if this fails: nothing that it sends later is an answer."""
        try:
            yield
        except Exception as error:  # unpickling raises almost anything
            self._kill()
            if is_interrupt(error):
                raise
            raise ForkServerError(f"the fork server failed: {error}") from error

    def _kill(self) -> None:
        """Kill it, and the workers that it has forked without an answer; others go on."""
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

        Raises:
            TimeoutError: The fork server uses no CPU time, or takes too long.
        """
        poll = select.poll()
        poll.register(message_of, select.POLLIN)
        began = moved = time.monotonic()
        used = self._ticks()
        while not poll.poll(_LOOK_MILLISECONDS):
            now, before, used = time.monotonic(), used, self._ticks()
            moved = moved if used == before else now
            if now - moved > _STILL_SECONDS or now - began > _BUSY_SECONDS:
                warn_user(
                    f"the fork server (process {self.process.pid}) did not answer for "
                    f"{now - began:.0f} s and was killed; workers start from a new fork server or "
                    "are spawned"
                )
                raise TimeoutError(f"it did not answer for {now - began:.0f} s")

    def _ticks(self) -> int:
        """CPU time of the template and of its forks, one of which may count GPUs for it."""
        pid = self.process.pid
        return sum(map(cpu_ticks, (pid, *children_of(pid))))

    def leave(self) -> None:
        """Ask it for nothing more: it ends with the last of its workers. Idempotent."""
        self._control.close()


class ForkServers:
    """The template of this program, and those that were, as long as they have workers."""

    def __init__(self) -> None:
        self.asking = threading.RLock()
        self._current: ForkServer | None = None
        self._left: list[ForkServer] = []
        self._tries = 0  # fork_servers that could not be forked because of a module
        self._left_out: set[str] = set()  # modules that cannot be imported before a fork
        # After engines have ended their workers.
        self._at_exit = util.Finalize(None, self._end, exitpriority=50)

    def ready(self) -> ForkServer:
        """The one that there is, ready to fork, or another one where that would not do.

        Raises:
            ForkServerError: there can be none, or its forks could not do what a new process can.
        """
        if getattr(sys, "frozen", False):
            raise ForkServerError("this program is frozen into an executable")
        if not has_pidfd():
            raise ForkServerError("this system does not support process file descriptors (pidfd)")
        with self.asking, _no_template():
            self._left = [template for template in self._left if not template.is_over]
            here, current = (process_environment(), filters_import_warnings()), self._current
            if current is not None and (
                current.process_environment != here or (current.is_over and current.why_not is None)
            ):
                self.leave()
                current = None
            if current is None:
                current = self._current = ForkServer(here)
            everything = (*_modules(), *_wanted())
            modules = tuple(name for name in everything if name not in self._left_out)
            try:
                current.prepare(modules)
            except ForkServerError as error:
                if names := self._to_leave_out(error.module, modules):
                    return self._ready_without(names, error)
                current.why_not = error
                current.leave()
                raise
            except BaseException:  # interrupted: what it answers would be another's answer
                self.leave()
                raise
            return current

    def _to_leave_out(self, module: str, modules: Sequence[str]) -> list[str]:
        """Return the modules without which a template may do.

        Args:
            module: The one to blame; if "", any module of set_forkserver_preload may be.
            modules: Those that the template was to import.
        """
        self._tries += 1
        if not module:
            return [name for name in _wanted() if name in modules]
        package = _package(module) if self._tries < _MOST_TRIES else ""
        return _within(package, modules) if module not in _ALWAYS else []

    def _ready_without(self, names: Sequence[str], error: ForkServerError) -> ForkServer:
        self._left_out |= {*names}
        self.leave()
        template = self.ready()
        warn_user(
            f"{', '.join(names)}: not preloaded in the fork server, because workers could not be "
            f"forked afterwards: {error}. Each worker imports it itself, which may take seconds."
        )
        return template

    def leave(self) -> None:
        """Make another one when next there is one asked for."""
        with self.asking:
            if self._current is not None:
                self._current.leave()
                self._left.append(self._current)
                self._current = None

    def forget(self) -> None:
        """In a fork of this process: they are its parent's."""
        self.asking = threading.RLock()  # that may be held by a thread which is not here
        self.leave()

    def _end(self) -> None:
        self.leave()
        for template in self._left:
            template.process.kill()
            template.process.wait()


fork_servers = ForkServers()
"""Those of this program."""

os.register_at_fork(after_in_child=fork_servers.forget)


@contextlib.contextmanager
def _no_template() -> Iterator[None]:
    """What the system refuses, or does not tell, is that there is no template."""
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
    """What a template imports now, so that no worker has to.

    Of this package it is what this program has imported: its script does so again in each worker.
    """
    here = [*sys.modules]  # at once: other threads may import
    own = sorted(name for name in here if isinstance(name, str) and name.startswith(_PACKAGE))
    there = (name for name in (*_IF_HERE, *own) if sys.modules.get(name) is not None)
    return (*_ALWAYS, *there)


def _package(module: str) -> str:
    """Return the package whose modules may import it: of this package, a subpackage."""
    return module.rpartition(".")[0] if module.startswith(_PACKAGE) else module.partition(".")[0]


def _within(package: str, modules: Sequence[str]) -> list[str]:
    """Return the modules of a package, or all if it is "", without the one that must be there."""
    return [
        name
        for name in dict.fromkeys(modules)
        if name not in _ALWAYS and (not package or f"{name}.".startswith(f"{package}."))
    ]


def _wanted() -> tuple[str, ...]:
    """What this program has told multiprocessing's fork servers to import."""
    wanted = getattr(forkserver._forkserver, "_preload_modules", ())
    return tuple(name for name in wanted if name != "__main__")


def _path() -> list[str]:
    """Where this process looks for modules, wherever it goes."""
    own: str = process.ORIGINAL_DIR  # type: ignore[attr-defined] # as spawn does
    return [own if entry == "" else entry for entry in sys.path if isinstance(entry, str)]
