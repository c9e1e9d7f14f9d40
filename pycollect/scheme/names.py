"""PyTorchRL's names of data, infos and components; look-ups by them, and small helpers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

import torch

from pycollect.data.devices import check_available, named_device

# Infos of `collect_data`.
EPISODES = "Episodes"
TIME = "Time"
COLLECTION = "DataCollection"
VERSION = "ActorVersion"
WEIGHTS = "ActorWeights"
NUMSAMPLES = "NumberSamples"
TRAIN_REWARD = "TrainReward"
TEST_REWARD = "TestReward"

# Entries of a step.
OBS = "Observation"
RHS = "RecurrentHiddenStates"
DONE = "Done"
ACT = "Action"
REW = "Reward"
OBS2 = "NextObservation"
RHS2 = "NextRecurrentHiddenStates"
DONE2 = "NextDone"
INFO = "EnvironmentInformation"

# Entries that algorithms add.
VAL = "Value"
LOGP = "LogProbability"

# Components.
ALGORITHM = "Algorithm"
ACTOR = "Actor"
STORAGE = "Storage"
ENV_TRAIN = "TrainEnvironment"
ENV_TEST = "TestEnvironment"

ATTRIBUTES = {
    ENV_TRAIN: "envs_train",
    ENV_TEST: "envs_test",
    ACTOR: "actor",
    ALGORITHM: "algo",
    STORAGE: "storage",
}
"""Attributes of a worker by component name, in the order of construction."""

HELD_AS = {"envs_train": "envs", "actor": "actor", "algo": "algo"}
"""Attribute names by which components refer to each other."""


def nothing(*_: Any) -> None:
    """Make no environments."""


def attribute_of(component_name: str) -> str:
    """Return the worker attribute of a component, given its name or the attribute itself."""
    known = {**ATTRIBUTES, **{attribute: attribute for attribute in ATTRIBUTES.values()}}
    if component_name not in known:
        raise unknown("component_name", component_name, known)
    return known[component_name]


def check_callable(name: str, value: Any) -> None:
    """Raise TypeError for an argument that cannot be called."""
    if not callable(value):
        raise TypeError(f"{name}: expected a callable, got {type(value).__name__}")


def check_made(factory: str, component: Any, protocol: type) -> Any:
    """Return a component from a factory; raise TypeError if it lacks a member of its Protocol."""
    members = [name for name in vars(protocol) if not name.startswith("_")]
    lacks = [name for name in members if not hasattr(component, name)]
    if lacks:
        raise TypeError(
            f"{factory}: expected to return an object with all members of "
            f"pycollect.scheme.{protocol.__name__}, got {type(component).__name__} without "
            f"{', '.join(lacks)}"
        )
    return component


def check_parameter(argument: str, owner: Any, name: str) -> None:
    """Raise AttributeError if a component has no such attribute."""
    if not hasattr(owner, name):
        raise unknown(argument, name, [known for known in dir(owner) if not known.startswith("_")])


def unknown(argument: str, name: str, known: Collection[str]) -> AttributeError:
    """Return the error for an unknown name."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    expected = f"one of {sorted(known)}" if len(known) < 12 else "a known name"
    return AttributeError(f"{argument}: expected {expected}, got {name!r}{hint}")


def device_of(name: str, device: Any) -> torch.device:
    """Return the torch device of an argument; ``None`` means CUDA if available, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return named_device(name, device)


def device_here(name: str, device: Any) -> torch.device:
    """Return the device like `device_of`; raise ValueError if this process does not have it."""
    own = device_of(name, device)
    check_available(name, own)
    return own


def share(fraction: float, count: int) -> int:
    """Return the smallest number that is at least this fraction of `count`."""
    return math.ceil(fraction * count - 1e-9)  # 0.7 * 10 is 7, despite its rounding error


_OF_THE_STATE = (OBS, RHS, DONE)


def valid_rows(data: dict[str, Any], steps: int) -> dict[str, Any]:
    """Copy the rows of the collected steps, and the state after the last one.

    The data are arrays or tensors ``[rows, P, ...]``, ``None``, or dicts of such values, by name.
    On-policy storages have one row more than steps: observation, hidden state and done flag after
    the last step. Other entries are 0 in that row, as after a full rollout. Entries that are not
    longer are returned unchanged.
    """
    return {name: _cut(value, steps, name in _OF_THE_STATE) for name, value in data.items()}


def _cut(value: Any, steps: int, of_the_state: bool) -> Any:
    if isinstance(value, dict):
        return {name: _cut(item, steps, of_the_state) for name, item in value.items()}
    if value is None or len(value) <= steps + 1:
        return value
    rows = value[: steps + 1]
    rows = rows.clone() if hasattr(rows, "clone") else rows.copy()
    if not of_the_state:
        rows[steps:] = 0
    return rows
