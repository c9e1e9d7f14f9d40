"""Observations with a text: MiniGrid, and an environment whose step takes a microsecond."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.race import Side
from pycollect.bench.sides import ours, read_tensors

STEPS = 500
IMAGE = (7, 7, 3)
MINIGRID = "MiniGrid-Empty-5x5-v0"


class Light(gymnasium.Env):
    """Returns the same image and text in each step, and ends after 100 steps."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, IMAGE, np.uint8),
        direction=spaces.Discrete(4),
        mission=spaces.Text(60),
    )
    action_space = spaces.Discrete(7)
    image = np.zeros(IMAGE, np.uint8)

    def observe(self) -> dict[str, Any]:
        """Return the observation."""
        return {"image": self.image, "direction": 1, "mission": "get to the green goal square"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Start an episode."""
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        """Count the steps."""
        self.steps += 1
        return self.observe(), 1.0, self.steps == 100, False, {}


def make(name: str) -> gymnasium.Env:
    """Return the environment."""
    if name == "light":
        return Light()
    import minigrid  # noqa: F401 (registers its environments)

    return gymnasium.make(name)


class TurnLeft(nn.Module):
    """Scores that always choose action 0, so that all sides step the same states."""

    def __init__(self) -> None:
        """Create the layer."""
        super().__init__()
        self.layer = nn.Linear(int(np.prod(IMAGE)), 7)
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.bias.copy_(torch.arange(7, 0, -1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the action for an image."""
        return self.layer(image.flatten(-3).float()).argmax(-1)


def policy() -> TensorDictModule:
    """Return the policy for the image."""
    return TensorDictModule(TurnLeft(), in_keys=["image"], out_keys=["action"])


def read(batch: TensorDictBase) -> int:
    """Read tensors and both lists of texts; return the number of frames."""
    read_tensors(batch["image"], batch["action"], batch["next", "reward"])
    assert len(batch["mission"]) == len(batch["next", "mission"]) == batch.numel()
    return batch.numel()


def plain_loop(name: str) -> Iterator[int]:
    """Run a loop by hand with preallocated arrays and lists of texts."""
    env, choose = make(name), TurnLeft()
    images = np.empty((2, STEPS, *IMAGE), np.uint8)
    directions, actions = np.empty((2, STEPS), np.int64), np.empty(STEPS, np.int64)
    rewards, flags = np.empty(STEPS, np.float32), np.empty((2, STEPS), bool)
    shown, _ = env.reset(seed=0)
    while True:
        texts: tuple[list[str], list[str]] = [], []
        with torch.no_grad():
            for t in range(STEPS):
                images[0, t], directions[0, t] = shown["image"], shown["direction"]
                texts[0].append(shown["mission"])
                actions[t] = choose(torch.from_numpy(images[0, t])).numpy()
                shown, rewards[t], flags[0, t], flags[1, t], _ = env.step(actions[t])
                images[1, t], directions[1, t] = shown["image"], shown["direction"]
                texts[1].append(shown["mission"])
                if flags[0, t] or flags[1, t]:
                    shown, _ = env.reset()
        read_tensors(*map(torch.from_numpy, (images[0], actions, rewards)))
        yield STEPS


WANTED = {"light": 0.85, MINIGRID: 0.9}


@pytest.mark.parametrize("name", WANTED)
def test_text(compare: Callable[..., None], name: str) -> None:
    """Compare with a loop by hand."""
    if name != "light":
        pytest.importorskip("minigrid")
    work = {
        "collector": "SyncDataCollector",
        "env": partial(make, name),
        "policy": policy,
        "read": read,
        "frames_per_batch": STEPS,
    }
    compare(
        f"text: {name}, linear policy, in process, {STEPS} frames",
        [Side("pycollect", ours, work), Side("plain loop", plain_loop, {"name": name})],
        frame_bytes=2 * int(np.prod(IMAGE)),
        wanted={"plain loop": WANTED[name]},
    )
