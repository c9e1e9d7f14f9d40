"""A node that is lost takes its actors with it; others take their place on the nodes there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A cluster of its own: Ray's usual patience with a node that is silent is minutes.
SCRIPT = """
import logging
import ray
from ray.cluster_utils import Cluster
from collect_support import ASYNC, STACK, collecting
from test_restarts import check_ledger, endless

HERE = {"num_cpus": 1, "memory": 1024**3}
ELSEWHERE = {"num_cpus": 0, "memory": 0, "resources": {"elsewhere": 1}}
NODE = {"num_cpus": 0, "resources": {"elsewhere": 1}, "object_store_memory": 100 * 1024**2}
PATIENCE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 10,
}
head = {"num_cpus": 2, "memory": 4 * 1024**3, "object_store_memory": 200 * 1024**2}
cluster = Cluster(
    initialize_head=True,
    head_node_args={**head, "include_dashboard": False, "_system_config": PATIENCE},
)
node = cluster.add_node(**NODE)
ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
for way in (STACK, ASYNC[2]):
    with collecting(way, endless, frames=5, remote_configs=[HERE, ELSEWHERE]) as collector:
        collector.next()
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(**NODE)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        seen = set()
        while seen != {0, 1}:
            seen |= set((collector.next()["observation"][..., 0].flatten() // 10).int().tolist())
        ledger = check_ledger(collector)
        assert set(ledger["workers"][1]["reasons"]) == {"worker_died"}
        assert ledger["workers"][0]["lost"] == 0
        workers = collector.stats()["workers"]
        assert [workers[w]["restarts"] for w in (0, 1)] == [0, 1]
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_lost_node() -> None:
    pytest.importorskip("ray")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
