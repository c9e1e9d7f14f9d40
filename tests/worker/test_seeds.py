"""set_seed: the seed chain, the generators, and their independence (section 10)."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import IN_PROCESS, MULTI_AHEAD, MULTI_STACK, STACK, Way, collecting, marked
from echo_envs import ENTRIES, wait_until
from envs_for_tests import CountingEnv
from raising import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from pycollect._core import Mailbox
from pycollect.data.generators import Generators, GeneratorState
from pycollect.transport.messages import plain_report
from pycollect.transport.pickling import pack
from pycollect.worker.report import Lazy, RolloutReport, WorkerSeconds

T = 6
ASYNC_ONE = Way("async, one actor", 1, {"prefetch": 2})


class NoisyEnv(CountingEnv):
    """Observe noise from the environment's own and the global generators as the third number."""

    def observe(self) -> Any:
        noise = self.np_random.random() + 10 * np.random.random() + 100 * random.random()
        return np.array([self.number, self.np_random_seed % 10_000, noise], np.float32)


def noisy(worker: int) -> Any:
    return [partial(NoisyEnv, 10 * worker + p, length=4) for p in range(2)]


def noise(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = observation.shape[:-1]
    return torch.randint(0, 2, batch), torch.randn(batch)


def noisy_policy() -> TensorDictModule:
    return TensorDictModule(noise, ["observation"], ["action", "noise"])


def equal(a: TensorDict, b: TensorDict) -> bool:
    """Compare the data, without trajectory ids, which keep counting."""
    ids = ("collector", "traj_ids")
    return bool((a.exclude(ids) == b.exclude(ids)).all())


class SeedsEnv(CountingEnv):
    """Observe the seed of the last reset, modulo 10,000."""

    def observe(self) -> Any:
        seed = next((s for s in reversed(self.seeds) if s is not None), 0)
        return np.array([self.number, seed % 10_000, self.steps], np.float32)


def torchrl_chain(seed: int, count: int) -> list[int]:
    """Return seeds as TorchRL assigns them, from its own function if it is installed."""
    try:
        from torchrl._utils import seed_generator
    except ImportError:
        pytest.skip("needs TorchRL as the oracle")
    seeds = [seed]
    for _ in range(count):
        seeds.append(seed_generator(seeds[-1]))
    return seeds


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**32 - 2])
def test_the_chain_of_seeds_equals_torchrls(seed: int) -> None:
    chain = torchrl_chain(seed, 3)
    entry = [partial(SeedsEnv, p) for p in range(3)]
    with collecting(IN_PROCESS, lambda w: entry, frames=6) as collector:
        assert collector.set_seed(seed) == chain[3]
        td = collector.next()
        assert td["observation"][:, 0, 1].tolist() == [s % 10_000 for s in chain[:3]]
        assert collector.set_seed(seed, static_seed=True) == seed
        assert set(collector.next()["observation"][..., 1].flatten().tolist()) == {seed % 10_000}


@pytest.mark.processes
def test_all_workers_get_the_same_static_seed() -> None:
    with collecting(MULTI_STACK, lambda w: [SeedsEnv, SeedsEnv], frames=4) as collector:
        assert collector.set_seed(7, static_seed=True) == 7
        assert set(collector.next()["observation"][..., 1].flatten().tolist()) == {7}


def test_known_seeds() -> None:
    """Fixed values of the seed chain, to check it without TorchRL."""
    with collecting(IN_PROCESS, ENTRIES["one"], frames=6) as collector:
        assert collector.set_seed(0) == KNOWN[0]
        assert collector.set_seed(np.int64(42)) == KNOWN[42]


KNOWN = {0: 795726461, 42: 1445067485}


@pytest.mark.parametrize("policy", [None, noisy_policy()], ids=["random actions", "policy"])
def test_same_seed_same_data_in_process(policy: Any) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(len(runs))
        with collecting(IN_PROCESS, noisy, policy, frames=2 * T) as collector:
            collector.next()
            collector.set_seed(5)
            runs.append([collector.next() for _ in range(3)])
            collector.set_seed(6)
            runs[-1].append(collector.next())
            collector.set_seed(5)
            runs[-1].append(collector.next())
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))
    first, second, _, other, again = runs[0]
    assert equal(first, again)
    assert not equal(first, second)
    assert not equal(first, other)


def global_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


def test_the_callers_generators_are_not_changed() -> None:
    with collecting(IN_PROCESS, noisy, noisy_policy(), frames=2 * T) as collector:
        before = global_states()
        collector.set_seed(5)
        assert global_states() == before
        undisturbed = [collector.next() for _ in range(3)]
        assert global_states() == before
        collector.set_seed(5)
        for expected in undisturbed:
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            torch.rand(3)
            assert equal(collector.next(), expected)


class NormalEnv(CountingEnv):
    """Observe normals of numpy's global generator, which draws pairs and may keep one half."""

    def observe(self) -> Any:
        return np.array([self.number, 0, np.random.standard_normal()], np.float32)


def test_a_pair_of_normals_may_span_batches() -> None:
    streams = []
    for frames in (3, 5, 15):
        entry = partial(NormalEnv, 0, length=100)
        with collecting(IN_PROCESS, lambda w, entry=entry: entry, frames=frames) as collector:
            collector.set_seed(5)
            batches = [collector.next()["observation"] for _ in range(15 // frames)]
        streams.append(torch.cat(batches).tolist())
    assert streams[0] == streams[1] == streams[2]


def test_the_callers_pair_of_normals_is_not_changed() -> None:
    np.random.seed(1)
    expected = np.random.standard_normal(4).tolist()
    with collecting(IN_PROCESS, noisy, frames=2 * T) as collector:
        collector.set_seed(5)
        np.random.seed(1)
        drawn = []
        for _ in range(4):
            drawn.append(np.random.standard_normal())
            collector.next()
    assert drawn == expected


@pytest.mark.parametrize("kind", [None, np.random.PCG64, np.random.MT19937])
def test_generators_continue_from_a_state(kind: Any) -> None:
    def draw(own: Generators, kind: Any = None) -> list[float]:
        with own.active():
            if kind is not None:
                np.random.mtrand.set_bit_generator(kind(7))
            return [np.random.standard_normal(), torch.rand(1).item(), random.random()]

    own, before = Generators(np.random.SeedSequence(3)), np.random.mtrand.get_bit_generator()
    draw(own, kind)  # leaves half a pair
    state = own.state([np.random.default_rng(0)])
    again = Generators.of(GeneratorState.from_plain(state.plain()))
    assert [draw(again) for _ in range(3)] == [draw(own) for _ in range(3)]
    assert np.random.mtrand.get_bit_generator() is before


@pytest.mark.parametrize("name", ["seed", "Generator", "unknown", 3])
def test_a_state_of_no_bit_generator_is_refused(name: Any) -> None:
    plain = Generators(np.random.SeedSequence(3)).state([]).plain()
    plain["numpy"][0] = name
    with refused(ValueError, "state_dict") as caught:
        GeneratorState.from_plain(plain)
    assert "'numpy'" in str(caught.value)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_caller_may_have_another_bit_generator() -> None:
    before = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(1))
        expected = np.random.standard_normal(4).tolist()
        own, drawn = np.random.PCG64(1), []
        with collecting(IN_PROCESS, noisy, noisy_policy(), frames=2 * T) as collector:
            collector.set_seed(5)
            np.random.mtrand.set_bit_generator(own)
            for _ in range(4):
                drawn.append(np.random.standard_normal())
                collector.next()
        assert drawn == expected
        assert np.random.mtrand.get_bit_generator() is own
    finally:
        np.random.mtrand.set_bit_generator(before)


def test_a_seeded_rollouts_report_fits_into_the_mailbox() -> None:
    """Otherwise new memory would be shared for each rollout."""
    generators = Generators(np.random.SeedSequence(0)).state([np.random.default_rng(0)] * 8)
    told = Lazy[Any](generators, pickle.dumps)
    report = RolloutReport(8, 0, [], WorkerSeconds(), 0, (), generators=told)
    _, memory = pack((plain_report(report), None), Mailbox.ANSWER_BYTES)
    assert memory is None


def test_without_a_seed_the_callers_generator_is_used() -> None:
    """Until set_seed is called, torch.manual_seed works as expected in this process."""
    batches = []
    for _ in range(2):
        with collecting(IN_PROCESS, ENTRIES["one"], noisy_policy(), frames=T) as collector:
            torch.manual_seed(8)
            batches.append(collector.next())
    assert equal(*batches)


def test_every_env_has_random_actions_of_its_own() -> None:
    """Env p draws the same actions for any number of envs."""
    actions = {}
    for count in (2, 3):
        entry = [partial(CountingEnv, p) for p in range(count)]
        with collecting(IN_PROCESS, lambda w, entry=entry: entry, frames=count * 30) as collector:
            collector.set_seed(3)
            actions[count] = collector.next()["action"]
    assert torch.equal(actions[2], actions[3][:2])
    assert not torch.equal(actions[3][0], actions[3][1])


def test_a_vector_env_with_seeds_of_its_rows() -> None:
    fns = [partial(SeedsEnv, p) for p in range(3)]
    chain = torchrl_chain(7, 3)
    entry = partial(gymnasium.vector.SyncVectorEnv, fns)
    with collecting(IN_PROCESS, lambda w: entry, frames=6) as collector:
        collector.set_seed(7)
        rows = collector.next()["observation"][:, 0, 1]
    assert rows.tolist() == [s % 10_000 for s in chain[:3]]


# Actors


class TurnsEnv(NoisyEnv):
    """Wait at the end of each rollout until environment `first` has ended its own.

    Environment `first` itself does not wait.
    """

    def __init__(self, folder: str, number: int, first: int) -> None:
        super().__init__(number, length=4)
        self.folder, self.first = Path(folder), first
        self.rollouts = 0

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if len(self.actions) % T == 0:
            self.rollouts += 1
            if self.number != self.first:
                wait_until((self.folder / f"{self.first} {self.rollouts}").exists)
            (self.folder / f"{self.number} {self.rollouts}").touch()
        return result


@pytest.mark.parametrize("policy", [None, noisy_policy()], ids=["random actions", "policy"])
@pytest.mark.parametrize("way", marked(STACK, MULTI_STACK))
def test_same_seed_same_data_in_any_order_of_workers(way: Way, policy: Any, tmp_path: Path) -> None:
    runs = []
    for first in (0, 10):
        folder = tmp_path / str(first)
        folder.mkdir()
        entry = partial(turns, str(folder), first)
        with collecting(way, entry, policy, frames=T) as collector:
            following = collector.set_seed(5)
            runs.append([collector.next() for _ in range(3)])
    assert following == torchrl_chain(5, 2)[2]
    for a, b in zip(*runs, strict=True):
        assert equal(a, b)
        assert torch.equal(a["collector", "traj_ids"], b["collector", "traj_ids"])
        assert not torch.equal(a[0]["observation"], a[1]["observation"])


def turns(folder: str, first: int, worker: int) -> Callable[[], TurnsEnv]:
    return partial(TurnsEnv, folder, 10 * worker, first)


@pytest.mark.parametrize("way", marked(STACK, MULTI_STACK))
def test_streams_of_workers_without_a_seed(way: Way) -> None:
    """Torch seeds each new process with the same constant, so workers must reseed."""
    with collecting(way, noisy, noisy_policy(), frames=2 * T) as collector:
        a, b = collector.next()
    assert not torch.equal(a["noise"], b["noise"])
    assert not torch.equal(a["observation"][..., 2], b["observation"][..., 2])


@pytest.mark.parametrize(
    "way", marked(ASYNC_ONE, Way("multi async, one worker", 1, {"prefetch": 2}))
)
def test_a_seed_drops_rollouts_in_flight(way: Way) -> None:
    """The next batch is the first of the new stream; ids have no gap, and total_frames holds."""
    with collecting(way, noisy, noisy_policy(), frames=2 * T, total_frames=8 * 2 * T) as collector:
        for _ in range(3):
            before = collector.next()
        collector.set_seed(5)
        first = [collector.next() for _ in range(2)]
        collector.set_seed(5)
        again = [collector.next() for _ in range(2)]
        (last,) = collector
    for a, b in zip(first, again, strict=True):
        assert equal(a, b)
    ids = torch.stack([td["collector", "traj_ids"] for td in (before, *first, *again, last)])
    started = [td["collector", "traj_ids"].min() for td in (before, first[0], again[0])]
    assert started[0] < started[1] < started[2]
    assert first[0]["collector", "traj_ids"][0, 0] == before["collector", "traj_ids"].max() + 1
    assert ids.max() == last["collector", "traj_ids"].max()


@pytest.mark.parametrize("way", marked(Way("ahead", 2, {"sync": True, "prefetch": 1}), MULTI_AHEAD))
def test_a_sync_collector_that_collects_ahead(way: Way) -> None:
    with collecting(way, noisy, noisy_policy(), frames=2 * T) as collector:
        collector.next()
        runs = []
        for _ in range(2):
            collector.set_seed(9)
            runs.append([collector.next() for _ in range(2)])
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))
