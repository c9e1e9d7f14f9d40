"""Data and information packed, leaf by leaf."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from raising import refused

from pycollect.data.compression import PackedArray
from pycollect.scheme import Packed, pack, unpack

VALUES: list[Any] = [
    torch.zeros(40, 50),
    torch.rand(40, 50),
    torch.rand(3, 4).bfloat16(),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.arange(600).reshape(20, 30).T,
    torch.zeros(5000, dtype=torch.bool),
    np.zeros((30, 84, 84), np.uint8),
    np.random.default_rng(0).normal(size=(100, 17)),
    np.zeros(3000, "f4")[::2],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{v.dtype}-{tuple(v.shape)}")
def test_arrays_survive_a_round_trip(value: Any) -> None:
    packed = pack({"a": value, "b": [value, (1, "x")]})
    assert isinstance(packed, Packed)
    for opened in (unpack(packed), unpack(pickle.loads(pickle.dumps(packed)))):
        assert opened["b"][1] == (1, "x")
        for copy in (opened["a"], opened["b"][0]):
            assert copy.dtype == value.dtype
            assert type(copy) is type(value)
            assert copy.shape == value.shape
            assert bool((copy == value).all())
            copy[...] = 1  # must be writable


def test_only_compressible_arrays_are_compressed() -> None:
    content = pack([torch.zeros(4000), torch.rand(4000)]).content
    assert [leaf.data.nbytes < leaf.size for leaf in content] == [True, False]
    assert all(isinstance(leaf, PackedArray) for leaf in content)


def test_arrays_are_not_copied_into_the_pickle() -> None:
    """Arrays are sent as out-of-band pickle buffers."""
    buffers: list[Any] = []
    text = pickle.dumps(
        pack({"a": torch.rand(100_000)}), protocol=5, buffer_callback=buffers.append
    )
    assert len(text) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 400_000


def test_a_packed_pair_can_be_unpacked_into_two_values() -> None:
    data, info = pack(({"Reward": torch.ones(2000)}, {"NumberSamples": 3}))
    assert info == {"NumberSamples": 3}
    assert data["Reward"].sum() == 2000
    assert unpack(info) is info  # unpacked values are returned as they are


def test_a_frame_of_another_size_is_refused() -> None:
    packed = PackedArray.of(torch.zeros(4000))
    with refused(ValueError, "data"):
        PackedArray(packed.dtype, (1,), 4, packed.data).open()
