"""Worker processes behind an engine: rollouts in place, weights, errors, deaths, cleanup."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from collect_support import is_gone
from echo_envs import GateEnv, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError
from raising import refused
from torch import nn

from pycollect._core import Placement, SharedSlabPool, Slab
from pycollect.data.slabs import SlabRows, slab_tensors
from pycollect.data.weights import WeightSpec, weights_from
from pycollect.errors import WorkerDied, WorkerError
from pycollect.transport.engine import AnswerWaiter
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import RolloutRequest, WorkerInfo, WorkerSpec, set_seed
from pycollect.transport.pickling import WeightSlab
from pycollect.transport.processes.engine import ProcessEngine
from pycollect.worker.options import WorkerOptions

STEPS = 6
LONG = 120.0


class Constant(nn.Module):
    """Return the module's only parameter as the action."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.number.to(torch.int64).expand(observation.shape[:-1]).clone()


class SlowEnv(CountingEnv):
    """An environment with slow steps."""

    def step(self, action: Any) -> Any:
        time.sleep(0.02)
        return super().step(action)


class BrokenEnv(CountingEnv):
    """Raise an error at the given step, with a message of the given length."""

    def __init__(self, at: int, length: int) -> None:
        super().__init__()
        self.left, self.message = at, "x" * length

    def step(self, action: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise EnvBrokeError(self.message)
        return super().step(action)


class ParentEnv(CountingEnv):
    """Start a child process, and write its pid to a file."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.child = subprocess.Popen(["sleep", "1000"])
        Path(note).write_text(str(self.child.pid))


class ClosingEnv(CountingEnv):
    """Write a file on close."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note

    def close(self) -> None:
        Path(self.note).write_text("closed")


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    engine = ProcessEngine()
    yield engine
    engine.leave()


def start(engine: ProcessEngine, entry: Any, index: int = 0, **options: Any) -> WorkerHandle:
    spec = WorkerSpec(index, entry, None, WorkerOptions(STEPS, num_threads=1, **options))
    return engine.start(spec, engine.put(cloudpickle.dumps(Constant())), {})


@dataclass(frozen=True)
class Started:
    """A worker that is built, with the specs that it reported."""

    handle: WorkerHandle
    info: WorkerInfo

    def ask(self, random: bool = False) -> Slab:
        """Request a rollout, and return its slab."""
        slab = SharedSlabPool(self.info.placement, 1, 0).acquire()
        self.handle.submit(RolloutRequest(random, SlabRows(slab)))
        return slab


def started(engine: ProcessEngine, entry: Any, index: int = 0, **options: Any) -> Started:
    handle = start(engine, entry, index, **options)
    return Started(handle, handle.built())


def await_gone(pid: int) -> None:
    deadline = time.monotonic() + LONG
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def await_reaped(pid: int) -> None:
    """Wait until multiprocessing has reaped the process, as it does when it starts another."""
    wait_until(lambda: all(child.pid != pid for child in multiprocessing.active_children()))


def test_workers_write_into_the_rows_of_one_batch(engine: ProcessEngine) -> None:
    handles = [start(engine, lambda i=i: CountingEnv(i), i) for i in range(2)]
    infos = [handle.built() for handle in handles]
    assert infos[0].pid != infos[1].pid
    layout = infos[0].leaves.layout()
    for order, shape in (("stack", [2, STEPS]), ("time", [2 * STEPS])):
        pool = SharedSlabPool(Placement(layout, 2, 1, STEPS, order), 1, 1)
        for _ in range(2):
            slab = pool.acquire()
            for row, handle in enumerate(handles):
                handle.submit(RolloutRequest(False, SlabRows(slab, row, order)))
            waiting = list(handles)
            while waiting:
                handle = AnswerWaiter(engine.bell).wait_any(waiting, LONG)
                assert handle is not None
                rollout = handle.rollout()
                assert rollout.buffer is None
                assert rollout is not handle.rollout()
                handle.pop()
                waiting.remove(handle)
            numbers = slab_tensors(slab, shape)["observation",][..., 0].reshape(2, STEPS)
            assert (numbers == torch.arange(2.0)[:, None]).all()
            assert [slab.header(row).worker for row in range(2)] == [0, 1]
            del slab, numbers


def test_rollouts_that_are_queued_each_have_their_slab(engine: ProcessEngine) -> None:
    worker = started(engine, CountingEnv)
    slabs = [worker.ask(random=True) for _ in range(2)]
    for sequence, slab in enumerate(slabs):
        assert worker.handle.rollout().report.stepped >= STEPS
        worker.handle.pop()
        assert slab.header().sequence == sequence
    assert worker.handle.steps() == 2 * STEPS


def test_queued_rollouts_use_the_newest_weights(engine: ProcessEngine) -> None:
    worker = started(engine, SlowEnv)
    handle, policy = worker.handle, Constant()
    packer = WeightSlab(WeightSpec.of(policy))
    worker.ask()
    slab = worker.ask()
    for serial in range(1, 4):
        with torch.no_grad():
            policy.number.fill_(serial % 2)
        packed = np.empty(packer.bytes(weights_from(policy)), np.uint8)
        packer.pack(weights_from(policy), packed)
        weights = engine.put(packed)
        assert handle.assign(serial, 10 * serial, weights, True) is None
    handle.rollout()
    handle.pop()
    handle.rollout()
    assert slab.header().policy_version == 30
    assert (slab_tensors(slab, [STEPS])["action",] == 1).all()


@pytest.mark.parametrize("length", [10, 100_000])
def test_an_error_is_raised_unchanged_and_the_worker_continues(
    engine: ProcessEngine, length: int
) -> None:
    worker = started(engine, lambda: BrokenEnv(9, length))
    handle = worker.handle
    for _ in range(3):
        worker.ask()
    handle.rollout()
    handle.pop()
    with pytest.raises(EnvBrokeError, match="x" * 10) as caught:
        handle.rollout()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert len(str(caught.value)) == length
    handle.pop()
    assert handle.rollout().report.episodes is not None


def test_requests_wait_their_turn_and_answer(engine: ProcessEngine) -> None:
    worker = started(engine, CountingEnv)
    handle = worker.handle
    worker.ask()
    assert pickle.loads(handle.answer(handle.run(set_seed, [3], 3))) is None
    assert handle.has_answer
    handle.drop_rollouts()
    assert not handle.has_answer
    with pytest.raises(TypeError, match="seeds"):
        handle.answer(handle.run(set_seed))


def test_dropped_rollouts_end_soon_and_are_not_returned(engine: ProcessEngine) -> None:
    worker = started(engine, SlowEnv)
    handle = worker.handle
    for _ in range(100):  # more than the mailbox can hold
        worker.ask()
        handle.drop_rollouts()
    worker.ask()
    rollout = handle.rollout()
    assert rollout.report.stepped < 100 * STEPS


def test_stop_ends_the_oldest_rollout_early(engine: ProcessEngine) -> None:
    worker = started(engine, SlowEnv, mask=True)
    slab = worker.ask()
    worker.handle.stop()
    worker.handle.rollout()
    assert 1 <= slab.lengths()[0] < STEPS


def test_every_wait_notices_a_killed_worker(engine: ProcessEngine) -> None:
    for read in ("rollout", "wait_any", "answer"):
        worker = started(engine, SlowEnv, 3)
        handle, pid = worker.handle, worker.info.pid
        worker.ask()
        call = handle.run(set_seed, [1], 1)
        os.kill(pid, signal.SIGKILL)
        since = time.monotonic()
        if read == "wait_any":
            assert AnswerWaiter(engine.bell).wait_any([handle], LONG) is handle
        with pytest.raises(WorkerDied, match="SIGKILL") as caught:
            handle.answer(call) if read == "answer" else handle.rollout()
        assert time.monotonic() - since < LONG / 2
        assert caught.value.worker == 3
        handle.kill()
        handle.kill()
        assert is_gone(pid)


def test_processes_of_environments_end_with_their_worker(
    engine: ProcessEngine, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    for way in ("killed", "died", "died, as another found"):
        worker = started(engine, lambda: ParentEnv(str(note)))
        handle = worker.handle
        child = int(note.read_text())
        if way != "killed":
            os.kill(worker.info.pid, signal.SIGKILL)
            await_gone(worker.info.pid)
        if way == "died, as another found":
            await_reaped(worker.info.pid)
            assert "was ended by SIGKILL" in handle.process.end().summary
        assert way != "killed" or not is_gone(child)
        handle.kill()
        await_gone(child)


def test_environments_are_closed(engine: ProcessEngine, tmp_path: Path) -> None:
    note = tmp_path / "note"
    worker = started(engine, lambda: ClosingEnv(str(note)))
    worker.ask()
    AnswerWaiter(engine.bell).wait_closed([worker.handle])
    assert note.read_text() == "closed"
    assert is_gone(worker.info.pid)


class LockedEnv(CountingEnv):
    """Make a lock, as TorchRL's TrajCounter does, and write the name of its semaphore."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.lock = multiprocessing.get_context("spawn").Lock()
        note.write_text(self.lock._semlock.name.lstrip("/"))  # type: ignore[attr-defined]


def test_locks_of_environments_end_with_their_worker(engine: ProcessEngine, tmp_path: Path) -> None:
    note = tmp_path / "note"
    worker = started(engine, lambda: LockedEnv(note))
    semaphore = Path("/dev/shm", f"sem.{note.read_text()}")
    assert semaphore.exists()
    AnswerWaiter(engine.bell).wait_closed([worker.handle])
    assert not semaphore.exists()


class SlowlyClosingEnv(ClosingEnv):
    """Write a file when closing begins, and finish closing once the file is deleted."""

    def close(self) -> None:
        going = Path(self.note).with_suffix(".begun")
        going.touch()
        wait_until(lambda: not going.exists())
        super().close()


def test_slow_environments_are_closed_and_do_not_delay_others(
    engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, gate = tmp_path / "note", tmp_path / "gate"
    slow = started(engine, lambda: SlowlyClosingEnv(str(note)))
    stuck = started(engine, lambda: GateEnv(gate, 2), 1)
    stuck.ask()
    wait_until(gate.with_suffix(".reached").exists)
    wait_dead, begun = AnswerWaiter._wait_dead, note.with_suffix(".begun")
    awaited = []

    def wait(self: AnswerWaiter, handles: Sequence[Any], timeout: float) -> None:
        awaited.append([handle.spec.index for handle in handles])
        wait_until(begun.exists)
        if len(awaited) == 2:  # otherwise the time is over before any process exits
            begun.unlink()
            wait_dead(self, handles, LONG)

    monkeypatch.setattr(AnswerWaiter, "_wait_dead", wait)
    AnswerWaiter(engine.bell).wait_closed([slow.handle, stuck.handle])
    assert awaited == [[0, 1], [0]]
    assert note.read_text() == "closed"
    assert is_gone(slow.info.pid)
    assert is_gone(stuck.info.pid)


def test_a_worker_that_cannot_be_built_reports_the_reason(engine: ProcessEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        start(engine, lambda: 1 / 0).built()

    def leave() -> None:
        print("so long", file=sys.stderr)
        os._exit(3)

    handle = start(engine, leave)
    with pytest.raises(WorkerDied, match="exit code 3"):
        handle.built()
    assert handle.recent_log() == "so long\n"


def test_more_memory_than_the_machine_has_is_refused(engine: ProcessEngine) -> None:
    with refused(ValueError, "frames_per_batch", "prefetch") as caught:
        engine.check_memory(1 << 60, in_place=True)
    assert "1152921504606846976" in str(caught.value)


DRIVER = """
import sys
import psutil
from pycollect.transport.processes.engine import ProcessEngine
from test_process_engine import ParentEnv, Started, start
def main():
    engine = ProcessEngine()
    handles = [start(engine, lambda i=i: ParentEnv(sys.argv[1] + str(i)), i) for i in range(2)]
    ours = [own for own in psutil.Process().children(recursive=True) if "pyc-" in own.name()]
    print(*(own.pid for own in ours), flush=True)
    workers = [Started(handle, handle.built()) for handle in handles]
    print("built", flush=True)
    while True:
        for worker in workers:
            worker.ask()
        for worker in workers:
            worker.handle.rollout()
            worker.handle.pop()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "moment", [0, *(pytest.param(moment, marks=pytest.mark.slow) for moment in range(1, 14))]
)
def test_a_killed_driver_leaves_nothing(moment: int, tmp_path: Path) -> None:
    """The driver is killed while its workers start, or at a random moment afterwards."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "pid")], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3  # two workers and their fork server
    if moment:
        assert driver.stdout.readline() == "built\n"
    # the moment of the kill, not a wait for an event
    time.sleep(random.Random(moment).random() / 2)
    driver.kill()
    driver.wait(LONG)
    pids += [int(file.read_text()) for file in tmp_path.glob("pid*")]
    for pid in pids:
        await_gone(pid)


UNGUARDED = """
import gymnasium
from pycollect import MultiSyncDataCollector
make = lambda: gymnasium.make("CartPole-v1")
MultiSyncDataCollector([make], None, frames_per_batch=10).next()
"""


def test_a_script_without_a_main_guard_gets_an_explanation(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LONG
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "WorkerError: worker 0" in last
    assert 'if __name__ == "__main__":' in last


def test_no_descriptor_is_left() -> None:
    def run() -> None:
        engine = ProcessEngine()
        worker = started(engine, CountingEnv)
        worker.ask()
        worker.handle.rollout()
        AnswerWaiter(engine.bell).wait_closed([worker.handle])
        engine.leave()

    run()  # multiprocessing keeps some descriptors of its first run
    before = len(os.listdir("/proc/self/fd"))
    run()
    assert len(os.listdir("/proc/self/fd")) <= before
