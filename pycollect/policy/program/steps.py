"""Steps of a program: calls of functions over tensors, and distributions to sample.

A `Program` is a list of steps that read and write one dictionary of tensors by key. It describes
the computation; `compile.py` decides whether the module itself or a plan runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from torch import nn
from torch.nn.parameter import is_lazy

from pycollect.data.devices import generator_state, set_generator_state
from pycollect.data.layout import Key, as_key, is_delivered, show, show_all
from pycollect.data.tensordicts import overwrite

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Values: TypeAlias = dict[Key, torch.Tensor]

IGNORED: Key = ("_",)  # tensordict's name for an ignored output


class CannotUnwrapError(Exception):
    """The policy needs a TensorDict, so it is called with one."""


class PolicyOutputError(ValueError):
    """A policy's output is not supported, or differs from that of its first call."""


@dataclass(frozen=True)
class CallStep:
    """One call `function(*inputs)`, or `function(**inputs)` if there are `names`.

    Attributes:
        lenient: Convert returned numpy arrays and Python numbers to tensors. Otherwise they raise
            `CannotUnwrapError`, because TensorDictModule has its own rules for them.
        others: Keys at the end of `out_keys` that the policy does not name, see `other_keys`.
        numbered: Whether these keys are output1, output2, ..., so that the values of a returned
            tuple are in the order of `out_keys`.
    """

    function: Callable[..., Any]
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]
    names: tuple[str, ...] | None = None
    lenient: bool = False
    others: tuple[Key, ...] = ()
    numbered: bool = False

    def with_outputs(self, others: tuple[Key, ...]) -> CallStep:
        """Return the step with keys for further outputs."""
        if not others:
            return self
        numbered = others == tuple((f"output{n}",) for n in range(1, len(others) + 1))
        out_keys = (*self.out_keys, *others)
        return replace(self, out_keys=out_keys, others=others, numbered=numbered)

    @property
    def module(self) -> nn.Module | None:
        """The nn.Module that the step calls with one tensor, which a plan may replace.

        ``None`` for other functions.
        """
        simple = isinstance(self.function, nn.Module) and len(self.in_keys) == 1
        return self.function if simple and self.names is None else None  # type: ignore[return-value]


@dataclass(frozen=True)
class HeadStep:
    """Sampling from the distribution of a ProbabilisticTensorDictModule."""

    head: ProbabilisticTensorDictModule
    in_keys: tuple[Key, ...]
    sample_keys: tuple[Key, ...]
    log_prob_key: Key | None
    default: InteractionType

    @property
    def out_keys(self) -> tuple[Key, ...]:
        """Keys of the samples, followed by the log-probability's."""
        return self.sample_keys + ((self.log_prob_key,) if self.log_prob_key else ())


Step: TypeAlias = CallStep | HeadStep


@dataclass(frozen=True)
class Program:
    """A policy as a sequence of steps.

    Attributes:
        selected: Keys that the policy returns. Defaults to ``None``: all that it writes.
        watched: Modules whose hooks, children and attributes must not change while the program is
            used.
    """

    steps: tuple[Step, ...]
    selected: frozenset[Key] | None = None
    watched: tuple[nn.Module, ...] = ()

    @property
    def others(self) -> tuple[Key, ...]:
        """Keys of outputs that the policy itself does not name."""
        steps = (step for step in self.steps if isinstance(step, CallStep))
        return tuple(key for step in steps for key in step.others)

    def with_outputs(self, others: tuple[Key, ...]) -> Program:
        """Return the program of a policy over tensors with keys for further outputs."""
        steps = tuple(
            step.with_outputs(others) if isinstance(step, CallStep) and step.lenient else step
            for step in self.steps
        )
        return replace(self, steps=steps)

    @property
    def written(self) -> tuple[Key, ...]:
        """Keys that the policy writes and returns, in the order of first writing."""
        keys = dict.fromkeys(key for step in self.steps for key in step.out_keys if key != IGNORED)
        return tuple(key for key in keys if self.selected is None or key in self.selected)

    @property
    def read(self) -> tuple[Key, ...]:
        """Keys that the program reads before writing them, in the order of first reading."""
        keys: dict[Key, None] = {}
        known: set[Key] = set()
        for step in self.steps:
            keys.update(dict.fromkeys(key for key in step.in_keys if key not in known))
            known.update(step.out_keys)
        return tuple(keys)


def other_keys(out: Any, step: CallStep) -> tuple[Key, ...]:
    """Return the keys of all outputs except those that the step names itself.

    Entries of a dict keep their keys. Further entries of a tuple are named as in TorchRL: output1,
    output2, ..., and ("output1", "0"), ... in a nested tuple.
    """
    if not step.lenient:
        return ()
    return tuple(key for key in _entries(out, step) if key not in step.out_keys)


def _entries(out: Any, step: CallStep) -> dict[Key, Any]:
    """Return the outputs of a function over tensors by key."""
    if isinstance(out, Mapping | TensorDictBase):
        return dict(_parts(out, ()))
    values = _as_tuple(out, step)
    named = len(step.out_keys) - len(step.others)
    entries = dict(zip(step.out_keys, values[:named], strict=False))
    for number, value in enumerate(values[named:], 1):
        entries.update(_parts(value, (f"output{number}",)))
    return entries


def _parts(value: Any, key: Key) -> list[tuple[Key, Any]]:
    """Return keys and values of nested dicts and tuples, without None and private keys."""
    if isinstance(value, Mapping | TensorDictBase):
        parts = [((*key, *_name(name)), part) for name, part in value.items()]
    elif isinstance(value, tuple):
        parts = [((*key, str(place)), part) for place, part in enumerate(value)]
    else:
        return [] if value is None or not is_delivered(key) else [(key, value)]
    return [entry for inner, part in parts for entry in _parts(part, inner)]


def _name(name: Any) -> Key:
    try:
        return as_key(name)
    except TypeError as error:
        raise PolicyOutputError(
            "policy: expected strings, or tuples of strings, as keys of a returned dict, got "
            f"{name!r}"
        ) from error


def spread(out: Any, step: CallStep) -> tuple[torch.Tensor, ...]:
    """Return one tensor per output key of a call."""
    keys = step.out_keys
    is_dict = isinstance(out, Mapping | TensorDictBase)
    if is_dict and step.lenient:
        out = _flat(out, keys) or _all_of(_entries(out, step), keys)
    elif is_dict:
        out = _by_key(out, keys)
    elif step.others and not (step.numbered and isinstance(out, tuple) and len(out) == len(keys)):
        out = _all_of(_entries(out, step), keys)
    else:
        values = _as_tuple(out, step)
        extra = step.lenient and len(values) > len(keys)
        out = _all_of(_entries(out, step), keys) if extra else values
    if len(out) != len(keys):
        raise PolicyOutputError(
            f"policy: expected {len(keys)} output(s), for the key(s) {show_all(keys)}, got "
            f"{len(out) or None}"
        )
    return tuple(_as_tensor(o, key, step.lenient) for o, key in zip(out, keys, strict=True))


def _as_tuple(out: Any, step: CallStep) -> tuple[Any, ...]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if out is None:
        return ()
    if isinstance(out, list) and step.lenient and any(isinstance(o, torch.Tensor) for o in out):
        return tuple(out)
    return out if isinstance(out, tuple) else (out,)


def _flat(out: Any, keys: tuple[Key, ...]) -> tuple[Any, ...]:
    """Return the entries of a dict of exactly these keys, all tensors; else ()."""
    if not isinstance(out, dict) or len(out) != len(keys):
        return ()
    values = tuple([out.get(key[0] if len(key) == 1 else key) for key in keys])
    return values if all(isinstance(value, torch.Tensor) for value in values) else ()


def _all_of(entries: Mapping[Key, Any], keys: tuple[Key, ...]) -> tuple[Any, ...]:
    """Return the entries in the order of the keys; raise PolicyOutputError if the keys differ."""
    missing = [key for key in keys if key not in entries]
    if missing:
        raise PolicyOutputError(
            f"policy: expected the output(s) {show_all(missing)}, got {show_all(entries)}"
        )
    if len(entries) > len(keys):
        others = [key for key in entries if key not in keys]
        raise PolicyOutputError(
            f"policy: it returned {show_all(others)}, but in its first call only {show_all(keys)}; "
            "always return the same keys"
        )
    return tuple([entries[key] for key in keys])


def _by_key(out: Mapping[Any, Any] | TensorDictBase, keys: tuple[Key, ...]) -> tuple[Any, ...]:
    if isinstance(out, TensorDictBase):
        out = dict(out.items(include_nested=True))
    entries = {as_key(key): value for key, value in out.items()}
    missing = [key for key in keys if key not in entries]
    if missing:
        raise CannotUnwrapError(f"it returned no {show_all(missing)}")
    return tuple([entries[key] for key in keys])


def _as_tensor(value: Any, key: Key, lenient: bool) -> Any:
    if isinstance(value, torch.Tensor) or key == IGNORED:
        return value
    if not lenient:
        raise CannotUnwrapError(f"{show(key)} is a {type(value).__name__}, not a tensor")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "; pass a function or class that makes the policy as policy_factory"
        raise PolicyOutputError(
            f"policy: expected a tensor for {show(key)}, got a {type(value).__name__}"
            f"{hint if callable(value) else ''}"
        ) from error


@contextmanager
def preserve_state(policy: Any, device: torch.device) -> Iterator[None]:
    """Restore random generators and the module's buffers when the block ends.

    The generators are torch's on the CPU and on `device`, the global ones of numpy and Python, and
    attributes of the policy's modules. Buffers get their old tensors and contents back.
    """
    torch_state, device_state = torch.get_rng_state(), generator_state(device)
    numpy_state = np.random.get_state(legacy=False)
    python_state = random.getstate()
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    restorers = [
        _restorer(generator)
        for module in modules
        for generator in vars(module).values()
        if isinstance(generator, torch.Generator | np.random.Generator)
    ]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        set_generator_state(device, device_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for restore in restorers:
            restore()
        with torch.no_grad():
            for module, name, buffer, contents in buffers:
                overwrite(buffer, contents)
                module._buffers[name] = buffer


def _restorer(generator: torch.Generator | np.random.Generator) -> Callable[[], object]:
    """Return a function that brings the generator back into its present state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
