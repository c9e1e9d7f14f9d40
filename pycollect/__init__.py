"""A compiled-core data collector for reinforcement learning."""

from pycollect.collectors.ray import RayCollector
from pycollect.collectors.single import SyncDataCollector
from pycollect.errors import WorkerError
from pycollect.trajectory import split_trajectories

Collector = SyncDataCollector

__version__ = "0.1.0"
__all__ = ["Collector", "RayCollector", "SyncDataCollector", "WorkerError", "split_trajectories"]
