"""The return of an actor, over episodes that were chosen before they began."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mean_return(algo: Any, actor: Any, envs: Any, episodes: int) -> float:
    """The mean return of an actor that acts deterministically.

    How many episodes each environment contributes is settled beforehand, as in Stable-Baselines3's
    ``evaluate_policy``. To take whichever end first, as PyTorchRL does, prefers short ones.

    Args:
        algo: an Algorithm.
        actor: its Actor, in evaluation mode.
        envs: a VecEnv.
        episodes: how many in all.
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
