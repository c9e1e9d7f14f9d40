"""SIGINT at any moment: collected frames come in the next batch, or the ledger reports a loss."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import (
    CENTRAL,
    CENTRAL_ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    STEPS,
    FrameOracle,
    Way,
    collecting,
    is_gone,
    marked,
    of_ranks,
    parity_policy,
)
from echo_envs import LENGTHS, EchoEnv, echo_fns, wait_until
from test_restarts import check_ledger, endless, kill
from torch import nn

from pycollect import SyncDataCollector
from pycollect.data.trajectory_queue import TrajectoryQueue
from pycollect.driver import assembly, in_process
from pycollect.driver import stream as base
from pycollect.driver.accounts import Ledger, Statistics
from pycollect.driver.flow import Flow
from pycollect.driver.membership import Membership
from pycollect.driver.workers import WorkerGroup
from pycollect.transport import channel
from pycollect.transport.distributed.engine import RankCaller
from pycollect.transport.handle import WorkerHandle
from pycollect.worker.worker import Worker

OF_PROCESSES = (MULTI_STACK, MULTI_ASYNC[0], CENTRAL, CENTRAL_ASYNC)


class LimitedEnv(EchoEnv):
    """An environment that receives one signal during a step or a reset."""

    def __init__(self, where: str) -> None:
        super().__init__(0, LENGTHS)
        self._left, self._where = 3, where

    def _arrive(self, where: str) -> None:
        self._left -= where == self._where
        if self._left == 0:
            self._left = -1
            signal.raise_signal(signal.SIGUSR1)

    def reset(self, **arguments: Any) -> Any:
        self._arrive("reset")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self._arrive("step")
        return super().step(action)


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("trajs", [0, 2])
def test_a_time_limit_within_an_environment_of_this_process(
    time_limit: None, where: str, trajs: int
) -> None:
    """The error is raised once, its rollout is discarded, and the next call collects another."""
    with SyncDataCollector(
        partial(LimitedEnv, where), frames_per_batch=STEPS, trajs_per_batch=trajs or None
    ) as collector:
        with pytest.raises(TimeoutError):
            deque(collector, 0)
        frames = int(collector.next()["next", "done"].numel())
        total = collector.ledger()["total"]
    assert frames >= STEPS or trajs
    assert total["reasons"].get("incomplete", 0) == STEPS
    assert total["issued"] == total["delivered"] + total["in_flight"] + total["lost"]


class LimitedPolicy(nn.Module):
    """A policy with action 0 that receives a signal during one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 30

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGUSR1)
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.processes
def test_a_time_limit_within_a_policy_that_is_called_here(time_limit: None) -> None:
    with collecting(CENTRAL, endless, LimitedPolicy(), frames=STEPS) as collector:
        with pytest.raises(TimeoutError):
            deque(collector, 0)
        for _ in range(3):
            collector.next()
        check_ledger(collector)
        assert collector.ledger()["total"]["lost"] == 0


@pytest.mark.parametrize("way", marked(IN_PROCESS, MULTI_STACK, MULTI_ASYNC[0]))
def test_a_batch_interrupted_by_a_time_limit_is_returned_next(
    monkeypatch: pytest.MonkeyPatch, time_limit: None, way: Way
) -> None:
    check_interrupted(monkeypatch, way, base, "assemble", signal.SIGUSR1, TimeoutError)


def test_an_error_of_the_environment_is_not_taken_for_an_interrupt() -> None:
    """A TimeoutError from the environment itself is raised again by every later call."""
    with SyncDataCollector(partial(LateEnv, 0), frames_per_batch=STEPS) as collector:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                collector.next()


def raise_without_frame(number: int, frame: Any) -> None:
    frame = None
    raise TimeoutError(f"the program's time limit: {frame}")


def test_a_handler_that_assigns_to_its_parameter_is_not_recognized(time_limit: None) -> None:
    signal.signal(signal.SIGUSR1, raise_without_frame)
    with SyncDataCollector(partial(LimitedEnv, "step"), frames_per_batch=STEPS) as collector:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                collector.next()


class LateEnv(EchoEnv):
    """An environment with a step that raises TimeoutError and keeps the caller's frame."""

    def step(self, action: Any) -> Any:
        return self.simulated()

    def simulated(self, level: int = 2) -> Any:
        frame = sys._getframe(1)
        raise TimeoutError(f"the simulator does not answer: {level}, {frame.f_lineno}")


def check_interrupted(
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
    module: Any,
    name: str,
    number: signal.Signals = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Interrupt the fourth of seven calls: no frame is lost, and none comes twice."""
    oracle, envs = FrameOracle(), len(echo_fns(0))
    with collecting(way, echo_fns, parity_policy(), frames=STEPS * envs) as collector:
        for at in range(6):
            if at == 3:
                with monkeypatch.context() as patch:
                    patch_once(patch, module, name, number)
                    with pytest.raises(error):
                        collector.next()
            oracle.check(way.rows(collector.next(), envs, True))
        total = collector.ledger()["total"]
        assert collector.stats()["batches"] == 6
    assert total["lost"] == 0
    assert (
        total["delivered"] == oracle.frames == 6 * STEPS * envs * (way.workers if way.sync else 1)
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (assembly, "_numbering"),  # while joining
        (assembly, "Batch"),  # after all rollouts are copied
        (base, "assemble"),  # during delivery
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[0]))
def test_an_interrupted_batch_of_processes_is_returned_next(
    monkeypatch: pytest.MonkeyPatch, way: Way, module: Any, name: str
) -> None:
    check_interrupted(monkeypatch, way, module, name)


@pytest.mark.parametrize("module", [in_process, base], ids=["joining", "delivering"])
def test_an_interrupted_batch_of_this_process_is_returned_next(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    name = "Batch" if module is in_process else "assemble"
    check_interrupted(monkeypatch, IN_PROCESS, module, name)


@pytest.mark.parametrize(
    "way", [pytest.param(own, id=own.name, marks=pytest.mark.processes) for own in OF_PROCESSES]
)
def test_an_answer_that_was_being_read_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    check_interrupted(monkeypatch, way, channel, "unpack")


@pytest.mark.parametrize("way", [IN_PROCESS, *marked(MULTI_STACK, MULTI_ASYNC[0])])
@pytest.mark.parametrize("trajs", [None, 2])
def test_an_interrupted_finished_batch_is_returned_next(
    monkeypatch: pytest.MonkeyPatch, way: Way, trajs: int | None
) -> None:
    """The interrupt arrives when the batch is finished and the time of the call is recorded."""
    with collecting(
        way, echo_fns, parity_policy(), frames=20 * STEPS, trajs_per_batch=trajs
    ) as own:
        frames = 0
        for _ in range(4):
            frames += count(own.next())
            with monkeypatch.context() as patch:
                patch_once(patch, Statistics, "left")
                with pytest.raises(KeyboardInterrupt):
                    own.next()
            frames += count(own.next())
        total = own.ledger()["total"]
        assert (total["delivered"], total["reasons"].get("incomplete", 0)) == (frames, 0)
        assert own.stats()["frames"] == frames


@pytest.mark.parametrize("way", [IN_PROCESS, *marked(MULTI_STACK, MULTI_ASYNC[0])])
def test_a_batch_interrupted_in_postproc_is_lost_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """A batch that `postproc` has already changed is not passed to it again."""
    frames, lost = 0, 0
    with collecting(way, echo_fns, parity_policy(), frames=20 * STEPS) as own:
        for _ in range(3):
            frames += count(own.next())
            with monkeypatch.context() as patch:
                patch_once(patch, base, "finish")
                with pytest.raises(KeyboardInterrupt):
                    own.next()
            lost += 20 * STEPS if way is IN_PROCESS else 0
        total = own.ledger()["total"]
        assert total["delivered"] == frames == own.stats()["frames"]
        assert total["reasons"]["incomplete"] >= lost


@pytest.mark.parametrize("arguments", [{}, {"extend_buffer": False}, {"trajs_per_batch": 1}])
def test_an_interrupt_within_a_write_loses_the_frames_of_the_write(
    arguments: dict[str, Any],
) -> None:
    """The collector cannot tell which frames the buffer stored before the interrupt."""

    class Interrupted(list[Any]):
        def extend(self, td: Any) -> None:
            super().extend(td)
            if len(self) == 2 * STEPS:
                signal.raise_signal(signal.SIGINT)

    taken = Interrupted()
    with SyncDataCollector(
        partial(EchoEnv, 0, (STEPS,)),
        None,
        frames_per_batch=STEPS,
        max_frames_per_traj=STEPS,
        replay_buffer=taken,
        **arguments,
    ) as own:
        own.next()
        with pytest.raises(KeyboardInterrupt):
            own.next()
        own.next()
        total = own.ledger()["total"]
        assert (total["delivered"], total["reasons"]) == (2 * STEPS, {"replay_buffer": STEPS})
        assert own.stats()["replay_written_frames"] == 2 * STEPS
    assert len(taken) == 3 * STEPS


@pytest.mark.parametrize(
    ("way", "owner", "name"),
    [
        (IN_PROCESS, Flow, "drop"),
        *[
            pytest.param(way, owner, name, id=f"{way.name} {name}", marks=pytest.mark.processes)
            for way in OF_PROCESSES
            for owner, name in ((Flow, "drop"), (Membership, "settle"))
        ],
    ],
)
@pytest.mark.parametrize("call", ["set_seed", "reset", "load_state_dict"])
def test_trajectories_begin_anew_after_an_interrupted_reset(
    monkeypatch: pytest.MonkeyPatch, way: Way, owner: Any, name: str, call: str
) -> None:
    """The interrupt arrives before the workers are asked to reset their environments."""
    with collecting(
        way, echo_fns, parity_policy(), frames=15, trajs_per_batch=1, traj_format="cat"
    ) as own:
        frames, state = count(own.next()), own.state_dict()
        calls = {"set_seed": (0,), "reset": (), "load_state_dict": (state,)}
        with monkeypatch.context() as patch:
            patch_once(patch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                getattr(own, call)(*calls[call])
        for _ in range(20):
            batch = own.next()
            frames += count(batch)
            assert batch["observation"][:, 2].tolist() == list(range(len(batch)))
        check_ledger(own)
        assert own.ledger()["total"]["delivered"] == frames


@pytest.mark.parametrize("way", marked(MULTI_STACK, CENTRAL_ASYNC))
def test_the_next_shutdown_completes_an_interrupted_one(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    with collecting(way, echo_fns, parity_policy(), frames=15) as own:
        own.next()
        pids = [worker["pid"] for worker in own.stats()["workers"].values()]
        with monkeypatch.context() as patch:
            patch_once(patch, Ledger, "lose_in_flight")
            with pytest.raises(KeyboardInterrupt):
                own.shutdown()
        own.shutdown()
        wait_until(lambda: all(map(is_gone, pids)), 60)
        check_ledger(own)


@pytest.mark.parametrize(("owner", "name"), [(TrajectoryQueue, "pop"), (Statistics, "count_batch")])
def test_all_frames_are_counted_if_a_write_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    with SyncDataCollector(
        partial(EchoEnv, 0, (STEPS,)),
        None,
        frames_per_batch=STEPS,
        max_frames_per_traj=STEPS,
        trajs_per_batch=1,
        replay_buffer=[],
    ) as own:
        own.next()
        with monkeypatch.context() as patch:
            patch_once(patch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                own.next()
        own.next()
        total, stats = own.ledger()["total"], own.stats()
        assert total["in_flight"] == 0
        assert total["delivered"] == stats["frames"] == stats["replay_written_frames"]


def test_trajectories_without_a_rollout_that_an_interrupt_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupt arrives when the rollout is recorded, but not returned yet."""
    with collecting(
        IN_PROCESS, echo_fns, parity_policy(), frames=6, trajs_per_batch=1, traj_format="cat"
    ) as own:
        own.next()
        with monkeypatch.context() as patch:
            patch_once(patch, Worker, "_packed_extras")
            with pytest.raises(KeyboardInterrupt):
                deque(own, 0)
        for _ in range(20):
            batch = own.next()
            assert batch["observation"][:, 2].tolist() == list(range(len(batch)))
        check_ledger(own)


@pytest.mark.processes
def test_frames_are_shared_anew_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(MULTI_STACK, echo_fns, parity_policy(), frames=15) as own:
        added = own.add_collectors([echo_fns(2)])
        own.next()
        own.remove_collectors(added)
        with monkeypatch.context() as patch:
            patch_once(patch, WorkerHandle, "resize")
            with pytest.raises(KeyboardInterrupt):
                own.remove_collectors(1)
        assert own.next().shape == own.next().shape == (1, 3, 10)


def count(batch: Any) -> int:
    mask = batch.get(("collector", "mask"), None)
    return int(batch.numel() if mask is None else mask.sum())


@pytest.mark.parametrize("name", ["restart", "send_all"])
@pytest.mark.parametrize("way", marked(MULTI_STACK, MULTI_ASYNC[0]))
def test_a_worker_whose_replacement_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, way: Way, name: str
) -> None:
    check_replaced(monkeypatch, way, WorkerGroup, name)


@pytest.mark.processes
@pytest.mark.ranks
def test_the_connection_to_a_rank_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one thread of the driver connects to the rank."""
    by_messages = of_ranks(MULTI_ASYNC[0])[1]
    check_replaced(monkeypatch, by_messages, RankCaller, "__init__")


def check_replaced(monkeypatch: pytest.MonkeyPatch, way: Way, owner: Any, name: str) -> None:
    """Interrupt the replacement of a worker.

    It is replaced once, its pending frames are lost once, and the replacement delivers.
    """
    with collecting(way, endless, parity_policy(), frames=STEPS) as collector:
        collector.next()
        before = collector.stats()["workers"][1]["frames"]
        kill(collector, 1)
        with monkeypatch.context() as patch:
            patch_once(patch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                deque(collector, 0)
        deadline = time.monotonic() + 60
        while collector.stats()["workers"][1]["frames"] < before + 4 * STEPS:
            assert time.monotonic() < deadline, "the replacement delivers nothing"
            collector.next()
        check_ledger(collector)
        workers = collector.stats()["workers"]
        assert [workers[index]["restarts"] for index in (0, 1)] == [0, 1]


def patch_once(
    patch: pytest.MonkeyPatch, module: Any, name: str, number: signal.Signals = signal.SIGINT
) -> None:
    """Make the next call of a function send a signal to this process before it returns."""
    whole = getattr(module, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        patch.setattr(module, name, whole)
        result = whole(*args, **kwargs)
        signal.raise_signal(number)
        return result

    patch.setattr(module, name, interrupted)
