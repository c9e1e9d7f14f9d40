"""How the core defers signals, and a lock that an interrupt at any instruction leaves free."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from echo_envs import PATIENCE, wait_until

from pycollect._core import FairLock, Uninterrupted


class TestUninterrupted:
    def test_an_interrupt_is_raised_at_the_end_of_the_outermost_block(self) -> None:
        done = []

        def block() -> None:
            with Uninterrupted():
                with Uninterrupted():
                    signal.raise_signal(signal.SIGINT)
                    done.append("inner")
                done.append("outer")

        with pytest.raises(KeyboardInterrupt):
            block()
        assert done == ["inner", "outer"]

    def test_after_the_block_an_interrupt_is_raised_at_once(self) -> None:
        with Uninterrupted():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def test_an_error_passes_through(self) -> None:
        with pytest.raises(ZeroDivisionError, match="own words"), Uninterrupted():
            raise ZeroDivisionError("own words")

    def test_the_programs_own_handler_is_called_at_the_end(self) -> None:
        seen: list[str] = []
        before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
        try:
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
                seen.append("inside")
        finally:
            signal.signal(signal.SIGINT, before)
        assert seen == ["inside", "handled"]

    def test_every_handler_of_the_program_is_deferred(self, time_limit: None) -> None:
        done = []

        def block() -> None:
            with Uninterrupted():
                signal.raise_signal(signal.SIGUSR1)
                done.append("inside")

        with pytest.raises(TimeoutError):
            block()
        assert done == ["inside"]

    def test_a_fork_by_another_thread_has_the_programs_handlers(self) -> None:
        """The thread that defers signals does not exist in the child."""
        before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
        children: list[int] = []

        def fork() -> None:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGUSR1)
                os._exit(1)
            children.append(child)

        try:
            with Uninterrupted():
                thread = threading.Thread(target=fork)
                thread.start()
                thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7

    def test_another_thread_defers_nothing(self) -> None:
        inside, over = threading.Event(), threading.Event()

        def block() -> None:
            with Uninterrupted():
                inside.set()
                over.wait()

        thread = threading.Thread(target=block)
        thread.start()
        try:
            inside.wait()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        finally:
            over.set()
            thread.join()


class TestFairLock:
    def test_an_interrupt_before_any_instruction_leaves_the_lock_free(self) -> None:
        """The signal arrives before the instruction; Python decides when to call its handler."""
        prototype = ctypes.PYFUNCTYPE(None, *[ctypes.py_object] * 3)
        arrive = prototype(("PyErr_SetInterrupt", ctypes.pythonapi))
        left = interrupts = 0

        def trace(*event: Any) -> Any:
            nonlocal left
            event[0].f_trace_opcodes = True
            left -= 1
            return trace if left > 0 else arrive if left == 0 else None

        def stop(*_: Any) -> None:
            sys.settrace(None)
            raise KeyboardInterrupt

        def block(lock: FairLock) -> None:
            with lock, lock:
                pass

        handler, tracing = signal.signal(signal.SIGINT, stop), sys.gettrace()
        try:
            with ThreadPoolExecutor(1) as other:
                while left <= 0:
                    interrupts += 1
                    lock, left = FairLock(), interrupts
                    try:
                        sys.settrace(trace)
                        block(lock)
                        sys.settrace(None)
                    except KeyboardInterrupt:
                        pass
                    assert other.submit(lock.enter_if_free).result(PATIENCE), interrupts
        finally:
            sys.settrace(tracing)
            signal.signal(signal.SIGINT, handler)
        assert interrupts > 20

    def test_an_interrupted_thread_leaves_the_queue(self) -> None:
        lock, held, leave = FairLock(), threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                leave.wait()

        def follow() -> bool:
            wait_until(lambda: lock.n_waiting == 1)
            with lock:
                return leave.is_set()

        def interrupt_main() -> None:
            wait_until(lambda: lock.n_waiting == 2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with ThreadPoolExecutor(3) as others:
            others.submit(hold)
            held.wait()
            follower = others.submit(follow)
            others.submit(interrupt_main)
            with pytest.raises(KeyboardInterrupt), lock:
                pass
            assert lock.n_waiting == 1
            leave.set()
            assert follower.result(PATIENCE)
        assert not lock.is_busy

    @pytest.mark.parametrize("raises", [False, True])
    def test_a_handler_may_enter_the_lock_for_which_its_thread_waits(
        self, time_limit: None, raises: bool
    ) -> None:
        lock, held = FairLock(), threading.Event()

        def handle(*event: Any) -> None:
            with lock:
                if raises:
                    raise TimeoutError

        def hold() -> None:
            with lock:
                held.set()
                wait_until(lambda: lock.n_waiting == 1)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                wait_until(lambda: lock.n_waiting == 2)

        signal.signal(signal.SIGUSR1, handle)
        with ThreadPoolExecutor(1) as other:
            other.submit(hold)
            held.wait()
            with pytest.raises(TimeoutError) if raises else lock, lock:
                pass
            assert other.submit(lock.enter_if_free).result(PATIENCE)
