"""The random generators of a worker, apart from those of the program around it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pycollect.devices import CPU, generator_state, set_generator_state


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


def derived_seeds(count: int, entropy: int, *key: int) -> list[int]:
    """Seeds for `count` envs that depend on nothing but `entropy` and `key`."""
    sequence = np.random.SeedSequence(entropy, spawn_key=key)
    return [int(seed) for seed in sequence.generate_state(count, np.uint32)]


# What torch, numpy and Python raise where they are given something that is no state.
_REFUSALS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class GeneratorState:
    """What has to be kept to go on drawing where a worker stopped; pickles.

    Attributes:
        torch: of the global generator, uint8.
        numpy: as ``np.random.get_state(legacy=False)`` returns it.
        python: as ``random.getstate()`` returns it.
        actions: ``bit_generator.state`` of each env's generator of random actions.
        device: of the global generator of the policy's device, uint8; empty for the CPU.
    """

    torch: npt.NDArray[np.uint8]
    numpy: Any
    python: Any
    actions: tuple[dict[str, Any], ...]
    device: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def plain(self) -> dict[str, Any]:
        """As tensors, numbers and strings, which ``torch.load(weights_only=True)`` takes."""
        version, words, next_gauss = self.python
        return {
            "torch": torch.from_numpy(self.torch.copy()),
            "numpy": _plain_numpy(self.numpy),
            "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), next_gauss],
            "actions": [_plain(state) for state in self.actions],
            "device": torch.from_numpy(self.device.copy()),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GeneratorState:
        """What `plain` returned; ValueError for anything that no generator takes."""
        try:
            version, words, next_gauss = plain["python"]
            state = cls(
                torch=plain["torch"].numpy(),
                numpy=_whole_numpy(plain["numpy"]),
                python=(version, tuple(words.tolist()), next_gauss),
                actions=tuple(_whole(own) for own in plain["actions"]),
                device=plain["device"].numpy(),
            )
            Generators.of(state)
            state.action_generators()
        except _REFUSALS as error:
            raise ValueError(f"state_dict: expected states of generators, got {error}") from error
        return state

    def action_generators(self) -> list[np.random.Generator]:
        """New generators that go on where those of the state stood."""
        generators = []
        for state in self.actions:
            generator = np.random.default_rng()
            generator.bit_generator.state = state
            generators.append(generator)
        return generators


@dataclass(frozen=True)
class TeamState:
    """Where the generators of several processes stand that are one worker, in their order."""

    processes: tuple[GeneratorState, ...]

    def plain(self) -> dict[str, Any]:
        """As :meth:`GeneratorState.plain`."""
        return {"processes": [state.plain() for state in self.processes]}


def from_plain(plain: Any) -> GeneratorState | TeamState:
    """What `plain` of one of them returned; ValueError for anything that no generator takes."""
    if isinstance(plain, Mapping) and isinstance(plain.get("processes"), list):
        return TeamState(tuple(map(GeneratorState.from_plain, plain["processes"])))
    return GeneratorState.from_plain(plain)


def _plain_numpy(state: Mapping[str, Any]) -> Any:
    """numpy's global generator: an MT19937, unless somebody has put another one there."""
    if state["bit_generator"] != "MT19937":
        return _plain(state)
    inner = state["state"]
    keys = torch.from_numpy(inner["key"].astype(np.int64))
    return ["MT19937", keys, inner["pos"], state["has_gauss"], state["gauss"]]


def _whole_numpy(plain: Any) -> dict[str, Any]:
    if isinstance(plain, Mapping):
        return _whole(plain)
    name, keys, position, has_gauss, gauss = plain
    inner = {"key": keys.numpy().astype(np.uint32), "pos": position}
    return {"bit_generator": name, "state": inner, "has_gauss": has_gauss, "gauss": gauss}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A numpy bit generator's state: its integers have 128 bits, so they become strings."""
    inner = {name: str(value) for name, value in state["state"].items()}
    return {**state, "state": inner}


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": {name: int(value) for name, value in state["state"].items()}}


class Generators:
    """States of torch's, numpy's and Python's global generators, to be swapped in for a while.

    Args:
        sequence: what all of them are seeded from.
        device: whose global generator is swapped, too.
    """

    def __init__(self, sequence: np.random.SeedSequence, device: torch.device = CPU) -> None:
        torch_seed, numpy_seed, python_seed, last = sequence.generate_state(4, np.uint64)
        self._place = device
        self._device: torch.Tensor | None = None
        if device.type != "cpu":
            self._device = torch.Generator(device).manual_seed(int(last) >> 1).get_state()
        self._torch = torch.Generator().manual_seed(int(torch_seed) >> 1).get_state()
        legacy = np.random.RandomState(int(numpy_seed) % 2**32)
        self._numpy = _Numpy.of(legacy.get_state(legacy=False))
        self._python = random.Random(int(python_seed)).getstate()

    @classmethod
    def of(cls, state: GeneratorState, device: torch.device = CPU) -> Generators:
        """Generators that go on where those of the state stood.

        Where the state has none of that device, its generator is seeded from the state's seed.
        """
        own = torch.Generator()
        own.set_state(torch.from_numpy(state.torch.copy()))
        self = cls(np.random.SeedSequence(own.initial_seed()), device)
        if state.device.size and device.type != "cpu":
            self._device = torch.from_numpy(state.device.copy())
        python = random.Random()
        python.setstate(state.python)
        self._torch, self._numpy = own.get_state(), _Numpy.of(state.numpy)
        self._python = python.getstate()
        return self

    def state(self, actions: Sequence[np.random.Generator]) -> GeneratorState:
        """Where they stand now, and where the generators of random actions do."""
        own = tuple(dict(generator.bit_generator.state) for generator in actions)
        place = np.empty(0, np.uint8) if self._device is None else self._device.numpy()
        return GeneratorState(self._torch.numpy(), self._numpy.state, self._python, own, place)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the global generators are the worker's; afterwards the caller's, unchanged."""
        callers = torch.get_rng_state(), _Numpy.now(), random.getstate()
        callers_device = generator_state(self._place)
        set_generator_state(self._place, self._device)
        torch.set_rng_state(self._torch)
        self._numpy.put()
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch = torch.get_rng_state()
            self._numpy = _Numpy.now()
            self._python = random.getstate()
            self._device = generator_state(self._place)
            set_generator_state(self._place, callers_device)
            torch.set_rng_state(callers[0])
            callers[1].put()
            random.setstate(callers[2])


class _Numpy(NamedTuple):
    """numpy's global generator as it stood at some moment.

    Its bit generator is exchanged as a whole: to write a state into one takes 40 us. Whoever holds
    that object, instead of drawing from ``np.random``, goes on drawing from the caller's.

    Attributes:
        state: as ``np.random.get_state(legacy=False)`` returns it.
    """

    state: Any
    bits: Any

    @classmethod
    def now(cls) -> _Numpy:
        return cls(np.random.get_state(legacy=False), np.random.mtrand.get_bit_generator())

    @classmethod
    def of(cls, state: Any) -> _Numpy:
        """In that state, with a bit generator of its own; ValueError where it is none."""
        kind = getattr(np.random, state["bit_generator"], None)
        if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
            raise ValueError(f"expected a bit generator's name, got {state['bit_generator']!r}")
        bits = kind()
        np.random.RandomState(bits).set_state(state)  # looks at all of it
        return cls(state, bits)

    def put(self) -> None:
        """Make it numpy's global generator again, of which nobody else has drawn since."""
        np.random.mtrand.set_bit_generator(self.bits)
        if self.state["has_gauss"]:  # half of a pair of normals, which lies outside of the bits
            np.random.set_state(self.state)
