"""What data and information are called: PyTorchRL's names, by which its components find them."""

from __future__ import annotations

# What `collect_data` tells beside the data.
EPISODES = "Episodes"
TIME = "Time"
COLLECTION = "DataCollection"
VERSION = "ActorVersion"
WEIGHTS = "ActorWeights"
NUMSAMPLES = "NumberSamples"
TRAIN_REWARD = "TrainReward"
TEST_REWARD = "TestReward"

# What a step is made of.
OBS = "Observation"
RHS = "RecurrentHiddenStates"
DONE = "Done"
ACT = "Action"
REW = "Reward"
OBS2 = "NextObservation"
RHS2 = "NextRecurrentHiddenStates"
DONE2 = "NextDone"
INFO = "EnvironmentInformation"

# What algorithms add to it.
VAL = "Value"
LOGP = "LogProbability"

# Components.
ALGORITHM = "Algorithm"
ACTOR = "Actor"
STORAGE = "Storage"
ENV_TRAIN = "TrainEnvironment"
ENV_TEST = "TestEnvironment"
