"""AsyncBatchedCollector compared with TorchRL's: its arguments and its batches."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from collect_support import parity_policy
from envs_for_tests import EnvBrokeError, RaisingEnv
from raising import refused, warned
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import pycollect
from pycollect.api.async_batched_arguments import Chunks

pytest.importorskip("torchrl")

import torchrl.collectors as theirs
import torchrl.testing.mocking_classes as mock
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules.inference_server import InferenceDeviceConfig, InferenceServerConfig

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.processes(usual=2)]

ENVS, FRAMES, LENGTH = 2, 24, 4
HOMES = (theirs, pycollect)


class Scaled(nn.Module):
    """Return action 1, and the observation times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> Any:
        return torch.ones_like(observation, dtype=torch.int32), observation * self.scale


def policy() -> TensorDictModule:
    return TensorDictModule(Scaled(), ["observation"], ["action", "seen"])


@contextmanager
def made(home: Any, **arguments: Any) -> Any:
    given: dict[str, Any] = {"policy": policy(), "frames_per_batch": FRAMES}
    if "policy_factory" in arguments:
        del given["policy"]
    if home is theirs:
        arguments.setdefault("env_backend", "threading")
    entries = [partial(mock.CountingEnv, LENGTH)] * ENVS
    collector = home.AsyncBatchedCollector(entries, **{**given, **arguments})
    try:
        yield collector
    finally:
        collector.shutdown()


def own_rows(batch: Any, env: int) -> Any:
    """Return the frames of one environment, in order."""
    index = batch.get("env_index")
    ids = torch.as_tensor(index.tolist() if hasattr(index, "tolist") else index)
    return batch[(ids.flatten() == env).nonzero().flatten()]


def test_arguments_equal_torchrls() -> None:
    other, mine = (
        dict(inspect.signature(home.AsyncBatchedCollector.__init__).parameters) for home in HOMES
    )
    assert mine.pop("env_groups").default == 1  # only in pycollect
    assert mine.pop("max_policy_lag").default is None
    assert list(mine) == list(other)
    assert {name: own.default for name, own in mine.items()} == {
        name: own.default for name, own in other.items()
    } | {"exploration_type": mine["exploration_type"].default}
    assert {name: own.kind for name, own in mine.items()} == {
        name: own.kind for name, own in other.items()
    }


def test_frames_equal_torchrls() -> None:
    batches = []
    for home in HOMES:
        with made(home, total_frames=2 * FRAMES) as collector:
            batches.append(torch.cat([batch.contiguous() for batch in collector]))
    their, our = batches
    assert our.shape == their.shape == (2 * FRAMES,)
    missing = set(their.keys(True, True)) - set(our.keys(True, True)) - {"env_index"}
    assert not missing
    for env in range(ENVS):
        pair = own_rows(our, env), own_rows(their, env)
        count = min(map(len, pair))
        assert count > 0
        for key in set(their.keys(True, True)) - {"env_index"}:
            mine, other = (rows.get(key)[:count] for rows in pair)
            assert mine.dtype == other.dtype, key
            assert torch.equal(mine, other), key


def test_complete_trajectories() -> None:
    for home in HOMES:
        with made(home, yield_completed_trajectories=True) as collector:
            for _, batch in zip(range(3), collector, strict=False):
                assert batch.ndim == 1
                done = batch["next", "done"].flatten()
                assert done[-1]
                assert done.sum() == 1
                assert len(set(map(int, batch["env_index"]))) == 1


def test_inputs_of_the_buffer_and_the_hook_equal_torchrls() -> None:
    for home in HOMES:
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        shapes: list[Any] = []
        arguments = {
            "replay_buffer": buffer,
            "total_frames": 2 * FRAMES,
            "post_collect_hook": lambda td, shapes=shapes: shapes.append(tuple(td.shape)),
            "postproc": lambda td: td.set("twice", 2 * td["observation"]),
        }
        with made(home, **arguments) as collector:
            assert list(collector) == [None, None]
        assert shapes == [(FRAMES,)] * 2
        assert len(buffer) == 2 * FRAMES
        assert torch.equal(buffer[:]["twice"], 2 * buffer[:]["observation"])


def test_complete_trajectories_in_the_buffer_equal_torchrls() -> None:
    for home in HOMES:
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        lengths: list[int] = []
        arguments = {
            "replay_buffer": buffer,
            "policy_version": 5,
            "post_collect_hook": lambda td, lengths=lengths: lengths.append(len(td)),
        }
        with made(home, yield_completed_trajectories=True, **arguments) as collector:
            assert not any(batch for _, batch in zip(range(8), collector, strict=False))
        assert lengths
        for frames in buffer[:].split(lengths):
            assert frames["next", "done"].flatten().nonzero().flatten().tolist() == [
                len(frames) - 1
            ]
            assert (frames["policy_version"] == 5).all()
            assert len(set(map(int, frames["env_index"]))) == 1


def test_versions_and_weights() -> None:
    """Each update increments the version, from its initial value on, and frames record it."""
    for home in HOMES:
        arguments = {"policy_version": 5, "policy_version_key": "acted_by"}
        with made(home, policy_factory=policy, **arguments) as collector:
            batch = next(iter(collector))
            assert (batch["acted_by"] == 5).all()
            weights = TensorDict.from_module(policy()).data.clone().apply(lambda own: 3 * own)
            collector.update_policy_weights_(weights)
            assert collector.policy_version == 6
            while (batch["acted_by"] != 6).any():
                batch = next(iter(collector))
            assert torch.equal(batch["seen"], 3 * batch["observation"])


def test_workers_follow_a_policy_trained_in_the_driver() -> None:
    """TorchRL's server calls the caller's own module, unless the server is a process."""
    for home in HOMES:
        own = policy()
        with made(home, policy=own) as collector:
            for _ in range(3):
                batch = next(iter(collector))
            assert collector.policy_version == 0
            with torch.no_grad():
                own.module.scale.fill_(3)
            for _ in range(20):
                batch = next(iter(collector))
            assert torch.equal(batch["seen"], 3 * batch["observation"])


def test_environments_of_one_process() -> None:
    with made(pycollect, envs_per_worker=2, total_frames=2 * FRAMES) as collector:
        assert len(collector.stats()["workers"]) == 1
        for batch in collector:
            assert batch.shape == (FRAMES,)
            assert batch["env_index"].bincount().tolist() == [FRAMES // 2] * 2


def test_a_vector_environment_is_one_entry() -> None:
    entry = partial(gym.make_vec, "CartPole-v1", num_envs=2, vectorization_mode="sync")
    turns = TensorDictModule(lambda seen: (seen[..., 2] > 0).long(), ["observation"], ["action"])
    with pycollect.AsyncBatchedCollector(
        [entry] * 2, policy=turns, frames_per_batch=64, transition_chunk_size=8
    ) as collector:
        batch = collector.next()
        while batch["env_index"].unique().tolist() != [0, 1]:
            batch = collector.next()
    ids = batch["collector", "traj_ids"].flatten()
    for own in ids.unique():
        assert len(batch["env_index"][ids == own].unique()) == 1


class Pinned(mock.CountingEnv):
    """Return the number of available CPUs as the reward."""

    def _step(self, tensordict: Any) -> Any:
        td = super()._step(tensordict)
        return td.set("reward", torch.full_like(td["reward"], len(os.sched_getaffinity(0))))


def linear(device: str) -> TensorDictModule:
    with torch.device(device):
        module = nn.Linear(4, 2)
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action"])


def test_the_documented_program() -> None:
    """The second example of TorchRL's docstring, on the CPU; all frames use the old weights."""
    collector = pycollect.AsyncBatchedCollector(
        create_env_fn=[lambda: GymEnv("CartPole-v1")] * 3,
        policy_factory=partial(linear, "cpu"),
        frames_per_batch=512,
        env_backend="multiprocessing",
        transport="auto",
        transition_chunk_size=64,
        server_config=InferenceServerConfig(max_batch_size=3, min_batch_size=1, timeout=0.001),
        device_config=InferenceDeviceConfig(
            policy_device="cpu", output_device="cpu", storing_device="cpu"
        ),
    )
    assert collector.server_backend == "process"
    collector.update_policy_weights_(linear("cpu"))
    for batch in collector:
        assert batch.shape == torch.Size([512])
        assert (batch["policy_version"] == 1).all()
        break
    collector.shutdown()


def test_cpus_of_each_process() -> None:
    cpu = min(os.sched_getaffinity(0))
    collector = pycollect.AsyncBatchedCollector(
        [Pinned] * ENVS, policy=policy(), frames_per_batch=8, worker_affinity=lambda _: [cpu]
    )
    with collector:
        assert (collector.next()["next", "reward"] == 1).all()


def test_configs_of_the_server_and_of_devices() -> None:
    arguments = {
        "server_config": InferenceServerConfig(max_batch_size=1, min_batch_size=1, timeout=0.1),
        "device_config": InferenceDeviceConfig(policy_device="cpu", storing_device="cpu"),
        "transport": "auto",
        "backend": "multiprocessing",
    }
    with made(pycollect, **arguments) as collector:
        assert collector.next().device == torch.device("cpu")
        assert collector.server_backend == "process"
        assert collector.server_stats()["restarts"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"policy": None}, TypeError, "policy"),
        ({"policy_factory": policy, "policy": policy()}, ValueError, "policy_factory"),
        ({"transport": object()}, ValueError, "transport"),
        ({"backend": "ray"}, ValueError, "backend"),
        ({"driver_affinity": [0]}, ValueError, "driver_affinity"),
        ({"worker_affinity": [[0]]}, ValueError, "worker_affinity"),
        ({"worker_affinity": [[]] * ENVS}, ValueError, "worker_affinity"),
        ({"transition_chunk_size": 0}, ValueError, "transition_chunk_size"),
        ({"envs_per_worker": 0}, ValueError, "envs_per_worker"),
        (
            {"server_config": InferenceServerConfig(), "min_batch_size": 2},
            ValueError,
            "server_config",
        ),
        ({"device_config": InferenceDeviceConfig(), "device": "cpu"}, ValueError, "device_config"),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, dict) else "",
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    given = {"policy": policy(), "frames_per_batch": 8, **arguments}
    with refused(error, name):
        pycollect.AsyncBatchedCollector([mock.CountingEnv] * ENVS, **given)


@pytest.mark.parametrize(
    ("steps", "batch", "envs", "per_worker", "expected"),
    [
        ("auto", 200, 4, 1, (50, 4)),
        ("auto", 1024, 64, 1, (64, 16)),
        ("auto", 24, 2, 1, (24, 1)),
        ("auto", 1000, 2, 1, (500, 2)),
        ("auto", 997, 4, 1, (250, 4)),
        ("auto", 1024, 8, 4, (512, 2)),
        (16, 64, 2, 1, (16, 4)),
        (16, 60, 2, 1, (16, 4)),
        (1, 6, 2, 2, (2, 3)),
    ],
)
def test_rollouts_of_a_batch(
    steps: Any, batch: int, envs: int, per_worker: int, expected: tuple[int, int]
) -> None:
    chunks = Chunks.of(steps, batch, envs, per_worker)
    assert (chunks.frames, chunks.number) == expected
    assert chunks.batch_frames >= batch


def test_complete_frames_are_delivered_before_a_failure() -> None:
    collector = pycollect.AsyncBatchedCollector(
        [partial(RaisingEnv, at=11)],
        policy=parity_policy(),
        frames_per_batch=16,
        transition_chunk_size=4,
    )
    with collector:
        assert collector.next().shape == (8,)
        with pytest.raises(EnvBrokeError):
            collector.next()
        assert collector.stats()["frames"] == 8


def test_a_rounded_batch_size_causes_a_warning() -> None:
    with warned("frames_per_batch"):
        collector = pycollect.AsyncBatchedCollector(
            [mock.CountingEnv] * 2, policy=policy(), frames_per_batch=10, transition_chunk_size=4
        )
    with collector:
        assert collector.next().shape == (12,)
        assert collector.frames_per_batch == 12
