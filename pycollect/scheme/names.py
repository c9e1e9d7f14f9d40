"""PyTorchRL's names of data and infos, which its components use as keys, and rows by name."""

from __future__ import annotations

from typing import Any

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

_OF_THE_STATE = (OBS, RHS, DONE)


def valid_rows(data: dict[str, Any], steps: int) -> dict[str, Any]:
    """Copy the rows of the collected steps, and the state after the last one.

    On-policy storages have one row more than steps: observation, hidden state and done flag after
    the last step. Other entries are 0 in that row, as after a full rollout. Entries that are not
    longer are returned unchanged.

    Args:
        data: Arrays or tensors ``[rows, P, ...]``, ``None``, or dicts of such values, by name.
        steps: Number of stored steps.
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
