"""The random generators of a worker, apart from those of the program around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def next_seed(seed: int) -> int:
    """The seed that follows `seed` in TorchRL's chain (``torchrl._utils.seed_generator``)."""
    generator = np.random.default_rng(seed)
    return int.from_bytes(generator.bytes(8), "big") % (2**32 - 1)


def seed_chain(seed: int, count: int, static: bool) -> tuple[list[int], int]:
    """Seeds for `count` envs, the first of them `seed`, and the next one of the chain."""
    if static:
        return [seed] * count, next_seed(seed)
    seeds = []
    for _ in range(count):
        seeds.append(seed)
        seed = next_seed(seed)
    return seeds, seed


class Generators:
    """States of torch's, numpy's and Python's global generators, to be swapped in for a while.

    Args:
        sequence: what all three are seeded from.
    """

    def __init__(self, sequence: np.random.SeedSequence) -> None:
        torch_seed, numpy_seed, python_seed = sequence.generate_state(3, np.uint64)
        self._torch = torch.Generator().manual_seed(int(torch_seed) >> 1).get_state()
        self._numpy: Any = np.random.RandomState(int(numpy_seed) % 2**32).get_state()
        self._python = random.Random(int(python_seed)).getstate()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the global generators are the worker's; afterwards the caller's, unchanged."""
        callers = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch = torch.get_rng_state()
            self._numpy = np.random.get_state()
            self._python = random.getstate()
            torch.set_rng_state(callers[0])
            np.random.set_state(callers[1])
            random.setstate(callers[2])
