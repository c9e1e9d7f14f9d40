"""The ledger: issued = delivered + in flight + lost, for every worker, at every moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    STACK,
    Way,
    collecting,
    marked,
    parity_policy,
)
from echo_envs import ENTRIES, echo_fns
from envs_for_tests import CountingEnv, EnvBrokeError, RaisingEnv
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from raising import refused
from torch import nn

from pycollect import MultiSyncDataCollector, SyncDataCollector

T = 5
AHEAD = Way("ray sync ahead", 2, {"sync": True, "prefetch": 1})
WAYS = [
    pytest.param(IN_PROCESS),
    *marked(STACK, AHEAD, ASYNC[0], ASYNC[2], MULTI_STACK, MULTI_AHEAD, MULTI_ASYNC[2]),
]


def one(worker: int) -> Any:
    return echo_fns(worker)[0]


def check(ledger: dict[str, Any]) -> dict[str, Any]:
    """Check the equation, and that the total is the sum of the workers."""
    assert set(ledger) == {"total", "workers"}
    for account in (ledger["total"], *ledger["workers"].values()):
        assert set(account) == {"issued", "delivered", "in_flight", "lost", "reasons"}
        assert account["issued"] == (account["delivered"] + account["in_flight"] + account["lost"])
        assert account["lost"] == sum(account["reasons"].values())
        assert min(account[key] for key in ("issued", "delivered", "in_flight", "lost")) >= 0
    for key in ("issued", "delivered", "in_flight", "lost"):
        assert ledger["total"][key] == sum(w[key] for w in ledger["workers"].values())
    total: dict[str, Any] = ledger["total"]
    return total


class EndingEnv(CountingEnv):
    """An environment that shuts its collector down in a step, and may then raise an exception."""

    collector: SyncDataCollector | None = None
    error: Exception | None = None

    def step(self, action: Any) -> Any:
        if self.collector is not None and len(self.actions) % T == 2:
            self.collector.shutdown()
            if self.error is not None:
                raise self.error
        return super().step(action)


@pytest.mark.parametrize("error", [None, EnvBrokeError("once")], ids=["goes on", "raises"])
@pytest.mark.parametrize("arguments", [{}, {"trajs_per_batch": 2}], ids=["frames", "trajectories"])
def test_a_shutdown_within_a_step_loses_the_rollout(
    arguments: dict[str, Any], error: Exception | None
) -> None:
    env = EndingEnv()
    collector = SyncDataCollector(env, None, frames_per_batch=T, **arguments)
    collector.next()
    delivered = check(collector.ledger())["delivered"]
    env.collector, env.error = collector, error
    with pytest.raises(RuntimeError if error is None else EnvBrokeError):
        collector.next()
    total = check(collector.ledger())
    assert (total["delivered"], total["in_flight"]) == (delivered, 0)
    assert set(total["reasons"]) == {"shutdown"}


CALLS: dict[str, Callable[[Any], Any]] = {
    "next": lambda own: own.next(),
    "rollout": lambda own: own.rollout(),
    "reset": lambda own: own.reset(),
    "set_seed": lambda own: own.set_seed(0),
    "load_state_dict": lambda own: own.load_state_dict(own.state_dict()),
    "workers": lambda own: own.get_distant_attr("env"),
}


class Calling(nn.Module):
    """A policy that calls its collector once."""

    call: Callable[[], Any] | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        call, self.call = self.call, None
        if call is not None:
            call()
        return observation.new_zeros(*observation.shape[:-1], 1)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "workers"])
@pytest.mark.parametrize("arguments", [{}, {"trajs_per_batch": 2}], ids=["frames", "trajectories"])
def test_a_call_within_a_rollout_is_refused(name: str, arguments: dict[str, Any]) -> None:
    if name == "rollout" and arguments:
        pytest.skip("refused anyway")
    policy = Calling()
    with SyncDataCollector(CountingEnv, policy, frames_per_batch=T, **arguments) as collector:
        collector.next()
        delivered = check(collector.ledger())["delivered"]
        policy.call = partial(CALLS[name], collector)
        with refused(RuntimeError, name):
            collector.next()
        total = check(collector.ledger())
    assert total["delivered"] == delivered
    assert total["reasons"] == {"env_error": T}


@pytest.mark.processes
@pytest.mark.parametrize("name", ["next", "reset", "set_seed", "load_state_dict", "workers"])
def test_a_call_within_a_served_rollout_is_refused(name: str) -> None:
    policy = Calling()
    with MultiSyncDataCollector(
        [CountingEnv], policy, frames_per_batch=T, inference="central"
    ) as collector:
        collector.next()
        policy.call = partial(CALLS[name], collector)
        with refused(RuntimeError, name):
            collector.next()
        check(collector.ledger())
    assert check(collector.ledger())["in_flight"] == 0


@pytest.mark.processes
def test_a_served_policy_may_shut_its_collector_down() -> None:
    policy = Calling()
    with MultiSyncDataCollector(
        [CountingEnv], policy, frames_per_batch=T, inference="central"
    ) as collector:
        collector.next()
        policy.call = collector.shutdown
        with pytest.raises(RuntimeError, match="shut down"):
            collector.next()
        assert check(collector.ledger())["in_flight"] == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_run_to_its_end_loses_nothing(way: Way) -> None:
    workers = way.workers if way.sync else 1
    with collecting(way, one, parity_policy(), frames=T, total_frames=6 * T * workers) as collector:
        assert check(collector.ledger())["issued"] == 0
        delivered = 0
        for td in collector:
            delivered += td.numel()
            assert check(collector.ledger())["delivered"] == delivered
        total = check(collector.ledger())
    assert total == {
        "issued": 6 * T * workers,
        "delivered": 6 * T * workers,
        "in_flight": 0,
        "lost": 0,
        "reasons": {},
    }
    assert check(collector.ledger()) == total  # after shutdown


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_frames_in_flight_are_lost_with_a_reason(way: Way) -> None:
    prefetch = way.arguments.get("prefetch", 0)
    with collecting(way, one, parity_policy(), frames=T) as collector:
        # An async actor that did not deliver has one rollout pending even without prefetch.
        ahead = {0: {0, T} if way.remote and not way.sync else {0}}.get(
            prefetch, {2 * prefetch * T}
        )
        collector.next()
        state = collector.state_dict()
        expected: dict[str, int] = {}
        for reason, act in {
            "set_seed": partial(collector.set_seed, 1),
            "reset": collector.reset,
            "load_state_dict": partial(collector.load_state_dict, state),
            "shutdown": collector.shutdown,
        }.items():
            collector.next()
            in_flight = check(collector.ledger())["in_flight"]
            assert in_flight in ahead
            act()
            if reason == "load_state_dict":  # the ledger now comes from the loaded state
                expected = {}
            if in_flight:
                expected[reason] = in_flight
            total = check(collector.ledger())
            assert total["reasons"] == expected
            assert total["in_flight"] == 0


def test_lost_frames_remain_lost_in_a_resumed_run() -> None:
    """A loaded state brings its ledger, with no frames in flight."""
    arguments: dict[str, Any] = {"frames": 7, "trajs_per_batch": 1}
    with collecting(IN_PROCESS, one, None, **arguments) as first:
        first.next()
        waiting = check(first.ledger())["in_flight"]
        first.set_seed(1)
        state, total = first.state_dict(), check(first.ledger())
    assert waiting > 0
    assert total["reasons"] == {"set_seed": waiting}
    with collecting(IN_PROCESS, one, None, **arguments) as second:
        second.load_state_dict(state)
        assert check(second.ledger()) == total


def test_uncollected_cells_were_never_issued() -> None:
    collector = SyncDataCollector(ENTRIES["ignores masks"](0), None, frames_per_batch=3 * 7)
    frames = sum(int(collector.next()["collector", "mask"].sum()) for _ in range(3))
    total = check(collector.ledger())
    assert frames < 3 * 3 * 7
    assert total["issued"] == total["delivered"] == frames
    collector.shutdown()


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3], WAYS[5]], ids=lambda way: way.name)
def test_an_exception_loses_its_rollout(way: Way) -> None:
    def entry(worker: int) -> Any:
        return partial(RaisingEnv, at=2 * T + 3, number=10 * worker)

    with collecting(way, entry, parity_policy(), frames=T) as collector:
        with pytest.raises(EnvBrokeError):
            list(collector)
        total = check(collector.ledger())
        assert total["reasons"]["env_error"] >= T
        with pytest.raises(EnvBrokeError):
            collector.next()
        assert collector.state_dict()["batches"] == collector.stats()["batches"]
    total = check(collector.ledger())
    assert total["in_flight"] == 0


class InterruptingEnv(RaisingEnv):
    """An environment that raises KeyboardInterrupt in its step number `at`."""

    def step(self, action: Any) -> Any:
        try:
            return super().step(action)
        except EnvBrokeError:
            raise KeyboardInterrupt from None


def test_an_interrupted_rollout_is_incomplete() -> None:
    collector = SyncDataCollector(partial(InterruptingEnv, at=T + 2), None, frames_per_batch=T)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    assert check(collector.ledger())["reasons"] == {"incomplete": T}
    collector.next()  # collection continues after an interrupt
    assert check(collector.ledger())["delivered"] == 2 * T
    collector.shutdown()


def test_trajectories_that_are_complete_outlive_an_interrupt() -> None:
    """The interrupt comes after three episodes of five frames, and one frame of a fourth."""
    collector = SyncDataCollector(
        partial(InterruptingEnv, at=18),
        None,
        frames_per_batch=8,
        trajs_per_batch=4,
        max_frames_per_traj=10,
    )
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    total = check(collector.ledger())
    assert (total["in_flight"], total["reasons"]) == (16, {"incomplete": 8})
    episodes = collector.next()["observation"][:, 0, 1]
    assert episodes.tolist() == [0, 1, 2, 4]
    assert check(collector.ledger())["reasons"] == {"incomplete": 8 + 1}
    collector.shutdown()


class Program(RuleBasedStateMachine):
    """The equation holds after any sequence of calls to an in-process collector."""

    def __init__(self) -> None:
        super().__init__()
        self.collector = SyncDataCollector(
            ENTRIES["ignores masks"](0), None, frames_per_batch=3 * 4, total_frames=300
        )
        self.saved: list[Any] = []
        self.ended = False

    @precondition(lambda self: not self.ended)
    @rule()
    def collect(self) -> None:
        before = self.collector.ledger()["total"]["delivered"]
        td = self.collector.next()
        frames = 0 if td is None else int(td["collector", "mask"].sum())
        assert self.collector.ledger()["total"]["delivered"] == before + frames

    @precondition(lambda self: not self.ended)
    @rule(seed=st.integers(0, 9))
    def seed(self, seed: int) -> None:
        self.collector.set_seed(seed)

    @precondition(lambda self: not self.ended)
    @rule()
    def reset(self) -> None:
        self.collector.reset()

    @rule()
    def save(self) -> None:
        self.saved.append((self.collector.state_dict(), self.collector.ledger()["total"]))

    @precondition(lambda self: self.saved and not self.ended)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        state, total = data.draw(st.sampled_from(self.saved))
        self.collector.load_state_dict(state)
        assert self.collector.ledger()["total"]["delivered"] == total["delivered"]

    @rule()
    def shut_down(self) -> None:
        self.ended = True
        self.collector.shutdown()

    @invariant()
    def holds(self) -> None:
        check(self.collector.ledger())

    def teardown(self) -> None:
        self.collector.shutdown()


TestProgram = Program.TestCase
TestProgram.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_frames_that_a_buffer_refuses_are_lost_with_a_reason() -> None:
    class Full(list[Any]):
        def extend(self, td: Any) -> None:
            if self:
                raise OSError("full")
            self.append(td)

    for arguments in ({}, {"trajs_per_batch": 1, "trajs_per_write": 1, "max_frames_per_traj": 2}):
        taken = Full()
        collector = SyncDataCollector(
            CountingEnv, None, frames_per_batch=5, replay_buffer=taken, **arguments
        )
        with pytest.raises(OSError, match="full"):
            list(collector)
        total = check(collector.ledger())
        (td,) = taken
        lost = 2 if arguments else 5
        assert (total["delivered"], total["reasons"]) == (td.numel(), {"replay_buffer": lost})
        assert collector.stats()["frames"] == td.numel()
        collector.shutdown()


@pytest.mark.parametrize("trajectories", [None, 1])
@pytest.mark.parametrize("name", ["set_seed", "reset", "shutdown"])
def test_a_buffer_may_call_its_collector(name: str, trajectories: int | None) -> None:
    """Frames being written to the buffer are neither in flight nor lost."""

    class Calling:
        taken = 0

        def extend(self, td: Any) -> None:
            if not self.taken:
                getattr(collector, name)(*([3] if name == "set_seed" else []))
            self.taken += td.numel()

    buffer = Calling()
    collector = SyncDataCollector(
        partial(CountingEnv, 0, (3,)),
        None,
        frames_per_batch=10,
        replay_buffer=buffer,
        trajs_per_batch=trajectories,
        trajs_per_write=trajectories,
        max_frames_per_traj=20,
    )
    collector.next()
    total = check(collector.ledger())
    assert 0 < total["delivered"] == buffer.taken == collector.stats()["frames"]
    assert min(total["in_flight"], *total["reasons"].values(), 0) == 0
    collector.shutdown()
    assert check(collector.ledger())["in_flight"] == 0


@pytest.mark.parametrize("name", ["set_seed", "reset", "shutdown"])
def test_a_hook_may_call_its_collector(name: str) -> None:
    """The call drops frames, which are lost once, and their trajectories are not delivered."""
    calls: list[int] = []

    def hook(td: Any) -> None:
        calls.append(td.numel())
        if len(calls) == 2:
            getattr(collector, name)(*([3] if name == "set_seed" else []))

    collector = SyncDataCollector(
        partial(CountingEnv, 0, (3,)),
        None,
        frames_per_batch=4,
        total_frames=24,
        post_collect_hook=hook,
        trajs_per_batch=2,
        max_frames_per_traj=20,
    )
    if name == "shutdown":
        with pytest.raises(RuntimeError, match="shut down"):
            collector.next()
    else:
        list(collector)
    total = check(collector.ledger())
    assert total["reasons"][name] == 8
    assert total["in_flight"] == 0
    collector.shutdown()


@pytest.mark.parametrize("name", ["set_seed", "reset", "shutdown"])
def test_a_hook_before_a_rollout_may_call_its_collector(name: str) -> None:
    """No frames are in flight then, and frames collected afterwards count once."""
    calls: list[int] = []

    def hook() -> None:
        calls.append(1)
        if len(calls) == 2:
            getattr(collector, name)(*([3] if name == "set_seed" else []))

    collector = SyncDataCollector(
        partial(CountingEnv, 0, (3,)),
        None,
        frames_per_batch=4,
        total_frames=12,
        pre_collect_hook=hook,
    )
    if name == "shutdown":
        collector.next()
        with pytest.raises(RuntimeError, match="shut down"):
            collector.next()
    else:
        assert [td.numel() for td in collector] == [4, 4, 4]
    total = check(collector.ledger())
    assert total["delivered"] == (4 if name == "shutdown" else 12)
    assert total["in_flight"] == 0
    assert total["reasons"] == {}
