"""Nests: processes that collect for one worker, as in an actor."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import pytest
import torch
from collect_support import (
    FrameOracle,
    bias_policy,
    is_gone,
    parity_policy,
    worker_processes,
)
from echo_envs import LENGTHS, PATIENCE, wait_until
from envs_for_tests import CountingEnv, TextEnv
from nest_support import FIRST, INNERS, STACK, STACK_2, Inner, T, W, check_padded
from test_stragglers import END, MeetingEnv

from pycollect import WorkerError
from pycollect._core import RolloutControl, SharedNumber
from pycollect.data.slabs import make_pool, slab_tensors, to_tensordict
from pycollect.data.weights import Weights
from pycollect.driver.nest import Nest
from pycollect.driver.options import Preemption, RemoteOptions
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import WorkerSpec
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker


@contextmanager
def nest_of(
    entries: Sequence[Any],
    policy: Any,
    inner: Inner = STACK,
    preemption: Preemption | None = None,
    **given: Any,
) -> Iterator[Nest]:
    arguments = {
        "prefetch": None,
        "max_weight_update_interval": None,
        "worker_init_timeout": PATIENCE,
        "worker_timeout": None,
        "max_worker_restarts": 3,
        "restart_on_error": False,
        **given,
    }
    sync = inner.joined is not None
    options = RemoteOptions.checked(
        {"cat_results": inner.joined, **arguments}, sync=sync, built_by_workers=False
    )
    if preemption is not None:
        options = replace(options, preemption=preemption, uneven=True, padded=True)
    own = WorkerOptions(frames=inner.frames, num_threads=1, mask=preemption is not None)
    nest = Nest(WorkerSpec(1, list(entries), None, own), cloudpickle.dumps(policy), options)
    try:
        yield nest
    finally:
        nest.close()


def collected(
    nest: Nest, version: int = 0, random: bool = False, control: RolloutControl | None = None
) -> tuple[Any, Any]:
    """Return a rollout as a TensorDict, and its report."""
    slab = make_pool(nest.placement, 1).acquire()
    report = nest.collect(slab, 0, version, random, control)
    assert (slab.header().frames, slab.header().worker) == (report.frames, 1)
    tensors = slab_tensors(slab, nest.batch_shape, nest.leaves.keys)
    return to_tensordict(tensors, nest.batch_shape), report


def pids() -> list[int]:
    """Return the pids of this process's workers."""
    return [process.pid for process in worker_processes(os.getpid())]


@pytest.mark.processes
@pytest.mark.parametrize("inner", [FIRST, *[inner for inner in INNERS if inner != FIRST]], ids=str)
def test_every_frame_of_a_nest(inner: Inner) -> None:
    oracle = FrameOracle()
    with nest_of(inner.entries(1), parity_policy(), inner) as nest:
        assert nest.info().num_seeds == W * max(inner.envs, 1)
        for _ in range(4):
            td, report = collected(nest)
            oracle.check(inner.rows(td, None if inner.joined is None else 1))
            assert report.frames == inner.frames == td.numel()
            assert report.lost == {}
        nest.set_share(2 * inner.frames)
        td, report = collected(nest)
        assert td.shape[-1] == 2 * inner.shape[-1]
        assert report.frames == 2 * inner.frames
        in_flight = 0 if inner.joined is not None else 2 * W * inner.frames
        assert report.lost == ({"reset": in_flight} if in_flight else {})


@pytest.mark.processes
def test_a_process_that_dies_is_replaced_by_its_nest() -> None:
    """Also checks seeds, generator states, weight versions, and an error past the limit."""
    entries = [partial(CountingEnv, 10, (4,)), partial(CountingEnv, 11, (4,))]
    with nest_of(entries, None, max_worker_restarts=1) as nest:
        nest.set_seed([1, 2], 5)
        first, report = collected(nest)
        state = nest.generator_state()
        second, _ = collected(nest, version=3)
        nest.set_seed([1, 2], 5)
        again, _ = collected(nest)
        assert torch.equal(first["action"], again["action"])
        assert not torch.equal(first["action"][0], first["action"][1])
        nest.resume(state, [3, 4])
        assert torch.equal(collected(nest)[0]["action"], second["action"])

        last, _ = collected(nest, version=4)
        victim = pids()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_gone(victim))
        td, report = collected(nest, version=4)
        assert report.policy_version == 4
        assert report.lost == {"worker_died": T}
        assert report.restarts == 1
        before, after = last["collector", "traj_ids"], td["collector", "traj_ids"]
        went_on = [bool((before[w, -1] == after[w]).any()) for w in range(W)]
        assert sorted(went_on) == [False, True]
        assert collected(nest)[1].lost == {}

        for victim in pids():
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: is_gone(victim))
        with pytest.raises(WorkerError, match="worker 1"):
            collected(nest)


def ask_to_stop(stop: SharedNumber, once: Path) -> None:
    wait_until(once.exists)
    stop.value = 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("inner", "fraction"),
    [(STACK, 0.7), (STACK_2, 0.0), (Inner(0, 2), 0.0), (Inner(-1), 0.7), (Inner(-1, 2), 0.0)],
    ids=str,
)
def test_a_straggling_nest_is_stopped(
    inner: Inner, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process stays in step END of its rollout until it receives the stop request."""
    gate, reached, stop = tmp_path / "gate", tmp_path / "reached", SharedNumber()
    entries = inner.entries(1)
    number = 10 + max(inner.envs, 1)
    slow = partial(MeetingEnv, reached, gate, END, number=number, length=LENGTHS)
    if inner.envs:
        entries[1][0] = slow
    else:
        entries[1] = slow
    stops = WorkerHandle.stop

    def stop_and_open(self: WorkerHandle) -> None:
        stops(self)
        if self.spec.index == 1:
            gate.touch()

    monkeypatch.setattr(WorkerHandle, "stop", stop_and_open)
    with nest_of(entries, parity_policy(), inner, Preemption(1.0, fraction)) as nest:
        oracle = FrameOracle()
        control = RolloutControl(stop, 1, 1)
        asking = Thread(target=ask_to_stop, args=(stop, reached))
        asking.start()
        for batch in range(3):
            td, report = collected(nest, control=control if batch == 0 else None)
            lengths = check_padded(inner.rows(td, 1), oracle)
            assert report.frames == sum(lengths) == td["collector", "mask"].sum()
            least = max(END, math.ceil(fraction * T))
            if batch == 0:
                assert lengths[-1] == least
            else:
                assert lengths == [T] * len(lengths)
        asking.join()


@pytest.mark.slow
def test_text_and_random_actions_from_a_nest() -> None:
    entries = [partial(TextEnv, 10 + p, length=LENGTHS) for p in range(W)]
    with nest_of(entries, None) as nest:
        report = collected(nest, random=True)[1]
        hints = report.extras.value["hint",]
        assert hints.shape == (W, T)
        alone = Worker(
            0,
            [partial(TextEnv, 10 + p, length=LENGTHS) for p in range(W)],
            None,
            None,
            WorkerOptions(frames=W * T),
        )
        slab = make_pool(alone.placement, 1).acquire()
        assert (alone.collect(slab, 0, 0, True).extras.value["hint",] == hints).all()
    with nest_of(STACK.entries(1), bias_policy()) as nest:
        nest.load_weights(Weights({"module.bias": torch.full((1,), 3.0)}))
        assert (collected(nest, 1, random=True)[0]["bias"] == 0).all()
        assert (collected(nest, 1)[0]["bias"] == 3).all()
