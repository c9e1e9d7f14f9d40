"""Recurrent states of a policy, and entries that the collector writes for it.

The form of a state (shape, dtype, first value) comes from the first of these that defines it: a
primer of the policy's modules, as TorchRL's `make_tensordict_primer()` returns it (TorchRL is not
imported); `policy_state`; the RNN layers inside the policy. The last two may allow several forms.
The probe then calls the policy with each, and uses the first form whose dtype and shape it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycollect._core import Leaf
from pycollect.data.layout import Key, as_key, dtype_name, show
from pycollect.envs.base import EnvSpec

IS_INIT: Key = ("is_init",)
STEP_COUNT: Key = ("step_count",)
_FLAGS: tuple[Key, ...] = (("done",), ("terminated",), ("truncated",))


class CollectorEntries:
    """Inputs of a policy that the collector writes: `is_init`, `step_count` and flags.

    An entry is created when a policy reads it, so others cost nothing.

    Args:
        env: The environment. If it has no flags of its own, the flags are offered. They are always
            False, because an environment is reset before its policy acts again.
        counts_steps: Whether the recorder counts the steps of each trajectory.

    Attributes:
        tensors: Entries by key, [1] or [P, 1] each: `is_init` and flags bool, `step_count` int64.
            The Recorder updates `is_init` and `step_count`.
    """

    def __init__(self, env: EnvSpec, counts_steps: bool) -> None:
        self._shape = (*env.rows, 1)
        self._first: dict[Key, bool | int] = {IS_INIT: True}
        if not env.own_flags:
            self._first.update(dict.fromkeys(_FLAGS, False))
        if counts_steps:
            self._first[STEP_COUNT] = 0
        self.tensors: dict[Key, torch.Tensor] = {}

    def offers(self, key: Key) -> bool:
        return key in self._first

    def missing(self, error: KeyError) -> Key | None:
        """Return the offered entry that a policy's KeyError names, ``None`` if there is none."""
        left = (key for key in self._first if key not in self.tensors)
        return next((key for key in left if key[0] in str(error)), None)

    def give(self, key: Key) -> torch.Tensor:
        """Create an entry with its value at a trajectory's first step, and return its memory."""
        self.tensors[key] = torch.tensor(self._first[key], device="cpu").repeat(self._shape)
        return self.tensors[key]


@dataclass(frozen=True)
class PolicyState:
    """A state that a policy passes to its next call: it reads `leaf.key`, writes ("next", ...)."""

    leaf: Leaf  # key that the policy reads, dtype, and shape for one environment
    current: torch.Tensor  # for the next call, [*frame] or [P, *frame]; the Recorder updates it
    initial: torch.Tensor  # value at a trajectory's first step, [*frame] or [P, *frame]
    recorded: bool = True  # whether batches contain the state (default: ``True``)

    @property
    def next_key(self) -> Key:
        """The key under which the policy returns the next value."""
        return ("next", *self.leaf.key)

    @property
    def next_leaf(self) -> Leaf:
        return Leaf(self.next_key, self.leaf.dtype, self.leaf.shape)


@dataclass(frozen=True)
class StateForm:
    """One form that a state may have.

    `draw` draws the first value for one environment or for all; without it, every trajectory begins
    with `initial`.
    """

    shape: tuple[int, ...]
    initial: torch.Tensor  # value at a trajectory's first step, of that shape
    draw: Callable[[], torch.Tensor] | None = None

    def state(self, key: Key, env: EnvSpec, device: torch.device) -> PolicyState:
        """Create the state with this form on a device, with its first values."""
        leaf = Leaf(key, dtype_name(self.initial.dtype), self.shape)
        initial = self.initial
        if self.draw is not None:
            initial = self.drawn(env)
        current = initial.expand((*env.rows, *self.shape)).clone()
        return PolicyState(leaf, current.contiguous().to(device), initial.to(device))

    def drawn(self, env: EnvSpec) -> torch.Tensor:
        """Draw first values for every environment, [*frame] or [P, *frame]."""
        assert self.draw is not None
        value = self.draw()
        if not env.batch_size or value.shape != self.shape:
            return value.clone()
        return torch.stack([value, *(self.draw() for _ in range(env.num_envs - 1))])


def find_states(
    policy: Any,
    env: EnvSpec,
    policy_state: Mapping[Any, Any] | None,
    read: Iterable[Key] | None,
    written: Iterable[Key],
) -> dict[Key, Sequence[StateForm]]:
    """Return the states of a policy, with the forms that each may have.

    Args:
        policy: Policy, which is searched for primers and RNN layers.
        env: Its environment; primers may have the environment's batch shape.
        policy_state: By key, the shape for one environment, or the first value as a tensor
            [*frame].
        read: Keys that the policy reads. ``None`` if it does not declare them; its states are then
            those of `policy_state`.
        written: Keys that the policy writes.

    Raises:
        ValueError: A value of `policy_state` is neither a shape nor a tensor, or the shape of a
            state is unknown.
        TypeError: A key of `policy_state` is not a string or a tuple of strings.
    """
    given = {as_key(key): _check_value(key, value) for key, value in (policy_state or {}).items()}
    primed, failures = _primed_forms(policy, env)
    keys = list(given)
    if read is not None:
        observed = {leaf.key for leaf in env.observation}
        unobserved = [key for key in read if key not in observed and key != IS_INIT]
        keys = _state_keys(unobserved, set(written), dict.fromkeys((*primed, *given)))
    unknown = [key for key in given if key not in keys]
    if unknown:
        raise ValueError(
            f"policy_state: {show(unknown[0])} is not a state of the policy; a state is read "
            f"as {show(unknown[0])} and written as {show(('next', *unknown[0]))}"
        )
    return {key: _forms(key, policy, primed.get(key), given.get(key), failures) for key in keys}


def _state_keys(read: Iterable[Key], written: set[Key], named: Iterable[Key]) -> list[Key]:
    """Return the keys of states: named ones inside a key that is read, and those also written."""
    inside = [key for key in named if any(key[: len(r)] == r for r in read)]
    plain = [
        key
        for key in read
        if ("next", *key) in written
        and key not in written  # if it writes the key itself, its next call reads that
        and not any(k[: len(key)] == key for k in inside)
    ]
    return [*inside, *plain]


def _forms(
    key: Key, policy: Any, primed: StateForm | None, given: Any, failures: Sequence[str]
) -> Sequence[StateForm]:
    if primed is not None:
        if given is not None and _shape_of(given) != primed.shape:
            raise ValueError(
                f"policy_state: expected shape {list(primed.shape)} for {show(key)}, as in the "
                f"policy's primer, got {list(_shape_of(given))}"
            )
        return [primed]
    if given is not None:
        return _forms_of_value(given, policy)
    forms = _layer_forms(policy)
    if not forms:
        hint = f" ({failures[0]})" if failures else ""
        raise ValueError(
            f"policy: the shape of its state {show(key)} (written as {show(('next', *key))}) is "
            f"unknown{hint}; pass policy_state={{{show(key)}: shape}}"
        )
    return forms


def check_policy_state(value: Any) -> Mapping[Any, Any] | None:
    """Return ``None``, or shapes or tensors by key; TypeError or ValueError for other values."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"policy_state: expected a dict of shapes, got {type(value).__name__}")
    for key, form in value.items():
        _check_value(key, form)
    return value


def _check_value(key: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    sizes = (value,) if isinstance(value, int) else value
    if (
        isinstance(value, bool)
        or not isinstance(sizes, (tuple, list))
        or not all(isinstance(size, int) and size >= 0 for size in sizes)
    ):
        raise ValueError(
            f"policy_state: expected a shape (of one environment) or a tensor for {key!r}, "
            f"got {value!r}"
        )
    return tuple(sizes)


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _forms_of_value(value: Any, policy: Any) -> list[StateForm]:
    """Return the form of a tensor, or forms with several dtypes for a shape."""
    if isinstance(value, torch.Tensor):
        return [StateForm(tuple(value.shape), value.clone())]
    dtypes = (_float_dtype(policy), torch.float32, torch.float64, torch.int64, torch.bool)
    return [_zero_form(value, dtype) for dtype in dict.fromkeys(dtypes)]


def _float_dtype(policy: Any) -> torch.dtype:
    parameters = policy.parameters() if isinstance(policy, nn.Module) else ()
    found = (p.dtype for p in parameters if p.dtype.is_floating_point)
    return next(found, torch.get_default_dtype())


def _zero_form(shape: tuple[int, ...], dtype: torch.dtype) -> StateForm:
    return StateForm(shape, torch.zeros(shape, dtype=dtype, device="cpu"))


def _layer_forms(policy: Any) -> list[StateForm]:
    """Return the forms of the RNN layers' states: [layers, size] as in TorchRL, or [size]."""
    shapes: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
    for layer in policy.modules() if isinstance(policy, nn.Module) else ():
        if isinstance(layer, nn.RNNCellBase):
            sizes: list[tuple[int, ...]] = [(layer.hidden_size,)]
        elif isinstance(layer, nn.RNNBase):
            rows = layer.num_layers * (2 if layer.bidirectional else 1)
            widths = dict.fromkeys((layer.hidden_size, layer.proj_size or layer.hidden_size))
            sizes = [*((rows, width) for width in widths), *((width,) for width in widths)]
        else:
            continue
        shapes.update(dict.fromkeys((size, _float_dtype(layer)) for size in sizes))
    return [_zero_form(shape, dtype) for shape, dtype in shapes]


def _primed_forms(policy: Any, env: EnvSpec) -> tuple[dict[Key, StateForm], list[str]]:
    """Return the forms of the modules' primers by key, and the errors of failed primers."""
    forms: dict[Key, StateForm] = {}
    failures: list[str] = []
    for module in policy.modules() if isinstance(policy, nn.Module) else (policy,):
        make: Any = getattr(module, "make_tensordict_primer", None)
        if make is None:
            continue
        try:
            primer = make()
        except Exception as error:  # for example, the module does not know the size
            failures.append(f"{type(module).__name__}.make_tensordict_primer: {error}")
            continue
        for single in getattr(primer, "transforms", None) or (primer,):
            forms.update(_forms_of_primer(single, env))
    return forms, failures


def _forms_of_primer(primer: Any, env: EnvSpec) -> dict[Key, StateForm]:
    specs = getattr(primer, "primers", None)
    if specs is None:
        return {}
    return {
        as_key(name): _form_of_spec(primer, name, spec, env)
        for name, spec in specs.items(True, True)
    }


def _form_of_spec(primer: Any, name: Any, spec: Any, env: EnvSpec) -> StateForm:
    shape = tuple(spec.shape)
    lead = len(primer.primers.shape) or (0 if primer.expand_specs else len(env.batch_size))
    if lead and shape[:lead] == env.batch_size:  # the primer's shape includes the batch shape
        shape = shape[lead:]
    if primer.random:
        return _drawn_form(shape, spec.dtype, spec.rand)
    if getattr(primer, "single_default_value", False):
        return _drawn_form(shape, spec.dtype, lambda: primer.default_value().get(name))
    default = primer.default_value[name]
    if callable(default):
        return _drawn_form(shape, spec.dtype, default)
    value = torch.as_tensor(default, dtype=spec.dtype, device="cpu")
    return StateForm(shape, value.expand(shape).clone())


def _drawn_form(shape: tuple[int, ...], dtype: torch.dtype, draw: Callable[[], Any]) -> StateForm:
    def drawn() -> torch.Tensor:
        return torch.as_tensor(draw()).to("cpu", dtype)

    return StateForm(shape, torch.zeros(shape, dtype=dtype, device="cpu"), drawn)
