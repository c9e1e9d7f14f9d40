"""Explain why a policy's first call failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pycollect.batch.frame import FLAGS
from pycollect.batch.layout import Key, torch_dtype
from pycollect.policy.inputs import PolicyInputs
from pycollect.policy.program.steps import show, show_all

_OF_FORM = {
    RuntimeError: re.compile(
        r"dtype|\btypes?\b|shape|size|dimension|channels|\b\dD\b|a long tensor", re.IGNORECASE
    ),
    IndexError: re.compile(
        r"too many indices|dimension specified|dimension out of range|tensors used as indices",
        re.IGNORECASE,
    ),
    ValueError: re.compile(r"^RNN input dtype|Expected \w+ to be \dD|got input size"),
}
"""Patterns of torch's errors about dtypes and shapes."""

_OF_TYPES = re.compile(r"dtype|\btypes?\b|a long tensor|tensors used as indices", re.IGNORECASE)
_OF_INDICES = re.compile(r"\bind(ex|ices)\b", re.IGNORECASE)
_INDEX_DTYPES = {torch.int64, torch.int32}

_NAMES = {
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "long": torch.int64,
    "long int": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "char": torch.int8,
    "signed char": torch.int8,
    "byte": torch.uint8,
    "unsigned char": torch.uint8,
    "short unsigned int": torch.uint16,
}
"""Torch's other names of dtypes, from C and of tensor classes."""

_DTYPE = re.compile(
    r"(?:\b|(?<=CPU)|(?<=CUDA))"  # as in CPUBoolType
    r"(short unsigned int|unsigned char|signed char|long int|short int"
    r"|double|half|long|short|char|byte|bool|bfloat16|float(?:16|32|64)?|u?int(?:8|16|32|64)?)"
    r"(?=Tensor\b|Type\b|\b)",
    re.IGNORECASE,
)


class Failure(NamedTuple):
    """Why a policy's first call raised.

    Attributes:
        raised: The policy's exception.
        told: Error that also lists the policy's inputs, if torch refused one: a ValueError if
            `raised` is one, else a RuntimeError.
        is_of_observation: Whether torch refused the dtypes of observations only.
        is_of_state: Whether torch refused the dtype of a state.
    """

    raised: Exception
    told: RuntimeError | ValueError | None = None
    is_of_observation: bool = False
    is_of_state: bool = False


def failure(
    error: Exception, policy: Any, read: Mapping[Key, torch.Tensor], inputs: PolicyInputs
) -> Failure:
    """Return the explanation of an error of a policy's first call.

    Args:
        read: Inputs that the policy may have read, by key.
        inputs: All inputs of the policy.
    """
    words = _OF_FORM.get(type(error))
    if words is None or not words.search(str(error)):
        return Failure(error)
    misfit = _Misfit(str(error), policy, read, inputs)
    forms = (
        f"{show(key)} {_name(tensor.dtype)} {list(tensor.shape)}" for key, tensor in read.items()
    )
    told = (ValueError if isinstance(error, ValueError) else RuntimeError)(
        f"policy: the first call, with {', '.join(forms) or 'no tensors'}, raised: "
        f"{str(error).rstrip('.')}{misfit.remedy()}"
    )
    states = {state.leaf.key for state in inputs.states}
    return Failure(
        error,
        told,
        is_of_observation=bool(misfit.odd) and all(key in inputs.observation for key in misfit.odd),
        is_of_state=any(key in states for key in misfit.odd),
    )


class _Misfit:
    """Between what a policy read and what torch took there.

    Attributes:
        odd: the inputs of a dtype that does not fit; none where the error is one of shapes.
    """

    def __init__(
        self, text: str, policy: Any, read: Mapping[Key, torch.Tensor], inputs: PolicyInputs
    ) -> None:
        self._text = text
        self._read = read
        self._inputs = inputs
        self._own = _parameter_dtype(policy)
        is_of_types = _OF_TYPES.search(text) is not None
        self._is_of_indices = is_of_types and _OF_INDICES.search(text) is not None
        self.odd = self._odd() if is_of_types else []

    def _odd(self) -> list[Key]:
        fitting = _INDEX_DTYPES if self._is_of_indices else {self._own}
        if None in fitting:
            return []
        named = _named_dtypes(self._text) - fitting
        if named:
            return [key for key, tensor in self._read.items() if tensor.dtype in named]
        # Some errors say only what would fit, or that dtypes differ. Where parameters are floats,
        # other floats come first: integers may be another layer's indices. And the reverse.
        odd = [key for key, tensor in self._read.items() if tensor.dtype not in fitting]
        near = [
            key for key in odd if self._read[key].dtype.is_floating_point is not self._is_of_indices
        ]
        return near or odd

    def remedy(self) -> str:
        """Return further sentences on how to correct the error; empty if that is unknown."""
        numbers = self._numbers()
        cast = [key for key in self.odd if key not in numbers and self._can_be_cast(key)]
        return self._of_numbers(numbers) + (self._of_types(cast) if cast else "")

    def _can_be_cast(self, key: Key) -> bool:
        return key in self._inputs.observation and key[-1] not in FLAGS

    def _numbers(self) -> list[Key]:
        """The observations of one number per environment that were taken for vectors."""
        if self._is_of_indices:  # which they may well be
            return []
        single = [leaf.key for leaf in self._inputs.env.observation if not leaf.shape]
        return [
            key
            for key in single
            if key in self._read
            and (_is_taken_for_a_vector(self._read[key], self._text) or self._is_odd_integer(key))
        ]

    def _is_odd_integer(self, key: Key) -> bool:
        return key in self.odd and _is_integer(self._read[key].dtype)

    def _of_numbers(self, keys: Iterable[Key]) -> str:
        dtypes = {leaf.key: torch_dtype(leaf.dtype) for leaf in self._inputs.env.observation}
        kind = "floats" if self._own is None else _name(self._own)
        return "".join(
            f". {show(key)} is one integer per environment, not a vector; embed it in the policy "
            f"(torch.nn.Embedding), or one-hot encode it as {kind}"
            if _is_integer(dtypes[key])
            else f". {show(key)} is one number per environment, not a vector; add a dimension in "
            "the policy (unsqueeze(-1))"
            for key in keys
        )

    def _of_types(self, keys: list[Key]) -> str:
        if self._is_of_indices:
            return (
                f". Indices must be int64, but {_are(keys)} not; to cast whole numbers for the "
                f"policy and in the batch, pass {self._cast(keys, torch.int64)}. For other "
                "numbers, use a layer such as torch.nn.Linear"
            )
        assert self._own is not None  # else none is odd
        bools = any(self._read[key].dtype == torch.bool for key in keys)
        return (
            f". The policy's parameters are {_name(self._own)}, but {_are(keys)} not; to cast for "
            f"the policy and in the batch, pass {self._cast(keys, self._own)}"
            f"{' (bools are only cast if they are named)' if bools else ''}"
        )

    def _cast(self, keys: list[Key], dtype: torch.dtype) -> str:
        """Return the argument that casts exactly these observations."""
        alike = {
            key
            for key, tensor in self._inputs.observation.items()
            if tensor.dtype not in (dtype, torch.bool) and not tensor.is_complex()
        }
        if alike == set(keys):
            return f"observation_dtype=torch.{_name(dtype)}"
        named = ", ".join(f"{show(key)}: torch.{_name(dtype)}" for key in keys)
        return f"observation_dtype={{{named}}}"


def _are(keys: list[Key]) -> str:
    return f"{show_all(keys)} {'is' if len(keys) == 1 else 'are'}"


def _parameter_dtype(policy: Any) -> torch.dtype | None:
    """The floating dtype of the policy's parameters; None where it has none, or several."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else ()
    dtypes = {one.dtype for one in parameters if one.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _named_dtypes(text: str) -> set[torch.dtype]:
    """The dtypes that an error of torch's names."""
    names = (name.lower() for name in _DTYPE.findall(text))
    return {_NAMES[name] if name in _NAMES else getattr(torch, name) for name in names}


def _is_taken_for_a_vector(numbers: torch.Tensor, text: str) -> bool:
    """Whether an error of torch's is of this tensor, which has batch dimensions alone."""
    if numbers.dim() == 0:
        return re.search(r"\b0D\b", text) is not None
    columns = numbers.shape[-1]  # the environments, as a layer takes them
    return f"({numbers.numel() // columns}x{columns} and" in text


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
