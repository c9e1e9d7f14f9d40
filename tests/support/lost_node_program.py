"""A program that loses a node during collection and fails if its statistics are wrong.

Pass "central" to test central inference. The program starts its own Ray, because Ray by default
waits minutes for a silent node.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import ray
from collect_support import (
    ASYNC,
    RAY_CENTRAL,
    RAY_CENTRAL_ASYNC,
    STACK,
    Way,
    collecting,
    parity_policy,
)
from ray.cluster_utils import Cluster
from test_restarts import check_ledger, endless

HERE = {"num_cpus": 1, "memory": 1024**3}
ELSEWHERE = {"num_cpus": 0, "memory": 0, "resources": {"elsewhere": 1}}
HEAD = {
    "num_cpus": 2,
    "memory": 4 * 1024**3,
    "object_store_memory": 200 * 1024**2,
    "include_dashboard": False,
    "_system_config": {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 10,
    },
}
NODE = {"num_cpus": 0, "resources": {"elsewhere": 1}, "object_store_memory": 100 * 1024**2}


def collect(cluster: Any, node: Any, way: Way) -> Any:
    """Lose the node of worker 1, check the reason, and return the replacement node."""
    policy, configs = parity_policy(), [HERE, ELSEWHERE]
    with collecting(way, endless, policy, frames=5, remote_configs=configs) as collector:
        collector.next()
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(**NODE)
        while not collector.stats()["workers"][1]["restarts"]:
            collector.next()
        seen: set[int] = set()
        while seen != {0, 1}:
            seen |= set((collector.next()["observation"][..., 0].flatten() // 10).int().tolist())
        ledger = check_ledger(collector)
        assert set(ledger["workers"][1]["reasons"]) == {"worker_died"}, ledger
        assert ledger["workers"][0]["lost"] == 0
        workers = collector.stats()["workers"]
        assert [workers[index]["restarts"] for index in (0, 1)] == [0, 1]
    return node


def main(central: bool) -> None:
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    node = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    for way in (RAY_CENTRAL, RAY_CENTRAL_ASYNC) if central else (STACK, ASYNC[2]):
        node = collect(cluster, node, way)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(central="central" in sys.argv)
