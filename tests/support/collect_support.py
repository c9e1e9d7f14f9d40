"""Shared parts of the collector tests: ways to collect, counting environments, and their oracle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from echo_envs import LENGTHS, PATIENCE
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import (
    DistributedDataCollector,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    RPCDataCollector,
    SyncDataCollector,
)

STEPS = 7  # steps per env and rollout; not a multiple of the sum of the lengths
ACTORS = 2
MANY = 4


def parity(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the action (episode + step) % 2 and a copy of the observation."""
    return ((observation[..., 1] + observation[..., 2]) % 2).long(), observation.clone()


def parity_policy() -> TensorDictModule:
    return TensorDictModule(parity, ["observation"], ["action", "seen"])


class Bias(nn.Module):
    """Return action 0 and its only parameter, which shows the weights that a worker used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        lead = observation.shape[:-1]
        return torch.zeros(lead, dtype=torch.int64), self.bias.expand(*lead, 1).clone()


def bias_policy() -> TensorDictModule:
    return TensorDictModule(Bias(), ["observation"], ["action", "bias"])


def assert_equal(ours: Any, theirs: Any) -> None:
    """Check that two batches have equal keys, names, shapes, devices, dtypes and values."""
    assert [*ours.keys(True, True)] == [*theirs.keys(True, True)]
    assert ours.names == theirs.names
    assert (ours.shape, ours.device) == (theirs.shape, theirs.device)
    for key, expected in theirs.items(True, True):
        assert (ours[key].dtype, ours[key].device) == (expected.dtype, expected.device), key
        assert ours[key].is_contiguous() == expected.is_contiguous(), key
        assert torch.equal(ours[key], expected), key


def case_name(value: Any) -> str:
    """Return a parameter as text without addresses, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@dataclass(frozen=True)
class Way:
    """One way to collect: the class and the arguments that determine the layout of a batch."""

    name: str
    workers: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def remote(self) -> bool:
        return self.name != "in process"

    @property
    def multi(self) -> bool:
        return self.name.startswith("multi")

    @property
    def ranks(self) -> bool:
        return self.name.startswith("ranks")

    @property
    def children(self) -> bool:
        """Whether the workers are child processes."""
        return self.multi or self.ranks

    @property
    def transport(self) -> str:
        """Transport of rollouts from ranks, which may appear to be on another node."""
        by = self.name.removeprefix("ranks by ").partition(" ")[0]
        return by if by in ("messages", "rpc") else "shared memory"

    @property
    def sync(self) -> bool:
        return "sync" in self.arguments or self.name.startswith("multi sync")

    def collector(self, entries: Sequence[Any], policy: Any = None, **arguments: Any) -> Any:
        """Create a collector of this class over these workers; `arguments` override its own."""
        own = dict(self.arguments)
        if policy is None and arguments.get("policy_factory") is None:
            own.pop("inference", None)  # workers draw random actions
        if "inference" not in own or not all(isinstance(entry, list) for entry in entries):
            own.pop("env_groups", None)  # a single environment is one group
        arguments = {**own, **arguments}
        if not self.remote:
            return SyncDataCollector(entries, policy, **arguments)
        arguments.setdefault("worker_init_timeout", PATIENCE)
        if self.multi:
            cls = MultiSyncDataCollector if self.sync else MultiaSyncDataCollector
            return cls(list(entries), policy, **arguments)
        if self.ranks:
            arguments.setdefault("launcher", "mp")
            cls = RPCDataCollector if self.transport == "rpc" else DistributedDataCollector
            with nullcontext() if self.transport == "shared memory" else elsewhere():
                return cls(list(entries), policy, **arguments)
        arguments.setdefault("remote_configs", {"num_cpus": 1, "memory": 1024**3})
        return RayCollector(list(entries), policy, **arguments)

    @property
    def cat(self) -> Any:
        return self.arguments.get("cat_results", "stack") if self.sync else None

    def shape(self, envs: int, batched: bool, steps: int) -> tuple[int, ...]:
        """Return the batch dimensions that section 5 of the contract specifies."""
        if not self.sync:
            return (envs, steps) if batched else (steps,)
        if self.cat == "stack":
            return (self.workers, envs, steps) if batched else (self.workers, steps)
        if not batched:
            return (self.workers * steps,)
        return (self.workers * envs, steps) if self.cat == 0 else (envs, self.workers * steps)

    def rows(self, td: Any, envs: int, batched: bool) -> list[tuple[int | None, int, Any]]:
        """Return (worker, env, its frames [T]) in the order in which ids are numbered."""
        steps = td.shape[-1] // (self.workers if self.cat == -1 or self._flat(td, batched) else 1)
        rows = []
        for w in range(self.workers if self.sync else 1):
            for p in range(envs):
                worker = w if self.sync or not self.remote else None
                rows.append((worker, p, self._row(td, w, p, envs, batched, steps)))
        return rows

    def _flat(self, td: Any, batched: bool) -> bool:
        return self.cat == 0 and not batched

    def _row(self, td: Any, w: int, p: int, envs: int, batched: bool, steps: int) -> Any:
        own = slice(w * steps, (w + 1) * steps)
        if not self.sync:
            return td[p] if batched else td
        if self.cat == "stack":
            return td[w, p] if batched else td[w]
        if not batched:
            return td[own]
        return td[w * envs + p] if self.cat == 0 else td[p, own]


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make all ranks of collectors created in this context appear to be on another node."""
    with mock.patch("pycollect.transport.distributed.engine.this_node", return_value="another"):
        yield


IN_PROCESS = Way("in process")
STACK = Way("ray sync stack", ACTORS, {"sync": True})
CAT_0 = Way("ray sync 0", ACTORS, {"sync": True, "cat_results": 0})
CAT_TIME = Way("ray sync -1", ACTORS, {"sync": True, "cat_results": -1})
ASYNC = [Way(f"ray async {n}", ACTORS, {"prefetch": n}) for n in (0, 1, 2)]
# An actor's entry is that of its only process, or a list with one env for each of its processes.
# Batches have the layout of the same actors without processes.
NEST_STACK = Way(
    "ray sync stack of nests",
    ACTORS,
    {"sync": True, "collector_class": "sync", "collector_kwargs": {"cat_results": 0}},
)
MULTI_STACK = Way("multi sync stack", ACTORS)
MULTI_0 = Way("multi sync 0", ACTORS, {"cat_results": 0})
MULTI_TIME = Way("multi sync -1", ACTORS, {"cat_results": -1})
MULTI_AHEAD = Way("multi sync ahead", ACTORS, {"prefetch": 1})
# Central inference: one policy call for all workers, in the driver if they are sync, otherwise in a
# server process. Tests over MULTI_STACK or any of MULTI_ASYNC also run these ways; likewise tests
# over actors.
CENTRAL = Way("multi sync central", ACTORS, {"inference": "central"})
CENTRAL_ASYNC = Way("multi async central", ACTORS, {"prefetch": 1, "inference": "central"})
RAY_CENTRAL = Way("ray sync central", ACTORS, {"sync": True, "inference": "central"})
GROUPS = Way("multi sync central in groups", ACTORS, {**CENTRAL.arguments, "env_groups": 2})
GROUPS_ASYNC = Way(
    "multi async central in groups", ACTORS, {**CENTRAL_ASYNC.arguments, "env_groups": 2}
)
RAY_CENTRAL_ASYNC = Way("ray async central", ACTORS, {"prefetch": 1, "inference": "central"})
MULTI_ASYNC = [Way(f"multi async {n}", ACTORS, {"prefetch": n}) for n in (0, 1, 2)]


def of_ranks(way: Way) -> list[Way]:
    """Return this way with torch.distributed ranks: by shared memory, messages and RPC.

    Messages come in two variants, plain and compressed.
    """
    arguments = {**way.arguments, "sync": True} if way.sync else way.arguments
    rest = way.name.removeprefix("multi ")
    kinds = ("ranks", "ranks by messages", "ranks by rpc")
    ways = [Way(f"{kind} {rest}", way.workers, arguments) for kind in kinds]
    packed = {**arguments, "compress": True}
    return [*ways, Way(f"ranks by messages compressed {rest}", way.workers, packed)]


def of_four(way: Way) -> list[Way]:
    """Return this way with four ranks on a simulated other node, if it has several workers."""
    if way.workers != ACTORS:
        return []
    by = "messages" if way.sync else "rpc"
    own = next(own for own in of_ranks(way) if own.transport == by)
    return [replace(own, name=f"{own.name} of {MANY}", workers=MANY)]


def marked(*ways: Way, central: bool = True, many: bool = False) -> list[Any]:
    """Return the ways as test parameters, marked by the place of their workers.

    Ranks are added wherever processes are tested. Nests and sets of four ranks are slow because
    they start the most processes.

    Args:
        central: the test also holds for central inference.
        many: the test does not depend on two workers.
    """
    every = [*ways]
    of_processes = [way for way in ways if way.multi and "inference" not in way.arguments]
    every += [own for way in of_processes for own in of_ranks(way)]
    every += [own for way in ways if way.multi and many for own in of_four(way)]
    if central:
        every += [CENTRAL, GROUPS] if MULTI_STACK in ways else []
        every += [CENTRAL_ASYNC, GROUPS_ASYNC] if any(way in ways for way in MULTI_ASYNC) else []
        every += [RAY_CENTRAL] if STACK in ways else []
        every += [RAY_CENTRAL_ASYNC] if any(way in ways for way in ASYNC) else []
    return [pytest.param(way, id=way.name, marks=marks_of(way)) for way in every]


def marks_of(way: Way) -> list[Any]:
    """Return a way's marks: the place of its workers, and `slow` if they start slowly."""
    if not way.remote:
        return []
    marks = [pytest.mark.processes if way.children else pytest.mark.ray]
    marks += [pytest.mark.ranks] if way.ranks else []
    slow = way in (NEST_STACK, RAY_CENTRAL, RAY_CENTRAL_ASYNC) or way.workers == MANY
    return [*marks, pytest.mark.slow] if slow else marks


# The ways that most tests run in. Async workers of ON_REQUEST collect nothing ahead.
EVERYWHERE = marked(IN_PROCESS, STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2])
REMOTELY = marked(STACK, ASYNC[2], MULTI_STACK, MULTI_ASYNC[2])
ON_REQUEST = marked(STACK, ASYNC[0], MULTI_STACK, MULTI_ASYNC[0])
SYNC_WAYS = marked(IN_PROCESS, MULTI_STACK, STACK)


@contextmanager
def collecting(
    way: Way, entry: Callable[[int], Any], policy: Any = None, *, frames: int, **arguments: Any
) -> Iterator[Any]:
    """Yield a collector with `frames` frames per worker and batch; shut it down on exit."""
    per_batch = frames * way.workers if way.sync else frames
    entries = [entry(w) for w in range(way.workers)]
    with way.collector(entries, policy, frames_per_batch=per_batch, **arguments) as collector:
        yield collector


class FrameOracle:
    """Follows every env frame by frame: nothing is lost, repeated or shifted.

    Args:
        lengths: episode lengths, which every env cycles through.
        max_frames: max_frames_per_traj.
        exact: an env is reset exactly once between two trajectories.
        skips: the step after a done is an uncollected cell.
        ids: trajectory ids by (env number, episode); shared by the oracles of one collector.
    """

    def __init__(
        self,
        lengths: Sequence[int] = LENGTHS,
        *,
        max_frames: int = 0,
        set_truncated: bool = False,
        reset_each: bool = False,
        exact: bool = True,
        skips: bool = False,
        acts: bool = True,
        ids: dict[tuple[int, int], int] | None = None,
    ) -> None:
        self.lengths, self.max_frames = lengths, max_frames
        self.set_truncated, self.reset_each = set_truncated, reset_each
        self.exact, self.skips, self.acts = exact, skips, acts
        self.ids = {} if ids is None else ids
        self.last: dict[int, tuple[int, int, bool]] = {}  # number: (episode, step + 1, ended)
        self.dummy_due: set[int] = set()
        self.frames = 0

    def check(self, rows: Sequence[tuple[int | None, int, Any]]) -> None:
        """Check one batch, in the form that `Way.rows` returns."""
        workers = set()
        for worker, env, td in rows:
            numbers = td["observation"][:, 0]
            collected = td["collector", "traj_ids"] >= 0
            number = int(numbers[collected][0])
            assert number % 10 == env
            if worker is None:
                workers.add(number // 10)
            else:
                assert number // 10 == worker
            self._row(number, td, collected.tolist())
        assert len(workers) <= 1
        assert set(self.ids.values()) == set(range(len(self.ids)))

    def _row(self, number: int, td: Any, collected: list[bool]) -> None:
        assert self.skips or all(collected)
        final = max(t for t, there in enumerate(collected) if there)
        flat = {
            key if isinstance(key, str) else ".".join(key): value.tolist()
            for key, value in td.items(include_nested=True, leaves_only=True)
        }
        if self.reset_each and number in self.last:
            self.last[number] = (*self.last[number][:2], True)
            self.dummy_due.discard(number)
        for t, there in enumerate(collected):
            frame = {key: values[t] for key, values in flat.items()}
            assert there == (number not in self.dummy_due), f"env {number}, time {t}: {frame}"
            self.dummy_due.discard(number)
            if not there:
                self._dummy(number, frame)
                continue
            self._frame(number, frame, t == final)
            if self.skips and self.last[number][2]:
                self.dummy_due.add(number)

    def _dummy(self, number: int, frame: dict[str, Any]) -> None:
        assert frame.pop("collector.traj_ids") == -1
        assert frame.pop("collector.mask") is False
        for key, value in frame.items():
            assert not torch.tensor(value).any(), f"env {number}: {key} of an uncollected cell"

    def _frame(self, number: int, frame: dict[str, Any], final: bool) -> None:
        _, episode, step = (int(x) for x in frame["observation"])
        if number not in self.last:
            assert step == 0
        else:
            before, following, ended = self.last[number]
            if ended:
                assert step == 0
                assert episode == before + 1 or (not self.exact and episode > before)
            else:
                assert (episode, step) == (before, following)
        self._check_frame(number, episode, step, frame, final)
        end = self._ends(episode, step) or step + 1 == self.max_frames
        self.last[number] = (episode, step + 1, end)
        self.frames += 1

    def _ends(self, episode: int, step: int) -> bool:
        return step + 1 >= self.lengths[episode % len(self.lengths)]

    def _check_frame(
        self, number: int, episode: int, step: int, frame: dict[str, Any], final: bool
    ) -> None:
        terminated = self._ends(episode, step)
        truncated = step + 1 == self.max_frames or (final and self.set_truncated)
        action = frame["action"]
        expected: dict[str, Any] = {
            "observation": [number, episode, step],
            "next.observation": [number, episode, step + 1],
            "next.reward": [step + 1 + 100 * action],
            "next.terminated": [terminated],
            "next.truncated": [truncated],
            "next.done": [terminated or truncated],
            **{flag: [False] for flag in ("done", "terminated", "truncated")},
            "collector.traj_ids": self.ids.setdefault((number, episode), len(self.ids)),
        }
        if self.acts:
            expected["action"] = (episode + step) % 2
            expected["seen"] = [number, episode, step]
        if self.max_frames:
            expected["step_count"], expected["next.step_count"] = [step], [step + 1]
        if self.skips:
            expected["collector.mask"] = True
        came = {key: frame[key] for key in expected}
        assert came == expected, f"env {number}, episode {episode}, step {step}"
        if self.acts:
            assert frame.keys() == expected.keys()


def collected_frames(td: TensorDict) -> int:
    """Return the number of cells that hold a frame."""
    return int((td["collector", "traj_ids"] >= 0).sum())


def is_gone(pid: int) -> bool:
    """Return whether the process has ended; it may still be a zombie."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def worker_processes(below: int) -> list[psutil.Process]:
    """Return the worker processes below this driver, including starting ones."""
    found = []
    for process in psutil.Process(below).children(recursive=True):
        with suppress(psutil.Error):  # the process has ended
            if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("pyc-worker"):
                found.append(process)
    return found
