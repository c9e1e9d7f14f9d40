"""Assumptions of tests that run in parallel."""

from __future__ import annotations

import pytest


def test_all_tests_with_ray_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Each process would start its own cluster; pytest 9.2 with xdist 3.8 does so silently."""
    with_ray = [item for item in request.session.items if item.get_closest_marker("ray")]
    if not with_ray or not request.config.getoption("loadgroup", False):
        pytest.skip("no tests with Ray run side by side")
    assert all(item.nodeid.endswith("@ray") for item in with_ray)
