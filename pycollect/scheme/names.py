"""PyTorchRL's names of data and infos, which its components use as keys."""

from __future__ import annotations

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
