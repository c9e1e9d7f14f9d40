"""Weights and their versions: receivers, timing and contents (section 9)."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from collect_support import IN_PROCESS, MULTI_STACK, Way, collecting, marked
from echo_envs import ENTRIES, EchoEnv, GateEnv, TallyEnv, wait_until
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from pycollect.transport.pickling import share

T = 4
ONE = ENTRIES["one"]
SYNC = Way("sync", 2, {"sync": True})
ASYNC_ONE = Way("async, one actor", 1, {"prefetch": 2})
MULTI_ONE = Way("multi async, one worker", 1, {"prefetch": 2})
VERSION = ("collector", "policy_version")


class Constant(torch.nn.Module):
    """Output the parameter and the buffer."""

    def __init__(self, value: float = 0.0, size: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), value))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = observation.shape[:-1]
        weight = self.weight.sum().expand(batch)
        return torch.zeros(batch, dtype=torch.int64), weight, self.count.expand(batch)


def constant_policy(value: float = 0.0, size: int = 3) -> TensorDictModule:
    return TensorDictModule(Constant(value, size), ["observation"], ["action", "weight", "count"])


def set_policy(policy: TensorDictModule, value: float) -> None:
    with torch.no_grad():
        policy.module.weight.fill_(value / 3)
        policy.module.count.fill_(int(value))


def seen(td: Any) -> set[tuple[float, int]]:
    """Return the (weight, buffer) pairs that a batch was collected with."""
    weights = td["weight"].flatten().round().tolist()
    return set(zip(weights, td["count"].flatten().tolist(), strict=True))


def test_in_process_the_module_is_live() -> None:
    policy = constant_policy()
    with collecting(IN_PROCESS, ONE, policy, frames=T, track_policy_version=True) as collector:
        assert seen(collector.next()) == {(0.0, 0)}
        set_policy(policy, 3.0)
        assert seen(collector.next()) == {(3.0, 3)}
        assert collector.policy_version == 0
        collector.update_policy_weights_()
        assert collector.policy_version == 1
        assert collector.policy_lag == {0: 1}
        assert (collector.next()[VERSION] == 1).all()
        assert collector.policy_lag == {0: 0}


def test_an_update_within_a_rollout_of_this_process_acts_at_once() -> None:
    other = constant_policy()
    set_policy(other, 6.0)

    class Updating(EchoEnv):
        calls = 0

        def step(self, action: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                thread = threading.Thread(target=collector.update_policy_weights_, args=(other,))
                thread.start()
                thread.join()
            return super().step(action)

    with collecting(
        IN_PROCESS,
        lambda worker: partial(Updating, 0, (2 * T,)),
        constant_policy(),
        frames=T,
        track_policy_version=True,
    ) as collector:
        td = collector.next()
        assert td["weight"].flatten().tolist() == [0.0, 0.0, 6.0, 6.0]
        assert (td[VERSION] == 0).all()
        assert collector.policy_lag == {0: 1}
        assert (collector.next()[VERSION] == 1).all()


FORMS = ("module", "tensordict", "parameters", "flat", "state dict", "nested dicts")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_weights_in_process(form: str) -> None:
    policy, other = constant_policy(), constant_policy()
    set_policy(other, 6.0)
    with collecting(IN_PROCESS, ONE, policy, frames=T) as collector:
        collector.update_policy_weights_(in_form(other, form), wait=True)
        assert seen(collector.next()) == {(6.0, 6)}
    set_policy(other, 9.0)
    assert policy.module.count == 6  # the collector has a copy


def in_form(policy: TensorDictModule, form: str) -> Any:
    return {
        "module": policy,
        "tensordict": TensorDict.from_module(policy),
        "parameters": TensorDict.from_module(policy, as_module=True),
        "flat": TensorDict.from_module(policy).data.flatten_keys("."),
        "state dict": policy.state_dict(),
        "nested dicts": TensorDict.from_module(policy).data.to_dict(),
    }[form]


def part(value: float) -> TensorDict:
    """Return weights with only one of the names."""
    return TensorDict({"module": {"weight": torch.full((3,), value / 3)}})


def test_names_that_are_missing_stay_as_they_are() -> None:
    policy = constant_policy(1.0)
    with collecting(IN_PROCESS, ONE, policy, frames=T) as collector:
        policy.module.count.fill_(7)
        collector.update_policy_weights_(part(6.0))
        assert seen(collector.next()) == {(6.0, 7)}


@pytest.mark.parametrize("way", marked(MULTI_STACK, SYNC, central=False))
def test_workers_with_weights_of_their_own(way: Way) -> None:
    """Also checks partial updates, a state, and a new policy for all workers."""
    policy, other = constant_policy(), constant_policy()
    with collecting(way, ONE, policy, frames=T, track_policy_version=True) as collector:
        set_policy(other, 3.0)
        collector.update_policy_weights_({1: other})
        assert collector.policy_version == 1
        assert [seen(row) for row in collector.next()] == [{(0.0, 0)}, {(3.0, 3)}]
        collector.update_policy_weights_({0: part(6.0), 1: part(9.0)})
        collector.update_policy_weights_({0: {"module.count": torch.tensor(2)}, 1: part(3.0)})
        assert collector.policy_version == 3
        td = collector.next()
        assert [seen(row) for row in td] == [{(6.0, 2)}, {(3.0, 3)}]
        assert (td[VERSION] == 3).all()
        state = collector.state_dict()
        set_policy(other, 12.0)
        collector.update_policy_weights_(other)
        assert seen(collector.next()) == {(12.0, 12)}
        collector.load_state_dict(state)
        assert [seen(row) for row in collector.next()] == [{(6.0, 2)}, {(3.0, 3)}]
        collector.update_policy_weights_({0: other, 1: part(9.0)}, worker_ids=1)
        assert [seen(row) for row in collector.next()] == [{(6.0, 2)}, {(9.0, 3)}]


@pytest.mark.parametrize("way", marked(MULTI_STACK, SYNC, central=False))
def test_with_a_factory_the_policy_provides_the_weights(way: Way) -> None:
    """Workers build their own policies, and start with the weights of the driver's policy."""
    policy = constant_policy(2.0)
    policy.module.lock = threading.Lock()  # so that it cannot be pickled
    with collecting(way, ONE, policy, frames=T, policy_factory=constant_policy) as collector:
        assert seen(collector.next()) == {(6.0, 0)}
        assert collector.policy_version == 0
        set_policy(policy, 9.0)
        collector.update_policy_weights_()
        assert seen(collector.next()) == {(9.0, 9)}


@pytest.mark.processes
def test_weights_of_another_policy_remain_until_the_policy_changes() -> None:
    policy, other = constant_policy(), constant_policy()
    with collecting(MULTI_STACK, ONE, policy, frames=T, update_after_each_batch=True) as collector:
        collector.next()
        set_policy(other, 6.0)
        collector.update_policy_weights_(other)
        assert [seen(collector.next()) for _ in range(2)] == [{(6.0, 6)}] * 2
        assert policy.module.count == 0
        set_policy(policy, 9.0)
        assert seen(collector.next()) == {(9.0, 9)}


MISFITS: list[tuple[Any, type[Exception], str]] = [
    (lambda: constant_policy(size=4), ValueError, "[4]"),
    (lambda: torch.nn.Linear(2, 2), ValueError, "bias"),
    (
        lambda: {"module.weight": torch.zeros(3), "more": torch.zeros(3)},
        ValueError,
        "more",
    ),
    (lambda: {0: {"more": torch.zeros(3)}}, ValueError, "more"),
    (lambda: {0: dict(constant_policy().state_dict()), 7: {}}, ValueError, "7"),
    (dict, ValueError, "module.weight"),
    (lambda: 3, TypeError, "int"),
    (lambda: {"module.weight": 3, "module.count": 0}, TypeError, "int"),
]


@pytest.mark.parametrize(("make", "error", "given"), MISFITS)
def test_weights_that_do_not_fit_in_process(make: Any, error: Any, given: str) -> None:
    with collecting(IN_PROCESS, ONE, constant_policy(1.0), frames=T) as collector:
        with refused(error, "policy_or_weights") as caught:
            collector.update_policy_weights_(make())
        assert given in str(caught.value)
        assert collector.policy_version == 0
        assert seen(collector.next()) == {(3.0, 0)}


def test_without_a_policy_weights_are_refused() -> None:
    with collecting(IN_PROCESS, ONE, None, frames=T) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_(torch.nn.Dropout())
        with refused(ValueError, "policy_or_weights"):
            collector.update_policy_weights_(torch.nn.Linear(2, 2))


# Actors


@pytest.mark.ray
def test_each_worker_has_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check formats, errors, worker_ids, versions and lag; weights are shared once per version."""
    puts = []
    policy, other = constant_policy(), constant_policy()
    with collecting(SYNC, ONE, policy, frames=T, track_policy_version=True) as collector:
        monkeypatch.setattr(
            "pycollect.driver.sending.share", lambda data: (puts.append(data), share(data))[1]
        )
        assert collector.policy_lag == {0: 0, 1: 0}
        assert seen(collector.next()) == {(0.0, 0)}
        for version, form in enumerate(("module", "tensordict", "state dict"), 1):
            set_policy(other, 3.0 * version)
            collector.update_policy_weights_(in_form(other, form))
            set_policy(other, 0.0)  # the update has copied the weights
            assert len(puts) == version == collector.policy_version
            td = collector.next()
            assert seen(td) == {(3.0 * version, 3 * version)}
            assert (td[VERSION] == version).all()
        for make, error, given in MISFITS:
            with refused(error, "policy_or_weights") as caught:
                collector.update_policy_weights_(make())
            assert given in str(caught.value)
        assert collector.policy_version == 3
        set_policy(policy, 12.0)
        collector.update_policy_weights_(worker_ids=1)
        td = collector.next()
        assert [seen(row) for row in td] == [{(9.0, 9)}, {(12.0, 12)}]
        assert td[VERSION].tolist() == [[3] * T, [4] * T]
        assert collector.policy_lag == {0: 1, 1: 0}
        assert [w["version"] for w in collector.stats()["workers"].values()] == [3, 4]
        with refused(ValueError, "worker_ids"):
            collector.update_policy_weights_(worker_ids=[0, 2])
        set_policy(policy, 15.0)
        collector.update_policy_weights_(worker_ids=[0], wait=True)
        assert [seen(row) for row in collector.next()] == [{(15.0, 15)}, {(12.0, 12)}]
    assert len(puts) == 5


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("way", marked(ASYNC_ONE, MULTI_ONE))
def test_a_queued_rollout_takes_the_newest(way: Way, wait: bool, tmp_path: Path) -> None:
    """Rollout 1 is done, 2 is running (it waits at the gate), 3 is queued."""
    gate = tmp_path / "gate"
    policy = constant_policy()
    with collecting(way, lambda w: partial(GateEnv, gate, T + 1), policy, frames=T) as collector:
        assert seen(collector.next()) == {(0.0, 0)}
        wait_until(gate.with_suffix(".reached").exists)
        for value in (3.0, 6.0):
            set_policy(policy, value)
            collector.update_policy_weights_(wait=wait)  # returns while the gate is closed
        set_policy(policy, 9.0)
        gate.touch()
        assert seen(collector.next()) == {(0.0, 0)}
        queued = seen(collector.next())
        if wait or (way.children and way.transport == "shared memory"):
            assert queued == {(6.0, 6)}
            assert collector.policy_lag == {0: 0}
        else:  # without a wait, the update may arrive after the rollout starts
            assert queued in ({(0.0, 0)}, {(3.0, 3)}, {(6.0, 6)})
            assert seen(collector.next()) == {(6.0, 6)}  # queued after the updates
        assert collector.policy_version == 2


@pytest.mark.parametrize("way", marked(SYNC, MULTI_STACK))
def test_update_after_each_batch_sync(way: Way) -> None:
    """Strictly on-policy, including the first batch."""
    policy = constant_policy()
    with collecting(
        way, ONE, policy, frames=T, update_after_each_batch=True, track_policy_version=True
    ) as collector:
        for number in range(5):
            set_policy(policy, 3.0 * number)
            td = collector.next()
            assert seen(td) == {(3.0 * number, 3 * number)}
            assert (td[VERSION] == collector.policy_version).all()
            assert collector.policy_lag == {0: 0, 1: 0}


@pytest.mark.parametrize(
    "way",
    marked(*[Way(name, 1, {"prefetch": n}) for name in ("async", "multi async") for n in (0, 2)]),
)
def test_update_after_each_batch_async(way: Way) -> None:
    """At most prefetch + 1 versions old, and with prefetch 0 never old."""
    policy, prefetch = constant_policy(), way.arguments["prefetch"]
    with collecting(
        way, ONE, policy, frames=T, update_after_each_batch=True, track_policy_version=True
    ) as collector:
        collector.next()
        for number in range(1, 12):
            set_policy(policy, 3.0 * number)
            td = collector.next()
            (version,) = set(td[VERSION].tolist())
            assert seen(td) == {(3.0 * version, version * 3)}
            assert 0 <= collector.policy_version - version <= prefetch + (prefetch > 0)
            assert collector.policy_version == number


@pytest.mark.parametrize("way", marked(ASYNC_ONE, MULTI_ONE))
def test_workers_keep_going_while_the_learner_works(way: Way, tmp_path: Path) -> None:
    """Workers collect exactly `prefetch` rollouts beyond the delivered one."""

    entry = partial(TallyEnv, tmp_path / "steps")

    def steps() -> int:
        return (tmp_path / "steps").stat().st_size

    with collecting(way, lambda w: entry, constant_policy(), frames=T) as collector:
        for delivered in range(1, 4):
            collector.next()
            ahead = (delivered + 2) * T
            wait_until(lambda ahead=ahead: steps() == ahead)
            collector.update_policy_weights_(wait=True)  # a full round trip
            assert steps() == ahead


@pytest.mark.slow
@pytest.mark.ray
def test_random_actors_have_no_weights() -> None:
    """A random policy has nothing to push."""
    with collecting(
        SYNC, ONE, None, frames=T, update_after_each_batch=True, track_policy_version=True
    ) as collector:
        for _ in range(3):
            assert (collector.next()[VERSION] == 0).all()
        assert collector.policy_version == 0
