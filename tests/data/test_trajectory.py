"""`split_trajectories` against a model, over shapes, ids, masks and kinds of leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from arrays_for_tests import batch_shapes
from hypothesis import given
from hypothesis import strategies as st
from raising import refused
from tensordict import LazyStackedTensorDict, TensorDict

from pycollect import split_trajectories


def cells_of(td: TensorDict, *, by_done: bool = True) -> list[list[tuple[int, ...]]]:
    """Return the trajectories as lists of cells, as the contract defines them."""
    done = td.get(("next", "done"), None) if by_done else None
    ids = td.get(("collector", "traj_ids"), None)
    mask = td.get(("collector", "mask"), None)
    result: list[list[tuple[int, ...]]] = []
    for row in np.ndindex(tuple(td.shape[:-1])):
        current: list[tuple[int, ...]] = []
        for t in range(td.shape[-1]):
            cell = (*row, t)
            here = (ids is None or ids[cell] != -1) and (mask is None or bool(mask[cell]))
            if current and (not here or (ids is not None and ids[cell] != ids[current[-1]])):
                result.append(current)
                current = []
            if here:
                current.append(cell)
                if done is not None and done[cell].any():
                    result.append(current)
                    current = []
        if current:
            result.append(current)
    return result


def check(td: TensorDict, out: TensorDict, ids_key: tuple[str, ...]) -> None:
    """Compare every leaf of the padded form, cell by cell."""
    expected = cells_of(td)
    longest = max(map(len, expected), default=0)
    assert out.shape == (len(expected), longest)
    mask_key = (*ids_key[:-1], "mask")
    mask = torch.zeros(out.shape, dtype=torch.bool)
    for i, cells in enumerate(expected):
        mask[i, : len(cells)] = True
    assert torch.equal(out[mask_key], mask)
    assert out[mask_key].dtype == torch.bool
    source_keys = set(td.keys(True, True))
    assert set(out.keys(True, True)) == source_keys | {
        mask_key if len(mask_key) > 1 else mask_key[0],
        ids_key if len(ids_key) > 1 else ids_key[0],
    }
    for key in source_keys - {mask_key}:
        leaf, result = td[key], out[key]
        assert result.dtype == leaf.dtype
        wanted = torch.zeros((*out.shape, *leaf.shape[td.ndim :]), dtype=leaf.dtype)
        if key == ids_key:
            wanted -= 1
        for i, cells in enumerate(expected):
            for t, cell in enumerate(cells):
                wanted[i, t] = leaf[cell]
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def make(
    shape: tuple[int, ...], seed: int, *, ids: bool = True, mask: bool = False, done: float = 0.2
) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    over = torch.rand((*shape, 1), generator=g) < done
    td = TensorDict(
        {
            "observation": {
                "pixels": torch.randint(0, 255, (*shape, 2, 3), dtype=torch.uint8, generator=g),
                "nothing": torch.zeros((*shape, 0)),
            },
            "action": torch.randint(0, 9, shape, generator=g),
            "half": torch.randn(shape, generator=g).bfloat16(),
            "next": {"reward": torch.randn((*shape, 1), generator=g), "done": over},
            "collector": {},
        },
        batch_size=shape,
    )
    if ids:
        td["collector", "traj_ids"] = torch.randint(-1, 3, shape, generator=g).sort(-1).values
    if mask:
        td["collector", "mask"] = torch.rand(shape, generator=g) < 0.8
    return td


@given(batch_shapes, st.integers(0, 2**32), st.booleans(), st.booleans())
def test_one_row_per_trajectory(shape: tuple[int, ...], seed: int, ids: bool, mask: bool) -> None:
    td = make(shape, seed, ids=ids, mask=mask)
    before = td.clone()
    out = split_trajectories(td)
    check(td, out, ("collector", "traj_ids"))
    assert (td == before).all()
    assert out.ndim == 2
    assert out.names == [None, "time"]


@given(batch_shapes, st.integers(0, 2**32), st.booleans())
def test_flat_is_the_padded_form_without_padding(
    shape: tuple[int, ...], seed: int, ids: bool
) -> None:
    td = make(shape, seed, ids=ids)
    padded = split_trajectories(td)
    flat, offsets, lengths = split_trajectories(td, format="cat")
    mask = padded["collector", "mask"]
    assert torch.equal(lengths, mask.sum(1))
    assert offsets.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert flat.shape == (int(lengths.sum()),)
    assert flat.names == ["time"]
    assert ("collector", "mask") not in flat.keys(True)
    for key, leaf in flat.items(True, True):
        assert torch.equal(leaf, padded[key][mask]), key


def test_keys_can_be_passed() -> None:
    td = TensorDict({"x": torch.arange(6)}, [6])
    td["meta", "which"] = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    td["next", "over"] = torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.bool)
    by_ids = split_trajectories(td, trajectory_key=("meta", "which"))
    assert by_ids.shape == (2, 3)
    assert by_ids["meta", "mask"].all()
    both = split_trajectories(td, trajectory_key=("meta", "which"), done_key="over")
    assert both["meta", "mask"].sum(1).tolist() == [2, 1, 3]
    assert both["meta", "which"].tolist() == [[0, 0, -1], [0, -1, -1], [1, 1, 1]]
    assert both["meta", "which"].dtype == torch.int32
    by_done = split_trajectories(td, done_key=("next", "over"))
    assert by_done["mask"].sum(1).tolist() == [2, 4]
    assert by_done["traj_ids"][:, 0].tolist() == [0, 1]
    elsewhere = split_trajectories(td, prefix="stats", done_key="over")
    assert elsewhere["stats", "mask"].shape == (2, 4)


@given(st.data(), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_any_memory_layout_of_the_batch(
    data: st.DataObject, seed: int, ids: bool, mask: bool
) -> None:
    rank = data.draw(st.integers(1, 3))
    td = make((3, 4, 5)[:rank], seed, ids=ids, mask=mask)
    view = td.permute(*data.draw(st.permutations(range(rank))))
    view = view[tuple(slice(data.draw(st.integers(0, 1)), None, step) for step in [1, 2, 1][:rank])]
    check(view, split_trajectories(view), ("collector", "traj_ids"))
    flat = split_trajectories(view, format="cat")
    cells = [cell for trajectory in cells_of(view) for cell in trajectory]
    assert flat.td["action"].tolist() == [view["action"][cell].item() for cell in cells]


@given(batch_shapes, st.integers(0, 2**32), st.sampled_from(["prefix", "trajectory_key"]))
def test_the_same_under_other_keys(shape: tuple[int, ...], seed: int, argument: str) -> None:
    td = make(shape, seed, mask=True)
    other = td.exclude("collector")
    other["meta", "traj_ids"] = td["collector", "traj_ids"]
    other["meta", "mask"] = td["collector", "mask"]
    if argument == "prefix":
        out = split_trajectories(other, prefix="meta")
    else:
        out = split_trajectories(other, trajectory_key=("meta", "traj_ids"), done_key="done")
    expected = split_trajectories(td)
    assert out.shape == expected.shape
    for name in ("traj_ids", "mask"):
        assert torch.equal(out["meta", name], expected["collector", name])
    assert torch.equal(out["action"], expected["action"])


def test_several_flags_per_frame_end_a_trajectory_together() -> None:
    td = TensorDict({"x": torch.arange(4)}, [4])
    done = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 1]], dtype=torch.bool)
    td["next", "agents", "done"] = done.unsqueeze(-1)
    out = split_trajectories(td, done_key=("agents", "done"))
    assert out["x"].tolist() == [[0, 1], [2, 3]]
    td["next", "done"] = done
    td["collector", "traj_ids"] = torch.zeros(4, dtype=torch.int64)
    assert split_trajectories(td)["x"].tolist() == [[0, 1], [2, 3]]


def test_expanded_and_lazily_stacked_batches() -> None:
    td = make((4, 3, 10), 2)
    expanded = td[0, 0].expand(3, 10)
    check(expanded, split_trajectories(expanded), ("collector", "traj_ids"))
    stacked = LazyStackedTensorDict(*td.unbind(0), stack_dim=0)
    check(td, split_trajectories(stacked), ("collector", "traj_ids"))


def test_nested_batch_dimensions_and_empty_nests_stay() -> None:
    td = TensorDict({"next": {"done": torch.zeros(6, dtype=torch.bool)}, "none": {}}, [6])
    td["agents"] = TensorDict({"x": torch.randn(6, 3, 2)}, [6, 3])
    out = split_trajectories(td)
    assert out["agents"].batch_size == (1, 6, 3)
    assert out["none"].batch_size == (1, 6)
    assert torch.equal(out["agents", "x"][0], td["agents", "x"])


def test_memory_of_a_result_is_not_shared_and_reused_only_after_its_release() -> None:
    td = make((2, 8), 3)
    first = split_trajectories(td)
    kept = first.clone()
    first_view = first["observation", "pixels"][1:]
    kept_view = first_view.clone()
    del first
    others = [split_trajectories(make((2, 8), seed)) for seed in range(20)]
    assert torch.equal(first_view, kept_view)
    again = split_trajectories(td)
    assert (again == kept).all()
    td["action"].fill_(77)
    assert not (again["action"] == 77).any()
    assert len({o["action"].data_ptr() for o in others}) == len(others)


def test_gradients_pass() -> None:
    td = make((2, 6), 4)
    weight = torch.randn(2, 6, 3, requires_grad=True)
    td["value"] = weight * 2
    out = split_trajectories(td)
    assert torch.equal(
        out["value"][out["collector", "mask"]], split_trajectories(td, format="cat").td["value"]
    )
    out["value"].sum().backward()
    collected = (td["collector", "traj_ids"] != -1).unsqueeze(-1).expand(2, 6, 3)
    assert torch.equal(weight.grad, 2.0 * collected)
    with torch.no_grad():
        assert not split_trajectories(td)["value"].requires_grad


def test_leaves_that_the_core_does_not_read() -> None:
    td = make((2, 6), 5)
    td["conjugate"] = torch.randn(2, 6, dtype=torch.complex64).conj()
    td["tiny"] = torch.randn(2, 6).to(torch.float8_e5m2)
    td["negative"] = torch.randn(2, 6, dtype=torch.complex64).conj().imag
    out = split_trajectories(td)
    flat = split_trajectories(td, format="cat").td
    for key in ("conjugate", "tiny", "negative"):
        wanted = td[key][td["collector", "traj_ids"] != -1]
        got = out[key][out["collector", "mask"]]
        if key == "tiny":
            wanted, got, flat[key] = wanted.float(), got.float(), flat[key].float()
        assert out[key].dtype == td[key].dtype
        assert torch.equal(got, wanted)
        assert torch.equal(flat[key], wanted)


def test_bad_input_is_named() -> None:
    td = make((2, 6), 6)
    with refused(ValueError, "format"):
        split_trajectories(td, format="nested")
    with refused(ValueError, "as_nested"):
        split_trajectories(td, as_nested=torch.sparse_coo)
    with refused(ValueError, "format"):
        split_trajectories(td, as_nested=True, format="cat")
    with refused(TypeError, "padding_id"):
        split_trajectories(td, padding_id=True)
    with refused(ValueError, "rollout_tensordict"):
        split_trajectories(TensorDict({"a": torch.zeros(3)}, []))
    with refused(KeyError, "rollout_tensordict") as caught:
        split_trajectories(TensorDict({"a": torch.zeros(3)}, [3]))
    assert "next.done" in str(caught.value)
    with refused(KeyError, "done_key") as caught:
        split_trajectories(td, done_key="over")
    assert "next.over" in str(caught.value)
    floats = td.clone()
    floats["collector", "traj_ids"] = torch.zeros(2, 6)
    with refused(ValueError, "collector.traj_ids"):
        split_trajectories(floats)
    numbers = td.clone()
    numbers["next", "done"] = torch.zeros(2, 6, 1)
    with refused(ValueError, "done"):
        split_trajectories(numbers)
    foreign = td.exclude("collector")
    foreign["mask"] = torch.zeros(2, 6, 4)
    with refused(ValueError, "mask"):
        split_trajectories(foreign)
    sparse = td.clone()
    sparse["next", "info"] = torch.eye(6).expand(2, 6, 6).to_sparse()
    with refused(TypeError, "next.info"):
        split_trajectories(sparse)


@pytest.mark.parametrize("given", [torch.zeros(3), {"a": torch.zeros(3)}, None])
def test_only_tensordicts_are_split(given: Any) -> None:
    with refused(TypeError, "rollout_tensordict"):
        split_trajectories(given)
