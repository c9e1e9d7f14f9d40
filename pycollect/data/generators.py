"""The random generators of a worker, separate from those of the program."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import Uninterrupted
from pycollect.data.devices import CPU, generator_state, set_generator_state


def next_seed(seed: int) -> int:
    """Return the seed after `seed` in TorchRL's chain (``torchrl._utils.seed_generator``)."""
    generator = np.random.default_rng(seed)
    return int.from_bytes(generator.bytes(8), "big") % (2**32 - 1)


def seed_chain(seed: int, count: int, static: bool) -> tuple[list[int], int]:
    """Return seeds for `count` environments, starting with `seed`, and the next seed of the chain.

    With `static`, all environments get `seed`, which is also the next one.
    """
    if static:
        return [seed] * count, seed
    seeds = []
    for _ in range(count):
        seeds.append(seed)
        seed = next_seed(seed)
    return seeds, seed


def derived_seeds(count: int, entropy: int, *key: int) -> list[int]:
    """Return seeds for `count` environments that depend only on `entropy` and `key`."""
    sequence = np.random.SeedSequence(entropy, spawn_key=key)
    return [int(seed) for seed in sequence.generate_state(count, np.uint32)]


# Errors of torch, numpy and Python for an invalid generator state.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_MT19937_WORDS = 624


@dataclass(frozen=True)
class GeneratorState:
    """States of a worker's random generators. Can be pickled."""

    torch: npt.NDArray[np.uint8]  # of torch's global generator
    numpy: Any  # as ``np.random.get_state(legacy=False)`` returns it
    python: Any  # as ``random.getstate()`` returns it
    actions: tuple[dict[str, Any], ...]  # `bit_generator.state` of each environment's generator
    # Of the global generator of the policy's device; empty for the CPU.
    device: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def plain(self) -> dict[str, Any]:
        """Return tensors, numbers and strings, which ``torch.load(weights_only=True)`` accepts."""
        version, words, next_gauss = self.python
        return {
            "torch": torch.from_numpy(self.torch.copy()),
            "numpy": _plain_numpy(self.numpy),
            "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), next_gauss],
            "actions": [_plain(state) for state in self.actions],
            "device": torch.from_numpy(self.device.copy()),
        }

    @classmethod
    def from_plain(cls, plain: Any, place: str = "generators") -> GeneratorState:
        if not isinstance(plain, Mapping):
            raise ValueError(
                f"state_dict: expected a dict of generator states in {place}, got "
                f"{type(plain).__name__}"
            )
        values = {}
        for name, read in _READERS.items():
            try:
                values[name] = read(plain[name])
            except _REFUSALS as error:
                raise ValueError(
                    f"state_dict: expected the state of a generator in {place}, {name!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return cls(**values)

    def action_generators(self) -> list[np.random.Generator]:
        """Create generators of random actions that continue from this state."""
        return [_action_generator(state) for state in self.actions]


@dataclass(frozen=True)
class NestState:
    """Generator states of the processes of an actor or rank that holds several workers."""

    processes: tuple[GeneratorState, ...]

    def plain(self) -> dict[str, Any]:
        return {"processes": [state.plain() for state in self.processes]}


def from_plain(plain: Any, place: str) -> GeneratorState | NestState:
    """Return the state of a worker from its plain form."""
    if isinstance(plain, Mapping) and isinstance(plain.get("processes"), list):
        return NestState(
            tuple(
                GeneratorState.from_plain(process, f"{place}, 'processes', {number}")
                for number, process in enumerate(plain["processes"])
            )
        )
    return GeneratorState.from_plain(plain, place)


def _plain_numpy(state: Mapping[str, Any]) -> Any:
    """Return the plain state of numpy's global generator, which may be other than MT19937."""
    if state["bit_generator"] != "MT19937":
        return _plain(state)
    inner = state["state"]
    keys = torch.from_numpy(inner["key"].astype(np.int64))
    return ["MT19937", keys, inner["pos"], state["has_gauss"], state["gauss"]]


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a numpy bit generator's state with strings for its integers of up to 128 bits."""
    inner = {name: str(value) for name, value in state["state"].items()}
    return {**state, "state": inner}


# Readers of plain states. Each returns a value that a generator has accepted.


def _read_torch(plain: torch.Tensor) -> npt.NDArray[np.uint8]:
    state = _bytes(plain)
    _torch_generator(state)
    return state


def _bytes(plain: torch.Tensor) -> npt.NDArray[np.uint8]:
    if plain.dtype != torch.uint8 or plain.ndim != 1:
        raise ValueError(f"expected a vector of uint8, got {plain.dtype}{list(plain.shape)}")
    return plain.numpy()


def _read_python(plain: Any) -> Any:
    version, words, next_gauss = plain
    if not isinstance(next_gauss, float | None):
        raise TypeError(f"expected a float or None as the next normal, got {next_gauss!r}")
    return _python_generator((version, tuple(words.tolist()), next_gauss)).getstate()


def _read_numpy(plain: Any) -> Any:
    state = _whole(plain) if isinstance(plain, Mapping) else _whole_mt19937(plain)
    if state["has_gauss"] not in (0, 1) or not isinstance(state["gauss"], float):
        raise ValueError("expected 0 or 1 for 'has_gauss' and a float for 'gauss'")
    return _Numpy.of(state).state


def _whole_mt19937(plain: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = plain
    if name != "MT19937" or keys.dtype != torch.int64 or keys.shape != (_MT19937_WORDS,):
        raise ValueError(f"expected {_MT19937_WORDS} words of an MT19937")
    words = keys.numpy()
    # numpy itself checks neither the words nor the position.
    if words.min() < 0 or words.max() >= 2**32 or not 0 <= position <= _MT19937_WORDS:
        raise ValueError("expected words below 2**32, and a position among them")
    inner = {"key": words.astype(np.uint32), "pos": position}
    return {"bit_generator": name, "state": inner, "has_gauss": has_gauss, "gauss": gauss}


def _read_actions(plain: Any) -> tuple[dict[str, Any], ...]:
    return tuple(dict(_action_generator(_whole(state)).bit_generator.state) for state in plain)


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a dict, got {type(state).__name__}")
    inner = state["state"]
    for name, value in inner.items():
        if not isinstance(value, str):
            raise TypeError(f"expected a string of digits for {name!r}, got {value!r}")
    return {**state, "state": {name: int(value) for name, value in inner.items()}}


_READERS: dict[str, Callable[[Any], Any]] = {
    "torch": _read_torch,
    "numpy": _read_numpy,
    "python": _read_python,
    "actions": _read_actions,
    "device": _bytes,  # unchecked, because this process may lack the device
}


def _torch_generator(state: npt.NDArray[np.uint8]) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state.copy()))
    return generator


def _python_generator(state: Any) -> random.Random:
    generator = random.Random()
    generator.setstate(state)
    return generator


def _action_generator(state: Mapping[str, Any]) -> np.random.Generator:
    generator = np.random.default_rng()
    generator.bit_generator.state = state
    return generator


class Generators:
    """Generators of a worker, which temporarily replace those of torch, numpy and Python."""

    def __init__(self, sequence: np.random.SeedSequence, device: torch.device = CPU) -> None:
        torch_seed, numpy_seed, python_seed, device_seed = sequence.generate_state(4, np.uint64)
        device_state = None
        if device.type != "cpu":
            device_state = torch.Generator(device).manual_seed(int(device_seed) >> 1).get_state()
        legacy = np.random.RandomState(int(numpy_seed) % 2**32)
        self._device = device
        self._states = _Globals(
            torch.Generator().manual_seed(int(torch_seed) >> 1).get_state(),
            _Numpy.of(legacy.get_state(legacy=False)),
            random.Random(int(python_seed)).getstate(),
            device_state,
        )

    @classmethod
    def of(cls, state: GeneratorState, device: torch.device = CPU) -> Generators:
        """Return generators that continue from a state.

        If the state has none for the device, the device's generator is seeded from torch's initial
        seed.
        """
        cpu_generator = _torch_generator(state.torch)
        self = cls(np.random.SeedSequence(cpu_generator.initial_seed()), device)
        device_state = self._states.device
        if state.device.size and device.type != "cpu":
            generator = torch.Generator(device)
            generator.set_state(torch.from_numpy(state.device.copy()))
            device_state = generator.get_state()
        self._states = _Globals(
            cpu_generator.get_state(),
            _Numpy.of(state.numpy),
            _python_generator(state.python).getstate(),
            device_state,
        )
        return self

    def state(self, actions: Sequence[np.random.Generator]) -> GeneratorState:
        """Return the present states, including the generators of random actions."""
        each = tuple(dict(generator.bit_generator.state) for generator in actions)
        states = self._states
        device = np.empty(0, np.uint8) if states.device is None else states.device.numpy()
        return GeneratorState(states.cpu.numpy(), states.numpy.state, states.python, each, device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the worker's generators as the global ones within the block."""
        caller = _Globals.now(self._device)
        is_active = is_restored = False
        try:
            with Uninterrupted():
                self._states.put(self._device)
                is_active = True
            yield
        finally:
            try:
                with Uninterrupted():
                    if is_active:
                        self._states = _Globals.now(self._device)
                    caller.put(self._device)
                    is_restored = True
            finally:
                if not is_restored:  # an interrupt came before the block
                    caller.put(self._device)


class _Globals(NamedTuple):
    """States of the global generators at one moment."""

    cpu: torch.Tensor
    numpy: _Numpy
    python: Any  # as ``random.getstate()`` returns it
    device: torch.Tensor | None  # state of a device's generator; ``None`` for the CPU

    @classmethod
    def now(cls, device: torch.device) -> _Globals:
        """Return the present states, including the device's generator."""
        return cls(torch.get_rng_state(), _Numpy.now(), random.getstate(), generator_state(device))

    def put(self, device: torch.device) -> None:
        set_generator_state(device, self.device)
        torch.set_rng_state(self.cpu)
        self.numpy.put()
        random.setstate(self.python)


class _Numpy(NamedTuple):
    """The state of numpy's global generator at some moment.

    The whole bit generator is replaced, because writing a state into one takes 40 us. Code that
    holds the bit generator object, instead of using ``np.random``, keeps drawing from the caller's.
    """

    state: Any  # as ``np.random.get_state(legacy=False)`` returns it
    bits: Any

    @classmethod
    def now(cls) -> _Numpy:
        return cls(np.random.get_state(legacy=False), np.random.mtrand.get_bit_generator())

    @classmethod
    def of(cls, state: Any) -> _Numpy:
        """Return a generator in a state; ValueError if it names an unknown bit generator."""
        kind = getattr(np.random, state["bit_generator"], None)
        if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
            raise ValueError(
                f"expected the name of a bit generator, got {state['bit_generator']!r}"
            )
        bits = kind()
        legacy = np.random.RandomState(bits)
        legacy.set_state(state)
        return cls(legacy.get_state(legacy=False), bits)

    def put(self) -> None:
        """Make this numpy's global generator; it must not have been used in the meantime."""
        np.random.mtrand.set_bit_generator(self.bits)
        if self.state["has_gauss"]:  # half of a pair of normals, which is not in the bit generator
            np.random.set_state(self.state)
