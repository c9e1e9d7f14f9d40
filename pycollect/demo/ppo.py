"""Proximal policy optimization in plain torch, on the batches of a collector.

One page to read and to copy. It does not depend on how the frames were collected: a batch is a
TensorDict with any leading dimensions and time last ([T], [P, T] or [B, P, T]). It contains
everything that learning needs: the policy's log-probabilities, the true next observations, the ends
of trajectories (`done`, `traj_ids`) and, if some cells hold no frame, the mask.

Source: J. Schulman et al., "Proximal policy optimization algorithms" (2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical


@dataclass(frozen=True)
class PPOConfig:
    """Hyperparameters of a PPO run; `minibatch` is a number of frames."""

    learning_rate: float = 2e-3
    epochs: int = 4
    minibatch: int = 256
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5


class Pixels(nn.Module):
    """Convert uint8 frames [..., C, H, W] to float32 features [..., F]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(init(nn.Conv2d(channels, 16, 8, stride=4)), nn.ReLU()),
            *(init(nn.Conv2d(16, 32, 4, stride=2)), nn.ReLU(), nn.Flatten()),
        )

    def forward(self, frames: Tensor) -> Tensor:
        flat = frames.reshape(-1, *frames.shape[-3:])
        features = cast(Tensor, self.net(flat.float() / 255))
        return features.reshape(*frames.shape[:-3], features.shape[-1])


class ActorCritic(nn.Module):
    """Logits and state values from vector ([..., D]) or pixel ([..., C, H, W]) observations.

    Actor and critic share the expensive layers for pixels, and share nothing for vectors.
    """

    def __init__(self, observation_shape: tuple[int, ...], actions: int) -> None:
        super().__init__()
        if len(observation_shape) == 3:
            body = Pixels(observation_shape[0])
            width = body(torch.zeros(observation_shape, dtype=torch.uint8)).shape[-1]
            self.body: nn.Module = nn.Sequential(body, init(nn.Linear(width, 256)), nn.ReLU())
            self.actor: nn.Module = init(nn.Linear(256, actions), 0.01)
            self.critic: nn.Module = init(nn.Linear(256, 1), 1.0)
        else:
            self.body = nn.Identity()
            self.actor = mlp(observation_shape[0], actions, 0.01)
            self.critic = mlp(observation_shape[0], 1, 1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [..., A] and values [...] of observations [..., *obs]."""
        features = self.body(observation)
        return self.actor(features), self.critic(features).squeeze(-1)

    def policy(self) -> ProbabilisticTensorDictSequential:
        """Return the actor as a policy that records `action` and `sample_log_prob`.

        It shares this module's parameters. Keys that start with "_" are not delivered.
        """
        return ProbabilisticTensorDictSequential(
            TensorDictModule(
                nn.Sequential(self.body, self.actor), in_keys=["observation"], out_keys=["_logits"]
            ),
            ProbabilisticTensorDictModule(
                in_keys={"logits": "_logits"},
                out_keys=["action"],
                distribution_class=Categorical,
                default_interaction_type=InteractionType.RANDOM,
                return_log_prob=True,
                log_prob_key="sample_log_prob",
            ),
        )


def init(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Give a layer orthogonal weights and zero biases, and return it."""
    nn.init.orthogonal_(cast(Tensor, layer.weight), gain)
    nn.init.zeros_(cast(Tensor, layer.bias))
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Return a network with two hidden tanh layers of 64."""
    hidden = (init(nn.Linear(inputs, 64)), nn.Tanh(), init(nn.Linear(64, 64)), nn.Tanh())
    return nn.Sequential(*hidden, init(nn.Linear(64, outputs), gain))


def state_values(net: ActorCritic, observation: Tensor) -> Tensor:
    """Return values [N] of observations [N, *obs], in parts, to limit memory for pixels."""
    parts = range(0, len(observation), 1024)
    return torch.cat([net(observation[start : start + 1024])[1] for start in parts])


def trajectory_ends(batch: TensorDictBase) -> Tensor:
    """Return bool [..., T], True for the last frame of each trajectory and of each row.

    A trajectory ends at a done flag, or if its id changes without one: at a reset at the start of a
    batch, or before a cell without a frame (id -1).
    """
    ends = batch["next", "done"].squeeze(-1).clone()
    ids = batch["collector", "traj_ids"]
    ends[..., :-1] |= ids[..., :-1] != ids[..., 1:]
    ends[..., -1] = True
    return cast(Tensor, ends)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    ends: Tensor,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> Tensor:
    """Return generalized advantage estimates [..., T].

    All arguments are [..., T]. `next_value` is zero if the environment terminated, else the value
    of the true next observation, also after truncation. Nothing propagates across `ends` (bool).

    Source: J. Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation" (2016).
    """
    delta = reward + gamma * next_value - value
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        running = delta[..., t] + (gamma * gae_lambda * running).masked_fill(ends[..., t], 0)
        advantage[..., t] = running
    return advantage


@torch.no_grad()
def advantages_and_returns(
    net: ActorCritic, batch: TensorDictBase, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """Return advantages and value targets, both [..., T], under the current critic.

    Within a trajectory, the next value is the following frame's value. Next observations are
    evaluated only at the ends of trajectories, which halves the work for pixels.
    """
    ends = trajectory_ends(batch)
    observation = batch["observation"].flatten(0, ends.ndim - 1)
    value = state_values(net, observation).view(ends.shape)
    next_value = value.roll(-1, dims=-1)
    next_value[ends] = state_values(net, batch["next", "observation"][ends])
    next_value[batch["next", "terminated"].squeeze(-1)] = 0.0
    reward = batch["next", "reward"].squeeze(-1)
    advantage = gae(reward, value, next_value, ends, config.gamma, config.gae_lambda)
    return advantage, advantage + value


def ppo_loss(
    net: ActorCritic,
    config: PPOConfig,
    observation: Tensor,
    action: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    target: Tensor,
) -> Tensor:
    """Return the loss of N frames: clipped surrogate, value error and entropy bonus."""
    logits, value = net(observation)
    log_probs = logits.log_softmax(-1)
    ratio = (log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1) - old_log_prob).exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    surrogate = torch.min(ratio * advantage, clipped * advantage).mean()
    value_error = 0.5 * (value - target).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss: Tensor = config.value_weight * value_error - surrogate - config.entropy_weight * entropy
    return loss


class PPO:
    """The learner: call `learn` with every batch of a collector."""

    def __init__(self, net: ActorCritic, config: PPOConfig) -> None:
        self.net = net
        self.config = config
        self.optimizer = torch.optim.Adam(net.parameters(), config.learning_rate, eps=1e-5)

    def learn(self, batch: TensorDictBase, remaining: float = 1.0) -> None:
        """Train for a few epochs on the frames of one batch.

        `remaining`, the remaining share of the run (1 to 0), scales the learning rate.
        """
        self.optimizer.param_groups[0]["lr"] = self.config.learning_rate * max(remaining, 0.0)
        advantage, target = advantages_and_returns(self.net, batch, self.config)
        mask = batch.get(("collector", "mask"), torch.ones_like(advantage, dtype=torch.bool))
        advantage = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)
        frames = batch.select("observation", "action", "sample_log_prob").flatten()
        columns = (
            *(frames[key] for key in ("observation", "action", "sample_log_prob")),
            *(advantage.flatten(), target.flatten()),
        )
        cells = mask.flatten().nonzero().squeeze(-1)
        for _ in range(self.config.epochs):
            order = cells[torch.randperm(len(cells))]
            for start in range(0, len(order), self.config.minibatch):
                self.step(*(x[order[start : start + self.config.minibatch]] for x in columns))

    def step(self, *minibatch: Tensor) -> None:
        """Make one optimizer step on a minibatch, given as the columns of `ppo_loss`."""
        loss = ppo_loss(self.net, self.config, *minibatch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
