"""Pack and unpack a rollout for another node: Atari's frames, and floats.

Counts observations of a single environment. PyTorchRL pickles the whole rollout, compresses it, and
encodes it as text.
"""

from collections.abc import Callable, Iterator

import gymnasium
import numpy as np
import torch

from benchmarks.race import Side

STEPS, ENVS = 128, 8


def pong() -> torch.Tensor:
    """Return observations of random play: four frames of 84 x 84 each, uint8."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env)
    return played(gymnasium.wrappers.FrameStackObservation(env, 4), 1).repeat(1, ENVS, 1, 1, 1)


def pendulum() -> torch.Tensor:
    """Return observations of three float32 each, a few hundred KiB."""
    return played(gymnasium.make("Pendulum-v1"), 20)


def played(env: gymnasium.Env, times: int) -> torch.Tensor:
    """Return observations [steps, 1, ...] of random actions."""
    env.action_space.seed(0)
    rows = [env.reset(seed=0)[0]]
    while len(rows) < STEPS * times:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        rows.append(env.reset()[0] if terminated or truncated else observation)
    return torch.from_numpy(np.stack(rows))[:, None]


def ours(make: Callable[[], torch.Tensor]) -> Iterator[int]:
    """Pack with pycollect: each leaf by LZ4."""
    from pycollect.scheme import pack, unpack

    yield from packing(make(), pack, unpack)


def theirs(make: Callable[[], torch.Tensor]) -> Iterator[int]:
    """Pack with PyTorchRL."""
    from pytorchrl.scheme.utils import pack, unpack

    yield from packing(make(), pack, unpack)


def copied(make: Callable[[], torch.Tensor]) -> Iterator[int]:
    """Copy twice, without compression."""
    yield from packing(make(), clone, clone)


def clone(value: tuple) -> tuple:
    """Return copies of the tensors."""
    data, info = value
    return {name: tensor.clone() for name, tensor in data.items()}, info


def packing(frames: torch.Tensor, pack: Callable, unpack: Callable) -> Iterator[int]:
    """Pack and unpack observations and rewards repeatedly."""
    data = {"Observation": frames, "Reward": torch.zeros(frames.shape[:2])}
    while True:
        opened, _ = unpack(pack((data, {"NumberSamples": 1})))
        assert opened["Observation"].shape == frames.shape
        yield frames.shape[0] * frames.shape[1]


def sides(make: Callable[[], torch.Tensor]) -> list[Side]:
    """Return our side, PyTorchRL's and the limit."""
    return [
        Side("pycollect", ours, {"make": make}),
        Side("PyTorchRL", theirs, {"make": make}, needs="pytorchrl"),
        Side("two copies", copied, {"make": make}),
    ]


def test_frames(compare: Callable[..., None]) -> None:
    """Compare frames of a game, which compress to about a hundredth."""
    compare(
        "pack and unpack, 4x84x84 uint8 frames of Pong",
        sides(pong),
        frame_bytes=4 * 84 * 84,
        wanted={"PyTorchRL": 3},
    )


def test_floats(compare: Callable[..., None]) -> None:
    """Compare floats, which hardly compress."""
    compare(
        "pack and unpack, float32 observations of Pendulum",
        sides(pendulum),
        frame_bytes=3 * 4,
        wanted={"PyTorchRL": 3},
    )
