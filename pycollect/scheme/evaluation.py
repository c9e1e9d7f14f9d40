"""Mean return of an actor over a fixed set of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mean_return(algo: Any, actor: Any, envs: Any, episodes: int) -> float:
    """Return the mean return of an actor with deterministic actions.

    The number of episodes of each environment is fixed in advance, as in Stable-Baselines3's
    ``evaluate_policy``. Taking the episodes that end first, as PyTorchRL does, favors short ones.

    Args:
        algo: An Algorithm.
        actor: Its Actor, in evaluation mode.
        envs: A VecEnv.
        episodes: Total number of episodes.
    """
    count = envs.num_envs
    wanted = np.array([(episodes + place) // count for place in range(count)])
    finished = np.zeros(count, int)
    running = np.zeros(count)
    returns: list[float] = []
    obs, rhs, done = actor.actor_initial_states(envs.reset())
    with torch.no_grad():
        while (finished < wanted).any():
            _, clipped, rhs, _ = algo.acting_step(obs, rhs, done, deterministic=True)
            obs, reward, done, _ = envs.step(clipped)
            running += reward.cpu().squeeze(-1).numpy()
            ended = done.cpu().squeeze(-1).numpy() == 1.0
            returns += running[ended & (finished < wanted)].tolist()
            finished += ended
            running[ended] = 0.0
    return float(np.mean(returns))
