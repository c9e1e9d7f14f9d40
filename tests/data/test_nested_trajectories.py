"""`split_trajectories(as_nested=...)`: the rows of the flat form, each with its own length."""

from __future__ import annotations

import pytest
import torch
from raising import refused
from tensordict import NonTensorData, TensorDict

from pycollect import split_trajectories

IDS = ("collector", "traj_ids")


def make(ids: list[list[int]], *, requires_grad: bool = False) -> TensorDict:
    """Return a batch with three kinds of leaves; id -1 marks a cell without a frame."""
    shape = (len(ids), len(ids[0]))
    g = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "scalar": torch.arange(shape[0] * shape[1]).reshape(shape),
            "image": torch.randint(0, 255, (*shape, 2, 3), dtype=torch.uint8, generator=g),
            "nothing": torch.zeros(*shape, 0),
            "next": {
                "reward": torch.randn(*shape, 1, generator=g, requires_grad=requires_grad),
                "done": torch.zeros(*shape, 1, dtype=torch.bool),
            },
            "collector": {"traj_ids": torch.tensor(ids)},
        },
        shape,
        names=[None, "time"],
    )


BATCHES = {
    "of any length": [[0, 0, 0, 1, 1], [2, 3, 3, 3, 3]],
    "of one length": [[0, 0, 0], [1, 1, 1]],
    "with gaps": [[0, 0, -1, 1], [-1, 2, 2, 2]],
    "of one frame": [[0]],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("as_nested", [True, torch.strided, torch.jagged])
def test_rows_equal_the_flat_form(name: str, as_nested: bool | torch.layout) -> None:
    td = make(BATCHES[name])
    flat = split_trajectories(td, format="cat")
    out = split_trajectories(td, as_nested=as_nested)
    layout = torch.strided if as_nested is True else as_nested
    count = len(flat.lengths)
    length = int(flat.lengths[0]) if len(set(flat.lengths.tolist())) == 1 else -1
    assert out.batch_size == ((count,) if layout == torch.jagged else (count, length))
    assert set(out.keys(True, True)) == set(flat.td.keys(True, True))
    for key, leaf in out.items(True, True):
        assert leaf.is_nested
        assert leaf.layout == layout
        assert leaf.dtype == flat.td[key].dtype
        rows = leaf.unbind()
        assert [len(row) for row in rows] == flat.lengths.tolist()
        assert torch.equal(torch.cat(rows), flat.td[key]), key


def test_jagged_leaves_can_be_combined() -> None:
    """All leaves share one symbolic length, so torch can combine two of them."""
    out = split_trajectories(make(BATCHES["of any length"]), as_nested=torch.jagged)
    total = out["next", "reward"].squeeze(-1) + out["scalar"]
    assert [len(row) for row in total.unbind()] == [3, 2, 1, 4]
    assert torch.nested.to_padded_tensor(out["scalar"], -1.0).shape == (4, 4)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_gradients_pass(layout: torch.layout) -> None:
    td = make(BATCHES["with gaps"], requires_grad=True)
    out = split_trajectories(td, as_nested=layout)
    torch.cat(out["next", "reward"].unbind()).sum().backward()
    grad = td["next", "reward"].grad
    assert grad is not None
    assert torch.equal(grad.squeeze(-1), (td[IDS] != -1).float())


def test_without_a_trajectory() -> None:
    td = make([[-1, -1]])
    assert split_trajectories(td, as_nested=torch.jagged).batch_size == (0,)
    with refused(ValueError, "as_nested"):
        split_trajectories(td, as_nested=True)


def test_a_torch_that_makes_no_jagged_tensors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nested, "nested_tensor_from_jagged")
    with refused(NotImplementedError, "as_nested"):
        split_trajectories(TensorDict(batch_size=[3]), as_nested=torch.jagged)


def test_an_entry_that_is_not_a_tensor_is_named() -> None:
    td = make(BATCHES["of one length"])
    td["task"] = NonTensorData("walk", td.batch_size)
    with refused(TypeError, "task"):
        split_trajectories(td, as_nested=True)


def test_a_dtype_that_strided_tensors_cannot_have() -> None:
    td = make(BATCHES["of any length"])
    td["depth"] = td["scalar"].to(torch.uint16)
    with refused(TypeError, "as_nested") as caught:
        split_trajectories(td, as_nested=True)
    assert "torch.uint16" in str(caught.value)
    depth = split_trajectories(td, as_nested=torch.jagged)["depth"]
    assert [row.tolist() for row in depth.unbind()] == [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9]]


@pytest.mark.parametrize("padding_id", [0, -1, 7])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32, None])
def test_padding_has_the_requested_id(padding_id: int, ids: torch.dtype | None) -> None:
    td = make(BATCHES["of any length"])
    if ids is None:  # trajectories are numbered
        td["next", "done"][0, 2] = td["next", "done"][1, 0] = True
        td = td.exclude("collector")
    else:
        td[IDS] = td[IDS].to(ids)
    out = split_trajectories(td, prefix="collector", padding_id=padding_id)
    assert out[IDS].dtype == (ids or torch.int64)
    p = padding_id
    assert out[IDS].tolist() == [[0, 0, 0, p], [1, 1, p, p], [2, p, p, p], [3, 3, 3, 3]]
    assert out["collector", "mask"].sum(1).tolist() == [3, 2, 1, 4]


def test_padding_of_a_leaf_that_needs_a_gradient() -> None:
    out = split_trajectories(make(BATCHES["of any length"], requires_grad=True), padding_id=0)
    assert out[IDS].min() == 0


def test_a_padding_id_that_the_ids_cannot_hold() -> None:
    td = make(BATCHES["of any length"])
    td[IDS] = td[IDS].to(torch.uint8)
    for value in (-2, 256):
        with refused(ValueError, "padding_id") as caught:
            split_trajectories(td, padding_id=value)
        assert str(value) in str(caught.value)
    assert split_trajectories(td, padding_id=255)[IDS].max() == 255
    assert split_trajectories(td)[IDS].max() == 3  # this dtype cannot represent -1
