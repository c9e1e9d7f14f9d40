"""PPO on CartPole with PyTorchRL's collection scheme: two remote workers, 16 environments each.

The components come from `pycollect.scheme.gym`, the learner from `pycollect/demo/ppo.py`.

    python examples/scheme.py
"""

from collections import deque

import gymnasium
import numpy as np
import ray
import torch

from pycollect.demo.ppo import PPO, PPOConfig, gae
from pycollect.scheme import CWorkerSet
from pycollect.scheme.gym import ActorCritic, GymEnvs, OnPolicy, RolloutStorage

STEPS, ENVS, WORKERS = 128, 16, 2


def make_workers() -> CWorkerSet:
    """Return two remote workers, which collect rollouts of 128 steps."""
    env = gymnasium.make("CartPole-v1")
    envs_factory = GymEnvs.create_factory(lambda: gymnasium.make("CartPole-v1"), num_envs=ENVS)
    create = CWorkerSet.create_factory(
        num_workers=WORKERS,
        algo_factory=OnPolicy.create_factory(num_test_episodes=32, gamma=PPOConfig.gamma),
        actor_factory=ActorCritic.create_factory(env.observation_space, env.action_space),
        storage_factory=RolloutStorage.create_factory(STEPS),
        train_envs_factory=envs_factory,
        test_envs_factory=envs_factory,
        col_worker_resources={"num_cpus": 1, "memory": 2**30},
    )
    return create(device="cpu", initial_weights=None, index_parent=0)


def columns_of(data, net, config):
    """Return the training data: observations, actions, log-probabilities, advantages, targets."""
    obs, reward, done, value, action, log_prob = (
        data[key] for key in ("Observation", "Reward", "Done", "Value", "Action", "LogProbability")
    )
    steps = len(obs) - 1  # the last row is the state after the last step
    with torch.no_grad():
        last_value = net(obs[steps])[1]
    reward, value = reward[:steps, :, 0].T, value[:steps, :, 0].T  # time is the last dimension
    ends = done[1:, :, 0].T.bool()
    next_value = torch.cat([value[:, 1:], last_value[:, None]], 1).masked_fill(ends, 0.0)
    advantage = gae(reward, value, next_value, ends, config.gamma, config.gae_lambda)
    rows = [x[:steps].flatten(0, 1) for x in (obs, action, log_prob)]
    rows[1:] = [x.squeeze(-1) for x in rows[1:]]
    return *rows, *(x.T.flatten() for x in (advantage, advantage + value))


def learn(learner, results, remaining):
    """Train for a few epochs on the rollouts of all workers."""
    config = learner.config
    learner.optimizer.param_groups[0]["lr"] = config.learning_rate * max(remaining, 0.0)
    of_workers = [columns_of(data, learner.net, config) for data, _ in results]
    columns = [torch.cat(parts) for parts in zip(*of_workers, strict=True)]
    columns[3] = (columns[3] - columns[3].mean()) / (columns[3].std() + 1e-8)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(columns[0])).split(config.minibatch):
            learner.step(*(column[rows] for column in columns))


def main(total_frames: int = 400_000, target: float = 475.0) -> float:
    """Train until the target or the last frame; return the mean return of 32 test episodes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with make_workers() as workers:
        train(workers, total_frames, target)
        tester = workers.remote_workers()[0]
        result = ray.get(tester.evaluate.remote())
        print(f"mean return of 32 episodes: {result:.1f}")
    return result


def train(workers: CWorkerSet, total_frames: int, target: float) -> None:
    """Collect, learn and send the weights, until the recent mean return reaches the target."""
    local = workers.local_worker()
    learner = PPO(local.actor, PPOConfig())
    recent, frames = deque(maxlen=5), 0
    while frames < total_frames:
        results = workers.collect_data()
        infos = [info for _, info in results]
        frames += sum(info["NumberSamples"] for info in infos)
        recent += [i["Episodes"]["TrainReward"] for i in infos if "TrainReward" in i["Episodes"]]
        mean = np.mean(recent) if recent else float("nan")
        lag = local.actor_version - min(i["ActorVersion"]["DataCollection"] for i in infos)
        print(f"{frames:>9,} frames   return {mean:6.1f}   policy lag {lag}")
        if len(recent) == recent.maxlen and mean >= target:
            return
        learn(learner, results, 1 - frames / total_frames)
        local.actor_version += 1
        workers.broadcast_weights()


if __name__ == "__main__":
    main()
