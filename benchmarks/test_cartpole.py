"""64 CartPoles stepped as a batch, and a policy with a categorical head.

The environment is Gymnasium's vector entry point, in which a reset takes one step of a
sub-environment. Neither side counts these steps as frames. TorchRL refuses this environment because
of its NEXT_STEP autoreset, so its peer row runs the fastest kind that it accepts: a SyncVectorEnv
without autoreset.

EnvPool steps in its own threads and has the same autoreset, so it is the same case with an
environment that takes little of the caller's time. It is omitted if it is not installed.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, read_tensors, torchrls

PEER = "TorchRL, SyncVectorEnv"
ENVS = 64
STEPS = 128
FRAME_BYTES = workloads.CARTPOLE_BYTES


def entry_point() -> VectorEnv:
    """Return CartPoleVectorEnv, which steps all sub-environments in one numpy expression."""
    return gymnasium.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point")


def pool() -> Any:
    """Return EnvPool's CartPoles."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=ENVS, seed=0)


def one_by_one() -> VectorEnv:
    """Return 64 environments stepped one after the other; the caller resets them."""
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=ENVS,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
    )


def work(make: Callable[[], Any]) -> dict[str, Any]:
    """Return the arguments of a collector in this process."""
    policy = workloads.categorical_policy
    single = {"collector": "SyncDataCollector", "env": make, "policy": policy}
    return {**single, "frames_per_batch": ENVS * STEPS}


def plain_loop(make: Callable[[], Any]) -> Iterator[int]:
    """Run a loop by hand: the bare network, the distribution, preallocated arrays."""
    env = make()
    network = workloads.mlp()
    observations = np.empty((STEPS, ENVS, 4), np.float32)
    actions = np.empty((STEPS, ENVS), np.int64)
    log_probs = np.empty((STEPS, ENVS), np.float32)
    rewards = np.empty((STEPS, ENVS), np.float32)
    terminated = np.empty((STEPS, ENVS), bool)
    truncated = np.empty((STEPS, ENVS), bool)
    arrays = [torch.from_numpy(array) for array in (observations, actions, rewards)]
    observation, _ = env.reset()
    ended_before = np.zeros(ENVS, bool)
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                head = torch.distributions.Categorical(
                    logits=network(torch.from_numpy(observation))
                )
                action = head.sample()
                log_probs[t] = head.log_prob(action).numpy()
                observations[t] = observation
                actions[t] = action.numpy()
                observation, reward, ended, cut, _ = env.step(action.numpy())
                rewards[t] = reward
                terminated[t] = ended
                truncated[t] = cut
        read_tensors(*arrays)
        done = terminated | truncated
        dummies = np.count_nonzero(ended_before) + np.count_nonzero(done[:-1])
        ended_before = done[-1]
        yield STEPS * ENVS - dummies


def test_vector_entry_point(compare: Callable[..., None]) -> None:
    """Compare one worker; dummy steps do not count as frames."""
    compare(
        "CartPole x64, categorical",
        [
            Side("pycollect", ours, work(entry_point)),
            Side(PEER, torchrls, work(one_by_one), needs="torchrl"),
            Side("plain loop", plain_loop, {"make": entry_point}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 0.85},
    )


def test_envpool(compare: Callable[..., None]) -> None:
    """Compare one worker; dummy steps do not count as frames."""
    if find_spec("envpool") is None:
        pytest.skip("needs envpool")
    compare(
        "CartPole x64, EnvPool, categorical",
        [
            Side("pycollect", ours, work(pool)),
            Side("plain loop", plain_loop, {"make": pool}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 1.3},
    )


@pytest.mark.full
def test_sync_vector_env(compare: Callable[..., None]) -> None:
    """Compare the environment that TorchRL accepts on both sides."""
    compare(
        "CartPole x64, SyncVectorEnv",
        [
            Side("pycollect", ours, work(one_by_one)),
            Side(PEER, torchrls, work(one_by_one), needs="torchrl"),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={},
    )
