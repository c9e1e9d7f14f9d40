"""SAC on Pendulum. Workers collect in the background, one frame per update of the learner.

Run it:

    python examples/sac.py
"""

import copy
import threading
import time
from itertools import chain

import gymnasium
import torch
from torch import nn

from pycollect import MultiaSyncDataCollector

FRAMES_PER_UPDATE = 1
WARM_UP = 1_000  # random frames
BATCH, GAMMA, TAU, RATE = 128, 0.95, 0.01, 1e-3
LIMIT = 2.0  # actions are in [-2, 2]


def make():
    """Return the environment."""
    return gymnasium.make("Pendulum-v1")


def mlp(inputs, outputs):
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


class Buffer:
    """A replay buffer that the collector's thread fills while the learner samples."""

    def __init__(self, capacity):
        self.capacity, self.written, self.rows = capacity, 0, None
        self.lock = threading.Lock()

    def extend(self, batch):
        """Write a rollout, [T], over the oldest rows."""
        with self.lock:
            if self.rows is None:
                self.rows = batch[0].expand(self.capacity).clone()
            self.rows[torch.arange(self.written, self.written + len(batch)) % self.capacity] = batch
            self.written += len(batch)

    def sample(self, size):
        """Return random rows."""
        with self.lock:
            return self.rows[torch.randint(min(self.written, self.capacity), (size,))]


class Actor(nn.Module):
    """A Gaussian squashed by tanh; in evaluation mode, its mode."""

    def __init__(self):
        super().__init__()
        self.net = mlp(3, 2)

    def forward(self, observation):
        """Return an action."""
        return self.sample(observation)[0]

    def sample(self, observation):
        """Return an action and the logarithm of its density."""
        mean, log_std = self.net(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp(), validate_args=False)
        raw = normal.rsample() if self.training else mean
        density = normal.log_prob(raw) - 2 * (0.6931 - raw - nn.functional.softplus(-2 * raw))
        return LIMIT * raw.tanh(), density.sum(-1, keepdim=True)


class Learner:
    """SAC with two critics and a learned temperature, whose target entropy is -1."""

    def __init__(self, actor):
        self.actor, self.critics = actor, nn.ModuleList([mlp(4, 1), mlp(4, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.actor_optim = torch.optim.Adam(
            chain(actor.parameters(), [self.log_alpha]), RATE, fused=True
        )
        self.critic_optim = torch.optim.Adam(self.critics.parameters(), RATE, fused=True)

    def update(self, sample):
        """Make one update from a sample of the replay buffer."""
        observation, action, successor = sample["observation"], sample["action"], sample["next"]
        with torch.no_grad():
            following, density = self.actor.sample(successor["observation"])
            value = least(self.targets, successor["observation"], following)
            value = value - self.log_alpha.exp() * density
            target = successor["reward"] + GAMMA * ~successor["terminated"] * value
        pair = torch.cat([observation, action], -1)
        loss = sum((critic(pair) - target).square().mean() for critic in self.critics)
        step(self.critic_optim, loss)

        chosen, density = self.actor.sample(observation)
        self.critics.requires_grad_(False)
        alpha = self.log_alpha.exp()
        loss = (alpha.detach() * density - least(self.critics, observation, chosen)).mean()
        step(self.actor_optim, loss - alpha * (density.detach() - 1.0).mean())
        self.critics.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_([*self.targets.parameters()], [*self.critics.parameters()], TAU)


def least(critics, observation, action):
    """Return the smaller value of two critics."""
    pair = torch.cat([observation, action], -1)
    return torch.minimum(critics[0](pair), critics[1](pair))


def step(optimizer, loss):
    """Minimize a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def evaluate(actor, episodes=20):
    """Return the mean return of the actor's most likely actions."""
    env, total = make(), 0.0
    actor.eval()
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            with torch.no_grad():
                action = actor(torch.as_tensor(observation)).numpy()
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
    return total / episodes


def main(updates=5_000, seed=0):
    """Train; return the mean return at the end and the number of frames collected."""
    torch.manual_seed(seed)
    actor = Actor()
    learner = Learner(actor)
    buffer = Buffer(50_000)
    with MultiaSyncDataCollector(
        [make] * 2,
        actor,
        frames_per_batch=20,
        init_random_frames=WARM_UP,
        replay_buffer=buffer,
        prefetch=0,
        max_frames_per_update=FRAMES_PER_UPDATE,  # collection waits for the learner
    ) as collector:
        collector.set_seed(seed)
        collector.start()
        for update in range(updates):
            while collector.stats()["frames"] < WARM_UP + FRAMES_PER_UPDATE * update:
                time.sleep(0.001)  # the learner waits for collection
            learner.update(buffer.sample(BATCH))
            collector.update_policy_weights_()
            if update % 1_000 == 999:
                stats = collector.stats()
                print(f"{update + 1} updates, {stats['frames']} frames", stats["episode_return"])
        frames = collector.stats()["frames"]
    return evaluate(actor), frames


if __name__ == "__main__":
    print(main())
