"""stats() over time, as a CSV file and for TensorBoard."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from envs_for_tests import CountingEnv

from pycollect import StatsWriter, SyncDataCollector


def test_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stats.csv"
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=10, total_frames=30)
    with StatsWriter(path) as writer:
        for _ in collector:
            writer.write(collector)
        writer.write(collector, step=99)
    writer.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step"]) for row in rows] == [10, 20, 30, 99]
    assert [float(row["frames"]) for row in rows] == [10, 20, 30, 30]
    assert float(rows[-1]["episode_return"]) == 15.0
    assert float(rows[-1]["workers/0/frames"]) == 30
    assert {"seconds/env", "seconds/policy", "frames_per_second"} <= rows[0].keys()
    collector.shutdown()


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    collector = SyncDataCollector(CountingEnv, None, frames_per_batch=10, total_frames=30)
    with StatsWriter(tmp_path / "run") as writer:
        for _ in collector:
            writer.write(collector)
    events = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("frames")] == [(10, 10), (20, 20), (30, 30)]
    assert "seconds/env" in events.Tags()["scalars"]
    collector.shutdown()


def test_a_later_statistic_gets_its_own_column(tmp_path: Path) -> None:
    path = tmp_path / "stats.csv"
    env = CountingEnv(length=25)
    collector = SyncDataCollector(env, None, frames_per_batch=10, total_frames=30)
    with StatsWriter(path) as writer:
        for _ in collector:
            writer.write(collector)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step"]) for row in rows] == [10, 20, 30]
    assert [row["episode_length"] for row in rows] == ["", "", "25.0"]
    collector.shutdown()
