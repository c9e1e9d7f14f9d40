"""`frames_per_batch` as a list with one number per worker, compared with TorchRL's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from torchrl.envs import GymEnv

import pycollect

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.processes]


def shapes(home: Any, name: str, **kwargs: Any) -> list[list[int]]:
    collector = getattr(home, name)([partial(GymEnv, "Pendulum-v1")] * 2, None, **kwargs)
    try:
        return [list(batch.shape) for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.parametrize("name", ["MultiAsyncCollector", "MultiSyncCollector"])
def test_batch_shapes_equal_torchrls(name: str) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": [10, 10], "total_frames": 40}
    if name == "MultiSyncCollector":
        kwargs["cat_results"] = "stack"
    theirs = shapes(torchrl.collectors, name, **kwargs)
    assert shapes(pycollect, name, **kwargs) == theirs
