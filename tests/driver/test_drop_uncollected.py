"""Cells without a frame: their mask and warning, and batches that omit them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from collect_support import IN_PROCESS, SYNC_WAYS, Way, collecting, parity_policy
from echo_envs import ENTRIES
from envs_for_tests import CountingEnv, CountingVectorEnv
from raising import refused, warned
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from pycollect import MultiSyncDataCollector, SyncDataCollector

DUMMIES = ENTRIES["ignores masks"]


def whole_and_flat(way: Way, entry: Any, **more: Any) -> tuple[TensorDictBase, TensorDictBase]:
    """Return the same batch with its empty cells and without them."""
    tds = []
    for drop in (False, True):
        with collecting(
            way, entry, parity_policy(), frames=42, drop_uncollected=drop, **more
        ) as collector:
            collector.set_seed(1)
            tds.append(collector.next())
            delivered = collector.ledger()["total"]["delivered"]
    assert delivered == tds[1].numel()
    return tds[0], tds[1]


@pytest.mark.filterwarnings("ignore:create_env_fn")
@pytest.mark.parametrize("way", SYNC_WAYS)
def test_flat_batches_contain_only_frames_in_order(way: Way) -> None:
    whole, flat = whole_and_flat(way, DUMMIES)
    mask = whole["collector", "mask"]
    assert not mask.all()
    assert flat.ndim == 1
    assert flat.numel() == int(mask.sum())
    assert "mask" not in flat["collector"]
    for key in ("observation", ("next", "observation"), "action", ("collector", "traj_ids")):
        assert torch.equal(flat[key], whole[key][mask])


def test_batches_without_such_cells_are_flat_too() -> None:
    whole, flat = whole_and_flat(IN_PROCESS, ENTRIES["list"])
    assert flat.shape == (whole.numel(),)
    assert torch.equal(flat["observation"], whole["observation"].flatten(0, 1))


@pytest.mark.filterwarnings("ignore:create_env_fn")
def test_without_ids_batches_have_no_collector_entries() -> None:
    _, flat = whole_and_flat(IN_PROCESS, DUMMIES, track_traj_ids=False)
    assert "collector" not in flat


@pytest.mark.filterwarnings("ignore:create_env_fn")
def test_a_replay_buffer_gets_only_frames() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    with collecting(
        IN_PROCESS,
        DUMMIES,
        parity_policy(),
        frames=42,
        total_frames=42,
        drop_uncollected=True,
        replay_buffer=buffer,
    ) as collector:
        for _ in collector:
            pass
        delivered = collector.ledger()["total"]["delivered"]
    assert len(buffer) == delivered
    assert (buffer[:]["collector", "traj_ids"] >= 0).all()


@pytest.mark.filterwarnings("ignore:create_env_fn")
def test_rows_in_a_replay_buffer_have_one_length() -> None:
    """Episodes of equal length end at once, so the last step of a rollout may only reset."""

    def clocks() -> CountingVectorEnv:
        return CountingVectorEnv([CountingEnv(0, 3), CountingEnv(1, 3)], ignores_mask=True)

    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    with SyncDataCollector(
        clocks, None, frames_per_batch=10, total_frames=60, replay_buffer=buffer
    ) as collector:
        for _ in collector:
            pass
        delivered = collector.ledger()["total"]["delivered"]
    masks = buffer[:]["collector", "mask"].unflatten(0, (-1, 2))  # [rollouts, 2, steps]
    assert not masks[:, :, -1].any(1).all()
    assert masks.shape[2] == 5
    assert masks.sum() == delivered


@pytest.mark.parametrize("other", [{"split_trajs": True}, {"trajs_per_batch": 2}])
def test_arguments_that_change_the_batch_shape_are_refused(other: dict[str, Any]) -> None:
    with refused(ValueError, "drop_uncollected"):
        SyncDataCollector(DUMMIES(0), None, frames_per_batch=9, drop_uncollected=True, **other)


def test_cells_without_a_frame_cause_one_warning() -> None:
    with warned("create_env_fn") as said:
        SyncDataCollector(DUMMIES(0), None, frames_per_batch=9).shutdown()
    assert [own.filename for own in said] == [__file__]
    assert "drop_uncollected=True" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in ({"drop_uncollected": True}, {"split_trajs": True}):
            SyncDataCollector(DUMMIES(0), None, frames_per_batch=9, **own).shutdown()


@pytest.mark.processes
def test_equal_warnings_of_workers_appear_once_at_the_users_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warned("info_keys") as said:
        MultiSyncDataCollector(
            [ENTRIES["one"](w) for w in range(2)], None, frames_per_batch=8, info_keys=["absent"]
        ).shutdown()
    (own,) = [one for one in said if "info_keys" in str(one.message)]
    assert own.filename == __file__
    assert "info_keys" not in capfd.readouterr().err
