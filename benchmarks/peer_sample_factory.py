"""The sampler of Sample Factory 2.1, in a separate interpreter because it needs another Gymnasium.

For each line of input, it samples a batch and prints the number of frames. It has Sample Factory's
defaults: one inference worker acts for all rollout workers, and each of them steps its environments
in two halves if it has more than one.
"""

from __future__ import annotations

import fcntl
import sys
import tempfile
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.encoder import Encoder
from torch import nn

CASE, LOCK, WORKERS, ENVS, STEPS, CALL_SECONDS, *WAITS = sys.argv[1:]
PIXELS: Any = ((4, 84, 84), np.uint8)
NUMBERS: Any = ((3,), np.float32)
# Sample Factory's own encoder has the convolutions of the Nature CNN.
ARGUMENTS = {
    "device": ["--use_rnn=False"],
    "lstm": ["--use_rnn=True", "--rnn_type=lstm", "--rnn_size=256"],
    "nature": ["--use_rnn=False", "--encoder_conv_architecture=convnet_atari"],
}


class Still(gymnasium.Env):  # type: ignore[misc]
    """An observation that does not change. A step takes the time that the command line names."""

    render_mode = None

    def __init__(self, number: int) -> None:
        """Create the spaces and the observation."""
        self.wait = float(WAITS[number % len(WAITS)])
        shape, dtype = PIXELS if CASE == "nature" else NUMBERS
        high = 255 if dtype is np.uint8 else 1
        self.observation_space = Box(0, high, shape, dtype)
        self.action_space = Discrete(2)
        self.observation = np.zeros(shape, dtype)

    def reset(self, **_: Any) -> Any:
        """Return the observation."""
        return self.observation, {}

    def step(self, action: Any) -> Any:
        """Wait, and return the same observation."""
        if self.wait:
            time.sleep(self.wait)
        return self.observation, 0.0, False, False, {}


class OnDevice(Encoder):  # type: ignore[misc]
    """An encoder whose calls lock the device."""

    def __init__(self, cfg: Any, space: Any) -> None:
        """Create a layer."""
        super().__init__(cfg)
        self.linear = nn.Linear(3, 8)

    def get_out_size(self) -> int:
        """Return the number of the layer's outputs."""
        return 8

    def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
        """Lock the device for the duration of a call."""
        with open(LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(float(CALL_SECONDS))
        return self.linear(observation["obs"])


def make(name: str, cfg: Any, env_config: Any, render_mode: Any) -> Still:
    """Return the environment of a rollout worker; the first one describes the spaces."""
    return Still(env_config.worker_index if env_config else 0)


def main() -> None:
    """Sample a batch for each line of input."""
    register_env("still", make)
    if CASE == "device":
        global_model_factory().register_encoder_factory(OnDevice)
    workers, envs, steps = int(WORKERS), int(ENVS), int(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--algo=APPO",
            "--env=still",
            f"--num_workers={workers}",
            f"--num_envs_per_worker={envs}",
            f"--worker_num_splits={min(envs, 2)}",
            f"--rollout={steps}",
            f"--batch_size={workers * envs * steps}",
            "--device=cpu",
            "--normalize_input=False",
            "--train_for_env_steps=1000000000000",
            f"--train_dir={folder}",
            *ARGUMENTS[CASE],
        ]
        config = parse_full_cfg(parse_sf_args(arguments)[0], arguments)
        sampler = SyncSamplingAPI(config, obtain_env_info_in_a_separate_process(config))
        sampler.start()
        for _ in sys.stdin:
            frames = 0
            while frames < workers * envs * steps:
                frames += samples_per_trajectory(sampler.get_trajectories_sync())
            print(f"\nframes {frames}", flush=True)
        sampler.stop()


if __name__ == "__main__":
    main()
