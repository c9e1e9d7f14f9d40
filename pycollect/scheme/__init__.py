"""PyTorchRL's collection scheme: workers made of factories, a local one and remote ones on Ray.

:class:`CWorkerSet` has the names and signatures of PyTorchRL's; its algorithms, actors, storages
and vector environments are taken as they are. :mod:`pycollect.scheme.protocols` says what else may
be in their place, and :mod:`pycollect.scheme.gym` has some over Gymnasium. The floor below is the
scheduler's. A rollout goes from a component's storage to whoever called `collect_data`.
"""

from pycollect.scheme.c_worker import CWorker
from pycollect.scheme.c_worker_set import CWorkerSet
from pycollect.scheme.compression import Packed, pack, unpack
from pycollect.scheme.messages import broadcast_message, check_message
from pycollect.scheme.protocols import Actor, Algorithm, Storage, VecEnv
from pycollect.scheme.worker import Worker
from pycollect.scheme.worker_set import WorkerSet, default_remote_config

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
