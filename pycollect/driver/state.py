"""The state of a collector, and the checks when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from pycollect.data.generators import GeneratorState, NestState, from_plain
from pycollect.data.weights import NO_WEIGHTS, Weights, weights_from
from pycollect.driver.accounts import PROGRESS

_FORMAT = "pycollect 1"


@dataclass(frozen=True)
class WorkerState:
    """State of one worker at the end of its last delivered rollout."""

    generators: GeneratorState | NestState | None = None  # ``None``: it draws from the program's
    policy: Weights = NO_WEIGHTS  # individual weights; empty: those of all workers
    version: int = 0  # policy version of the individual weights


def check_generators(worker: int, state: WorkerState, processes: int, envs: int) -> None:
    """Raise ValueError unless a state fits a worker with these processes and environments.

    Args:
        processes: Number of the worker's own processes; 0 if it collects itself.
        envs: Number of environments in a batch. If rollouts of processes are joined along time,
            each process has this number; otherwise the processes share them.
    """
    generators = state.generators
    if generators is None:
        return
    count = len(generators.processes) if isinstance(generators, NestState) else 0
    if count != processes:
        raise ValueError(
            f"state_dict: expected random generators of {processes} processes for worker {worker}, "
            f"got those of {count}"
        )
    each = [generators] if isinstance(generators, GeneratorState) else generators.processes
    for process_state in each:
        actions = len(process_state.actions)
        if actions != envs and actions * processes != envs:
            raise ValueError(
                f"state_dict: expected random generators of {envs} environments for worker "
                f"{worker}, got those of {actions * len(each)}"
            )


@dataclass(frozen=True)
class CollectorState:
    """State of a collector's stream after a delivered batch."""

    entropy: int  # root of the random streams that do not come from a worker's generators
    batches: int
    episodes: int
    trajectories: int  # number of trajectory ids assigned
    policy_version: int
    progress: dict[str, int]  # counters by the names in PROGRESS
    policy: Weights  # weights by name; empty if the collector does not know them
    ledger: dict[str, Any]
    workers: dict[int, WorkerState]  # state of each worker, by id

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of tensors, numbers, strings, lists and dicts, all copied.

        Extra state of a module keeps its own type.
        """
        workers = {str(index): worker for index, worker in self.workers.items()}
        individual = {name: own for name, own in workers.items() if own.policy}
        policies = {"policy": self.policy, **{name: own.policy for name, own in workers.items()}}
        return {
            "format": _FORMAT,
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "policy": self.policy.state_dict(),
            "policies": {name: own.policy.state_dict() for name, own in individual.items()},
            "versions": {name: own.version for name, own in individual.items()},
            "training": {name: dict(own.modes) for name, own in policies.items() if own.modes},
            "workers": {
                name: None if own.generators is None else own.generators.plain()
                for name, own in workers.items()
            },
        }

    @classmethod
    def from_dict(cls, source: Any, workers: Iterable[int]) -> CollectorState:
        """Return the state from a dict of `to_dict`, or from a state of TorchRL."""
        ids = sorted(workers)
        if isinstance(source, Sequence) and not isinstance(source, str):
            return _from_torchrl(list(source), ids)
        if not isinstance(source, Mapping):
            raise TypeError(
                "state_dict: expected a dict, or TorchRL's list of dicts, got "
                f"{type(source).__name__}"
            )
        if "format" not in source and "iter" in source:
            return _from_torchrl([source], ids)
        if source.get("format") != _FORMAT:
            raise ValueError(
                f"state_dict: expected the format {_FORMAT!r}, got {source.get('format')!r}"
            )
        return _checked(source, ids)


def _checked(source: Mapping[str, Any], ids: list[int]) -> CollectorState:
    count = {name: _count(source, name) for name in ("batches", "episodes", "trajectories")}
    names = {str(index): index for index in ids}
    generators = _mapping(source, "workers")
    policies = _mapping({"policies": {}, **source}, "policies")
    versions = _mapping({"versions": {}, **source}, "versions")
    progress = _mapping({"progress": {}, **source}, "progress")
    modes = _mapping({"training": {}, **source}, "training")
    if generators.keys() != names.keys():
        raise ValueError(f"state_dict: expected the workers {[*names]}, got {list(generators)}")
    _check_names("policies", policies, [*names])
    _check_names("versions", versions, [*names])
    _check_names("training", modes, ["policy", *names])
    _check_names("progress", progress, PROGRESS)
    version = _count(source, "policy_version")
    return CollectorState(
        entropy=_count(source, "entropy"),
        policy_version=version,
        progress={name: _count(progress, name) for name in progress},
        policy=_weights(source, "policy", modes),
        ledger=_checked_ledger(_mapping(source, "ledger")),
        workers={
            index: WorkerState(
                None
                if generators[name] is None
                else from_plain(generators[name], f"'workers', {name!r}"),
                _weights({name: {}, **policies}, name, modes),
                _count({name: version, **versions}, name),
            )
            for name, index in names.items()
        },
        **count,
    )


def _weights(source: Mapping[str, Any], name: str, modes: Mapping[str, Any]) -> Weights:
    """Return the weights under that name, with their training modes."""
    training = _mapping({name: {}, **modes}, name)
    if not all(isinstance(key, str) and isinstance(mode, bool) for key, mode in training.items()):
        raise ValueError(
            f"state_dict: expected a dict of bools in 'training' for {name!r}, got {training}"
        )
    return replace(weights_from(_mapping(source, name)), modes=training)


def _check_names(entry: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    others = [name for name in given if name not in known]
    if others:
        raise ValueError(f"state_dict: expected keys among {known} in {entry!r}, got {others}")


def _count(source: Mapping[str, Any], name: str) -> int:
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"state_dict: expected an int >= 0 for {name!r}, got {value!r}")
    if value >= 2**62 and name != "entropy":  # C++ continues these counters as int64
        raise ValueError(f"state_dict: expected an int < 2**62 for {name!r}, got {value!r}")
    return value


def _mapping(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = source.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"state_dict: expected a dict for {name!r}, got {type(value).__name__}")
    return value


def _checked_ledger(source: Mapping[str, Any]) -> dict[str, Any]:
    accounts = {}
    for worker, account in source.items():
        is_id = isinstance(worker, str) and worker.isdecimal() and worker == str(int(worker))
        if not (is_id and isinstance(account, Mapping)):
            raise ValueError(
                f"state_dict: expected dicts by worker id in 'ledger', got {worker!r}: {account!r}"
            )
        reasons = _mapping(account, "reasons")
        accounts[worker] = {
            "delivered": _count(account, "delivered"),
            "reasons": {reason: _count(reasons, reason) for reason in reasons},
        }
    return accounts


def _from_torchrl(sources: Sequence[Any], ids: list[int]) -> CollectorState:
    """Return weights, versions and counters of one TorchRL collector, or of a list of them."""
    for source in sources:
        if not (isinstance(source, Mapping) and "iter" in source):
            raise TypeError(
                "state_dict: expected dicts with an entry 'iter', as TorchRL makes them"
            )
    counted = sources
    if len(sources) == 1 and "worker0" in sources[0]:
        names = [name for name in sources[0] if re.fullmatch(r"worker\d+", str(name))]
        in_order = sorted(names, key=lambda name: int(name.removeprefix("worker")))
        sources = [_mapping(sources[0], name) for name in in_order]
    if len(sources) not in (1, len(ids)):
        raise ValueError(
            f"state_dict: expected one dict or one per worker ({len(ids)}), got {len(sources)}"
        )
    frames = [_torchrl_count({"frames": 0, **source}, "frames") for source in counted]
    if len(sources) == 1:
        sources = [sources[0]] * len(ids)
    policies = [_torchrl_policy(source) for source in sources]
    versions = [_torchrl_version(source) for source in sources]
    policy, version = policies[newest := versions.index(max(versions))], versions[newest]
    return CollectorState(
        entropy=sum(frames),
        batches=1 + max(_torchrl_count(source, "iter") for source in counted),
        episodes=0,
        trajectories=0,
        policy_version=version,
        progress={},
        policy=policy,
        ledger={
            str(index): {"delivered": count, "reasons": {}}
            for index, count in zip(ids, frames, strict=False)
        },
        workers={
            index: WorkerState()
            if (own_version, own.equal(policy)) == (version, True)
            else WorkerState(policy=own, version=own_version)
            for index, own, own_version in zip(ids, policies, versions, strict=True)
        },
    )


def _torchrl_count(source: Mapping[str, Any], name: str) -> int:
    """Return a counter of TorchRL's state; that of a worker is a tensor."""
    value = source[name]
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return _count({name: value.item() if is_number else value}, name)


def _torchrl_policy(source: Mapping[str, Any]) -> Weights:
    entries = _mapping({"policy_state_dict": {}, **source}, "policy_state_dict")
    # A TensorDict's own state_dict() describes itself in entries such as "__batch_size".
    return weights_from({name: own for name, own in entries.items() if "__" not in str(name)})


def _torchrl_version(source: Mapping[str, Any]) -> int:
    """Return the policy version, 0 if it was not tracked or is a UUID."""
    version = source.get("policy_version")
    if version is None or isinstance(version, str):
        return 0
    return _torchrl_count(source, "policy_version")
