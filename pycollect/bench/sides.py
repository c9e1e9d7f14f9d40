"""Workloads, and ways to collect them as generators of the number of frames per batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

FOREVER = 10**12
"""Frames that no run reaches; TorchRL's RayCollector yields nothing for its default, -1."""

T = TypeVar("T")
Stream = Generator[int, None, None]
Read = Callable[[TensorDictBase], int]
"""Reads a batch and returns its number of frames."""

_TORCHRLS = {
    "SyncDataCollector": "Collector",
    "MultiSyncDataCollector": "MultiSyncCollector",
    "MultiaSyncDataCollector": "MultiAsyncCollector",
    "DistributedDataCollector": "DistributedCollector",
}
"""Names of collectors since TorchRL 0.13, by the earlier ones."""


def count(batch: TensorDictBase) -> int:
    """Return the number of frames; cells outside of the mask hold none."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def read_tensors(*tensors: torch.Tensor) -> None:
    """Read every element."""
    for tensor in tensors:
        tensor.sum()


def read(batch: TensorDictBase) -> int:
    """Read observations, actions and rewards; return the number of frames."""
    read_tensors(batch["observation"], batch["action"], batch["next", "reward"])
    return count(batch)


def ours(
    collector: str, env: Any, policy: Any = None, *, read: Read = read, **arguments: Any
) -> Stream:
    """Collect with a collector of this package; `policy` makes the policy, None: random actions."""
    import pycollect

    return _batches(getattr(pycollect, collector), env, policy, read, arguments)


def torchrls(
    collector: str, env: Any, policy: Any = None, *, read: Read = read, **arguments: Any
) -> Stream:
    """Collect with TorchRL's collector of the same name; wrap Gymnasium's environments for it."""
    return _batches(torchrls_class(collector), for_torchrl(env), policy, read, arguments)


def _batches(kind: Any, env: Any, policy: Any, read: Read, arguments: dict[str, Any]) -> Stream:
    made = None if policy is None else policy()
    collector = kind(env, policy=made, **{"total_frames": FOREVER, **arguments})
    try:
        for batch in collector:
            yield read(batch)
    finally:
        collector.shutdown()


def torchrls_class(name: str) -> Any:
    """Return a collector class of TorchRL by its name in this package."""
    for module in ("torchrl.collectors", "torchrl.collectors.distributed"):
        for known in (_TORCHRLS.get(name, name), name):
            if found := getattr(import_module(module), known, None):
                return found
    raise ValueError(f"collector: TorchRL has no {name}")


def for_torchrl(env: Any) -> Any:
    """Return the callable, or each of a list, so that it makes environments of TorchRL."""
    if isinstance(env, list):
        return [for_torchrl(own) for own in env]
    return partial(_wrapped, env)


def _wrapped(make: Callable[[], Any]) -> Any:
    from torchrl.envs import EnvBase, GymWrapper

    env = make()
    return env if isinstance(env, EnvBase) else GymWrapper(env, categorical_action_encoding=True)


def lacks(module: str) -> str:
    """Return why a row cannot be measured, or "" if the module is installed."""
    return "" if find_spec(module) is not None else f"{module} is not installed"


def captured_calls(work: Callable[[], T]) -> Callable[[], T]:
    """Capture a function in a CUDA graph, as torch's documentation does; return its replay."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replayed() -> T:
        graph.replay()
        return result

    return replayed


FRAME_BYTES = 4 * 84 * 84


class FreeFrames(gymnasium.Env[Any, Any]):
    """Show four prepared frames of 4x84x84 bytes in turn; episodes have 1000 steps."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        frames = np.random.default_rng(0).integers(0, 256, (4, 4, 84, 84), dtype=np.uint8)
        self.frames = list(frames)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self.frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self.frames[self._steps & 3], 1.0, False, self._steps == 1000, {}


class Still(nn.Module):
    """A policy that ignores the frame."""

    def __init__(self) -> None:
        super().__init__()
        self.action = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.action.expand(*observation.shape[:-3], 1).clone()


class NatureCNN(nn.Module):
    """The network of Mnih et al., "Human-level control through deep reinforcement learning",
    Nature 518 (2015), on frames of 4x84x84 bytes.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, outputs),
        )
        self.outputs = outputs

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """[*lead, 4, 84, 84] uint8 to [*lead, outputs] float32."""
        lead = observation.shape[:-3]
        result: torch.Tensor = self.layers(observation.reshape(-1, 4, 84, 84).float() / 255)
        return result.reshape(*lead, self.outputs)


def nature_policy() -> TensorDictModule:
    """The network with one action in (-1, 1)."""
    net = nn.Sequential(NatureCNN(1), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
