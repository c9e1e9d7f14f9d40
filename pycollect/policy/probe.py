"""Call a policy for the first time, on copies and without side effects, to learn its outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from pycollect.data.extras import Extra, Kind
from pycollect.data.frame import FLAGS
from pycollect.data.layout import Key, as_key, is_delivered, show, show_all
from pycollect.errors import is_interrupt
from pycollect.policy.device import DeviceTransfer
from pycollect.policy.inputs import PolicyInputs, TensorDictCall, returned
from pycollect.policy.outputs import check_output_keys
from pycollect.policy.program.compile import Samples, run_plainly
from pycollect.policy.program.steps import CannotUnwrapError, Program, Values, preserve_state
from pycollect.policy.signature import Forms, is_env_state, overlaps
from pycollect.policy.states import PolicyState


class WriteDetector:
    """Detect whether a policy wrote into one of its inputs."""

    def __init__(self, key: Key, td: TensorDictBase) -> None:
        self.key = key
        self._td = td
        self._tensor = td.get(key)
        self._copy = self._tensor.clone()
        self._version = self._tensor._version
        self._is_stable = td.get(key) is self._tensor  # a lazy stack returns a new tensor each time

    def is_rewritten(self, out: TensorDictBase) -> bool:
        """Return whether the policy wrote the entry.

        If the policy returned another TensorDict, return whether the value differs.
        """
        value = out.get(self.key, None)
        if value is None:
            return False
        if out is self._td and self._is_stable:
            # A policy that reshapes the TensorDict temporarily, such as TorchRL's LSTMModule,
            # leaves a view of the same memory.
            return not _same_memory(value, self._tensor) or value._version != self._version
        return not equal(value, self._copy)


def _same_memory(a: Any, b: torch.Tensor) -> bool:
    """Return whether both are the same elements of the same memory."""
    return a is b or (
        isinstance(a, torch.Tensor)
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and a.data_ptr() == b.data_ptr()
    )


def equal(a: Any, b: torch.Tensor) -> bool:
    """Return whether `a` is a tensor of the same shape, dtype and values; NaN equals NaN."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


_MOST_TRIES = 64  # combinations of forms of states

_OF_TYPES = re.compile(r"dtype|\btypes?\b|a long tensor|tensors used as indices", re.I)
_OF_FORM = {
    RuntimeError: re.compile(rf"{_OF_TYPES.pattern}|shape|size|dimension|channels|\b\dD\b", re.I),
    IndexError: re.compile(
        rf"{_OF_TYPES.pattern}|too many indices|dimension (specified|out)", re.I
    ),
    ValueError: re.compile(r"^RNN input dtype|Expected \w+ to be \dD|got input size"),
}
"""Patterns of torch's errors about dtypes and shapes."""


class Probed(NamedTuple):
    """Result of a policy's first call."""

    program: Program | None  # ``None`` if the policy needs a TensorDict
    values: Values  # its outputs, and the states that it does not write
    extra_outputs: tuple[Extra, ...]  # outputs without a fixed shape and numeric dtype
    samples: Samples  # inputs of each step of the program, if there is one


class Probe:
    """Calls a policy for the first time; adds its states and missing entries to `inputs`."""

    def __init__(
        self, policy: Any, inputs: PolicyInputs, transfer: DeviceTransfer, call: TensorDictCall
    ) -> None:
        self._policy = policy
        self._inputs = inputs
        self._env = inputs.env
        self._transfer = transfer
        self._call = call

    def run(self, program: Program | None, forms: Forms) -> Probed:
        """Call the policy with each form of its states until one fits.

        Raises the policy's own error; if torch refused an input's dtype or shape, an error that
        also lists the inputs. Raises ValueError if no form fits, or if an output is not supported.
        """
        failures: list[_Failure] = []
        try:
            for choice in islice(product(*forms.values()), _MOST_TRIES):
                self._inputs.set_states(dict(zip(forms, choice, strict=True)))
                try:
                    return self._in_this_form(program)
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    failures.append(
                        _failure(error, self._policy, self._read(program), self._inputs)
                    )
            raise _refusal(failures, forms)
        finally:
            failures.clear()  # their tracebacks hold this frame

    def _read(self, program: Program | None) -> dict[Key, torch.Tensor]:
        """Return the inputs that the policy declares, or all inputs if it declares none."""
        tensors = self._inputs.tensors
        if program is not None:
            read = list(program.read)
        elif hasattr(self._policy, "in_keys"):
            read = [as_key(key) for key in self._policy.in_keys]
        else:
            return dict(tensors)
        return {key: tensor for key, tensor in tensors.items() if overlaps(key, read)}

    def _in_this_form(self, program: Program | None) -> Probed:
        probed = None if program is None else self._plainly(program)
        probed = probed or self._with_tensordict()
        for state in self._inputs.states:
            given = self._inputs.tensors[state.leaf.key]
            value = probed.values[source_of(state, probed.values)]
            if value.shape != given.shape or value.dtype != given.dtype:
                raise ValueError(
                    f"policy: its state {show(state.leaf.key)} must keep its dtype and shape, "
                    f"{given.dtype} {list(given.shape)}, but it returned {value.dtype} "
                    f"{list(value.shape)}"
                )
        return probed

    def _plainly(self, program: Program) -> Probed | None:
        """Call each step once. Return None if an output needs a TensorDict."""
        tensors = self._inputs.tensors
        fresh = {key: self._transfer.copy_to_device(own) for key, own in tensors.items()}
        try:
            with preserve_state(self._policy, self._transfer.device):
                program, samples, values = run_plainly(program, fresh)
        except CannotUnwrapError:
            return None
        keys = (*program.written, *self._unwritten(program.written))
        return Probed(program, {key: values[key] for key in keys}, (), samples)

    def _unwritten(self, written: Iterable[Key]) -> list[Key]:
        """Return the states that the policy reads and does not write; they do not change."""
        states = self._inputs.states
        keys = [state.leaf.key for state in states if state.next_key not in written]
        return [key for key in keys if key not in written]

    def _with_tensordict(self) -> Probed:
        entries = self._inputs.collector_entries
        while True:
            try:
                return self._outputs_with_tensordict()
            except KeyError as error:  # an undeclared input
                missing = entries.missing(error)
                if missing is None or overlaps(missing, self._inputs.tensors):
                    raise
            self._inputs.add_collector_entry(missing)

    def _outputs_with_tensordict(self) -> Probed:
        with preserve_state(self._policy, self._transfer.device):
            td = self._call.tensordict()
            states = (state.leaf for state in self._inputs.states)
            detectors = [WriteDetector(leaf.key, td) for leaf in (*self._env.observation, *states)]
            out = returned(self._policy, td)
        rewritten = [detector.key for detector in detectors if detector.is_rewritten(out)]
        keys = [*self._call.new_keys(out), *rewritten]
        entries = {key: _entry(out, key) for key in keys}
        values = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        extras = self._extras_among(entries)
        self._check_passed_on(values, extras)
        values.update({key: out.get(key) for key in self._unwritten(values)})
        return Probed(None, values, extras, {})

    def _extras_among(self, entries: Mapping[Key, Any]) -> tuple[Extra, ...]:
        """Return the outputs that are not leaves: objects, ragged tensors and nodes."""
        extras = [
            Extra(key, Kind.OBJECT if value is not None else Kind.RAGGED)
            for key, value in entries.items()
            if not isinstance(value, torch.Tensor) and is_delivered(key)
        ]
        keys = {extra.key for extra in extras}
        wrong = [leaf.key for leaf in self._env.action if leaf.key in keys]
        if wrong:
            raise ValueError(f"policy: expected tensors for {show_all(wrong)}, got other data")
        nodes = [extra for extra in self._env.action_extras if extra.kind is Kind.NODE]
        needed = [extra.key for extra in self._env.action_extras if extra.kind is not Kind.NODE]
        missing = [key for key in needed if key not in entries]
        if missing:
            raise ValueError(
                f"policy: expected the output(s) {show_all(missing)} for the environment, got "
                f"{show_all(entries)}"
            )
        return (*extras, *nodes)

    def _check_passed_on(self, values: Values, extras: Iterable[Extra]) -> None:
        """Check the policy's output keys; a state that it does not declare would be lost."""
        nexts = {state.next_key for state in self._inputs.states}
        written = (*values, *(extra.key for extra in extras if extra.kind is not Kind.NODE))
        others = [key for key in written if key not in nexts and not is_env_state(key, self._env)]
        check_output_keys(others, self._env)
        if hasattr(self._policy, "in_keys"):
            return
        unknown = [key for key in others if key[0] == "next" and key[1:] not in values]
        if unknown and self._reads(unknown, values):
            raise ValueError(
                f"policy: it writes {show(unknown[0])}, but does not declare that it reads "
                f"{show(unknown[0][1:])}; pass policy_state={{{show(unknown[0][1:])}: shape}}, or "
                "give the policy in_keys and out_keys"
            )

    def _reads(self, nexts: Iterable[Key], values: Values) -> bool:
        """Return whether outputs change if the policy also gets its own "next" entries."""
        with preserve_state(self._policy, self._transfer.device):
            td = self._call.tensordict()
            td.update({key[1:]: values[key] for key in nexts if key in values})
            out = returned(self._policy, td)
        return not all(equal(_entry(out, key), value) for key, value in values.items())


class _Failure(NamedTuple):
    """A first call that raised."""

    raised: Exception
    error: Exception  # error to raise: this exception, or one that also lists the policy's inputs
    is_of_types: bool = False  # whether torch refused the dtype of an input
    casts: Sequence[Key] = ()  # observations that a cast would make fit


def _failure(
    raised: Exception, policy: Any, read: Mapping[Key, torch.Tensor], inputs: PolicyInputs
) -> _Failure:
    """Return the explanation of an error of a first call that read these inputs, by key."""
    text = str(raised).rstrip(".")
    pattern = _OF_FORM.get(type(raised))
    if pattern is None or not pattern.search(text):
        return _Failure(raised, raised)
    single = [leaf.key for leaf in inputs.env.observation if not leaf.shape and leaf.key in read]
    is_of_types = _OF_TYPES.search(text) is not None
    dtypes = {parameter.dtype for parameter in getattr(policy, "parameters", tuple)()}
    casts: list[Key] = []
    if is_of_types and "indices" not in text and dtypes == {torch.float32}:
        odd = {
            key: tensor.dtype
            for key, tensor in read.items()
            if key in inputs.observation and key not in single and key[-1] not in FLAGS
        }
        odd = {key: dtype for key, dtype in odd.items() if dtype != torch.float32}
        casts = [
            key for key, dtype in odd.items() if dtype.is_floating_point or dtype == torch.bool
        ]
        casts = casts or [*odd]
    return _Failure(raised, _explained(raised, read, inputs, single, casts), is_of_types, casts)


def _explained(
    raised: Exception,
    read: Mapping[Key, torch.Tensor],
    inputs: PolicyInputs,
    single: Sequence[Key],
    casts: Sequence[Key],
) -> Exception:
    forms = (
        f"{show(key)} {str(own.dtype).removeprefix('torch.')} {list(own.shape)}"
        for key, own in read.items()
    )
    text = f"policy: the first call, with {', '.join(forms) or 'no tensors'}, raised: {raised}"
    if casts:
        plain = {
            key
            for key, tensor in inputs.observation.items()
            if tensor.dtype not in (torch.float32, torch.bool)
        }
        named = ", ".join(f"{show(key)}: torch.float32" for key in casts)
        cast = "torch.float32" if set(casts) == plain else f"{{{named}}}"
        text = f"{text.rstrip('.')}. observation_dtype={cast} casts to the parameters' dtype"
    elif single:
        text = (
            f"{text.rstrip('.')}. {show_all(single)}: one number per environment is no vector; "
            "embed it (torch.nn.Embedding), one-hot encode it or add a dimension (unsqueeze(-1))"
        )
    error = ValueError(text) if isinstance(raised, ValueError) else RuntimeError(text)
    error.__cause__ = raised
    return error


def _refusal(failures: Sequence[_Failure], forms: Forms) -> Exception:
    """Return the error of a policy if no form of its states fits.

    Args:
        forms: Forms of each state: of one shape and several dtypes if the shape was given.
    """
    for failure in failures:
        if failure.casts:
            return failure.error
    if all(len({form.shape for form in options}) == 1 for options in forms.values()):
        # An error about dtypes may only be of a wrong guess of a state's dtype.
        return next(
            (failure.error for failure in failures if not failure.is_of_types), failures[0].error
        )
    first = failures[0].raised
    error = ValueError(
        f"policy: the shape of its state(s) {show_all(forms)} is unknown; pass "
        "policy_state={key: shape}. The first call, with the shape(s) "
        f"{[list(options[0].shape) for options in forms.values()]}, raised: {first}"
    )
    error.__cause__ = first
    return error


def source_of(state: PolicyState, values: Mapping[Key, torch.Tensor]) -> Key:
    """Return the key of a state's next value; a state that is not written keeps its value."""
    return state.next_key if state.next_key in values else state.leaf.key


def _entry(td: Any, key: Key) -> Any:
    """Return the entry, or None if its tensors differ in shape."""
    try:
        return td.get(key)
    except RuntimeError:
        return None
