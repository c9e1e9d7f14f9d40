"""Python collectors over C++ environments: how long a pole stays up, and the cost per frame.

    python examples/cpp/python_env/collect.py

Build the module `poles` first; see CMakeLists.txt.
"""

import time
from functools import partial

import poles
import torch

from pycollect import MultiSyncDataCollector, SyncDataCollector

ENVS, FRAMES = 64, 64 * 256


def policy(observation: torch.Tensor) -> torch.Tensor:
    """Push the cart in the direction of the pole's lean, for all environments of a worker."""
    return (observation[:, 2] + 0.5 * observation[:, 3] > 0).long()


def main() -> None:
    """Collect in this process, then in two worker processes."""
    make = partial(poles.CartPole, envs=ENVS)
    for kind, entry in ((SyncDataCollector, make), (MultiSyncDataCollector, [make, make])):
        with kind(entry, policy, frames_per_batch=FRAMES, total_frames=20 * FRAMES) as collector:
            collector.set_seed(0)
            start = time.perf_counter()
            for batch in collector:
                last = batch
            seconds = (time.perf_counter() - start) / (20 * FRAMES)
            mean = collector.stats()["episode_return"]
        print(
            f"{kind.__name__}: {tuple(last.shape)}, mean return {mean:.0f}, "
            f"{seconds * 1e9:.0f} ns for each frame"
        )


if __name__ == "__main__":
    main()
