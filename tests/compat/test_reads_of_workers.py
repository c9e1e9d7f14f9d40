"""Attributes and methods of remote workers, compared with TorchRL's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from raising import refused
from tensordict import TensorDict

pytest.importorskip("torchrl.collectors")

import torchrl.collectors._multi_async
import torchrl.collectors._multi_sync
from reads_support import (
    BOTH,
    SEVERAL,
    linear,
    made,
    plain,
    plain_tensor,
    probed,
    slow,
    write_seven,
)
from torchrl.envs import GymEnv

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")

READ_OF_SEVERAL = (
    "compact_obs compiled_policy create_env_kwargs env_device exploration_type extend_buffer "
    "init_random_frames max_frames_per_traj num_workers policy_device preemptive_threshold "
    "requested_frames_per_batch reset_at_each_iter set_truncated split_trajs storing_device "
    "total_frames traj_format trajs_per_batch update_at_each_batch worker_idx num_sub_threads"
)


@pytest.mark.parametrize("name", SEVERAL)
def test_attributes_and_calls_of_workers_equal_torchrls(name: str) -> None:
    """No request to the workers loses a frame."""
    asked: list[Callable[[Any], Any]] = [
        lambda c: c.getattr_env("action_spec").shape,
        lambda c: c.getattr_policy("out_keys"),
        lambda c: c.get_distant_attr("worker_idx"),
        lambda c: c.get_distant_attr("policy.module.out_features"),
        lambda c: c.map_fn("get_distant_attr", [("env.batch_size",), ("total_frames",)]),
        lambda c: c.map_fn("env.action_spec.zero"),
        lambda c: c.frames_per_batch_worker(worker_idx=1),
        lambda c: [plain(getattr(c, read)) for read in READ_OF_SEVERAL.split()],
    ]
    refused: list[tuple[Callable[[Any], Any], type[Exception]]] = [
        (lambda c: c.getattr_env("nothing_of_this_name"), AttributeError),
        (lambda c: c.getattr_policy("nothing"), AttributeError),
        (lambda c: c.get_distant_attr("env.nothing"), AttributeError),
        (lambda c: c.map_fn("nothing"), AttributeError),
        (lambda c: c.map_fn("env.raise_it"), LookupError),
        (lambda c: c.map_fn("stats", [()]), ValueError),
        (lambda c: c.fake_tensordict(), NotImplementedError),
        (lambda c: c.shutdown(close_env=False), RuntimeError),
        (lambda c: c.env, AttributeError),
    ]
    answers = []
    for home in BOTH:
        with made(home, name, [probed] * 2, device="cpu", total_frames=-1) as collector:
            next(iter(collector))
            answers.append([plain_tensor(ask(collector)) for ask in asked])
            for ask, error in refused:
                with pytest.raises(error):
                    ask(collector)
            if home is pycollect:
                only_ours(collector)
    assert answers[0] == answers[1]


def only_ours(collector: Any) -> None:
    with refused(AttributeError, "reset") as caught:
        collector.map_fn("reset")
    assert "reset()" in str(caught.value)
    with pytest.raises(TypeError, match=r"env\.lock"):
        collector.map_fn("env.lock")
    weights = [TensorDict.from_module(linear()).data * 0 + value for value in (1.0, 2.0)]
    collector.map_fn("update_policy_weights_", [(own,) for own in weights])
    for _ in range(8):  # earlier requests
        collector.next()
    biases = collector.get_distant_attr("policy.module.bias")
    assert [bias.item() for bias in biases] == [1.0, 2.0]
    total = collector.ledger()["total"]
    assert (total["lost"], total["issued"]) == (0, total["delivered"] + total["in_flight"])


@pytest.mark.processes
def test_the_buffer_is_called_once_per_worker() -> None:
    with made(pycollect, "MultiAsyncCollector", [probed] * 2, replay_buffer=[1, 2]) as collector:
        assert collector.map_fn("replay_buffer.__len__") == [2, 2]
        assert collector.map_fn("replay_buffer.append", [(5,), (6,)]) == [None, None]
        assert collector.get_distant_attr("replay_buffer[3]") == [6, 6]
        with pytest.raises(AttributeError, match=r"replay_buffer\.nothing"):
            collector.get_distant_attr("replay_buffer.nothing")


VERSIONED = [
    pytest.param("MultiSyncCollector", {}, marks=pytest.mark.processes),
    pytest.param("MultiAsyncCollector", {"inference": "central"}, marks=pytest.mark.processes),
]


@pytest.mark.parametrize(("name", "arguments"), VERSIONED)
def test_workers_report_the_version_of_their_weights(name: str, arguments: dict[str, Any]) -> None:
    with made(pycollect, name, [probed] * 2, total_frames=-1, **arguments) as collector:
        assert collector.worker_policy_versions() == {0: 0, 1: 0}
        collector.update_policy_weights_()
        assert collector.worker_policy_versions() == {0: 1, 1: 1}
        if arguments:  # one inference server has the weights
            return
        weights = TensorDict.from_module(linear()).data * 0 + 3.0
        collector.update_policy_weights_(weights, worker_ids=[1])
        assert collector.worker_policy_versions() == {0: 1, 1: 2}
        assert collector.policy_version == 2
        collector.next()  # a rollout from before the updates
        assert collector.get_distant_attr("policy.module.bias")[1].item() == 3.0


@pytest.mark.processes
def test_a_worker_that_does_not_answer_is_replaced_and_reported() -> None:
    kwargs = {"total_frames": -1, "worker_timeout": 1.0}
    with made(pycollect, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
        collector.next()
        for method, error in (("env.die", pycollect.WorkerError), ("env.hang", TimeoutError)):
            with pytest.raises(error, match="worker 0"):
                collector.map_fn("cascade_execute", [(method,), ("worker_idx",)])
            assert collector.get_distant_attr("worker_idx") == [0, 1]
            assert collector.next().shape == (2, 6)
        restarts = [own["restarts"] for own in collector.stats()["workers"].values()]
    assert restarts == [2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_a_slow_rollout_is_not_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In TorchRL, a batch that takes longer than MAX_IDLE_COUNT seconds ends the run."""
    monkeypatch.setenv("MAX_IDLE_COUNT", "1")
    for module in (torchrl.collectors._multi_sync, torchrl.collectors._multi_async):
        monkeypatch.setattr(module, "_MAX_IDLE_COUNT", 1)  # read when TorchRL was imported
    with (
        pytest.raises(RuntimeError, match="MAX_IDLE_COUNT"),
        made(torchrl.collectors, name, [slow]) as theirs,
    ):
        next(iter(theirs))
    with made(pycollect, name, [slow]) as ours:
        assert ours.next().numel() == 12
        assert ours.stats()["workers"][0]["restarts"] == 0


@pytest.mark.parametrize("name", SEVERAL)
def test_hooks_of_workers_can_be_set_and_removed(name: str) -> None:
    """Changes apply from the next rollout on, and also to replacements of a worker."""
    with made(pycollect, name, [probed] * 2, total_frames=-1) as collector:
        collector.next()
        collector.post_collect_hook = write_seven
        assert collector.post_collect_hook is write_seven
        assert some(collector, lambda td: bool((td["next", "reward"] == 7).all()))
        with pytest.raises(pycollect.WorkerError):
            collector.map_fn("env.die")
        assert some(collector, lambda td: bool((td["next", "reward"] == 7).all()), 1)
        collector.post_collect_hook = None
        assert some(collector, lambda td: bool((td["next", "reward"] < 7).all()))
        for wrong in (3, partial(print, threading.Lock())):
            with refused(TypeError, "pre_collect_hook"):
                collector.pre_collect_hook = wrong
            assert collector.pre_collect_hook is None


def some(collector: Any, holds: Callable[[Any], bool], most: int = 8) -> bool:
    """Return whether a batch fulfils the condition; earlier rollouts may be delivered first."""
    return any(holds(collector.next()) for _ in range(most))


@pytest.mark.processes
@pytest.mark.slow
def test_single_workers_can_be_reset() -> None:
    counts = []
    for home in BOTH:
        kwargs = {"frames_per_batch": 6, "total_frames": -1, "max_frames_per_traj": 50}
        with made(home, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
            stream = iter(collector)
            next(stream)
            collector.reset([False, True])
            counts.append(next(stream)["step_count"][..., 0].tolist())
    assert counts[0] == counts[1] == [[3, 4, 5], [0, 1, 2]]
    for wrong in ([True], [True] * 3):
        collector = pycollect.MultiSyncCollector([probed] * 2, None, frames_per_batch=2)
        with refused(ValueError, "reset_idx"):
            collector.reset(wrong)
        collector.shutdown()


@pytest.mark.ray
def test_attributes_hooks_and_shutdown_of_actors() -> None:
    def write(td: Any) -> None:
        td["next", "reward"].fill_(7.0)

    kwargs: dict[str, Any] = {"total_frames": -1, "sync": True}
    entries = [partial(GymEnv, "Pendulum-v1")] * 2
    with made(pycollect, "RayCollector", entries, **kwargs) as collector:
        collector.next()
        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.getattr_env("action_spec").shape == (1,)
        assert collector.map_fn("getattr_policy", [("in_keys",)] * 2) == [["observation"]] * 2
        assert collector.device == collector.env_device == (None, None)
        with pytest.raises(AttributeError, match=r"env\.nothing"):
            collector.map_fn("env.nothing")
        with refused(ValueError, "list_of_args", "list_of_kwargs") as caught:
            collector.map_fn("get_distant_attr", list_of_args=[("worker_idx",)])
        assert "2" in str(caught.value)
        collector.post_collect_hook = write
        assert (collector.next()["next", "reward"] == 7).all()
        assert collector.ledger()["total"]["lost"] == 0
        with refused(TypeError, "shutdown_ray"):
            collector.async_shutdown(10)

        async def end() -> None:
            await collector.async_shutdown(shutdown_ray=False)

        asyncio.run(end())
        assert collector.closed
        asyncio.run(collector.async_shutdown())
