"""PyTorchRL's collection scheme: workers made by factories, one local and others on Ray.

:class:`CWorkerSet` has the names and signatures of PyTorchRL's class. PyTorchRL's algorithms,
actors, storages and vector environments work unchanged. :mod:`pycollect.scheme.protocols` defines
the methods that replacements need, and :mod:`pycollect.scheme.gym` contains replacements for
Gymnasium.
"""

from pycollect.data.compression import Packed, pack, unpack
from pycollect.scheme.c_worker import CWorker
from pycollect.scheme.c_worker_set import CWorkerSet
from pycollect.scheme.messages import broadcast_message, check_message
from pycollect.scheme.protocols import Actor, Algorithm, Storage, VecEnv
from pycollect.scheme.worker_set import Worker, WorkerSet, default_remote_config

__all__ = [
    "Actor",
    "Algorithm",
    "CWorker",
    "CWorkerSet",
    "Packed",
    "Storage",
    "VecEnv",
    "Worker",
    "WorkerSet",
    "broadcast_message",
    "check_message",
    "default_remote_config",
    "pack",
    "unpack",
]
