"""Compile a program to the function that is called at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from tensordict.nn import InteractionType, set_interaction_type

from pycollect.data.layout import Key
from pycollect.data.tensordicts import version_of
from pycollect.policy.program.distributions import (
    CategoricalSampler,
    Sampler,
    head_sampler,
    is_exact,
)
from pycollect.policy.program.exploration import TensorCall
from pycollect.policy.program.plan import Plan, make_plan
from pycollect.policy.program.steps import (
    CallStep,
    CannotUnwrapError,
    HeadStep,
    Program,
    Tensors,
    Values,
    other_keys,
    spread,
)
from pycollect.policy.program.tensordict_modules import RecurrentStep, forward_of

Act: TypeAlias = Callable[[], Tensors]
Samples: TypeAlias = dict[int, Tensors]
"""Inputs of each step at the first call, on which plans and distributions are checked."""

Finishers: TypeAlias = Sequence[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
_Run: TypeAlias = Callable[[Values], None]


def run_plainly(program: Program, values: Values) -> tuple[Program, Samples, Values]:
    """Run every step once with the policy's own modules; add all outputs to `values`, the inputs.

    Return the program with keys for all outputs, copies of each step's inputs, and `values`. Raises
    CannotUnwrapError if a step needs a TensorDict, or its sampling differs from the module's.
    """
    samples: Samples = {}
    unwritten = set(program.read).difference(*(step.out_keys for step in program.steps))
    for number, step in enumerate(program.steps):
        inputs = tuple(values[key] for key in step.in_keys)
        samples[number] = tuple(tensor.detach().clone() for tensor in inputs)
        if isinstance(step, CallStep):
            _check_exact(step, samples[number])
            versions = [version_of(tensor) for tensor in inputs]
            out = _caller(step)(*inputs)
            if not (step.lenient or unwritten.isdisjoint(_changed(step, inputs, versions))):
                raise CannotUnwrapError("a module that changes its input in place")
            others = other_keys(out, step)
            program, step = program.with_outputs(others), step.with_outputs(others)
            outs = spread(out, step)
        else:
            sampler = head_sampler(step)
            if not is_exact(sampler, step.head, step, samples[number]):
                raise CannotUnwrapError("a distribution that the module samples differently")
            outs = sampler(*inputs)
        values.update(zip(step.out_keys, outs, strict=True))
    return program, samples, values


def _changed(step: CallStep, inputs: Tensors, versions: list[int]) -> list[Key]:
    """Return the keys of the inputs that were changed in place."""
    each = zip(step.in_keys, inputs, versions, strict=True)
    return [key for key, tensor, version in each if version_of(tensor) != version]


def _check_exact(step: CallStep, inputs: Tensors) -> None:
    """Check that a function that replaces a module returns the same values."""
    function = step.function
    if isinstance(function, TensorCall):
        batch = function.lead
    elif isinstance(function, RecurrentStep):
        batch = tuple(inputs[-1].shape[:-1])
    else:
        return
    is_same = is_exact(function, function.module, step, inputs, batch)
    if isinstance(function, TensorCall):
        function.kept = {}
    if not is_same:
        raise CannotUnwrapError(f"a {type(function.module).__name__} that computes other values")


def assemble(
    program: Program,
    current: Mapping[Key, torch.Tensor],
    wanted: Sequence[Key],
    samples: Samples,
    finish: Finishers,
) -> tuple[Act, bool]:
    """Return the function that runs the program, and whether it reuses its tensors' memory."""
    if len(program.steps) == 1 and not finish and isinstance(program.steps[0], CallStep):
        act = _single(program.steps[0], current, wanted, samples.get(0))
        if act is not None:
            return act
    runs = _runs(program, current, samples)
    base = {key: current[key] for key in program.read}

    def act_in_steps() -> Tensors:
        values: Values = dict(base)
        for run in runs:
            run(values)
        return tuple([values[key] for key in wanted])

    if not finish:
        return act_in_steps, False

    def act_and_finish() -> Tensors:
        outs = list(act_in_steps())
        for place, function in finish:
            outs[place] = function(outs[place])
        return tuple(outs)

    return act_and_finish, False


def _single(
    step: CallStep,
    current: Mapping[Key, torch.Tensor],
    wanted: Sequence[Key],
    sample: Tensors | None,
) -> tuple[Act, bool] | None:
    """Return `act` for a single call of one tensor, without a dictionary of values.

    ``None`` if the step is not this simple.
    """
    if len(step.in_keys) != 1 or step.out_keys != tuple(wanted) or step.names is not None:
        return None
    source = current[step.in_keys[0]]
    plan = _plan(step, sample)
    if plan is not None and plan.tail is None and len(step.out_keys) == 1:
        return _planned(plan, source), True
    function, copy = forward_of(step.function), _copier(source)
    if len(step.out_keys) != 1:
        return lambda: spread(function(copy()), step), False

    def act() -> Tensors:
        out = function(copy())
        return (out,) if isinstance(out, torch.Tensor) else spread(out, step)

    return act, False


def _copier(source: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that copies `source` by numpy, twice as fast as torch for small arrays."""
    if source.dtype == torch.bfloat16 or source.device.type != "cpu":  # numpy cannot copy it
        return source.clone
    array, from_numpy = source.numpy(), torch.from_numpy
    return lambda: from_numpy(array.copy())


def _planned(plan: Plan, source: torch.Tensor) -> Act:
    first, rest, outs = partial(plan.first, source), plan.rest, (plan.out,)

    def act_once() -> Tensors:
        first()
        return outs

    def act() -> Tensors:
        first()
        for operation in rest:
            operation()
        return outs

    return act if rest else act_once


def _runs(program: Program, current: Mapping[Key, torch.Tensor], samples: Samples) -> list[_Run]:
    """Return a function over the dictionary of values for each step.

    An opaque function may keep its inputs, so it gets copies of observations and of a plan's
    outputs. A distribution may return its parameters as the sample. It gets copies of observations,
    which the recorder overwrites.
    """
    observed, reused = set(current), set[Key]()
    runs: list[_Run] = []
    for number, step in enumerate(program.steps):
        run, kind = _run(step, samples.get(number))
        copied: set[Key] = set()
        if kind not in ("plan", "recurrent"):
            copied = observed & set(step.in_keys)
        if kind == "opaque":
            copied |= reused & set(step.in_keys)
        observed -= copied
        reused -= copied
        if copied:
            runs.append(partial(_copy, tuple(copied)))
        runs.append(run)
        returns_new = kind in ("opaque", "recurrent") or (
            kind == "head" and not reused & set(step.in_keys)
        )
        reused = reused - set(step.out_keys) if returns_new else reused | set(step.out_keys)
    return runs


def _copy(keys: tuple[Key, ...], values: Values) -> None:
    for key in keys:
        values[key] = values[key].clone()


def _run(step: CallStep | HeadStep, sample: Tensors | None) -> tuple[_Run, str]:
    if isinstance(step, HeadStep):
        categorical = _categorical(step, sample)
        if categorical is not None:
            return _store(categorical, step), "plan"
        return _store(head_sampler(step), step), "head"
    plan = _plan(step, sample)
    if plan is not None:
        return _store_spread(plan.run, step), "plan"
    if isinstance(step.function, TensorCall):
        return _store(step.function, step), "reusing"
    kind = "recurrent" if isinstance(step.function, RecurrentStep) else "opaque"
    return _store_spread(_caller(step), step), kind


def _store(function: Sampler, step: CallStep | HeadStep) -> _Run:
    in_keys, out_keys = step.in_keys, step.out_keys

    def run(values: Values) -> None:
        outs = function(*[values[key] for key in in_keys])
        values.update(zip(out_keys, outs, strict=True))

    return run


def _store_spread(function: Callable[..., object], step: CallStep) -> _Run:
    in_keys, out_keys = step.in_keys, step.out_keys
    if len(in_keys) == 1 and len(out_keys) == 1:
        (source,), (target,) = in_keys, out_keys

        def run_single(values: Values) -> None:
            out = function(values[source])
            values[target] = out if isinstance(out, torch.Tensor) else spread(out, step)[0]

        return run_single

    def run(values: Values) -> None:
        out = function(*[values[key] for key in in_keys])
        values.update(zip(out_keys, spread(out, step), strict=True))

    return run


def _caller(step: CallStep) -> Callable[..., object]:
    """Return the step's function with positional arguments, even if it takes them by name."""
    function, names = forward_of(step.function), step.names
    if names is None:
        return function
    return lambda *inputs: function(**dict(zip(names, inputs, strict=True)))


def _plan(step: CallStep, sample: Tensors | None) -> Plan | None:
    module = step.module
    if module is None or sample is None:
        return None
    plan = make_plan(module, sample[0])
    outputs = 1 if plan is None or plan.tail is None else 2
    return plan if outputs == len(step.out_keys) else None


def _categorical(step: HeadStep, sample: Tensors | None) -> CategoricalSampler | None:
    if sample is None or not CategoricalSampler.fits(step, sample):
        return None
    sampler = CategoricalSampler(step, sample[0])
    with set_interaction_type(InteractionType.RANDOM):
        return sampler if is_exact(sampler, step.head, step, sample) else None
