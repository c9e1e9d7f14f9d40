"""Programs of TorchRL's tutorials, examples and implementations, reduced to a few lines each.

Every program runs with TorchRL's classes and with ours, and returns its observations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from raising import refused
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

pytest.importorskip("torchrl.collectors")

from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.collectors.distributed import RayCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import NextObservationDelta, NextStateReconstructor
from torchrl.modules import (
    EGreedyModule,
    LSTMModule,
    QValueModule,
    RandomPolicy,
    set_recurrent_mode,
)
from torchrl.modules.inference_server import InferenceServer
from torchrl.objectives import DQNLoss
from torchrl.objectives.value import GAE

import pycollect
from pycollect.api.ray import update_service

IDS = ("collector", "traj_ids")
OBSERVATION = ("next", "observation")


class Library(NamedTuple):
    """The names that a program imports."""

    collector: Any
    in_processes: Any
    on_ray: Any
    split: Any


THEIRS = Library(Collector, MultiAsyncCollector, RayCollector, split_trajectories)
OURS = Library(
    pycollect.Collector,
    pycollect.MultiAsyncCollector,
    pycollect.RayCollector,
    pycollect.split_trajectories,
)


def form(td: TensorDictBase) -> dict[str, Any]:
    """Return shapes and dtypes by key."""
    return {str(key): (leaf.shape, leaf.dtype) for key, leaf in td.items(True, True)}


def first(collector: Any) -> Any:
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1")


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def slices(transform: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(slice_len=4, traj_key=IDS),
        transform=transform,
        batch_size=40,
    )


def less_memory(library: Library) -> Any:
    """Omit next observations and reconstruct them, or store them as differences."""
    compact = first(
        library.collector(cart_pole, frames_per_batch=200, total_frames=200, compact_obs=True)
    )
    buffer = slices(NextStateReconstructor())
    buffer.extend(compact)
    sample = buffer.sample()
    ends = torch.isnan(sample[OBSERVATION]).any(-1)
    assert ends[sample["next", "done"].squeeze(-1)].all()
    value = TensorDictModule(
        lambda x: x.pow(2).sum(-1, keepdim=True), ["observation"], ["state_value"]
    )
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=value, shifted=False)
    assert torch.isfinite(advantage(sample.reshape(-1, 4))["advantage"]).all()

    def delta_env() -> TransformedEnv:
        return TransformedEnv(cart_pole(), NextObservationDelta())

    delta = first(library.collector(delta_env, frames_per_batch=200, total_frames=200))
    other = slices(NextObservationDelta(in_keys=["observation"]))
    other.extend(delta)
    again = other.sample()
    assert torch.isfinite(again[OBSERVATION]).all()
    return form(compact), form(delta), form(sample), form(again)


def trajectories(library: Library) -> Any:
    """Split a batch into trajectories, padded and nested; write whole ones to a buffer."""
    env = cart_pole()
    policy = RandomPolicy(env.action_spec)
    batch = first(library.collector(env, policy, frames_per_batch=200, total_frames=-1))
    padded = library.split(batch)
    nested = library.split(batch, as_nested=True)
    assert len(padded) == len(nested) == len(batch[IDS].unique())
    assert int(padded["collector", "mask"].sum()) == 200
    whole = first(
        library.collector(
            cart_pole(),
            policy,
            frames_per_batch=200,
            total_frames=-1,
            trajs_per_batch=5,
            traj_format="padded",
        )
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    buffer.extend(whole)
    dtypes = {str(key): leaf.dtype for key, leaf in nested.items(True, True)}
    kept = {str(key): leaf.dtype for key, leaf in buffer.sample(3).items(True, True)}
    return form(batch), dtypes, nested.batch_size[1:], len(buffer), kept


def sequences(library: Library) -> Any:
    """Train a recurrent policy on slices of its frames."""
    lstm = LSTMModule(
        input_size=4,
        hidden_size=8,
        in_keys=["observation", "h", "c"],
        out_keys=["features", ("next", "h"), ("next", "c")],
        python_based=True,
    )
    head = TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"])
    choice = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    policy = TensorDictSequential(lstm, head, choice)
    batch = first(
        library.collector(
            cart_pole(),
            policy,
            frames_per_batch=64,
            total_frames=128,
            device="cpu",
            auto_register_policy_transforms=True,
        )
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=4, strict_length=False),
        batch_size=16,
    )
    buffer.extend(batch)
    sample = buffer.sample()
    with set_recurrent_mode(True):
        loss = policy(sample)["logits"].pow(2).mean()
    loss.backward()
    assert next(lstm.parameters()).grad is not None
    # TorchRL also writes "is_init" under "next", always false.
    return form(batch.exclude(("next", "is_init")))


def recurrent_q_values(library: Library) -> Any:
    """Run an LSTM with Q-values and exploration; the environment's primer has its state."""
    env = TransformedEnv(cart_pole(), Compose(StepCounter(), InitTracker()))
    lstm = LSTMModule(input_size=4, hidden_size=8, in_key="observation", out_key="features")
    env.append_transform(lstm.make_tensordict_primer())
    head = TensorDictModule(nn.Linear(8, 2), ["features"], ["action_value"])
    values = TensorDictSequential(lstm, head, QValueModule(action_space=None, spec=env.action_spec))
    exploration = EGreedyModule(annealing_num_steps=100, spec=env.action_spec, eps_init=0.2)
    policy = TensorDictSequential(values, exploration)
    collector = library.collector(env, policy, frames_per_batch=20, total_frames=40)
    loss = DQNLoss(values, action_space=env.action_spec, delay_value=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    seen = []
    try:
        for batch in collector:
            buffer.extend(batch.unsqueeze(0))
            with set_recurrent_mode(True):
                loss(buffer.sample())["loss"].backward()
            exploration.step(batch.numel())
            collector.update_policy_weights_()
            seen.append(form(batch.exclude(("next", "is_init"))))
    finally:
        collector.shutdown()
    return collector.total_frames, seen


@pytest.mark.parametrize("program", [less_memory, trajectories, sequences, recurrent_q_values])
def test_in_process(program: Callable[[Library], Any]) -> None:
    assert program(OURS) == program(THEIRS)


def episodes() -> TransformedEnv:
    env = TransformedEnv(GymEnv("Pendulum-v1"), RewardSum())
    env.append_transform(StepCounter(max_steps=20))
    return env


class Stamped:
    """Flatten a batch and add the version of its weights."""

    def __init__(self, version: float) -> None:
        self.version = version

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        flat = td.reshape(-1)
        return flat.set("version", torch.full(flat.shape, self.version))


def batches_from_processes(library: Library) -> Any:
    """Run an actor and a learner that takes whole batches and sends weights back."""
    policy = linear()
    collector = library.in_processes(
        create_env_fn=[episodes] * 2,
        policy=policy,
        frames_per_batch=20,
        total_frames=100,
        device="cpu",
        storing_device="cpu",
        max_frames_per_traj=-1,
        update_at_each_batch=True,
        postproc=Stamped(1.0),
    )
    seen = []
    try:
        for batch in collector:
            assert batch["next", "episode_reward"][batch["next", "done"]].numel() == 1
            with torch.no_grad():
                next(policy.parameters()).zero_()
            collector.update_policy_weights_()
            seen.append(form(batch.exclude("collector")))
    finally:
        collector.shutdown()
    return seen


def a_buffer_that_is_filled_meanwhile(library: Library) -> Any:
    """Read from the buffer in the learner, until its write count reaches the end."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, shared_init=True), batch_size=8, shared=True
    )
    policy = linear()
    collector = library.in_processes(
        create_env_fn=[episodes],
        policy=policy,
        frames_per_batch=20,
        total_frames=100,
        replay_buffer=buffer,
        postproc=Stamped(1.0),
    )
    try:
        collector.start()
        deadline = time.monotonic() + 60
        while buffer.write_count < 100 and time.monotonic() < deadline:
            if len(buffer) >= 8:
                assert (buffer.sample()["version"] == 1).all()
                collector.update_policy_weights_()
        return buffer.write_count, buffer.sample().shape
    finally:
        collector.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize("program", [batches_from_processes, a_buffer_that_is_filled_meanwhile])
def test_in_processes(program: Callable[[Library], Any]) -> None:
    assert program(OURS) == program(THEIRS)


def local_makers() -> tuple[Callable[[], GymEnv], Callable[[], TensorDictModule]]:
    """Return local functions, which are pickled by value: actors cannot import this module."""

    def make_env() -> GymEnv:
        return GymEnv("Pendulum-v1", device="cpu")

    def make_policy() -> TensorDictModule:
        return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])

    return make_env, make_policy


def a_buffer_in_an_actor(library: Library) -> Any:
    """Fill a buffer in the background, until the program has enough frames."""
    buffer = RayReplayBuffer(storage=partial(LazyTensorStorage, 1000))

    async def main() -> Any:
        collector = library.on_ray(
            [local_makers()[0]],
            linear(),
            total_frames=600,
            frames_per_batch=200,
            remote_configs={"num_cpus": 1, "num_gpus": 0},
            replay_buffer=buffer,
        )
        collector.start()
        while not len(buffer):
            await asyncio.sleep(0.1)
        sample = buffer.sample(32)
        await collector.async_shutdown(shutdown_ray=False)
        return sample.shape, set(map(str, sample.keys(True, True)))

    try:
        return asyncio.run(main())
    finally:
        buffer.close()


def a_policy_in_an_actor(library: Library) -> Any:
    """Put the policy and the buffer into actors, and pass their clients to the collector."""
    make_env, make_policy = local_makers()
    options = {"remote_config": {"num_cpus": 1}}
    buffer = TensorDictReplayBuffer(
        storage=partial(LazyTensorStorage, 100),
        batch_size=4,
        service_backend="ray",
        service_backend_options=options,
        transport="auto",
    )
    service = InferenceServer(
        policy_factory=make_policy,
        service_backend="ray",
        service_backend_options=options,
        transport="auto",
    )
    collector = library.on_ray(
        create_env_fn=[make_env],
        policy=service,
        replay_buffer=buffer,
        collector_class="single",
        frames_per_batch=8,
        total_frames=16,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
        sync=True,
    )
    try:
        for _ in collector:
            weights = linear()
            nn.init.zeros_(weights.module.weight)
            nn.init.constant_(weights.module.bias, 2.0)
            collector.update_policy_weights_(weights)
        sample = buffer.sample()
        return len(buffer), sample.shape, set(map(str, sample.keys(True, True)))
    finally:
        collector.shutdown()
        service.shutdown()
        buffer.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("program", [a_policy_in_an_actor, a_buffer_in_an_actor])
def test_on_ray(program: Callable[[Library], Any], ray_cluster: Any) -> None:
    assert program(OURS) == program(THEIRS)


class Served:
    """An object that claims to be a service in an actor."""

    service_backend = "ray"

    def __init__(self) -> None:
        self.weights: list[Any] = []

    def client(self) -> Any:
        return lambda td: td

    def update_model_weights(self, weights: Any) -> None:
        self.weights.append(weights)


def test_a_policy_service_gets_weights() -> None:
    service = Served()
    policy = linear()
    update_service(service, policy)
    assert torch.equal(service.weights[0]["module", "weight"], policy.module.weight)
    with refused(ValueError, "policy_or_weights"):
        update_service(service, None)
    with refused(ValueError, "policy_factory"):
        pycollect.RayCollector(
            [linear], policy=service, policy_factory=linear, frames_per_batch=10, sync=True
        )
