"""Teams: processes that collect for one worker, on their own and inside Ray actors."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from collect_support import FrameOracle, bias_policy, is_gone, parity_policy
from echo_envs import LENGTHS, PATIENCE, EchoEnv, GateEnv, wait_until
from envs_for_tests import CountingEnv, EnvBrokeError, TextEnv
from test_stragglers import END, MeetingEnv

from pycollect import (
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
    WorkerError,
)
from pycollect._core import RolloutControl, SharedNumber
from pycollect.batch import make_pool, slab_tensors, to_tensordict
from pycollect.collectors.mailbox_handle import MailboxHandle
from pycollect.collectors.preemption import Preemption
from pycollect.collectors.remote_options import RemoteOptions
from pycollect.collectors.remote_worker import WorkerSpec
from pycollect.collectors.team import Team
from pycollect.collectors.worker_kind import WorkerKind
from pycollect.generators import next_seed
from pycollect.worker import Worker
from pycollect.worker_options import WorkerOptions

T = 7  # of one env in one rollout
W = 2  # processes of each team
CONFIG = {"num_cpus": 1, "memory": 1024**3}


@dataclass(frozen=True)
class Inner:
    """What a team's batches look like: how its W processes are joined, P envs of each.

    Attributes:
        joined: None: they are not sync.
        envs: P; 0: one env without a dimension of its own.
    """

    joined: Any = "stack"
    envs: int = 0

    def __str__(self) -> str:
        return f"{self.joined} of {self.envs}"

    @property
    def shape(self) -> tuple[int, ...]:
        envs = (self.envs,) if self.envs else ()
        if self.joined is None:
            return (*envs, T)
        if self.joined == "stack":
            return (W, *envs, T)
        return (W * self.envs, T) if self.joined == 0 and envs else (*envs, W * T)

    @property
    def frames(self) -> int:
        return max(self.envs, 1) * T * (1 if self.joined is None else W)

    @property
    def arguments(self) -> dict[str, Any]:
        if self.joined is None:
            return {"collector_class": MultiaSyncDataCollector}
        kwargs = {} if self.joined == "stack" else {"cat_results": self.joined}
        return {"collector_class": "sync", "collector_kwargs": kwargs}

    def entries(self, worker: int) -> list[Any]:
        """Env p of process w of worker b has the number 10 b + w P + p."""
        count = max(self.envs, 1)
        fns = [partial(EchoEnv, 10 * worker + i, LENGTHS) for i in range(W * count)]
        return [fns[w * count : (w + 1) * count] for w in range(W)] if self.envs else list(fns)

    def rows(self, td: Any, worker: int | None) -> list[tuple[int | None, int, Any]]:
        """(worker, env, its frames) in the order in which ids are numbered."""
        assert td.shape == self.shape
        count = max(self.envs, 1)
        if self.joined is None:
            parts = [td]
        elif self.joined == "stack":
            parts = list(td.unbind(0))
        else:
            parts = list(td.chunk(W, 0 if self.joined == 0 and self.envs else td.ndim - 1))
        rows = []
        for w, part in enumerate(parts):
            if self.joined is None:
                w = int(part["observation"].reshape(-1, 3)[0, 0]) % 10 // count
            rows += [(worker, w * count + p, part[p] if self.envs else part) for p in range(count)]
        return rows


INNERS = [Inner(joined, envs) for joined in ("stack", 0, -1, None) for envs in (0, 2)]
STACK, STACK_2, FIRST = Inner("stack"), Inner("stack", 2), Inner(None)


# A team alone, as an actor has it


@contextmanager
def team_of(
    entries: Sequence[Any],
    policy: Any,
    inner: Inner = STACK,
    preemption: Preemption | None = None,
    **given: Any,
) -> Iterator[Team]:
    arguments = {
        "prefetch": None,
        "update_each": False,
        "max_weight_update_interval": None,
        "worker_init_timeout": PATIENCE,
        "worker_timeout": None,
        "max_worker_restarts": 3,
        "restart_on_error": False,
        **given,
    }
    sync = inner.joined is not None
    options = RemoteOptions.checked(
        sync=sync, cat_results=inner.joined, built_by_workers=False, **arguments
    )
    if preemption is not None:
        options = replace(options, preemption=preemption, uneven=True, padded=True)
    own = WorkerOptions(frames=inner.frames, num_threads=1, mask=preemption is not None)
    team = Team(WorkerSpec(1, list(entries), None, own, team=options), cloudpickle.dumps(policy))
    try:
        yield team
    finally:
        team.close()


def collected(
    team: Team, version: int = 0, random: bool = False, control: RolloutControl | None = None
) -> tuple[Any, Any]:
    """A rollout as a TensorDict, and its report."""
    slab = make_pool(team.placement, 1).acquire()
    report = team.collect(slab, 0, version, random, control)
    assert slab.header().frames == report.header.frames
    tensors = slab_tensors(slab, team.batch_shape, team.leaves.keys)
    return to_tensordict(tensors, team.batch_shape), report


def pids() -> list[int]:
    """Of this process's own workers."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("inner", [FIRST, *[inner for inner in INNERS if inner != FIRST]], ids=str)
def test_every_frame_of_a_team(inner: Inner) -> None:
    oracle = FrameOracle()
    with team_of(inner.entries(1), parity_policy(), inner) as team:
        assert team.env.num_seeds == W * max(inner.envs, 1)
        for _ in range(4):
            td, report = collected(team)
            oracle.check(inner.rows(td, None if inner.joined is None else 1))
            assert report.header.worker == 1
            assert report.header.frames == inner.frames == td.numel()
            assert report.team.lost == {}
        team.set_share(2 * inner.frames)
        if inner.joined is not None:  # else it is not said which rollouts come first
            td, report = collected(team)
            assert td.shape[-1] == inner.shape[-1] // T * 2 * T
            assert report.header.frames == 2 * inner.frames


@pytest.mark.processes
def test_a_process_that_dies_is_replaced_by_its_team() -> None:
    """Also: seeds and states of generators, versions of weights, an exception past the limit."""
    entries = [partial(CountingEnv, 10, (4,)), partial(CountingEnv, 11, (4,))]
    with team_of(entries, None, max_worker_restarts=1) as team:
        team.set_seed([1, 2], 5)
        first, report = collected(team)
        state = team.generator_state()
        second, _ = collected(team, version=3)
        team.set_seed([1, 2], 5)
        again, _ = collected(team)
        assert torch.equal(first["action"], again["action"])
        assert not torch.equal(first["action"][0], first["action"][1])
        team.resume(state, [3, 4])
        assert torch.equal(collected(team)[0]["action"], second["action"])

        last, _ = collected(team, version=4)
        victim = pids()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_gone(victim))
        td, report = collected(team, version=4)
        assert report.header.policy_version == 4
        assert report.team.lost == {"worker_died": T}
        assert report.team.restarts == 1
        before, after = last["collector", "traj_ids"], td["collector", "traj_ids"]
        went_on = [bool((before[w, -1] == after[w]).any()) for w in range(W)]
        assert sorted(went_on) == [False, True]
        assert collected(team)[1].team.lost == {}

        for victim in pids():
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: is_gone(victim))
        with pytest.raises(WorkerError, match=r"of the processes of worker 1: worker \d died"):
            collected(team)


def check_padded(rows: Sequence[tuple[int | None, int, Any]], oracle: FrameOracle) -> list[int]:
    """How many frames each of these rows has, which zeros follow."""
    lengths = []
    for worker, env, row in rows:
        length = int(row["collector", "mask"].sum())
        lengths.append(length)
        assert row["collector", "mask"][:length].all()
        behind = row[length:]
        assert (behind["collector", "traj_ids"] == -1).all()
        for key, value in behind.exclude(("collector", "traj_ids")).items(True, True):
            assert not value.any(), key
        oracle.check([(worker, env, row[:length].exclude(("collector", "mask")))])
    return lengths


def ask_to_stop(stop: SharedNumber, once: Path) -> None:
    wait_until(once.exists)
    stop.value = 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("inner", "fraction"),
    [(STACK, 0.7), (STACK_2, 0.0), (Inner(0, 2), 0.0), (Inner(-1), 0.7), (Inner(-1, 2), 0.0)],
    ids=str,
)
def test_a_team_is_stopped(
    inner: Inner, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second process is in step END of its rollout until it has heard that it is to stop."""
    gate, reached, stop = tmp_path / "gate", tmp_path / "reached", SharedNumber()
    entries = inner.entries(1)
    number = 10 + max(inner.envs, 1)
    slow = partial(MeetingEnv, reached, gate, END, number=number, length=LENGTHS)
    if inner.envs:
        entries[1][0] = slow
    else:
        entries[1] = slow
    stops = MailboxHandle.stop

    def stop_and_open(self: MailboxHandle) -> None:
        stops(self)
        if self.index == 1:
            gate.touch()

    monkeypatch.setattr(MailboxHandle, "stop", stop_and_open)
    with team_of(entries, parity_policy(), inner, Preemption(1.0, fraction)) as team:
        oracle = FrameOracle()
        control = RolloutControl(stop, 1, 1)
        asking = Thread(target=ask_to_stop, args=(stop, reached))
        asking.start()
        for batch in range(3):
            td, report = collected(team, control=control if batch == 0 else None)
            lengths = check_padded(inner.rows(td, 1), oracle)
            assert report.header.frames == sum(lengths) == td["collector", "mask"].sum()
            least = max(END, math.ceil(fraction * T))
            if batch == 0:
                assert lengths[-1] == least
            else:
                assert lengths == [T] * len(lengths)
        asking.join()


@pytest.mark.slow
def test_text_and_random_actions_from_a_team() -> None:
    entries = [partial(TextEnv, 10 + p, length=LENGTHS) for p in range(W)]
    with team_of(entries, None) as team:
        report = collected(team, random=True)[1]
        hints = report.extras["hint",]
        assert hints.shape == (W, T)
        alone = Worker(
            0,
            [partial(TextEnv, 10 + p, length=LENGTHS) for p in range(W)],
            None,
            None,
            WorkerOptions(frames=W * T),
        )
        slab = make_pool(alone.placement, 1).acquire()
        assert (alone.collect(slab, 0, 0, True).extras["hint",] == hints).all()
    with team_of(STACK.entries(1), bias_policy()) as team:
        biases = {name: torch.full((1,), 3.0) for name in ("module.bias",)}
        team.load_weights(biases)
        assert (collected(team, 1, random=True)[0]["bias"] == 0).all()
        assert (collected(team, 1)[0]["bias"] == 3).all()


# In Ray actors


@contextmanager
def collecting(inner: Inner, workers: int, policy: Any, **arguments: Any) -> Iterator[Any]:
    given = {
        "remote_configs": CONFIG,
        "worker_init_timeout": PATIENCE,
        **inner.arguments,
        **arguments,
    }
    frames = inner.frames * (workers if given.get("sync") else 1)
    entries = given.pop("entries", None) or [inner.entries(b) for b in range(workers)]
    with RayCollector(entries, policy, frames_per_batch=frames, **given) as collector:
        yield collector


def processes_of(collector: Any, worker: int) -> list[int]:
    pid = collector.stats()["workers"][worker]["pid"]
    children = psutil.Process(pid).children()
    return [p.pid for p in children if "spawn_main" in " ".join(p.cmdline())]


def check_ledger(collector: Any) -> dict[str, Any]:
    ledger = collector.ledger()
    for account in (ledger["total"], *ledger["workers"].values()):
        assert account["issued"] == (
            account["delivered"] + account["in_flight"] + account["lost"]
        ), ledger
        assert account["lost"] == sum(account["reasons"].values())
    return ledger


OUTERS = {
    "stack": {"sync": True},
    "0": {"sync": True, "cat_results": 0},
    "-1": {"sync": True, "cat_results": -1},
    "async": {},
}


def outer_shape(outer: str, workers: int, inner: tuple[int, ...]) -> tuple[int, ...]:
    if outer == "stack":
        return (workers, *inner)
    if outer == "0":
        return (workers * inner[0], *inner[1:])
    return (*inner[:-1], workers * inner[-1]) if outer == "-1" else inner


def of_each_worker(td: Any, outer: str, workers: int) -> list[Any]:
    if outer == "stack":
        return list(td.unbind(0))
    if outer == "async":
        return [td]
    return list(td.chunk(workers, 0 if outer == "0" else td.ndim - 1))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        *[("stack", inner) for inner in INNERS],
        *[("async", inner) for inner in (STACK, STACK_2, Inner(-1, 2), FIRST, Inner(None, 2))],
        *[("0", inner) for inner in (STACK, STACK_2, Inner(0), Inner(-1, 2))],
        *[("-1", inner) for inner in (STACK, STACK_2, Inner(0, 2), Inner(-1), FIRST)],
    ],
    ids=str,
)
def test_every_frame_from_teams_in_actors(outer: str, inner: Inner) -> None:
    workers = 2
    oracle = FrameOracle()
    with collecting(inner, workers, parity_policy(), **OUTERS[outer]) as collector:
        for _ in range(5):
            td = collector.next()
            assert td.shape == outer_shape(outer, workers, inner.shape)
            assert td.names == [None] * (td.ndim - 1) + ["time"]
            rows = []
            for worker, own in enumerate(of_each_worker(td, outer, workers)):
                rows += inner.rows(own, None)
                if outer != "async":
                    assert (own["observation"][..., 0] // 10 == worker).all()
            for row in rows if outer != "async" else [rows]:
                oracle.check([row] if outer != "async" else row)
        ledger = check_ledger(collector)
    assert ledger["total"]["delivered"] == oracle.frames
    assert ledger["total"]["lost"] == 0


@pytest.mark.ray
def test_a_team_in_an_actor() -> None:
    """Shapes, seeds, weights, state, and a death of which the actor's collector hears."""
    policy = bias_policy()
    with collecting(STACK, 1, policy, sync=True) as collector:
        assert collector.set_seed(5) == next_seed(next_seed(5))
        first = collector.next()
        assert first.shape == (1, W, T)
        collector.update_policy_weights_({"module.bias": torch.tensor([2.0])})
        td = collector.next()
        assert (td["bias"] == 2).all()
        state = collector.state_dict()
        assert collector.stats()["workers"][0]["version"] == 1

        victim = processes_of(collector, 0)[1]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_gone(victim))
        later = collector.next()
        assert (later["bias"] == 2).all()
        account = check_ledger(collector)["workers"][0]
        assert account["reasons"] == {"worker_died": T}
        assert account["delivered"] == 3 * W * T
        assert collector.stats()["workers"][0]["restarts"] == 1
        ids = torch.cat([batch["collector", "traj_ids"] for batch in (first, td, later)])
        assert ids.unique().tolist() == list(range(int(ids.max()) + 1))

        collector.load_state_dict(state)
        again = collector.next()
        assert int(again["collector", "traj_ids"].min()) == int(ids[1].max()) + 1
        assert (again["observation"][..., 0, 2] == 0).all()
        left = processes_of(collector, 0)
    wait_until(lambda: all(is_gone(pid) for pid in left))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST, Inner(-1)], ids=str)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_actors_that_die_take_their_processes_with_them(inner: Inner, sync: bool) -> None:
    with collecting(inner, 2, parity_policy(), sync=sync) as collector:
        ids = [collector.next()["collector", "traj_ids"].flatten() for _ in range(3)]
        processes = processes_of(collector, 1)
        assert len(processes) == W
        os.kill(collector.stats()["workers"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in processes))
        ids += [collector.next()["collector", "traj_ids"].flatten() for _ in range(6)]
        check_ledger(collector)
    every = torch.cat(ids)
    assert every.unique().tolist() == list(range(int(every.max()) + 1))


class DragEnv(EchoEnv):
    """Takes its time."""

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        return super().step(action)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK_2, Inner(0, 2), Inner(-1), FIRST], ids=str)
def test_a_straggling_actor_stops_its_processes(inner: Inner) -> None:
    """As soon as it was stopped at all: nobody knows when it hears of it."""
    ours, theirs = inner.entries(0), inner.entries(1)
    for process in range(W if inner is FIRST else 1):  # where any may be first, all are slow
        drag = partial(DragEnv, 10 + process, LENGTHS)
        theirs[process] = [drag, *theirs[process][1:]] if inner.envs else drag
    with collecting(
        inner, 2, parity_policy(), entries=[ours, theirs], sync=True, preemptive_threshold=0.5
    ) as collector:
        oracle = FrameOracle()
        short = 0
        while short < 2:
            td = collector.next()
            assert td.shape == (2, *inner.shape)
            lengths = [check_padded(inner.rows(own, None), oracle) for own in td]
            short += min(lengths[1]) < T
        ledger = check_ledger(collector)["total"]
        assert ledger["delivered"] == ledger["issued"] == oracle.frames
        assert ledger["lost"] == 0


class BreakingEnv(CountingEnv):
    """Raises at its tenth step."""

    def step(self, action: Any) -> Any:
        if len(self.actions) == 9:
            raise EnvBrokeError("it broke")
        return super().step(action)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST], ids=str)
def test_an_exception_in_a_process_is_the_callers(inner: Inner) -> None:
    entries = [[partial(CountingEnv, 0), partial(BreakingEnv, 1)]]
    with collecting(inner, 1, None, entries=entries, sync=True) as collector:
        with pytest.raises(EnvBrokeError, match="it broke") as caught:
            list(collector)
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerError)
        assert cause.worker == 0
        assert "BreakingEnv" in cause.remote_traceback or "it broke" in cause.remote_traceback
        check_ledger(collector)
        with pytest.raises(EnvBrokeError):
            collector.next()


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_that_hangs_is_ended_by_its_team(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    entries = [[partial(EchoEnv, 0, (4,)), partial(GateEnv, gate, T + 3, number=1, length=(4,))]]
    with collecting(
        STACK, 1, parity_policy(), entries=entries, sync=True, worker_timeout=5.0
    ) as collector:
        collector.next()
        pid = collector.stats()["workers"][0]["pid"]
        collector.next()
        stats = collector.stats()["workers"][0]
        assert (stats["pid"], stats["restarts"]) == (pid, 1)
        assert check_ledger(collector)["total"]["reasons"] == {"worker_timeout": T}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, Inner(-1), FIRST], ids=str)
def test_whole_trajectories_from_teams(inner: Inner) -> None:
    with collecting(
        inner, 2, parity_policy(), sync=True, trajs_per_batch=5, max_frames_per_traj=10
    ) as collector:
        for _ in range(4):
            td = collector.next()
            for row in td:
                own = row[row["collector", "mask"]]
                assert own["observation"][:, 2].tolist() == list(range(len(own)))
                assert own["next", "done"].flatten().tolist() == [False] * (len(own) - 1) + [True]
        assert check_ledger(collector)["total"]["reasons"] == {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("inner", [STACK, FIRST], ids=str)
def test_teams_come_and_go(inner: Inner) -> None:
    with collecting(inner, 1, parity_policy(), sync=True) as collector:
        assert collector.next().shape == (1, *inner.shape)
        (new,) = collector.add_collectors([inner.entries(1)])
        with pytest.warns(UserWarning, match="2 workers from the next batch on"):
            td = collector.next()
        assert td.shape[:-1] == (2, *inner.shape[:-1])
        assert td.shape[-1] == -(-T // 2)
        processes = processes_of(collector, 0)
        with pytest.warns(UserWarning, match="1 workers from the next batch on"):
            collector.remove_collectors(0)
        assert collector.next().shape == (1, *inner.shape)
        assert list(collector.stats()["workers"]) == [0, new]
        wait_until(lambda: all(is_gone(pid) for pid in processes))
        check_ledger(collector)


@pytest.mark.ray
@pytest.mark.slow
def test_torchrls_classes_are_ours_by_name() -> None:
    collectors = pytest.importorskip("torchrl.collectors")
    cls = collectors.MultiSyncCollector
    entries = [partial(CountingEnv, b) for b in range(2)]
    with collecting(
        STACK, 2, None, entries=entries, sync=True, collector_class=cls, num_workers_per_collector=W
    ) as collector:
        td = collector.next()
    assert td.shape == (2, W, T)
    assert td["observation"][:, :, 0, 0].tolist() == [[0, 0], [1, 1]]


ENVS = [partial(CountingEnv), partial(CountingEnv)]
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"entries": [ENVS, ENVS], "num_workers_per_collector": 2}, ValueError, "num_workers_per_coll"),
    ({"entries": [[], ENVS]}, ValueError, "create_env_fn"),
    ({"entries": [[ENVS, 3], ENVS]}, TypeError, "create_env_fn"),
    ({"collector_kwargs": {"cat_results": 1}}, ValueError, "collector_kwargs: cat_results"),
    ({"collector_kwargs": {"prefetch": -1}}, ValueError, "collector_kwargs: prefetch"),
    ({"collector_kwargs": {"prefetch": "1"}}, TypeError, "collector_kwargs: prefetch"),
    ({"collector_kwargs": {"num_collectors": 1}}, ValueError, "num_collectors"),
    ({"collector_kwargs": {"sync": True}}, ValueError, "'sync'"),
    ({"collector_kwargs": {"create_env_kwargs": [{}] * 3}}, ValueError, "create_env_kwargs"),
    (
        {"collector_class": "async", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "collector_kwargs: cat_results",
    ),
    (
        {"collector_class": "single", "collector_kwargs": {"cat_results": 0}},
        ValueError,
        "cat_results",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED)
def test_what_is_refused(
    arguments: dict[str, Any], error: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("checked before Ray is started or joined")

    monkeypatch.setattr("pycollect.collectors.ray.RayEngine", started)
    given = {"collector_class": "sync", **arguments}
    entries = given.pop("entries", [partial(CountingEnv)] * 2)
    with pytest.raises(error, match=text):
        RayCollector(entries, None, frames_per_batch=4, sync=True, **given)


def test_names_of_what_an_actor_runs() -> None:
    for value in ("sync", MultiSyncDataCollector, "MultiSyncCollector"):
        assert WorkerKind.checked(value).team == "sync"
    for value in ("async", MultiaSyncDataCollector, "MultiAsyncCollector"):
        assert WorkerKind.checked(value).team == "async"
    assert WorkerKind.checked(SyncDataCollector).team is None
