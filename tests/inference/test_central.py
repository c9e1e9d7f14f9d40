"""Central inference: one call for all workers, live weights, and unsupported combinations.

The tests over all ways to collect also cover its frames, deaths, seeds and ledgers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from collect_support import (
    CENTRAL,
    CENTRAL_ASYNC,
    MULTI_STACK,
    PATIENCE,
    STEPS,
    FrameOracle,
    Way,
    collecting,
    parity,
    parity_policy,
)
from echo_envs import ENTRIES, LENGTHS, GateEnv, envs_of
from envs_for_tests import CountingEnv
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from raising import refused
from state_support import POLICIES, check_states_follow_the_loop
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type, set_interaction_type
from torch import nn

from pycollect import (
    DistributedDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    SyncDataCollector,
    WorkerError,
)
from pycollect._core import Memory, SharedMemoryError
from pycollect.api.arguments import check_devices
from pycollect.inference.client import PolicyClient
from pycollect.inference.server import ServingBell
from pycollect.transport.ray.engine import actor_options

pytestmark = pytest.mark.processes(usual=2)


class Watched(nn.Module):
    """The parity policy; it records the shape of every observation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> Any:
        self.seen.append(tuple(observation.shape))
        action, _ = parity(observation)
        return action, observation * self.scale


def watched() -> tuple[Watched, TensorDictModule]:
    module = Watched()
    return module, TensorDictModule(module, ["observation"], ["action", "seen"])


def frames_of(way: Any, kind: str, policy: Any, **arguments: Any) -> list[Any]:
    envs, _ = envs_of(kind)
    with collecting(way, ENTRIES[kind], policy, frames=envs * STEPS, **arguments) as collector:
        collector.set_seed(3)
        return [collector.next().clone() for _ in range(3)]


@pytest.mark.parametrize("kind", ["one", "list", "SyncVectorEnv NEXT_STEP", "ignores masks"])
@pytest.mark.parametrize("limit", [0, 2])
def test_the_same_data_as_with_the_policy_in_the_workers(kind: str, limit: int) -> None:
    if kind == "ignores masks" and limit:
        pytest.skip("there single environments cannot be reset")
    arguments = {"max_frames_per_traj": limit, "track_policy_version": True}
    there, here = (
        frames_of(way, kind, parity_policy(), **arguments) for way in (MULTI_STACK, CENTRAL)
    )
    for ours, theirs in zip(here, there, strict=True):
        assert (ours == theirs).all()
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))


@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("name", POLICIES)
def test_states_follow_the_loop(kind: str, name: str) -> None:
    check_states_follow_the_loop(CENTRAL, kind, name)


@pytest.mark.parametrize("kind", ["one", "list"])
def test_one_call_for_all_workers(kind: str) -> None:
    module, policy = watched()
    envs, batched = envs_of(kind)
    oracle = FrameOracle()
    with collecting(CENTRAL, ENTRIES[kind], policy, frames=envs * STEPS) as collector:
        oracle.check(CENTRAL.rows(collector.next(), envs, batched))
        module.seen.clear()
        oracle.check(CENTRAL.rows(collector.next(), envs, batched))
        seen = list(module.seen)
    assert seen == [(2 * envs, 3)] * STEPS


def limited(**kwargs: Any) -> CountingEnv:
    env = CountingEnv(**kwargs)
    env.spec = EnvSpec("Limited-v0", max_episode_steps=4)
    return env


def test_workers_with_and_without_a_time_limit_share_calls() -> None:
    module, policy = watched()
    with MultiSyncDataCollector(
        [CountingEnv, limited], policy, frames_per_batch=2 * STEPS, inference="central"
    ) as collector:
        collector.next()
        module.seen.clear()
        collector.next()
    assert module.seen == [(2, 3)] * STEPS


class UnsignedEnv(CountingEnv):
    """Observes large unsigned integers, also in a sequence of step + 1 rows."""

    def __init__(self, dtype: str, number: int) -> None:
        super().__init__(number, length=LENGTHS)
        self.high = int(np.iinfo(dtype).max)
        box = spaces.Box(0, self.high, (3,), dtype)  # type: ignore[arg-type]
        self.observation_space = spaces.Dict(plain=box, rows=spaces.Sequence(box))

    def observe(self) -> Any:
        dtype = self.observation_space["plain"].dtype
        plain = np.array([self.number, self.episode, self.high - self.steps], dtype)
        return {"plain": plain, "rows": (plain,) * (self.steps + 1)}


def act_and_tell(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(plain.shape[:-1], dtype=torch.int64), plain.clone()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@pytest.mark.parametrize("way", [CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_unsigned_integers(way: Way, dtype: str) -> None:
    policy = TensorDictModule(act_and_tell, ["plain"], ["action", "seen"])
    with collecting(way, lambda w: partial(UnsignedEnv, dtype, w), policy, frames=8) as collector:
        batches = [collector.next().reshape(-1) for _ in range(4)]
    for td in batches:
        for frame in td.unbind(0):
            plain = frame["plain"].numpy()
            assert plain.dtype == dtype
            assert torch.equal(frame["seen"], frame["plain"])
            rows = frame["rows"].numpy()
            assert len(rows) == np.iinfo(dtype).max - plain[2] + 1
            assert (rows == plain).all()


def test_sizes_of_a_call() -> None:
    module, policy = watched()
    arguments = {"max_batch_size": 3}
    with collecting(CENTRAL, ENTRIES["list"], policy, frames=3 * STEPS, **arguments) as collector:
        collector.next()
        module.seen.clear()
        collector.next()
    assert module.seen == [(3, 3)] * 2 * STEPS


def test_weights_are_live() -> None:
    module, policy = watched()
    arguments = {"track_policy_version": True}
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        batch = collector.next()
        assert torch.equal(batch["seen"], batch["observation"])
        with torch.no_grad():
            module.scale.fill_(0)
        batch = collector.next()
        assert not batch["seen"].any()
        assert not batch["collector", "policy_version"].any()
        weights = TensorDict.from_module(policy).data.clone().apply(lambda own: own + 2)
        collector.update_policy_weights_(weights)
        assert module.scale.item() == 2
        assert collector.policy_version == 1
        batch = collector.next()
        assert torch.equal(batch["seen"], 2 * batch["observation"])
        assert (batch["collector", "policy_version"] == 1).all()
        assert collector.policy_lag == {0: 0, 1: 0}


@pytest.mark.parametrize("way", [CENTRAL, CENTRAL_ASYNC], ids=lambda way: way.name)
def test_weights_of_single_workers_are_refused(way: Way) -> None:
    _, policy = watched()
    with collecting(way, ENTRIES["one"], policy, frames=STEPS) as collector:
        with refused(ValueError, "worker_ids"):
            collector.update_policy_weights_(worker_ids=[1])
        for wrong in ({0: policy, 1: policy}, {"no such weight": torch.zeros(1)}):
            with refused(ValueError, "policy_or_weights"):
                collector.update_policy_weights_(wrong)
        collector.next()


def test_a_factorys_policy_is_built_once_in_the_driver() -> None:
    made: list[Any] = []

    def factory() -> Any:
        made.append(watched()[1])
        return made[-1]

    arguments = {"policy_factory": factory}
    with collecting(CENTRAL, ENTRIES["one"], frames=STEPS, **arguments) as collector:
        collector.next()
        assert [collector.policy] == made


class Failing(nn.Module):
    """Raise in call number `left`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.left = error, -1

    def forward(self, observation: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return parity(observation)


def failing(error: BaseException) -> tuple[Failing, TensorDictModule]:
    module = Failing(error)
    return module, TensorDictModule(module, ["observation"], ["action", "seen"])


def test_an_exception_of_the_policy_reaches_the_caller() -> None:
    module, policy = failing(ZeroDivisionError("by the policy"))
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.next()
        module.left = 3
        with pytest.raises(ZeroDivisionError, match="by the policy") as raised:
            collector.next()
        assert isinstance(raised.value.__cause__, WorkerError)
        assert "in forward" in raised.value.__cause__.remote_traceback
        with pytest.raises(ZeroDivisionError):
            collector.next()
        total = collector.ledger()["total"]
    assert total["reasons"] == {"env_error": STEPS}


def test_workers_whose_policy_raised_are_replaced_if_configured() -> None:
    module, policy = failing(ZeroDivisionError("by the policy"))
    oracle = FrameOracle()
    arguments = {"restart_on_error": True}
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=STEPS, **arguments) as collector:
        oracle.check(CENTRAL.rows(collector.next(), 1, False))
        module.left = 3
        collector.next()
        assert collector.stats()["workers"][0]["restarts"] == 1
        assert collector.stats()["workers"][1]["restarts"] == 1
        total = collector.ledger()["total"]
    assert total["reasons"] == {"env_error": 2 * STEPS}
    assert total["delivered"] == 4 * STEPS


def test_an_interrupt_of_the_policy_loses_nothing() -> None:
    module, policy = failing(KeyboardInterrupt())
    oracle = FrameOracle()
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=STEPS) as collector:
        oracle.check(CENTRAL.rows(collector.next(), 1, False))
        module.left = 3
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        for _ in range(2):
            oracle.check(CENTRAL.rows(collector.next(), 1, False))
        assert collector.ledger()["total"]["lost"] == 0
    assert oracle.frames == 3 * 2 * STEPS


def one_waits(gate: Path, worker: int) -> Any:
    """Return worker 0's environment, or worker 1's, which waits for a file in its third step."""
    return partial(GateEnv, gate, 3, number=10) if worker else partial(CountingEnv)


class Opening(Watched):
    """Open the gate after STEPS - 2 calls with a single worker."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, observation: torch.Tensor) -> Any:
        out = super().forward(observation)
        if self.seen.count((1, 3)) == STEPS - 2:
            self.gate.touch()
        return out


@contextmanager
def without_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the driver's periodic checks, so that a lost wake-up exceeds the time limit."""
    seconds = 60.0
    with monkeypatch.context() as patched:
        patched.setattr("pycollect.inference.server.POLL_SECONDS", seconds)
        patched.setattr("pycollect.transport.engine.IDLE_SECONDS", seconds)
        patched.setattr("pycollect.transport.engine.POLL_SECONDS", seconds)
        patched.setattr("pycollect.driver.records.CHECK_SECONDS", seconds)
        begin = time.monotonic()
        yield
    assert time.monotonic() - begin < seconds


@pytest.mark.parametrize("arguments", [{"server_timeout": 0.01}, {"min_batch_size": 1}])
def test_other_workers_continue_while_one_steps(
    tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    module = Opening(gate)
    policy = TensorDictModule(module, ["observation"], ["action", "seen"])
    entry = partial(one_waits, gate)
    running = collecting(CENTRAL, entry, policy, frames=STEPS, **arguments)
    with running as collector, without_looks(monkeypatch):
        batch = collector.next()
    assert batch.shape == (2, STEPS)
    assert (batch["observation"][:, :, 2] == torch.arange(STEPS) % 5).all()  # length of an episode


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"min_batch_size": 1},
        {"min_batch_size": 2},
        {"max_batch_size": 1},
        {"server_timeout": 0.01},
        {"env_groups": 2},
    ],
    ids=str,
)
def test_no_wake_up_depends_on_periodic_checks(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ENTRIES["list"] if "env_groups" in arguments else ENTRIES["one"]
    with collecting(CENTRAL, entry, parity_policy(), frames=STEPS, **arguments) as collector:
        collector.next()
        with without_looks(monkeypatch):
            for _ in range(4):
                collector.next()


class HangsOnce(CountingEnv):
    """Hang in the third step, but only once over all instances."""

    def __init__(self, hung: Path) -> None:
        super().__init__(number=10)
        self.hung = hung

    def step(self, action: Any) -> Any:
        if len(self.actions) == 2 and not self.hung.exists():
            self.hung.touch()
            time.sleep(PATIENCE)
        return super().step(action)


def test_a_worker_that_waits_for_the_policy_is_not_stalled(tmp_path: Path) -> None:
    """Worker 1 hangs and is replaced; worker 0 waits for its request and is not replaced."""
    hung = tmp_path / "hung"
    with collecting(
        CENTRAL,
        lambda worker: partial(HangsOnce, hung) if worker else CountingEnv,
        parity_policy(),
        frames=STEPS,
        worker_timeout=1.0,
    ) as collector:
        assert collector.next().shape == (2, STEPS)
        workers = collector.stats()["workers"]
        total = collector.ledger()["total"]
    assert (workers[0]["restarts"], workers[1]["restarts"]) == (0, 1)
    assert total["reasons"] == {"worker_timeout": STEPS}


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"inference": "here"}, ValueError, "inference"),
        ({"policy": None}, ValueError, "inference"),
        ({"policy": None, "policy_factory": [parity_policy] * 2}, ValueError, "policy_factory"),
        ({"policy_factory": parity_policy}, ValueError, "policy_factory"),
        ({"policy_device": ["cpu", None]}, ValueError, "policy_device"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"server_timeout": -1.0}, ValueError, "server_timeout"),
        ({"inference": None, "min_batch_size": 2}, ValueError, "min_batch_size"),
        ({"policy": 3}, TypeError, "policy"),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else "",
)
def test_arguments_refused_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], name: str
) -> None:
    arguments = {"policy": parity_policy(), "inference": "central", **arguments}
    with refused(error, name):
        MultiSyncDataCollector([CountingEnv] * 2, frames_per_batch=4, **arguments)


@pytest.mark.parametrize("cls", [SyncDataCollector, DistributedDataCollector])
def test_collectors_without_central_inference_name_the_alternative(cls: Any) -> None:
    with refused(ValueError, "inference") as caught:
        cls([CountingEnv], parity_policy(), frames_per_batch=4, inference="central")
    assert "MultiSyncDataCollector" in str(caught.value)


def test_workers_that_cannot_open_the_servers_memory_raise() -> None:
    gone = Memory.share(1).address
    assert gone is not None
    with refused(SharedMemoryError, "inference"):
        SyncDataCollector(CountingEnv, PolicyClient(gone, 0, gone), frames_per_batch=4)


class Asked(Exception):
    """Raised with the requested options of actors."""


@pytest.mark.parametrize(("inference", "gpus"), [("central", 0), (None, 0.2)])
def test_actors_request_no_gpu_that_only_the_policy_needs(
    inference: str | None, gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(configs: Any, devices: Any) -> None:
        raise Asked(actor_options(configs, devices)["num_gpus"])

    monkeypatch.setattr("pycollect.api.ray.actor_options", asked)
    there = partial(check_devices, other_machines=True)  # this machine may have no GPU
    monkeypatch.setattr("pycollect.api.central.check_devices", there)
    arguments = {"policy_factory": parity_policy, "policy_device": "cuda", "inference": inference}
    with pytest.raises(Asked) as raised:
        RayCollector([CountingEnv], frames_per_batch=4, **arguments)
    assert raised.value.args == (gpus,)


def test_actors_with_processes_are_refused() -> None:
    with refused(ValueError, "collector_class"):
        RayCollector(
            [[CountingEnv] * 2],
            parity_policy(),
            frames_per_batch=4,
            inference="central",
            collector_class="sync",
        )


def test_async_workers_are_served_first_come_first_served(tmp_path: Path) -> None:
    """Worker 1 hangs until worker 0 has delivered twice, for any `min_batch_size`."""
    gate = tmp_path / "gate"
    for arguments in ({}, {"min_batch_size": 2}):
        gate.unlink(missing_ok=True)
        entry = partial(one_waits, gate)
        with collecting(
            CENTRAL_ASYNC, entry, parity_policy(), frames=STEPS, **arguments
        ) as collector:
            for _ in range(2):
                assert (collector.next()["observation"][..., 0] == 0).all()
            gate.touch()
            while not (collector.next()["observation"][..., 0] == 10).all():
                pass


def of_one(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def test_a_policy_that_takes_no_batch_is_refused() -> None:
    with (
        refused(ValueError, "policy") as caught,
        collecting(CENTRAL, ENTRIES["one"], of_one, frames=4),
    ):
        pass
    assert "'action'" in str(caught.value)


def test_workers_can_be_added_and_removed() -> None:
    _, policy = watched()
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=6) as collector:
        collector.next()
        collector.add_collectors([ENTRIES["one"](2)])
        with pytest.warns(UserWarning, match="3 workers"):
            batch = collector.next()
        assert batch.shape == (3, 4)
        with refused(ValueError, "policy"):
            collector.add_collectors([ENTRIES["one"](3)], policy=policy)
        with pytest.warns(UserWarning, match="2 workers"):
            collector.remove_collectors([0])
        batch = collector.next()
    assert batch.shape == (2, 6)
    assert torch.equal(batch["seen"], batch["observation"])


def test_the_programs_settings_hold_while_the_driver_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program's other threads may draw random numbers and call policies during the wait."""
    seen: list[tuple[Any, Any]] = []
    make = ServingBell.__init__

    class Asleep:
        def __init__(self, bell: Any) -> None:
            self.bell = bell

        def __getattr__(self, name: str) -> Any:
            return getattr(self.bell, name)

        def wait_knock(self, *arguments: Any) -> Any:
            seen.append((interaction_type(), torch.get_rng_state()))
            return self.bell.wait_knock(*arguments)

    def made(self: ServingBell, bell: Any, server: Any) -> None:
        make(self, cast(Any, Asleep(bell)), server)

    monkeypatch.setattr(ServingBell, "__init__", made)
    _, policy = watched()
    with collecting(CENTRAL, ENTRIES["one"], policy, frames=STEPS) as collector:
        collector.set_seed(1)
        state = torch.get_rng_state()
        seen.clear()
        with set_interaction_type(InteractionType.MEAN):
            collector.next()
            asleep = [*seen]  # before shutdown
    assert asleep
    assert all(mode is InteractionType.MEAN and torch.equal(own, state) for mode, own in asleep)
