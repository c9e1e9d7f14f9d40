"""PPO on CartPole with two Ray actors, 32 environments each: the demo as a short program.

The learner is `pycollect/demo/ppo.py`, one page of plain torch that you can copy.

    python examples/ppo.py
"""

import warnings

import gymnasium
import torch

from pycollect import RayCollector
from pycollect.demo.ppo import PPO, ActorCritic, PPOConfig


def make_env() -> gymnasium.vector.VectorEnv:
    """Return a vector environment of 32 CartPoles."""
    return gymnasium.make_vec("CartPole-v1", num_envs=32, vectorization_mode="vector_entry_point")


def main(total_frames: int = 300_000, target: float = 475.0) -> float:
    """Train until the target or the last frame; return the mean return of the last 100 episodes."""
    # The learner leaves out the cells without a frame.
    warnings.filterwarnings("ignore", "create_env_fn: this vector environment")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster for small layers, and leaves the CPUs to the workers
    net = ActorCritic(observation_shape=(4,), actions=2)
    learner = PPO(net, PPOConfig())
    mean = 0.0
    with RayCollector(
        [make_env] * 2,
        net.policy(),
        frames_per_batch=4096,  # of both workers; a batch is [2, 32, 64]
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
