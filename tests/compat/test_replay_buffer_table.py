"""Contents of a replay buffer after each batch, compared entry by entry with TorchRL's."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from raising import refused
from tensordict.nn import TensorDictModule

import pycollect
from pycollect.transport.processes.engine import ProcessEngine

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.utils import _TrajectoryPool
from torchrl.data import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.postprocs import MultiStep
from torchrl.data.replay_buffers.samplers.prioritized import SumSegmentTreeFp32
from torchrl.envs import SerialEnv
from torchrl.envs.transforms import MultiStepTransform, Reward2GoTransform
from torchrl_support import IDS, in_order

WORKERS = 2
SHARE = 12  # frames of one worker in a batch
BATCHES = 3
LENGTHS = (5, 3, 7)

pytestmark = [
    pytest.mark.filterwarnings("ignore:split_trajs=True produces:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to Collector:FutureWarning"),
    pytest.mark.filterwarnings("ignore:trajs_per_batch. this environment has no time:UserWarning"),
]


def counting(steps: int) -> Any:
    env = mock.CountingEnv(max_steps=steps)
    env.add_truncated_keys()
    return env


def one(worker: int) -> Any:
    return counting(LENGTHS[worker])


def two(worker: int) -> Any:
    lengths = LENGTHS[worker], LENGTHS[worker + 1]
    return SerialEnv(2, [partial(counting, steps) for steps in lengths])


def act(observation: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(observation, dtype=torch.int8)


def policy() -> TensorDictModule:
    return TensorDictModule(act, ["observation"], ["action"])


def buffer(ndim: int = 1, storage: Callable[..., Any] = LazyTensorStorage, **kwargs: Any) -> Any:
    size = {} if ndim == 1 else {"ndim": ndim}
    return kwargs.pop("kind", ReplayBuffer)(storage=storage(400, **size), batch_size=8, **kwargs)


def fill(collector: Any, replay: Any) -> list[tuple[int, int]]:
    """Return the buffer's length and write count after each batch."""
    states = []
    try:
        for batch in collector:
            assert batch is None
            states.append((len(replay), replay.write_count))
    finally:
        collector.shutdown()
    return states


def in_process(cls: Any, entry: Any, replay: Any, worker: int = 0, **arguments: Any) -> Any:
    arguments = {"frames_per_batch": SHARE, "total_frames": BATCHES * SHARE, **arguments}
    collector = cls(entry(worker), policy(), replay_buffer=replay, **arguments)
    return fill(collector, replay)


def assert_same_contents(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    mine, other = ours[:], theirs[:]
    if isinstance(other, list):
        mine, other = torch.stack(mine), torch.stack(other)
    assert_same_td(mine, other)
    assert ours.sample().shape == theirs.sample().shape


def assert_same_td(mine: Any, other: Any) -> None:
    assert mine.shape == other.shape
    assert mine.names == other.names
    assert mine.device == other.device
    assert set(mine.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        one_, another = mine[key], other[key]
        assert one_.dtype == another.dtype, key
        if key == IDS:
            assert torch.equal(in_order(one_), in_order(another))
        else:
            torch.testing.assert_close(one_, another, rtol=0, atol=0, msg=str(key))


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"extend_buffer": False},
    {"trajs_per_batch": 2},
    {"trajs_per_batch": 2, "traj_format": "cat"},
    {"trajs_per_batch": 2, "trajs_per_write": 1, "max_frames_per_traj": 4},
    {"trajs_per_batch": 1, "reset_at_each_iter": True},
    {"trajs_per_batch": 1, "reset_at_each_iter": True, "set_truncated": True},
    {"set_truncated": True},
    {"max_frames_per_traj": 4},
    {"track_traj_ids": False},
    {"compact_obs": True},
    {"postproc": MultiStep(gamma=0.9, n_steps=1)},
]
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage]
PRIORITISED = pytest.param(
    partial(TensorDictPrioritizedReplayBuffer, alpha=1, beta=1),
    marks=pytest.mark.skipif(SumSegmentTreeFp32 is None, reason="TorchRL's extension is not here"),
)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize(("entry", "ndim"), [(one, 1), (two, 1), (two, 2)])
def test_in_process(entry: Any, ndim: int, arguments: dict[str, Any]) -> None:
    flat = "trajs_per_batch" in arguments
    if ndim == 2 and (flat or not arguments.get("extend_buffer", True)):
        pytest.skip("TorchRL's does not work")
    ours, theirs = buffer(ndim), buffer(ndim)
    states = in_process(Collector, entry, theirs, **arguments)
    assert in_process(pycollect.Collector, entry, ours, **arguments) == states
    assert_same_contents(ours, theirs)


@pytest.mark.parametrize("write", [{}, {"trajs_per_write": 1}], ids=str)
@pytest.mark.parametrize("entry", [one, two])
def test_the_write_mode_selects_complete_trajectories(entry: Any, write: dict[str, Any]) -> None:
    """TorchRL 0.14.1 has no `replay_write_mode`; there, `trajs_per_batch` writes the same."""
    ours, theirs, rollouts = (buffer() for _ in range(3))
    write = {"max_frames_per_traj": 5, **write}
    states = in_process(Collector, entry, theirs, trajs_per_batch=1, **write)
    mode: dict[str, Any] = {"replay_write_mode": "trajectory", **write}
    assert in_process(pycollect.Collector, entry, ours, **mode) == states
    assert_same_contents(ours, theirs)
    in_process(pycollect.Collector, entry, rollouts, replay_write_mode="rollout")
    assert rollouts[:].numel() == BATCHES * SHARE > len(ours)


@pytest.mark.parametrize("entry", [one, two])
def test_single_steps_are_not_split(entry: Any) -> None:
    split, whole = buffer(), buffer()
    in_process(pycollect.Collector, entry, split, extend_buffer=False, split_trajs=True)
    in_process(pycollect.Collector, entry, whole, extend_buffer=False)
    assert_same_contents(split, whole)


def test_single_steps_in_storages_of_two_dimensions() -> None:
    whole, steps = buffer(2), buffer(2)
    in_process(pycollect.Collector, two, whole)
    in_process(pycollect.Collector, two, steps, extend_buffer=False)
    assert_same_contents(steps, whole)


@pytest.mark.parametrize("cls", [Collector, pycollect.Collector])
def test_postproc_gets_complete_trajectories(cls: Any) -> None:
    """Trajectories have 5 steps, so a batch of 12 frames cuts every third."""
    shapes = []

    def note(td: Any) -> Any:
        shapes.append(tuple(td.shape))
        return td

    in_process(cls, one, buffer(), trajs_per_batch=1, trajs_per_write=1, postproc=note)
    assert shapes == [(SHARE,)] * BATCHES if cls is Collector else [(6,)] * (3 * SHARE // 6)


@pytest.mark.parametrize("arguments", ARGUMENTS[:3], ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, PRIORITISED])
def test_kinds_of_buffers(kind: Any, storage: Any, arguments: dict[str, Any]) -> None:
    ours, theirs = (buffer(1, storage, kind=kind) for _ in range(2))
    states = in_process(Collector, one, theirs, **arguments)
    assert in_process(pycollect.Collector, one, ours, **arguments) == states
    assert_same_contents(ours, theirs)


def test_transforms_of_a_buffer_get_the_same_input_as_in_torchrl() -> None:
    ours, theirs = (buffer(transform=Reward2GoTransform(gamma=0.9)) for _ in range(2))
    in_process(Collector, one, theirs, trajs_per_batch=1)
    in_process(pycollect.Collector, one, ours, trajs_per_batch=1)
    assert_same_contents(ours, theirs)


@pytest.mark.parametrize("cls", [Collector, pycollect.Collector])
@pytest.mark.parametrize("arguments", [{}, {"trajs_per_batch": 1}], ids=str)
def test_frames_have_the_device_of_the_storage(cls: Any, arguments: dict[str, Any]) -> None:
    replay, devices = buffer(storage=partial(LazyTensorStorage, device="cpu")), []
    extend = replay.extend

    def noting(td: Any) -> Any:
        devices.append(td.device)
        return extend(td)

    replay.extend = noting
    in_process(cls, one, replay, postproc=lambda td: td.clear_device_(), **arguments)
    assert set(devices) == {torch.device("cpu")}


@pytest.mark.parametrize("cls", [Collector, pycollect.Collector])
def test_existing_frames_of_a_buffer_count_as_random_frames(cls: Any) -> None:
    random = []
    for arguments in ({}, {"init_random_frames": 2 * SHARE}):
        replay = buffer()
        in_process(cls, one, replay, total_frames=2 * SHARE)
        torch.manual_seed(1)
        in_process(cls, one, replay, total_frames=SHARE, **arguments)
        random.append(replay["action"].clone())
    assert torch.equal(*random)


def of_workers(entry: Any, ndim: int, arguments: dict[str, Any]) -> Any:
    """Return a buffer that TorchRL's single-process collectors filled in turn, batch by batch.

    TorchRL's multi-process collectors do the same if their workers finish in order.
    """
    replay = buffer(ndim)
    total = {"frames_per_batch": SHARE, "total_frames": BATCHES * SHARE, **arguments}
    pool = _TrajectoryPool()  # shared, so that ids are unique
    members = [
        Collector(entry(worker), policy(), replay_buffer=replay, traj_pool=pool, **total)
        for worker in range(WORKERS)
    ]
    for _ in zip(*members, strict=True):
        pass
    for member in members:
        member.shutdown()
    return replay


@pytest.mark.processes(usual=2)
@pytest.mark.parametrize(
    ("entry", "ndim", "cat_results", "arguments"),
    [
        pytest.param(*case, id=f"{case[0].__name__}, ndim {case[1]}, {case[2]}, {case[3]}")
        for case in (
            (two, 2, 0, {}),
            (one, 1, "stack", {"trajs_per_batch": 2}),
            (one, 1, "stack", {}),
            (one, 1, -1, {}),
            (two, 1, "stack", {}),
            (two, 1, -1, {"extend_buffer": False}),
            (two, 1, 0, {"trajs_per_batch": 2}),
            (one, 1, 0, {"postproc": MultiStep(gamma=0.9, n_steps=1)}),
        )
    ],
)
def test_processes(entry: Any, ndim: int, cat_results: Any, arguments: dict[str, Any]) -> None:
    replay = buffer(ndim)
    collector = pycollect.MultiSyncCollector(
        [partial(entry, worker) for worker in range(WORKERS)],
        policy(),
        frames_per_batch=WORKERS * SHARE,
        total_frames=WORKERS * BATCHES * SHARE,
        replay_buffer=replay,
        cat_results=cat_results,
        split_trajs=True,  # no effect with a buffer, as in TorchRL
        **arguments,
    )
    states = fill(collector, replay)
    theirs = of_workers(entry, ndim, arguments)
    assert states[-1] == (len(theirs), theirs.write_count)
    assert_same_contents(replay, theirs)


@pytest.mark.slow
@pytest.mark.processes
def test_torchrls_own_processes() -> None:
    """The order of the workers within a batch does not matter."""
    made = [partial(one, worker) for worker in range(WORKERS)]
    frames = {"frames_per_batch": WORKERS * SHARE, "total_frames": WORKERS * BATCHES * SHARE}
    buffers = []
    for cls in (MultiSyncCollector, pycollect.MultiSyncCollector):
        buffers.append(buffer())
        states = fill(cls(made, policy(), replay_buffer=buffers[-1], **frames), buffers[-1])
        assert states == [(n * WORKERS * SHARE,) * 2 for n in range(1, BATCHES + 1)]
    theirs, ours = (sorted(replay["observation"].view(-1, SHARE).tolist()) for replay in buffers)
    assert ours == theirs


@pytest.mark.processes
@pytest.mark.parametrize("cls", [pycollect.MultiAsyncCollector, pycollect.MultiSyncCollector])
def test_slices_and_counts_while_the_buffer_fills(cls: Any) -> None:
    """A second thread samples whole rollouts, in slices of one trajectory each."""
    replay = buffer(kind=TensorDictReplayBuffer, sampler=SliceSampler(slice_len=3))
    with cls(
        [partial(one, worker) for worker in (0, 2)],
        policy(),
        frames_per_batch=SHARE,
        replay_buffer=replay,
        prefetch=1,
    ) as collector:
        collector.start()
        while replay.write_count < 20 * SHARE:
            if len(replay) < SHARE:
                continue
            slices = replay.sample(9 * 3).reshape(-1, 3)
            assert (slices[IDS] == slices[IDS][:, :1]).all()
            assert (slices["observation"][:, 1:] == slices["observation"][:, :-1] + 1).all()
        collector.pause()
        assert replay.write_count == collector.ledger()["total"]["delivered"]


def test_slices_by_done_flags_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessEngine, "start", None)  # fails if a worker starts before the warning
    replay = buffer(sampler=SliceSampler(slice_len=3, end_key=("next", "done")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with refused(UserWarning, "replay_buffer") as caught:
            pycollect.MultiSyncCollector(
                [partial(one, 0)] * 2, policy(), frames_per_batch=SHARE, replay_buffer=replay
            )
        assert "traj_key" in str(caught.value)


def test_sums_of_rewards_of_different_workers_are_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ProcessEngine, "start", None)  # fails if a worker starts before the warning
    replay = buffer(transform=MultiStepTransform(n_steps=2, gamma=0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with refused(UserWarning, "replay_buffer"):
            pycollect.MultiAsyncCollector(
                [partial(one, 0)] * 2, policy(), frames_per_batch=SHARE, replay_buffer=replay
            )


def summed(ndim: int) -> Any:
    """Return the contents of a buffer that sums two rewards, filled by two environments."""
    replay = buffer(ndim, transform=MultiStepTransform(n_steps=2, gamma=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pycollect.Collector(
            partial(two, 0),
            policy(),
            frames_per_batch=2 * SHARE,
            total_frames=4 * SHARE,
            replay_buffer=replay,
            extend_buffer=False,
        ) as collector:
            deque(collector, 0)
    return replay[:]


def test_sums_of_rewards_of_different_environments_are_warned_about() -> None:
    with refused(UserWarning, "replay_buffer"):
        summed(ndim=1)


def test_sums_of_rewards_along_time_are_not_warned_about() -> None:
    td = summed(ndim=2)
    last = torch.tensor(LENGTHS[:2]).view(2, 1, 1) + 1  # observation at the end of an episode
    assert (td["next", "observation"] == torch.minimum(td["observation"] + 2, last)).all()
