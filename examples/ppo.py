"""PPO on CartPole, two Ray actors with 32 environments each: what the demo runs, written out.

The learner is `pycollect/demo/ppo.py`, a page of plain torch to read and to copy from.

    python examples/ppo.py
"""

import gymnasium
import torch

from pycollect import RayCollector
from pycollect.demo.ppo import PPO, ActorCritic, PPOConfig


def make_env() -> gymnasium.vector.VectorEnv:
    """32 CartPoles in one vectorised environment."""
    return gymnasium.make_vec("CartPole-v1", num_envs=32, vectorization_mode="vector_entry_point")


def main(total_frames: int = 300_000, target: float = 475.0) -> float:
    """Train until the target or the last frame; the mean return of the last 100 episodes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small layers: more threads only get into the workers' way
    net = ActorCritic(observation_shape=(4,), actions=2)
    learner = PPO(net, PPOConfig())
    mean = 0.0
    with RayCollector(
        [make_env] * 2,
        net.policy(),
        frames_per_batch=4096,  # of both workers together: [2, 32, 64]
        total_frames=total_frames,
        sync=True,
    ) as collector:
        collector.set_seed(0)
        for batch in collector:
            stats = collector.stats()
            frames, mean = stats["frames"], stats["episode_return"] or 0.0
            print(f"{frames:>9,} frames {stats['episodes']:>6,} episodes   return {mean:6.1f}")
            if stats["episodes"] >= 100 and mean >= target:
                break
            learner.learn(batch, remaining=1 - frames / total_frames)
            collector.update_policy_weights_()
    return mean


if __name__ == "__main__":
    main()
