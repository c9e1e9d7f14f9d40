"""state_dict and load_state_dict: two resumed runs are equal."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collect_support import (
    ASYNC,
    IN_PROCESS,
    MULTI_AHEAD,
    MULTI_ASYNC,
    MULTI_STACK,
    MULTI_TIME,
    NEST_STACK,
    STACK,
    Way,
    collecting,
    marked,
)
from envs_for_tests import CountingEnv, EnvBrokeError
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from pycollect import MultiSyncDataCollector, SyncDataCollector

T = 6
AHEAD = Way("ray sync ahead", 2, {"sync": True, "prefetch": 1})
SYNC = [
    pytest.param(IN_PROCESS),
    *marked(STACK, AHEAD, MULTI_TIME, MULTI_AHEAD, NEST_STACK, many=True),
]
ALL = [*SYNC, *marked(ASYNC[2], MULTI_ASYNC[2], many=True)]


class DiceEnv(CountingEnv):
    """Draw the reward from the environment's own generator, which only a seed sets."""

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.np_random.random()), terminated, truncated, info


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, observation: torch.Tensor) -> Any:
        noise = torch.randn(*observation.shape[:-1], 1)
        return (noise > 0).long().squeeze(-1), noise * self.scale + self.bias


def noisy() -> TensorDictModule:
    return TensorDictModule(Noisy(), ["observation"], ["action", "noise"])


def dice(worker: int) -> Any:
    return [lambda p=p: DiceEnv(10 * worker + p, (3, 4)) for p in range(2)]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a[k], b[k]) for k in keys)


def resumed(way: Way, state: Any, policy: Any, **arguments: Any) -> list[Any]:
    with collecting(way, dice, policy, frames=2 * T, **arguments) as collector:
        collector.load_state_dict(state)
        return [collector.next() for _ in range(3)]


@pytest.mark.parametrize("policy", [noisy, lambda: None], ids=["module", "random"])
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("way", SYNC, ids=lambda way: way.name)
def test_two_runs_resumed_from_one_state_are_the_same(way: Way, seeded: bool, policy: Any) -> None:
    with collecting(way, dice, policy(), frames=2 * T) as collector:
        if seeded:
            collector.set_seed(7)
        first = [collector.next() for _ in range(2)]
        state = through_a_file(collector.state_dict())
        collector.next()
    a, b = (resumed(way, state, policy()) for _ in range(2))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert not same(a[0], a[1])
    assert not same(a[0].exclude("collector"), first[0].exclude("collector"))
    ids = torch.cat([td["collector", "traj_ids"].flatten() for td in (*first, *a)])
    assert ids.unique().tolist() == list(range(int(ids.max()) + 1))
    before = max(int(td["collector", "traj_ids"].max()) for td in first)
    assert int(a[0]["collector", "traj_ids"].min()) == before + 1  # all envs were reset


@pytest.mark.processes
def test_weights_that_were_sent_instead_of_the_policys_are_saved() -> None:
    policy = noisy()
    with collecting(MULTI_STACK, dice, policy, frames=2 * T) as collector:
        others = {name: value + 1.0 for name, value in policy.state_dict().items()}
        collector.update_policy_weights_(others)
        for saved in (collector.state_dict()["policy"], collector.policy_weights.flatten_keys(".")):
            assert all(torch.equal(saved[name], value) for name, value in others.items())
        collector.update_policy_weights_()
        saved = collector.state_dict()["policy"]
        assert all(torch.equal(saved[name], own) for name, own in policy.state_dict().items())


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.name)
def test_weights_versions_and_counters_are_restored(way: Way) -> None:
    policy = noisy()
    arguments: dict[str, Any] = {"total_frames": 12 * T * (2 * way.workers if way.sync else 2)}
    with collecting(way, dice, policy, frames=2 * T, **arguments) as collector:
        with torch.no_grad():
            policy.module.bias += 5.0
            policy.module.scale *= 2.0
        collector.update_policy_weights_()
        for _ in range(3):
            td = collector.next()
        in_flight = collector.ledger()["total"]["in_flight"]
        state = collector.state_dict()
        # saving did not interrupt the rollouts
        assert collector.ledger()["total"]["in_flight"] == in_flight
        frames, batch = collector.stats()["frames"], td.numel()
    fresh = noisy()
    with collecting(way, dice, fresh, frames=2 * T, **arguments) as collector:
        collector.next()
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        collector.load_state_dict(through_a_file(state))
        assert (fresh.module.bias, fresh.module.scale) == (5.0, 2.0)
        assert collector.policy_version == 1
        assert (collector.stats()["frames"], collector.stats()["batches"]) == (frames, 3)
        rest = list(collector)
        assert collector.ledger()["total"]["delivered"] == frames + len(rest) * batch
    assert len(rest) == 9
    assert rest[0]["noise"].mean() > 2.0  # the workers have the weights
    with collecting(way, dice, fresh, frames=2 * T, track_policy_version=True) as collector:
        for _ in range(3):
            collector.update_policy_weights_()
        collector.next()
        collector.load_state_dict(state)
        versions = [collector.next()["collector", "policy_version"].max() for _ in range(2)]
    assert versions == [1, 1]


class Counting(nn.Module):
    """A policy that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        return torch.zeros(observation.shape[:-1], dtype=torch.int64), self.calls.clone()


@pytest.mark.parametrize("way", marked(MULTI_AHEAD, AHEAD), ids=lambda way: way.name)
def test_rollouts_that_are_dropped_change_no_buffers(way: Way) -> None:
    policy = TensorDictModule(Counting(), ["observation"], ["action", "calls"])
    entry = partial(CountingEnv)
    with collecting(way, lambda w: entry, policy, frames=T, track_policy_version=True) as collector:
        state = collector.state_dict()
        for version in (1, 2):
            collector.update_policy_weights_()
            assert collector.next() is not None
            collector.load_state_dict(state)
            td = collector.next()
            assert td["calls"][:, :, 0].tolist() == [list(range(1, T + 1))] * 2, version
            assert not td["collector", "policy_version"].any()


@pytest.mark.processes
def test_a_worker_that_missed_an_update_resumes_with_its_own_version() -> None:
    policy = noisy()
    with collecting(MULTI_STACK, dice, policy, frames=2 * T) as collector:
        before = policy.module.bias.item()
        with torch.no_grad():
            policy.module.bias += 5.0
        collector.update_policy_weights_(worker_ids=[0])
        state = through_a_file(collector.state_dict())
    assert state["versions"] == {"1": 0}
    with collecting(MULTI_STACK, dice, noisy(), frames=2 * T) as collector:
        collector.load_state_dict(state)
        assert collector.worker_policy_versions() == {0: 1, 1: 0}
        biases = collector.get_distant_attr("policy.module.bias")
        assert [bias.item() for bias in biases] == [before + 5.0, before]
        collector.update_policy_weights_()
        assert collector.worker_policy_versions() == {0: 2, 1: 2}
        assert collector.state_dict()["versions"] == {}


def test_a_version_is_restored_without_weights() -> None:
    with collecting(
        MULTI_AHEAD, lambda w: CountingEnv, None, frames=T, track_policy_version=True
    ) as collector:
        state = collector.state_dict()
        collector.update_policy_weights_()
        assert (collector.next()["collector", "policy_version"] == 1).all()
        collector.load_state_dict(state)
        assert (collector.next()["collector", "policy_version"] == 0).all()
        assert set(collector.policy_lag.values()) == {0}


@pytest.mark.parametrize("way", [SYNC[0], *marked(STACK, MULTI_STACK, central=False)])
def test_a_bad_state_is_refused_and_changes_nothing(way: Way) -> None:
    policy = noisy()
    with collecting(way, dice, policy, frames=2 * T) as collector:
        collector.set_seed(3)
        collector.next()
        good = collector.state_dict()
        for change in BAD.values():
            bad = deepcopy(good)
            change(bad)
            with pytest.raises(ValueError, match=r"^(state_dict|policy_or_weights)\b"):
                collector.load_state_dict(bad)
        for bad in (3, "state", None):
            with refused(TypeError, "state_dict"):
                collector.load_state_dict(bad)
        assert collector.stats()["batches"] == 1
        assert collector.policy_version == 0
        following = collector.next()
    with collecting(way, dice, noisy(), frames=2 * T) as collector:
        collector.set_seed(3)
        collector.next()
        assert same(collector.next().exclude("noise"), following.exclude("noise"))


def own(state: Any) -> Any:
    """Return the generators of worker 0."""
    return state["workers"]["0"]


BAD: dict[str, Callable[[Any], Any]] = {
    "empty": lambda s: s.clear(),
    "another format": lambda s: s.update(format="pycollect 0"),
    "a negative count": lambda s: s.update(batches=-1),
    "no number": lambda s: s.update(trajectories="many"),
    "other workers": lambda s: s["workers"].update({"7": None}),
    "other weights": lambda s: s["policy"].pop("module.bias"),
    "other shapes": lambda s: s["policy"].update({"module.bias": torch.zeros(2)}),
    "a broken generator": lambda s: own(s).pop("torch"),
    "a cut generator": lambda s: own(s).update(torch=torch.zeros(3, dtype=torch.uint8)),
    "a generator that lacks words": lambda s: own(s)["numpy"].__setitem__(
        1, torch.zeros(5, dtype=torch.int64)
    ),
    "a generator of no number": lambda s: own(s)["actions"][0]["state"].update(state="-1"),
    "other environments": lambda s: own(s)["actions"].pop(),
    "no weights": lambda s: s["policy"].clear(),
    "a number that is too large": lambda s: s.update(policy_version=2**63),
    "a numpy generator of another kind": lambda s: own(s).update(numpy=own(s)["actions"][0]),
    "a position outside of the words": lambda s: own(s)["numpy"].__setitem__(2, 10**6),
    "words that are too large": lambda s: own(s)["numpy"][1].add_(2**32),
    "a pair of normals without a number": lambda s: own(s)["python"].__setitem__(2, "one"),
    "a generator of fractions": lambda s: own(s)["actions"][0]["state"].update(state=0.5),
    "a device generator of another dtype": lambda s: own(s).update(device=torch.zeros(16)),
    "generators that are no dict": lambda s: s["workers"].update({"0": [1]}),
    "workers of several types": lambda s: s["workers"].update({0: None}),
    "weights of another worker": lambda s: s["policies"].update({"7": {}}),
    "modes of another worker": lambda s: s["training"].update({"7": {}}),
    "an unknown counter": lambda s: s["progress"].update({"bogus": 3}),
    "a mode that is no bool": lambda s: s["training"]["policy"].update({"": 1}),
    "an account of no worker": lambda s: s["ledger"].update({"²": s["ledger"]["0"]}),
    "a broken ledger": lambda s: s["ledger"].update({"0": {"delivered": 3}}),
}


CHANGES = [None, -1, 0, 2**62, 0.5, float("nan"), "", "1", True, [], {}, b"1"]
TENSORS = [torch.zeros(0), torch.zeros(3, dtype=torch.uint8), torch.tensor([2**40, -1])]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values of nested dicts and lists."""
    if isinstance(tree, dict):
        return [path, *(own for key in tree for own in places(tree[key], (*path, key)))]
    if isinstance(tree, list):
        return [path, *(own for key in range(len(tree)) for own in places(tree[key], (*path, key)))]
    return [path]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def after_one_batch() -> Any:
    collector = SyncDataCollector(dice(0), noisy(), frames_per_batch=2 * T)
    collector.set_seed(3)
    collector.next()
    return collector


@pytest.fixture(scope="module")
def untouched() -> tuple[Any, Any]:
    """Return a state and the next batch of a collector that loads no other state."""
    collector = after_one_batch()
    state = collector.state_dict()
    batch = collector.next().clone()
    collector.shutdown()
    return state, batch


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_an_altered_state_is_loaded_completely_or_not_at_all(
    untouched: Any, data: st.DataObject
) -> None:
    good, following = untouched
    state = deepcopy(good)
    *inside, key = data.draw(st.sampled_from([path for path in places(state) if path]))
    parent = at(state, tuple(inside))
    change = data.draw(st.sampled_from(["remove", "replace", "copy", "shape"]))
    if change == "remove":
        del parent[key]
    elif change == "replace":
        parent[key] = data.draw(st.sampled_from([*CHANGES, *TENSORS]))
    elif change == "copy":  # another value of the same state
        parent[key] = deepcopy(at(good, data.draw(st.sampled_from(places(good)))))
    elif isinstance(parent[key], torch.Tensor):
        parent[key] = data.draw(
            st.sampled_from(
                [parent[key][:-1], parent[key][None], parent[key].float(), -parent[key]]
            )
        )
    collector = after_one_batch()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    refusal = ""
    try:
        collector.load_state_dict(state)
    except (ValueError, TypeError) as error:
        refusal = str(error)
    batch = collector.next()
    collector.shutdown()
    if refusal:
        assert re.match("state_dict|policy_or_weights", refusal)
        assert same(batch, following)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2]["state"]["key"] == np.random.get_state(legacy=False)["state"]["key"]).all()


class Draws(CountingEnv):
    """Draw from the global generators; raise in the third step if `error` is set."""

    error: type[BaseException] | None = None

    def step(self, action: Any) -> Any:
        torch.rand(1), random.random(), np.random.random()
        if self.error is not None and self.steps == 2:
            raise self.error
        return super().step(action)


@pytest.mark.parametrize("error", [EnvBrokeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["environment", "policy"])
def test_an_exception_does_not_change_the_callers_generators(
    where: str, error: type[BaseException]
) -> None:
    def raises(observation: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        if armed:
            raise error
        return torch.zeros((), dtype=torch.int64)

    armed: list[int] = []
    env = Draws()
    with SyncDataCollector(lambda: env, raises, frames_per_batch=T) as collector:
        collector.set_seed(3)
        if where == "policy":
            armed.append(1)
        else:
            env.error = error
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
        with pytest.raises(error):
            collector.next()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert (before[2] == np.random.get_state()[1]).all()


def test_a_state_has_tensors_of_its_own() -> None:
    policy = noisy()
    collector = SyncDataCollector(dice(0), policy, frames_per_batch=2 * T)
    state = collector.state_dict()
    with torch.no_grad():
        policy.module.bias += 1.0
    assert state["policy"]["module.bias"] == 0.0
    collector.shutdown()


def test_torchrls_states_give_weights_and_counters() -> None:
    weights = {"module.bias": torch.full((1,), 4.0), "module.scale": torch.ones(1)}
    theirs = {"policy_state_dict": weights, "env_state_dict": {}, "iter": 3, "frames": 60}
    workers = {"worker0": {**theirs, "policy_version": torch.tensor(2)}}
    for state in (theirs, [theirs], {**workers, "iter": 3, "frames": 60}):
        policy = noisy()
        collector = SyncDataCollector(dice(0), policy, frames_per_batch=2 * T, total_frames=84)
        collector.load_state_dict(state)
        assert policy.module.bias == 4.0
        assert collector.stats()["batches"] == 4  # TorchRL's "iter" is -1 before the first
        assert collector.policy_version == (2 if "worker0" in state else 0)
        assert len(list(collector)) == 2
        collector.shutdown()


def biases(state: Any, workers: int) -> list[float]:
    """Return the bias of each worker after that state was loaded."""
    policy = noisy()
    with MultiSyncDataCollector(
        [dice(0)] * workers, policy, frames_per_batch=2 * T * workers
    ) as collector:
        collector.load_state_dict(state)
        found = collector.state_dict()
    individual = found["policies"]
    return [float(individual.get(str(w), found["policy"])["module.bias"]) for w in range(workers)]


@pytest.mark.slow
def test_torchrls_states_reach_each_worker() -> None:
    def theirs(bias: float) -> dict[str, Any]:
        weights = {"module.bias": torch.full((1,), bias), "module.scale": torch.ones(1)}
        return {"policy_state_dict": weights, "env_state_dict": {}, "iter": 3, "frames": 60}

    assert biases(theirs(4.0), 2) == [4.0, 4.0]
    by_name = sorted((f"worker{w}", theirs(float(w))) for w in range(11))  # worker10 is third
    assert biases({**dict(by_name), "iter": 3, "frames": 60}, 11) == [*range(11)]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("iter", "x"),
        ("iter", None),
        ("iter", 1.5),
        ("iter", torch.tensor([1, 2])),
        ("policy_version", [1]),
        ("policy_version", -3),
        ("policy_version", 1.7),
    ],
)
def test_a_torchrl_state_with_a_bad_entry_is_refused(entry: str, value: Any) -> None:
    good = {"policy_state_dict": {}, "env_state_dict": {}, "iter": 3, "frames": 60}
    with SyncDataCollector(dice(0), None, frames_per_batch=T) as collector:
        with refused(ValueError, "state_dict") as caught:
            collector.load_state_dict({**good, entry: value})
        assert repr(entry) in str(caught.value)


def test_reset_starts_new_trajectories() -> None:
    collector = SyncDataCollector(dice(0), None, frames_per_batch=4)
    first, second = collector.next(), None
    collector.reset()
    second = collector.next()
    assert second["observation"][:, 0, 2].tolist() == [0, 0]
    assert second["collector", "traj_ids"].min() == first["collector", "traj_ids"].max() + 1
    assert isinstance(second, TensorDict)
    collector.shutdown()
