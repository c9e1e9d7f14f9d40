"""Plans: run a chain of Linear layers and activations as tensor operations into reused buffers.

A plan reads the module's weights through detached views, so it sees the steps of an optimizer. Once
per rollout, a `Fingerprint` detects other changes: a replaced parameter or layer, or a hook. A plan
is used only if its result equals the module's, bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tensordict.nn import NormalParamExtractor
from torch import nn

from pycollect.policy.program.distributions import same_bits
from pycollect.policy.program.steps import Tensors
from pycollect.policy.program.tensordict_modules import is_plain

Operation: TypeAlias = Callable[[torch.Tensor], Any]

_TORCHRL_MLP = ("torchrl.modules.models.models", "MLP")
_IN_PLACE: dict[type, Callable[[Any], Operation]] = {
    nn.Tanh: lambda module: torch.tanh_,
    nn.Sigmoid: lambda module: torch.sigmoid_,
    nn.ReLU: lambda module: torch.relu_,
    nn.SiLU: lambda module: partial(F.silu, inplace=True),
    nn.ELU: lambda module: lambda x: F.elu_(x, module.alpha),
    nn.LeakyReLU: lambda module: lambda x: F.leaky_relu_(x, module.negative_slope),
    nn.GELU: lambda module: lambda x: x.copy_(F.gelu(x, approximate=module.approximate)),
}
_KNOWN = {nn.Linear, nn.Identity, nn.Dropout, NormalParamExtractor, *_IN_PLACE}


class Plan:
    """A chain of layers for inputs of one shape: [n] for one environment, [P, n] for a batch.

    `run(x)` writes the result into the plan's own buffers and returns it: one tensor, or a pair if
    the chain ends with a NormalParamExtractor. It is valid until the next call.
    """

    def __init__(self, layers: Sequence[nn.Module], x: torch.Tensor) -> None:
        self.first, self.rest, self.out, self.tail = _compile(layers, x)

    def run(self, x: torch.Tensor) -> Any:
        """Return the chain's output for `x`. Call it under `torch.no_grad`."""
        self.first(x)
        for operation in self.rest:
            operation()
        return self.out if self.tail is None else self.tail(self.out)


def make_plan(module: nn.Module, x: torch.Tensor) -> Plan | None:
    """Return a plan for a module and inputs like `x`, or ``None`` if the module must be called.

    The plan is compared with the module on `x` and on three inputs near it, bit for bit.
    """
    layers = chain_of(module)
    if layers is None or not _is_plannable(module, layers, x):
        return None
    plan = Plan(layers, x)
    noise = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": noise, "dtype": x.dtype, "device": "cpu"}
    with torch.no_grad():
        nearby = (x + torch.randn(x.shape, **options) for _ in range(3))
        is_exact = all(_agrees(module, plan, value) for value in (x, *nearby))
    return plan if is_exact else None


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """Return a chain's layers in order of execution, ``None`` if it has an unknown class."""
    if _is_sequential(module):
        layers: list[nn.Module] = []
        for child in module._modules.values():  # children() omits a layer that is used twice
            part = chain_of(child) if child is not None else None
            if part is None:
                return None
            layers.extend(part)
        return layers
    return [module] if type(module) in _KNOWN else None


def _is_sequential(module: nn.Module) -> bool:
    kind = type(module)
    if (kind.__module__, kind.__qualname__) == _TORCHRL_MLP:
        return not getattr(module, "_reshape_out", True)
    return kind is nn.Sequential


def _is_plannable(module: nn.Module, layers: list[nn.Module], x: torch.Tensor) -> bool:
    linears = [layer for layer in layers if type(layer) is nn.Linear]
    return (
        bool(linears)
        and x.ndim in (1, 2)
        and x.dtype in (torch.float32, torch.float64)
        and not autocasts()[0]
        and all(is_plain(part) for part in module.modules())
        and all(_is_readable(linear, x.dtype) for linear in linears)
        # Torch has another kernel for vectors of one element, and its last bit may differ.
        and not (x.ndim == 1 and any(linear.in_features == 1 for linear in linears))
        and not any(type(layer) is nn.Dropout and layer.training for layer in layers)
        and all(type(layer) is not NormalParamExtractor for layer in layers[:-1])
        and not (getattr(layers[0], "inplace", False))
    )


def _is_readable(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """Return whether the weights are dense parameters of the input's dtype on the CPU."""
    tensors = [t for t in (linear.weight, linear.bias) if t is not None]
    return "weight" in linear._parameters and all(
        type(t) in (nn.Parameter, torch.Tensor)
        and t.dtype == dtype
        and t.device.type == "cpu"
        and t.layout is torch.strided
        for t in tensors
    )


def _agrees(module: nn.Module, plan: Plan, x: torch.Tensor) -> bool:
    expected, actual = module(x.clone()), plan.run(x)
    return same_bits(_as_tuple(expected), _as_tuple(actual))


def _as_tuple(out: Any) -> Tensors:
    return out if isinstance(out, tuple) else (out,)


def _compile(
    layers: Sequence[nn.Module], x: torch.Tensor
) -> tuple[Operation, list[Callable[[], Any]], torch.Tensor, Operation | None]:
    """Return the operations of a chain: the first one takes the input, others use buffers.

    Then come the buffer of the result, and the NormalParamExtractor to apply to it, if any.
    """
    operations: list[tuple[Operation, torch.Tensor]] = []
    value = x
    tail: Operation | None = None
    for layer in layers:
        if type(layer) is nn.Linear:
            operation, out = _linear(layer, value)
        elif type(layer) is NormalParamExtractor:
            tail = layer.forward
            continue
        elif type(layer) in _IN_PLACE:
            operation, out = _activation(layer, value, owned=bool(operations))
        else:
            continue
        operations.append((operation, value))
        value = out
    (first, _), *others = operations
    rest: list[Callable[[], Any]] = [partial(operation, source) for operation, source in others]
    return first, rest, value, tail


def _linear(linear: nn.Linear, x: torch.Tensor) -> tuple[Operation, torch.Tensor]:
    weight = linear.weight.detach()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if linear.bias is None:
        if x.ndim == 1:
            return partial(torch.mv, weight, out=out), out
        return partial(torch.mm, mat2=weight.t(), out=out), out
    bias = linear.bias.detach()
    if x.ndim == 1:
        return partial(torch.addmv, bias, weight, out=out), out
    return partial(torch.addmm, bias, mat2=weight.t(), out=out), out


def _activation(
    layer: nn.Module, x: torch.Tensor, *, owned: bool
) -> tuple[Operation, torch.Tensor]:
    """Return an activation that works in place on a buffer of the plan, or else on a copy."""
    in_place = _IN_PLACE[type(layer)](layer)
    if owned:
        return in_place, x
    out = torch.empty_like(x)
    return lambda value: in_place(out.copy_(value)), out


def autocasts() -> tuple[bool, bool]:
    """Return whether autocast is active in this thread, for the CPU and for CUDA."""
    try:
        return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    except TypeError:  # torch 2.3 has one function per device
        return bool(torch.is_autocast_cpu_enabled()), bool(torch.is_autocast_enabled())


class Fingerprint:
    """Detect changes of a program's modules: attributes, hooks, children and parameters.

    The fingerprint holds references to these objects, so that no new object has the address of an
    old one. A check takes about a microsecond per attribute; it is made once per rollout.

    Args:
        called: Modules to check only for changes of how they are called, see `forward_of`.
        captured: Modules whose training mode, parameters and buffers are kept by CUDA graphs
            (default: none).
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        called: Sequence[nn.Module],
        captured: Sequence[nn.Module] = (),
    ) -> None:
        self._modules, self._called, self._captured = modules, called, captured
        self._held: list[Any] = []
        self._marks = self._take(self._held)

    def is_current(self) -> bool:
        """Return whether nothing that the program depends on has changed."""
        return self._take([]) == self._marks

    def _take(self, held: list[Any]) -> list[int]:
        marks = [int(active) for active in autocasts()]
        for part in self._captured:
            marks.append(int(part.training))
            marks += _marks_of((*part._parameters.values(), *part._buffers.values()), held)
        for module in self._called:
            kind = type(module)
            # getattr would call descriptors, some of which return a new object each time.
            forward = inspect.getattr_static(kind, "forward", None)
            held.append(forward)
            marks += [int(is_plain(module)), id(kind), id(forward)]
        for module in self._modules:
            attributes = vars(module)
            children = list(module._modules.values())
            held.append((list(attributes.values()), children))
            marks.append(int(is_plain(module)))
            marks.extend((len(module._forward_hooks), *module._forward_hooks))
            marks.append(id(type(module)))
            marks.extend(map(id, attributes.values()))
            marks.extend(map(id, children))
            marks += _marks_of(module._parameters.values(), held)
        return marks


def _marks_of(values: Iterable[torch.Tensor | None], held: list[Any]) -> list[int]:
    """Return numbers that change if a tensor or its memory is replaced; add tensors to `held`."""
    tensors = [tensor for tensor in values if tensor is not None]
    held.append(tensors)
    each = ((id(t), t.data_ptr(), *t.shape, *t.stride()) for t in tensors)
    return [mark for marks in each for mark in marks]
