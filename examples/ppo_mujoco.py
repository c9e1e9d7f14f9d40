"""PPO on MuJoCo's InvertedPendulum, with the actor and loss of TorchRL's tutorial.

    pip install mujoco torchrl
    python examples/ppo_mujoco.py

MuJoCo returns float64 observations, but the networks use float32. `observation_dtype` casts the
observations in batches and for the policy.
"""

import gymnasium
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from pycollect import SyncDataCollector

ENV = "InvertedPendulum-v5"
EPOCHS, MINIBATCH = 6, 250


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network with two hidden layers of 64."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def networks() -> tuple[ProbabilisticActor, ValueOperator]:
    """Return an actor and a critic for the environment."""
    env = gymnasium.make(ENV)
    inputs, space = env.observation_space.shape[0], env.action_space
    env.close()
    parameters = nn.Sequential(mlp(inputs, 2 * space.shape[0]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parameters, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": torch.tensor(space.low), "high": torch.tensor(space.high)},
        return_log_prob=True,
    )
    return actor, ValueOperator(mlp(inputs, 1), in_keys=["observation"])


def main(total_frames: int = 60_000) -> float:
    """Train on `total_frames` frames; return the mean return of the last 100 episodes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster than more threads for layers this small
    actor, critic = networks()
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-4)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    mean = 0.0
    with SyncDataCollector(
        ENV,
        actor,
        frames_per_batch=2000,
        total_frames=total_frames,
        observation_dtype=torch.float32,
    ) as collector:
        collector.set_seed(0)
        for batch in collector:
            with torch.no_grad():
                advantage(batch)
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(batch)).split(MINIBATCH):
                    parts = loss(batch[rows])
                    total = sum(
                        parts[f"loss_{name}"] for name in ("objective", "critic", "entropy")
                    )
                    optimizer.zero_grad()
                    total.backward()
                    nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                    optimizer.step()
            collector.update_policy_weights_()
            stats = collector.stats()
            mean = stats["episode_return"] or 0.0
            print(f"{stats['frames']:>7,} frames   return {mean:6.1f}")
    return mean


if __name__ == "__main__":
    main()
