"""Intended differences between pycollect and TorchRL 0.14.1.

Each test shows both sides, or describes TorchRL's in its docstring. The reasons are in
docs/coming-from-torchrl.md. Everything else is equal: see `test_programs.py`.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collect_support import parity_policy
from echo_envs import GateEnv, TallyEnv, wait_until
from envs_for_tests import CountingEnv, DiscreteEnv, ReusedBufferEnv
from gymnasium import spaces
from raising import refused, warned
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential

import pycollect

pytest.importorskip("torchrl")

import torchrl.collectors
import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    MultiAction,
    PendulumEnv,
    SerialEnv,
    TransformedEnv,
)
from torchrl.modules import LSTMModule
from torchrl_support import IDS

T = 12

pytestmark = pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")


def batches(collector_class: Any, env: Any, policy: Any = None, **kwargs: Any) -> list[Any]:
    """Return two batches; for TorchRL's collector, wrap the Gymnasium env or the list."""
    if collector_class is Collector:
        env = SerialEnv(len(env), [partial(index, fn) for fn in env]) if _many(env) else index(env)
    torch.manual_seed(0)
    collector = collector_class(env, policy, frames_per_batch=T, total_frames=2 * T, **kwargs)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def _many(env: Any) -> bool:
    return isinstance(env, list)


def index(make: Any) -> Any:
    return GymWrapper(make(), categorical_action_encoding=True)


def ours_and_theirs(env: Any, policy: Any = None, **kwargs: Any) -> tuple[list[Any], list[Any]]:
    ours = batches(pycollect.SyncDataCollector, env, policy, **kwargs)
    return ours, batches(Collector, env, policy, **kwargs)


def test_reused_observation_buffers_are_safe() -> None:
    """In TorchRL, all frames of a batch are the last one."""
    (ours, _), (theirs, _) = ours_and_theirs(partial(ReusedBufferEnv, length=T))
    assert ours["observation"][:, 2].tolist() == list(range(T))
    assert len(theirs["observation"].unique(dim=0)) == 1


def halve_tensordict(td: Any) -> Any:
    td["observation"].mul_(0.5)
    return td.set("action", torch.zeros((), dtype=torch.int64))


def halve(observation: torch.Tensor) -> torch.Tensor:
    return observation.mul_(0.5)


def no_action(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


HALVING = [
    halve_tensordict,
    TensorDictModule(lambda seen: no_action(halve(seen)), ["observation"], ["action"]),
    TensorDictSequential(
        TensorDictModule(halve, ["observation"], ["half"]),
        TensorDictModule(no_action, ["half"], ["action"]),
    ),
]


@pytest.mark.parametrize("policy", HALVING, ids=["function", "module", "sequence"])
def test_an_in_place_change_by_a_policy_affects_only_its_own_frame(policy: Any) -> None:
    """In TorchRL, the change also reaches the previous frame, which shares its memory."""
    (ours, _), (theirs, _) = ours_and_theirs(partial(CountingEnv, length=T), policy)
    assert torch.equal(theirs["next", "observation"][:-1], theirs["observation"][1:])
    assert torch.equal(ours["next", "observation"][:-1] * 0.5, ours["observation"][1:])


def test_a_policy_over_tensors_gets_a_copy_of_its_input() -> None:
    """In TorchRL, the frame changes."""

    def act(observation: torch.Tensor) -> torch.Tensor:
        return no_action(halve(observation))

    (ours, _), (theirs, _) = ours_and_theirs(partial(CountingEnv, length=T), act)
    assert torch.equal(ours["next", "observation"][:-1], ours["observation"][1:])
    assert not torch.equal(theirs["observation"], ours["observation"])


def of_torchrl(collector_class: Any, env: Any, policy: Any = None) -> Any:
    """Return the first batch of a TorchRL environment."""
    torch.manual_seed(0)
    collector = collector_class(env, policy, frames_per_batch=T, total_frames=T)
    try:
        (batch,) = collector
        return batch
    finally:
        collector.shutdown()


class ClippingEnv(PendulumEnv):
    """Clip the action in the TensorDict that the environment got."""

    def _step(self, tensordict: Any) -> Any:
        tensordict["action"].clamp_(-0.5, 0.5)
        return super()._step(tensordict)


def test_an_env_that_writes_into_its_input_does_not_change_the_frame() -> None:
    policy = TensorDictModule(lambda th: torch.ones(1), ["th"], ["action"])
    for kind, action in ((pycollect.SyncDataCollector, 1.0), (Collector, 0.5)):
        assert of_torchrl(kind, ClippingEnv(), policy)["action"].unique().tolist() == [action]


def test_later_writes_of_an_env_do_not_change_the_batch() -> None:
    """The env adds to an observation after returning it; in TorchRL this changes the frame."""
    largest = {}
    for kind in (pycollect.SyncDataCollector, Collector):
        batch = of_torchrl(kind, mock.AutoResetHeteroCountingEnv(4, auto_reset=True))
        largest[kind] = [
            max(float(agent["camera"].max()) for agent in place["lazy"].unbind(-1))
            for place in (batch["next"][1:-1], batch[1:-1])
        ]
    # the values at the time of the return
    assert largest[pycollect.SyncDataCollector] == [0.0, 0.0]
    assert min(largest[Collector]) > 0


def test_entries_of_changing_shapes_are_always_lazy() -> None:
    """In TorchRL, a batch is dense if all entries happen to have one length."""
    policy = TensorDictModule(
        lambda seen: torch.ones((3, 1), dtype=torch.int8), ["observation"], ["action"]
    )
    ours, theirs = (
        of_torchrl(kind, TransformedEnv(mock.CountingEnv(max_steps=99), MultiAction()), policy)
        for kind in (pycollect.SyncDataCollector, Collector)
    )
    assert isinstance(ours["next"], LazyStackedTensorDict)
    assert isinstance(theirs["next"], TensorDict)
    assert torch.equal(ours["next", "reward"], theirs["next", "reward"])
    assert ours["next", "reward"].shape == (T, 3, 1)


class Counter(torch.nn.Module):
    """Count calls in a buffer, and draw a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.rand(2).argmax(-1)


def test_construction_does_not_change_the_policy() -> None:
    """In TorchRL, the call that detects the outputs is counted, and its random draws are lost."""
    traces = {}
    for kind, env in ((pycollect.SyncDataCollector, CountingEnv), (Collector, index(CountingEnv))):
        net = Counter()
        torch.manual_seed(3)
        before = torch.get_rng_state()
        policy = TensorDictModule(net, ["observation"], ["action"])
        collector = kind(env, policy, frames_per_batch=T, total_frames=T)
        traces[kind] = int(net.calls), torch.equal(torch.get_rng_state(), before)
        collector.shutdown()
    assert traces == {pycollect.SyncDataCollector: (0, True), Collector: (1, False)}


def test_versions_have_another_key() -> None:
    """In TorchRL, "policy_version" is at the root and under "next", like an observation.

    At the root, the first frame after an update has the version before it.
    """
    seen = {}
    for kind, env in ((pycollect.SyncDataCollector, CountingEnv), (Collector, index(CountingEnv))):
        policy = TensorDictModule(Counter(), ["observation"], ["action"])
        collector = kind(env, policy, frames_per_batch=3, total_frames=6, track_policy_version=True)
        for batch in collector:
            tracked = [key for key in batch.keys(True, True) if "policy_version" in key]
            seen[kind] = {key: batch[key].tolist() for key in tracked}
            collector.update_policy_weights_()
        collector.shutdown()
    assert seen[pycollect.SyncDataCollector] == {("collector", "policy_version"): [1, 1, 1]}
    assert seen[Collector] == {"policy_version": [0, 1, 1], ("next", "policy_version"): [1, 1, 1]}


def test_padding_has_the_id_minus_one() -> None:
    """In TorchRL, it has the id 0, which is also the id of a trajectory."""
    kwargs = {"split_trajs": True}
    (ours, _), (theirs, _) = ours_and_theirs(partial(CountingEnv, length=5), **kwargs)
    assert ours["collector", "mask"].tolist() == theirs["collector", "mask"].tolist()
    padded = ~ours["collector", "mask"]
    assert ours[IDS][padded].tolist() == [-1] * 3
    assert theirs[IDS][padded].tolist() == [0] * 3


def test_ids_count_from_zero_without_gaps() -> None:
    """In TorchRL, ids also count earlier resets, and are assigned by time, not by env."""
    kwargs = {"reset_at_each_iter": True}
    ours, theirs = ours_and_theirs(partial(CountingEnv, length=5), **kwargs)
    ids = [0] * 5 + [1] * 5 + [2] * 2
    assert [batch[IDS].tolist() for batch in ours] == [ids, [number + 3 for number in ids]]
    assert theirs[0][IDS][0] == 1

    envs = [partial(CountingEnv, length=n) for n in (3, 2)]
    (ours_first, _), (theirs_first, _) = ours_and_theirs(envs)
    assert ours_first[IDS].tolist() == [[0, 0, 0, 1, 1, 1], [2, 2, 3, 3, 4, 4]]
    assert theirs_first[IDS].tolist() == [[0, 0, 0, 3, 3, 3], [1, 1, 2, 2, 4, 4]]


def test_a_seed_begins_a_new_stream() -> None:
    """In TorchRL, the current observation is acted on first."""
    first = {}
    for kind, env in ((pycollect.SyncDataCollector, CountingEnv), (Collector, index(CountingEnv))):
        collector = kind(env, None, frames_per_batch=4, total_frames=8)
        next(iter(collector))
        collector.set_seed(1)
        first[kind] = int(next(iter(collector))["observation"][0, 2])
        collector.shutdown()
    assert first == {pycollect.SyncDataCollector: 0, Collector: 4}


class ScalarEnv(CountingEnv):
    """An environment with a Box without dimensions as its observation."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 100, (), np.float32)

    def observe(self) -> Any:
        return np.float32(self.steps)


def test_a_box_without_dimensions_has_none() -> None:
    """In TorchRL, it gets one dimension."""
    (ours, _), (theirs, _) = ours_and_theirs(ScalarEnv)
    assert ours["observation"].shape == (T,)
    assert theirs["observation"].shape == (T, 1)


def test_discrete_actions_begin_at_their_start() -> None:
    """In TorchRL, they begin at 0 for any start of the space."""
    (ours, _), (theirs, _) = ours_and_theirs(DiscreteEnv)
    assert set(ours["action"].tolist()) <= {5, 6, 7}
    assert set(theirs["action"].tolist()) <= {0, 1, 2}


def test_tuples_of_spaces_are_numbered() -> None:
    """In TorchRL, a Tuple of unlike spaces is an error."""

    class TupleEnv(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            box = self.observation_space
            self.observation_space = spaces.Tuple((box, spaces.Discrete(100)))

        def observe(self) -> Any:
            return np.array([self.number, self.episode, self.steps], np.float32), self.steps

    (ours, _) = batches(pycollect.SyncDataCollector, TupleEnv)
    assert ours["0"].shape == (T, 3)
    assert ours["1"].tolist() == ours["0"][:, 2].tolist()
    with pytest.raises(RuntimeError):
        index(TupleEnv)


def test_exploration_is_one_of_four() -> None:
    """TorchRL also has MEDIAN, which few distributions support."""
    with refused(ValueError, "exploration_type"):
        batches(pycollect.SyncDataCollector, CountingEnv, exploration_type=InteractionType.MEDIAN)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ("Collector", "SyncDataCollector"),
        ("MultiSyncCollector", "MultiSyncDataCollector"),
        ("MultiAsyncCollector", "MultiaSyncDataCollector"),
    ],
)
def test_a_class_is_called_by_its_older_name(newer: str, older: str) -> None:
    ours = getattr(pycollect, newer)
    assert ours is getattr(pycollect, older)
    assert ours.__name__ == older
    assert getattr(torchrl.collectors, newer).__name__ == newer


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_collector_with_few_arguments(ray_cluster: Any) -> None:
    """In TorchRL, `RayCollector` needs more arguments.

    Frames that do not divide are an error, several envs per collector crash or are ignored, the
    default actor waits for a GPU forever, and without total_frames no batch arrives.
    """
    with (
        warned("frames_per_batch"),
        pycollect.RayCollector(
            CountingEnv,
            frames_per_batch=6,
            num_collectors=2,
            num_workers_per_collector=2,
            sync=True,
        ) as collector,
    ):
        shapes = [batch.shape for batch in islice(collector, 3)]
    assert shapes == [(2, 2, 2)] * 3


def test_a_policy_without_an_action_is_refused_at_once() -> None:
    """In TorchRL, the first request for a batch raises a KeyError."""
    policy = TensorDictModule(lambda x: x.sum(), in_keys=["observation"], out_keys=["value"])
    with refused(ValueError, "policy") as caught:
        pycollect.Collector(CountingEnv, policy, frames_per_batch=T)
    assert "'action'" in str(caught.value)
    collector = Collector(index(CountingEnv), policy, frames_per_batch=T, total_frames=T)
    with pytest.raises(KeyError, match="action"):
        next(iter(collector))
    collector.shutdown()


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("Collector", "traj_format", "flat"),
        ("MultiSyncCollector", "frames_per_batch", [T]),
        ("MultiSyncCollector", "preemptive_threshold", 1.5),
    ],
)
def test_errors_name_the_argument(name: str, argument: str, value: Any) -> None:
    """The error has TorchRL's type, so that programs still catch it, but a different message."""
    entry = partial(index, CountingEnv)
    entries = entry if name == "Collector" else [entry] * 2
    arguments = {"frames_per_batch": T, "total_frames": T, "trajs_per_batch": 2, argument: value}
    with pytest.raises(ValueError, match=argument):
        getattr(torchrl.collectors, name)(entries, None, **arguments)
    with refused(ValueError, argument):
        getattr(pycollect, name)(entries, None, **arguments)


def test_a_replay_buffer_gets_dense_batches() -> None:
    """TorchRL stacks single frames as the storage writes them; the buffer has the same frames."""
    kinds: list[type] = []

    class Buffer(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            kinds.append(type(data))
            return super().extend(data, **kwargs)

    held = []
    for collector_class in (Collector, pycollect.Collector):
        replay = Buffer(storage=LazyTensorStorage(2 * T))
        torch.manual_seed(0)
        arguments: dict[str, Any] = {"frames_per_batch": T, "total_frames": 2 * T}
        collector = collector_class(
            partial(index, CountingEnv), None, replay_buffer=replay, **arguments
        )
        assert list(collector) == [None, None]
        collector.shutdown()
        held.append(replay[:]["observation"])
    assert kinds == [LazyStackedTensorDict] * 2 + [TensorDict] * 2
    assert torch.equal(*held)


@pytest.mark.slow
@pytest.mark.ray
def test_actors_do_not_wait_for_the_learner_nor_updates_for_a_rollout(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """In TorchRL, an actor idles until its next request, and an update waits for rollouts."""
    steps, gate = tmp_path / "steps", tmp_path / "gate"
    one: dict[str, Any] = {"frames_per_batch": T, "remote_configs": {"num_cpus": 1}}
    policy = parity_policy()
    with pycollect.RayCollector([partial(TallyEnv, steps)], policy, **one) as collector:
        next(collector)
        wait_until(lambda: steps.stat().st_size == 3 * T)
    with pycollect.RayCollector([partial(GateEnv, gate, T + 1)], policy, **one) as collector:
        next(collector)
        wait_until(gate.with_suffix(".reached").exists)
        collector.update_policy_weights_()
        gate.touch()


@pytest.mark.parametrize("transforms", ["none", "primer"])
@pytest.mark.parametrize("cut", [None, 3])
def test_compact_batches_have_no_successors(transforms: str, cut: int | None) -> None:
    lstm = LSTMModule(3, 4, in_key="observation", out_key="embed")
    head = TensorDictModule(torch.nn.Linear(4, 1), ["embed"], ["action"])
    primed = transforms == "primer"

    def make() -> Any:
        env = GymEnv("Pendulum-v1")
        if not primed:
            return env
        return TransformedEnv(env, Compose(InitTracker(), lstm.make_tensordict_primer()))

    policy = TensorDictSequential(lstm, head) if primed else None
    keys = []
    for collector_class in (pycollect.SyncDataCollector, Collector):
        collector = collector_class(
            make(), policy, frames_per_batch=T, compact_obs=True, max_frames_per_traj=cut
        )
        keys.append(set(next(iter(collector))["next"].keys()))
        collector.shutdown()
    assert keys[0] == {"reward", "done", "terminated", "truncated"}
    kept = {"recurrent_state_h", "recurrent_state_c"} if primed else set()
    assert keys[1] == keys[0] | kept
