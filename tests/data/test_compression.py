"""Rollouts that are compressed leaf by leaf for transport."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from collect_support import elsewhere
from envs_for_tests import PixelEnv
from raising import refused
from tensordict import TensorDictBase

from pycollect import DistributedDataCollector, RayCollector
from pycollect._core import Leaf
from pycollect.data.compression import PackedBuffer, leaf_sizes
from pycollect.data.frame import BatchLeaves, placement_of
from pycollect.data.slabs import make_pool


def test_a_slab_survives_a_round_trip() -> None:
    leaves = BatchLeaves(
        observation=(
            Leaf(("observation", "pixels"), "uint8", (84, 84)),
            Leaf(("observation", "nothing"), "float32", (0,)),
        ),
        outputs=(Leaf(("action",), "float32", (3,)),),
    )
    slab = make_pool(placement_of(leaves, 2, 10), 1).acquire()
    whole = slab.array()
    whole[:] = 0
    sizes = leaf_sizes(slab)
    assert sum(sizes) == whole.nbytes
    stored = [leaf for leaf in leaves.layout().leaves if 0 not in leaf.shape]
    assert len(sizes) == len(stored) + 1  # includes headers
    noise = np.random.default_rng(0).integers(0, 256, whole.nbytes // 2, np.uint8)
    whole[: len(noise)] = noise
    packed = PackedBuffer.of(slab)
    assert packed.data.nbytes < 0.8 * whole.nbytes
    assert (packed.open() == whole).all()


def test_compression_is_refused_without_lz4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    with refused(ImportError, "compress"):
        RayCollector([lambda: None], frames_per_batch=5, compress=True)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PackedBuffer]]:
    """Record the packed rollouts that arrive in this process."""
    seen: list[PackedBuffer] = []
    opened = PackedBuffer.open

    def noting(self: PackedBuffer) -> Any:
        seen.append(self)
        return opened(self)

    monkeypatch.setattr(PackedBuffer, "open", noting)
    yield seen


NEST = {"collector_class": "sync", "num_workers_per_collector": 2}


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    [pytest.param({}, id="alone"), pytest.param(NEST, id="with processes", marks=pytest.mark.slow)],
)
def test_ranks_on_another_node_give_the_same_batches(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(**arguments: Any) -> list[TensorDictBase]:
        with (
            elsewhere(),
            DistributedDataCollector(
                [PixelEnv] * 2,
                None,
                frames_per_batch=40,
                total_frames=120,
                sync=True,
                launcher="mp",
                **kind,
                **arguments,
            ) as collector,
        ):
            collector.set_seed(3)
            return [batch.clone() for batch in collector]

    plain = batches()
    with counted(monkeypatch) as packed:
        compressed = batches(compress=True)
    assert len(packed) == 6
    assert all(own.data.nbytes < sum(own.sizes) / 4 for own in packed)
    assert len(plain) == len(compressed) == 3
    assert all((one == other).all() for one, other in zip(plain, compressed, strict=True))
