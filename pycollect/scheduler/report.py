"""What `stats` tells of workers elsewhere."""

from __future__ import annotations

from typing import Any

from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.flow import Flow
from pycollect.stream.statistics import count_slow_paths


def stats_of(flow: Flow, group: WorkerGroup) -> dict[str, Any]:
    """The stream's statistics, and what each worker told last, former ones included.

    "seconds" of the collector has the phases idle (waiting for rollouts), transport, assemble,
    deliver and user, which add up to "elapsed"; "seconds" of each worker has env, policy,
    record and idle, since its first rollout began. "failure" says why it was last replaced, or is
    None. "transport" of a worker is "shared memory", where it writes into the batch itself, else
    "object store", "messages" or "rpc". "slow_paths" counts workers that go through one TensorDict
    per step, or have extras.
    """
    present, former = group.present, group.former
    everyone = sorted([*present, *former], key=lambda worker: worker.index)
    reports = [worker.report for worker in everyone if worker.report]
    return {
        **flow.statistics.report(),
        "frames_stepped": sum(report.stepped for report in reports),
        "slow_paths": count_slow_paths(report.slow_paths for report in reports),
        "workers": {
            worker.index: {
                "pid": worker.info.pid,
                "node": worker.info.node,
                "transport": worker.handle.transport,
                "version": worker.version,
                "restarts": worker.restarts,
                "failure": worker.failure,
                "frames": worker.frames,
                "seconds": worker.report.seconds.report() if worker.report else {},
            }
            for worker in everyone
        },
        "workers_alive": 0 if flow.closed else sum(not worker.starting for worker in present),
    }
