"""Profiles of the first rollouts, compared with TorchRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from raising import refused

pytest.importorskip("torchrl.collectors")

from reads_support import BOTH, made, probed, write_seven
from torchrl.data import LazyTensorStorage, ReplayBuffer

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("home", BOTH, ids=["theirs", "ours"])
def test_a_profile_of_the_first_rollouts(home: Any, tmp_path: Path) -> None:
    with made(home, "Collector", post_collect_hook=write_seven, total_frames=60) as collector:
        collector.enable_profile(save_path=tmp_path / "trace_{worker_idx}.json", activities=["cpu"])
        assert collector.profile_config.num_rollouts == 3
        batches = list(collector)
        assert (tmp_path / "trace_0.json").exists()
        if home is pycollect:  # TorchRL skips the hook during a profile
            assert all((td["next", "reward"] == 7).all() for td in batches)
        with pytest.raises(RuntimeError, match="enable_profile"):
            collector.enable_profile()
        collector.disable_profile()
        assert collector.post_collect_hook is write_seven
        assert collector.profile_config is None


@pytest.mark.parametrize(
    "argument",
    [
        {"workers": 3},
        {"workers": ["0"]},
        {"num_rollouts": "x"},
        {"num_rollouts": 1},
        {"warmup_rollouts": -1},
        {"activities": "cpu"},
        {"activities": [3]},
        {"save_path": 3},
        {"save_path": "{foo}"},
        {"save_path": "{"},
        {"on_trace_ready": 3},
    ],
    ids=str,
)
def test_a_bad_argument_of_a_profile_is_named(argument: dict[str, Any]) -> None:
    with made(pycollect, "Collector") as collector, refused((TypeError, ValueError), *argument):
        collector.enable_profile(**argument)


def test_setting_a_hook_keeps_the_profile(tmp_path: Path) -> None:
    with made(pycollect, "Collector", total_frames=-1) as collector:
        collector.enable_profile(save_path=tmp_path / "trace.json", activities=["cpu"])
        collector.post_collect_hook = write_seven
        assert (collector.next()["next", "reward"] == 7).all()
        collector.next()
        collector.post_collect_hook = None  # ends the profile
        assert collector.profile_config is None
        assert (tmp_path / "trace.json").exists()


def test_a_thread_does_not_begin_with_an_unfinished_profile(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    with made(pycollect, "Collector", total_frames=-1, replay_buffer=buffer) as collector:
        collector.enable_profile(save_path=tmp_path / "trace.json", activities=["cpu"])
        with refused(RuntimeError, "start"):
            collector.start()
        for _ in range(3):
            collector.next()
        collector.start()
    collector.disable_profile()


def test_a_profiles_configuration_equals_torchrls() -> None:
    ours, theirs = (home.ProfileConfig(workers=[0, 2]) for home in BOTH[::-1])
    names = [name for name in dir(theirs) if name[0] != "_"]
    assert names == [name for name in dir(ours) if name[0] != "_"]
    for worker in range(3):
        assert ours.should_profile_worker(worker) is theirs.should_profile_worker(worker)
        assert ours.get_save_path(worker) == theirs.get_save_path(worker)


@pytest.mark.processes
@pytest.mark.slow
def test_a_profile_of_some_workers(tmp_path: Path) -> None:
    kwargs = {"total_frames": -1, "post_collect_hook": write_seven}
    with made(pycollect, "MultiSyncCollector", [probed] * 2, **kwargs) as collector:
        path = str(tmp_path / "trace_{worker_idx}.json")
        collector.enable_profile(save_path=path, workers=[1, 9], activities=["cpu"])
        collector.next()
        collector.disable_profile()  # writes the trace so far
        assert [file.name for file in tmp_path.iterdir()] == ["trace_1.json"]
        assert (collector.next()["next", "reward"] == 7).all()
    with refused(ValueError, "num_rollouts"):
        pycollect.Collector(probed, None, frames_per_batch=2).enable_profile(num_rollouts=1)
