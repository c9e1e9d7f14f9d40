"""Plans: a chain of Linear layers and activations as tensor operations into buffers of its own.

A plan reads the module's weights through detached views, so that optimiser steps are seen at once;
what it cannot see (a parameter exchanged, a hook, a layer replaced) is looked for once per rollout
through a `Fingerprint`. It is taken only if it gives the module's result bit for bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
    """A chain bound to inputs of one shape: [n] for one env, [P, n] for a batch.

    `run(x)` writes the result into the plan's own buffers and returns it: one tensor, or a pair
    where the chain ends in a NormalParamExtractor. It is valid until the next call.
    """

    def __init__(self, layers: Sequence[nn.Module], x: torch.Tensor) -> None:
        self.first, self.rest, self.out, self.tail = _compile(layers, x)

    def run(self, x: torch.Tensor) -> Any:
        """The chain's output for `x`; call it under `torch.no_grad`."""
        self.first(x)
        for operation in self.rest:
            operation()
        return self.out if self.tail is None else self.tail(self.out)


def make_plan(module: nn.Module, x: torch.Tensor) -> Plan | None:
    """A plan for a module and inputs like `x`, None where the module has to be called itself.

    Proven on `x` and on three inputs around it, against the module, bit for bit.
    """
    layers = chain_of(module)
    if layers is None or not _is_plannable(module, layers, x):
        return None
    plan = Plan(layers, x)
    noise = torch.Generator().manual_seed(0)
    form: dict[str, Any] = {"generator": noise, "dtype": x.dtype, "device": "cpu"}
    with torch.no_grad():
        around = (x + torch.randn(x.shape, **form) for _ in range(3))
        proven = all(_agrees(module, plan, value) for value in (x, *around))
    return plan if proven else None


def chain_of(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a chain in order of execution, None if it holds a class that is not known."""
    if _is_sequential(module):
        layers: list[nn.Module] = []
        for child in module._modules.values():  # children() leaves out a layer that is used twice
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
        and not _is_autocasting()
        and all(is_plain(part) for part in module.modules())
        and all(_is_readable(linear, x.dtype) for linear in linears)
        # torch computes a vector of one element by another kernel, whose last bit may differ.
        and not (x.ndim == 1 and any(linear.in_features == 1 for linear in linears))
        and not any(type(layer) is nn.Dropout and layer.training for layer in layers)
        and all(type(layer) is not NormalParamExtractor for layer in layers[:-1])
        and not (getattr(layers[0], "inplace", False))
    )


def _is_readable(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """True if the weights are ordinary dense parameters of the input's dtype on the CPU."""
    tensors = [t for t in (linear.weight, linear.bias) if t is not None]
    return "weight" in linear._parameters and all(
        type(t) in (nn.Parameter, torch.Tensor)
        and t.dtype == dtype
        and t.device.type == "cpu"
        and t.layout is torch.strided
        for t in tensors
    )


def _agrees(module: nn.Module, plan: Plan, x: torch.Tensor) -> bool:
    expected, came = module(x.clone()), plan.run(x)
    return same_bits(_as_tuple(expected), _as_tuple(came))


def _as_tuple(out: Any) -> Tensors:
    return out if isinstance(out, tuple) else (out,)


def _compile(
    layers: Sequence[nn.Module], x: torch.Tensor
) -> tuple[Operation, list[Callable[[], Any]], torch.Tensor, Operation | None]:
    """The first operation (takes the input), the others (bound to buffers), the last buffer."""
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
    """In place on a buffer of the plan; on a copy where the input is somebody else's."""
    in_place = _IN_PLACE[type(layer)](layer)
    if owned:
        return in_place, x
    out = torch.empty_like(x)
    return lambda value: in_place(out.copy_(value)), out


def _is_autocasting() -> bool:
    try:
        return torch.is_autocast_enabled("cpu")
    except TypeError:  # torch 2.3 has one function per device
        return bool(torch.is_autocast_cpu_enabled())


class Fingerprint:
    """What a program was made from: modules, their attributes, hooks, children and parameters.

    Kept objects are held, so that no address is taken for another's. Taking one costs about a
    microsecond per attribute; it is done once per rollout.

    Args:
        modules: what is looked at in full.
        called: modules of which only how they are called is looked at, see `forward_of`.
        captured: Whether CUDA graphs of the called modules keep the training mode of each part.
    """

    def __init__(
        self, modules: Sequence[nn.Module], called: Sequence[nn.Module], captured: bool = False
    ) -> None:
        self._modules, self._called = modules, called
        self._parts = [part for own in called for part in own.modules()] if captured else []
        self._held: list[Any] = []
        self._marks = self._take(self._held)

    def still_true(self) -> bool:
        """False if anything that the program depends on was exchanged."""
        return self._take([]) == self._marks

    def _take(self, held: list[Any]) -> list[int]:
        marks = [int(_is_autocasting()), *(int(part.training) for part in self._parts)]
        for module in self._called:
            kind = type(module)
            forward = inspect.getattr_static(kind, "forward", None)  # asked for, some make it anew
            held.append(forward)
            marks += [int(is_plain(module)), id(kind), id(forward)]
        for module in self._modules:
            attributes = vars(module)
            tensors = [t for t in module._parameters.values() if t is not None]
            children = list(module._modules.values())
            held.append((list(attributes.values()), tensors, children))
            marks.append(int(is_plain(module)))
            marks.extend((len(module._forward_hooks), *module._forward_hooks))
            marks.append(id(type(module)))
            marks.extend(map(id, attributes.values()))
            marks.extend(map(id, children))
            for tensor in tensors:
                marks.append(id(tensor))
                marks.append(tensor.data_ptr())
        return marks
