"""The process that calls the policy for async workers: its weights, death and shutdown."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from collect_support import (
    CENTRAL_ASYNC,
    PATIENCE,
    STEPS,
    collecting,
    is_gone,
    parity,
    parity_policy,
)
from echo_envs import ENTRIES, GateEnv, TallyEnv, wait_until
from envs_for_tests import CountingEnv
from raising import raised
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from test_central import failing, watched
from test_kills import shared_files
from test_ledger import check
from torch import nn

from pycollect import WorkerError
from pycollect.driver.workers import WorkerGroup

pytestmark = pytest.mark.processes(usual=2)


def server(collector: Any) -> dict[str, Any]:
    told: dict[str, Any] = collector.stats()["server"]
    return told


def killed(collector: Any) -> None:
    """Kill the server."""
    os.kill(server(collector)["pid"], signal.SIGKILL)


def tally(path: Path, worker: int) -> Any:
    return partial(TallyEnv, path, number=10 * worker)


def test_workers_continue_while_no_batch_is_requested(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    entry = partial(tally, steps)
    with collecting(CENTRAL_ASYNC, entry, parity_policy(), frames=STEPS) as collector:
        collector.next()  # its worker starts another one
        wait_until(lambda: steps.stat().st_size == 3 * STEPS, PATIENCE)


class Where(nn.Module):
    """Output the pid of the process that calls the policy."""

    def forward(self, observation: torch.Tensor) -> Any:
        action, seen = parity(observation)
        return action, torch.full_like(seen, os.getpid())


def test_the_policy_is_called_in_a_separate_process() -> None:
    policy = TensorDictModule(Where(), ["observation"], ["action", "seen"])
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector:
        batches = [collector.next() for _ in range(4)]
        assert all((batch["seen"] == server(collector)["pid"]).all() for batch in batches)
        workers = {own["pid"] for own in collector.stats()["workers"].values()}
        assert server(collector)["pid"] not in workers | {os.getpid()}


def built() -> Any:
    return watched()[1]


@pytest.mark.parametrize("source", ["policy", "policy_factory"])
def test_each_frame_has_the_version_that_acted(source: str) -> None:
    _, policy = watched()
    given = {"policy": policy} if source == "policy" else {"policy": None, "policy_factory": built}
    arguments = {**given, "track_policy_version": True}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], frames=STEPS, **arguments) as collector:
        for version in range(1, 4):
            weights = (
                TensorDict.from_module(policy)
                .data.clone()
                .apply(lambda own, version=version: torch.full_like(own, 1.0 + version))
            )
            collector.update_policy_weights_(weights)
            oldest = -1
            while oldest < version:
                batch = collector.next()
                versions = batch["collector", "policy_version"]
                oldest = int(versions.min())
                expected = batch["observation"] * (1.0 + versions)[:, None]
                assert torch.equal(batch["seen"], expected)
        assert collector.policy_lag[int(batch["observation"][0, 0]) // 10] == 0


def test_weights_are_sent_automatically() -> None:
    module, policy = watched()
    arguments = {"update_after_each_batch": True}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        batch = collector.next()
        with torch.no_grad():
            module.scale.fill_(3.0)
        while not torch.equal(batch["seen"], 3 * batch["observation"]):
            batch = collector.next()


def test_a_state_continues_in_another_run() -> None:
    module, policy = watched()
    with torch.no_grad():
        module.scale.fill_(2.0)
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.set_seed(3)
        collector.next()
        state = collector.state_dict()
    _, other = watched()
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], other, frames=STEPS) as collector:
        collector.load_state_dict(state)
        batch = collector.next()
        assert torch.equal(batch["seen"], 2 * batch["observation"])


def test_a_server_that_dies_is_replaced_with_its_workers() -> None:
    _, policy = watched()
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.update_policy_weights_(TensorDict.from_module(policy).data.apply(lambda w: 2 * w))
        collector.next()
        before = server(collector)["pid"]
        killed(collector)
        while server(collector)["restarts"] == 0:
            collector.next()
        assert is_gone(before)
        assert "policy server" in server(collector)["failure"]
        assert "SIGKILL" in server(collector)["failure"]
        workers = collector.stats()["workers"]
        assert [own["restarts"] for own in workers.values()] == [1, 1]
        for _ in range(4):
            batch = collector.next()
            assert torch.equal(batch["seen"], 2 * batch["observation"])
        total = collector.ledger()["total"]
    assert total["reasons"].keys() == {"server_died"}
    assert total["issued"] == total["delivered"] + total["lost"] + total["in_flight"]


@pytest.mark.slow
def test_calls_to_the_policy_of_a_dead_server() -> None:
    """The calls return normally, and all workers continue."""
    _, policy = watched()
    arguments = {"max_worker_restarts": 10}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        collector.next()
        state = collector.state_dict()
        calls = [
            collector.reset,
            lambda: collector.set_seed(1),
            lambda: collector.load_state_dict(state),
        ]
        for number, call in enumerate(calls):
            killed(collector)
            call()
            while server(collector)["restarts"] == number:
                collector.next()
            collector.next()


def first_waits(gate: Path, worker: int) -> Any:
    """Make the first worker's environment wait in its first rollout."""
    return partial(CountingEnv, number=10) if worker else partial(GateEnv, gate, 3)


def test_a_request_to_a_worker_whose_server_died(tmp_path: Path) -> None:
    """The worker cannot reply, because it cannot finish its rollout first; the call raises."""
    gate, entry = tmp_path / "gate", partial(first_waits, tmp_path / "gate")
    with collecting(CENTRAL_ASYNC, entry, parity_policy(), frames=STEPS) as collector:
        collector.next()  # from the other worker
        wait_until(gate.with_suffix(".reached").exists, PATIENCE)
        pid = server(collector)["pid"]
        killed(collector)
        wait_until(lambda: is_gone(pid), PATIENCE)
        gate.touch()
        with pytest.raises(WorkerError, match="policy server"):
            collector.getattr_env("number")
        collector.next()


@pytest.mark.processes(usual=1)
@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("restart", "before"),
        ("await_replaced", "before"),
        ("await_replaced", "after"),
        ("replace", "before"),  # the first worker
        ("replace", "after"),
    ],
)
def test_an_interrupt_while_a_server_is_replaced(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server and its workers are still replaced, each exactly once."""
    original, interrupted = getattr(WorkerGroup, name), []

    def with_interrupt(group: WorkerGroup, *arguments: Any) -> None:
        is_first = not interrupted
        interrupted.append(when)
        if is_first and when == "before":
            signal.raise_signal(signal.SIGINT)
        original(group, *arguments)
        if is_first and when == "after":
            signal.raise_signal(signal.SIGINT)

    _, policy = watched()
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.next()
        monkeypatch.setattr(WorkerGroup, name, with_interrupt)
        killed(collector)
        with pytest.raises(KeyboardInterrupt):
            deque(collector, 0)
        for _ in range(6):
            collector.next()
        told = collector.stats()
        assert server(collector)["restarts"] == 1
        assert [own["restarts"] for own in told["workers"].values()] == [1, 1]
        check(collector.ledger())


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage_collection")
def test_deaths_of_the_server_leave_no_memory_behind() -> None:
    """A recorded death must not keep frames and slabs of the call that noticed it."""
    before = shared_files()
    with collecting(
        CENTRAL_ASYNC, ENTRIES["one"], parity_policy(), frames=STEPS, max_worker_restarts=9
    ) as collector:
        collector.next()
        shared = collector._source.assembly._shared
        for deaths in range(1, 4):
            killed(collector)
            while server(collector)["restarts"] < deaths:
                collector.next()
            for _ in range(4):
                collector.next()
        created = sum(pool.stats().created for pool in shared._pools.values())
        check(collector.ledger())
    assert created == 2 * (2 + 1)  # two workers, each with one slab in use and two spare
    del collector
    assert shared_files() == before


def test_beyond_the_limit_the_servers_death_is_reported() -> None:
    arguments = {"max_worker_restarts": 0}
    way, policy = CENTRAL_ASYNC, parity_policy()
    with collecting(way, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        collector.next()
        killed(collector)
        with raised(WorkerError, worker=-1) as caught:
            deque(collector, 0)
        assert "SIGKILL" in str(caught.value)
        with raised(WorkerError, worker=-1):
            collector.next()


class HangsIn(nn.Module):
    """Hang in call number `at`, but only once over all processes."""

    def __init__(self, hung: Path, at: int) -> None:
        super().__init__()
        self.hung, self.left = hung, at

    def forward(self, observation: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0 and not self.hung.exists():
            self.hung.touch()
            wait_until(lambda: False, PATIENCE)
        return parity(observation)


def test_a_hanging_call_is_aborted(tmp_path: Path) -> None:
    module = HangsIn(tmp_path / "hung", 10)
    policy = TensorDictModule(module, ["observation"], ["action", "seen"])
    arguments = {"worker_timeout": 1.0}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        while server(collector)["restarts"] == 0:
            collector.next()
        assert "worker_timeout" in server(collector)["failure"]
        collector.next()


def test_a_policy_that_cannot_be_built_is_the_callers_error() -> None:
    def factory() -> Any:
        raise ZeroDivisionError("of the factory")

    with (
        pytest.raises(ZeroDivisionError, match="of the factory") as caught,
        collecting(CENTRAL_ASYNC, ENTRIES["one"], frames=STEPS, policy_factory=factory),
    ):
        pass
    assert "policy server" in str(caught.value.__cause__)


def test_an_exception_of_the_policy_reaches_the_caller() -> None:
    module, policy = failing(ZeroDivisionError("by the policy"))
    module.left = 10
    with (
        collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector,
        pytest.raises(ZeroDivisionError, match="by the policy"),
    ):
        deque(collector, 0)


def test_a_shutdown_leaves_nothing() -> None:
    before = ours_running()
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], parity_policy(), frames=STEPS) as collector:
        collector.next()
        pid = server(collector)["pid"]
    assert is_gone(pid)
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], parity_policy(), frames=STEPS) as collector:
        collector.next()
        pid = server(collector)["pid"]
        forgotten = CENTRAL_ASYNC.collector(
            [ENTRIES["one"](0)], parity_policy(), frames_per_batch=STEPS
        )
        forgotten_pid = server(forgotten)["pid"]
        del forgotten
        gc.collect()
        wait_until(lambda: is_gone(forgotten_pid), PATIENCE)
    wait_until(lambda: ours_running() <= before, PATIENCE)


def ours_running() -> set[psutil.Process]:
    """Return the worker and inference server processes of this program."""
    found = set()
    for own in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if own.name().startswith(("pyc-worker", "pyc-policy")) and not is_gone(own.pid):
                found.add(own)
    return found


DRIVER = """
from echo_envs import ENTRIES
from pycollect import MultiaSyncDataCollector
def policy(observation):
    return observation[..., 0].long() % 2
if __name__ == "__main__":
    entries = [ENTRIES["one"](worker) for worker in range(2)]
    with MultiaSyncDataCollector(
        entries, policy, frames_per_batch=5, inference="central"
    ) as collector:
        collector.next()
        told = collector.stats()
        pids = [told["server"]["pid"], *(own["pid"] for own in told["workers"].values())]
        print(*pids, flush=True)
        for _ in collector:
            pass
"""


@pytest.mark.slow  # the server is a worker of the engine; see test_process_engine.py
def test_a_driver_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 3
    driver.kill()
    driver.wait(PATIENCE)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), PATIENCE)


def test_workers_can_be_added_and_removed() -> None:
    _, policy = watched()
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.next()
        collector.set_seed(3)
        collector.add_collectors([ENTRIES["one"](2)])
        numbers: set[int] = set()
        while numbers != {0, 10, 20}:
            batch = collector.next()
            assert torch.equal(batch["seen"], batch["observation"])
            numbers.add(int(batch["observation"][0, 0]))
        collector.remove_collectors([0, 1])
        while numbers != {20}:
            numbers = {int(collector.next()["observation"][0, 0]) for _ in range(3)}


class Sizes(nn.Module):
    """Output the number of environments in the call."""

    def forward(self, observation: torch.Tensor) -> Any:
        action, _ = parity(observation)
        return action, torch.full(action.shape, action.numel())


def test_a_call_waits_for_the_minimum_batch_size() -> None:
    """Two workers ask in turn; a call with only one of them would otherwise come first."""
    policy = TensorDictModule(Sizes(), ["observation"], ["action", "size"])
    arguments = {"min_batch_size": 2, "server_timeout": PATIENCE}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        assert (collector.next()["size"] == 2).all()


def test_a_buffer_is_filled_although_the_server_dies() -> None:
    class Kept:
        def __init__(self) -> None:
            self.frames = 0

        def extend(self, batch: Any) -> None:
            self.frames += batch.numel()

    kept = Kept()
    policy = parity_policy()
    arguments = {"replay_buffer": kept}
    with collecting(CENTRAL_ASYNC, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        collector.start()
        wait_until(lambda: kept.frames > 0)
        killed(collector)
        wait_until(lambda: server(collector)["restarts"] == 1)
        before = kept.frames
        wait_until(lambda: kept.frames > before + 3 * STEPS)
