"""`split_trajectories` compared with TorchRL's; tests of intended differences show both."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from pycollect import split_trajectories

torchrl_utils = pytest.importorskip("torchrl.collectors.utils")

oracle = torchrl_utils.split_trajectories


def collected(shape: tuple[int, ...], seed: int, done: float = 0.25) -> TensorDict:
    """Return a batch like a collector's: unique ids over all envs, new after each done."""
    g = torch.Generator().manual_seed(seed)
    over = torch.rand((*shape, 1), generator=g) < done
    starts = over.squeeze(-1).roll(1, -1)
    starts[..., 0] = True
    return TensorDict(
        {
            "observation": torch.randn((*shape, 4), generator=g),
            "nested": {"action": torch.randint(0, 5, shape, generator=g)},
            "next": {"reward": torch.randn((*shape, 1), generator=g), "done": over},
            "collector": {"traj_ids": starts.reshape(-1).cumsum(0).reshape(shape) - 1},
        },
        shape,
    )


def assert_equal(ours: TensorDict, theirs: TensorDict, ids: object) -> None:
    """Compare all but the padding's id, which is -1 here and 0 in TorchRL."""
    assert ours.shape == theirs.shape
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, value in theirs.items(True, True):
        got = ours[key]
        assert got.dtype == value.dtype, key
        if key == ids:
            assert (got == -1).eq(value.eq(0) & got.ne(0)).all()
            got = got.clamp_min(0)
        torch.testing.assert_close(got, value, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 20)])
@pytest.mark.parametrize("seed", range(5))
def test_collected_batches(shape: tuple[int, ...], seed: int) -> None:
    td = collected(shape, seed)
    assert_equal(split_trajectories(td), oracle(td), ("collector", "traj_ids"))


@pytest.mark.parametrize("shape", [(40,), (3, 40)])
def test_by_done(shape: tuple[int, ...]) -> None:
    td = collected(shape, 7).exclude("collector")
    assert_equal(split_trajectories(td), oracle(td), "traj_ids")
    assert_equal(
        split_trajectories(td, prefix="collector"),
        oracle(td, prefix="collector"),
        ("collector", "traj_ids"),
    )


def test_by_trajectory_key() -> None:
    td = collected((3, 40), 8)
    td["which"] = td["collector", "traj_ids"].int()
    ours, theirs = (split(td, trajectory_key="which") for split in (split_trajectories, oracle))
    ours["collector", "traj_ids"].clamp_min_(0)
    assert_equal(ours, theirs, "which")


ARGUMENTS = [
    {},
    {"prefix": "collector"},
    {"trajectory_key": ("collector", "traj_ids")},
    {"trajectory_key": "which"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 20)])
@pytest.mark.parametrize("nested", [False, True])
def test_all_entries_equal_torchrls(
    arguments: dict[str, object], shape: tuple[int, ...], nested: bool
) -> None:
    """With `padding_id=0`, only the name of the time dimension differs."""
    td = collected(shape, 3)
    td["which"] = td["collector", "traj_ids"].int()
    td["agents"] = TensorDict({"x": torch.randn(*shape, 2, 3)}, [*shape, 2])
    td.names = [*[None] * (len(shape) - 1), "time"]
    theirs = oracle(td, as_nested=nested, **arguments)
    ours = split_trajectories(td, as_nested=nested, padding_id=0, **arguments)
    assert (theirs.names, ours.names) == ([None, None], [None, None if nested else "time"])
    if nested:
        assert ours.batch_size == theirs.batch_size
        assert ours["agents"].batch_size == theirs["agents"].batch_size
        assert {leaf.layout for leaf in ours.values(True, True)} == {torch.strided}
        key = arguments.get("trajectory_key", ("collector", "traj_ids"))
        mask_key = "mask" if key == "which" else ("collector", "mask")
        ours, theirs = (each.to_padded_tensor(mask_key=mask_key) for each in (ours, theirs))
    assert ours.shape == theirs.shape
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, value in theirs.items(True, True):
        assert ours[key].dtype == value.dtype, key
        torch.testing.assert_close(ours[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("nested", [False, True])
def test_all_entries_equal_torchrls_when_split_by_done(nested: bool) -> None:
    td = collected((3, 40), 4).exclude("collector")
    td["next", "over"] = td["next", "done"].roll(1, 1)
    for arguments in ({}, {"done_key": "over"}, {"done_key": "over", "prefix": "meta"}):
        theirs = oracle(td, as_nested=nested, **arguments)
        ours = split_trajectories(td, as_nested=nested, padding_id=0, **arguments)
        for key, value in theirs.items(True, True):
            for mine, other in zip(ours[key].unbind(), value.unbind(), strict=True):
                assert torch.equal(mine, other), key


def test_layouts_are_the_requested_ones() -> None:
    """TorchRL's layouts are strided for any `as_nested`, and dense if all have one length."""
    td = collected((40,), 5)
    assert oracle(td, as_nested=torch.jagged)["observation"].layout == torch.strided
    assert split_trajectories(td, as_nested=torch.jagged)["observation"].layout == torch.jagged
    rows = collected((2, 10), 6, done=0.0)
    assert not oracle(rows, as_nested=True)["observation"].is_nested
    assert split_trajectories(rows, as_nested=True)["observation"].is_nested


def test_rows_of_equal_length_are_rows_too() -> None:
    td = collected((2, 3, 10), 9, done=0.0)
    assert oracle(td).shape == (2, 3, 10)
    assert split_trajectories(td).shape == (6, 10)


def test_repeated_ids_do_not_merge() -> None:
    td = TensorDict({"x": torch.arange(6), ("collector", "traj_ids"): torch.ones(6).long()}, [6])
    td["next", "done"] = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
    two = td.reshape(2, 3)  # one id in two rows
    assert oracle(two).shape == (1, 6)
    assert split_trajectories(two)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert oracle(td).shape == (1, 6)
    assert split_trajectories(td)["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_uncollected_cells_are_dropped() -> None:
    td = TensorDict({"x": torch.arange(1, 5)}, [4])
    td["collector", "traj_ids"] = torch.tensor([0, -1, 1, 1])
    td["next", "done"] = torch.tensor([1, 0, 0, 0], dtype=torch.bool)
    assert oracle(td).shape == (3, 2)
    assert split_trajectories(td)["x"].tolist() == [[1, 0], [3, 4]]
