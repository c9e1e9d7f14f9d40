"""Central inference on other nodes: the node's own server calls the policy for its workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collect_support import (
    ASYNC,
    RAY_CENTRAL,
    RAY_CENTRAL_ASYNC,
    STACK,
    STEPS,
    Way,
    collecting,
    parity_policy,
)
from echo_envs import ENTRIES
from test_ray_nodes import ELSEWHERE, HERE, follow, other_node

__all__ = ["other_node"]

pytestmark = pytest.mark.ray
WAYS = pytest.mark.parametrize("way", [RAY_CENTRAL, RAY_CENTRAL_ASYNC], ids=lambda way: way.name)


@WAYS
def test_frames(other_node: Any, way: Way) -> None:
    seen, *_ = follow(way, "list", 12, remote_configs=[HERE, ELSEWHERE])
    assert seen == ["shared memory", "object store"]
