"""Signatures, which editors show, say the arguments and defaults that the options are made of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pycollect import (
    DistributedDataCollector,
    DistributedSyncDataCollector,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RayCollector,
    RPCDataCollector,
    SyncDataCollector,
)
from pycollect.arguments import REQUIRED, defaults_of
from pycollect.collectors.arguments.workers import WORKER_ARGUMENTS
from pycollect.inference.options import InferenceOptions
from pycollect.scheduler.options import RemoteOptions
from pycollect.stream.options import StreamOptions
from pycollect.worker.options import WorkerOptions

HERE = (StreamOptions, WorkerOptions)
ELSEWHERE = (*HERE, RemoteOptions)
PROCESS_OPTIONS = (*ELSEWHERE, InferenceOptions)

# Who has workers, and what is said of them, is the constructors' own.
OWN = {
    "create_env_fn",
    "policy",
    "device",
    "storing_device",
    "env_device",
    "policy_device",
    "create_env_kwargs",
    "policy_factory",
}
CHOICE = {"num_collectors", "sync", "backend", "backend_options"}
PROCESSES = {"num_workers", "num_sub_threads", "collector_class"}
ACTORS = {
    "collector_class",
    "collector_kwargs",
    "num_workers_per_collector",
    "sync",
    "ray_init_config",
    "remote_configs",
    "num_collectors",
}
RANKS = (ACTORS - {"ray_init_config", "remote_configs"}) | {
    "slurm_kwargs",
    "backend",
    "launcher",
    "tcp_port",
    "tcp_address",
}

# (class, what its options are made of, its own arguments, those of the options that it lacks)
FAMILIES: list[tuple[type, tuple[type, ...], set[str], set[str]]] = [
    (SyncDataCollector, HERE, OWN | CHOICE, set()),
    (MultiSyncDataCollector, PROCESS_OPTIONS, OWN | PROCESSES, {"compress"}),
    (
        MultiaSyncDataCollector,
        PROCESS_OPTIONS,
        OWN | PROCESSES,
        {"preemptive_threshold", "min_fraction", "compress"},
    ),
    (RayCollector, PROCESS_OPTIONS, OWN | ACTORS, {"update_at_each_batch"}),
    (DistributedDataCollector, ELSEWHERE, OWN | RANKS, {"update_at_each_batch"}),
    (
        RPCDataCollector,
        ELSEWHERE,
        OWN | RANKS | {"visible_devices", "tensorpipe_options"},
        {"update_at_each_batch"},
    ),
    (
        DistributedSyncDataCollector,
        ELSEWHERE,
        (OWN | RANKS | {"update_interval"}) - {"sync"},
        {"update_at_each_batch", "update_after_each_batch"},
    ),
]


@pytest.mark.parametrize(("cls", "options", "own", "lacks"), FAMILIES)
def test_names_and_defaults(cls: Any, options: Any, own: set[str], lacks: set[str]) -> None:
    signature = inspect.signature(cls).parameters
    shown = {
        name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for name, parameter in signature.items()
        if name not in own and parameter.kind is not parameter.VAR_KEYWORD
    }
    made_of = {name: value for kind in options for name, value in defaults_of(kind).items()}
    for name in {*lacks, "worker_idx"}:  # a hint, which is in no signature
        assert name not in signature
        del made_of[name]
    if issubclass(cls, DistributedDataCollector):  # TorchRL's
        made_of.update(frames_per_batch=200, max_weight_update_interval=-1)
    if cls is not SyncDataCollector:
        made_of["num_threads"] = 1  # of a process of its own
    assert shown == made_of
    assert set(own) <= set(signature)


def test_what_each_worker_may_be_told_is_in_every_signature() -> None:
    for cls, *_ in FAMILIES:
        assert set(WORKER_ARGUMENTS) <= set(inspect.signature(cls).parameters)


def test_a_call_that_does_not_fit_names_the_class() -> None:
    for cls in (MultiSyncDataCollector, RayCollector):
        with pytest.raises(TypeError, match="frames_per_batch") as caught:
            cls([], None)
        assert cls.__name__ in str(caught.value)
