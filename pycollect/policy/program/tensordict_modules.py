"""Unwrap TensorDictModules and recurrent modules, so that no TensorDict is built per step.

Only the library's own code is unwrapped. A class that overrides a method, a module with hooks, or
an option that changes the inputs of later modules raises CannotUnwrapError, and the policy is then
called with a TensorDict. TorchRL's classes are recognized without importing TorchRL: most inherit
these methods, and `SafeProbabilisticModule.forward` is recognized by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.nn.modules import module as torch_module

from pycollect.data.layout import Key, as_key
from pycollect.policy.program.exploration import check_kept, hooks_of_others, tensor_call
from pycollect.policy.program.steps import CallStep, CannotUnwrapError, HeadStep, Program, Step

_RNN = "torchrl.modules.tensordict_module.rnn"
_LAYERS = {f"{_RNN}.LSTMModule.forward": "lstm", f"{_RNN}.GRUModule.forward": "gru"}
_KERNELS: dict[type, Callable[..., Any]] = {nn.LSTM: torch.lstm, nn.GRU: torch.gru}


class RecurrentStep:
    """One step of an RNN layer: (value, states..., is_init) to (out, next states...).

    States have the shape of TorchRL's collectors, `[*batch, layers, size]`. If `is_init` is true,
    they are taken as zero. The returned tensors are new.

    Args:
        module: An LSTMModule or GRUModule.
        direct: A call of the layer runs its class's `forward` and nothing else. Its kernel is then
            called directly, because `forward` takes half of the time in small layers.
    """

    def __init__(self, module: nn.Module, layer: nn.RNNBase, direct: bool) -> None:
        self.module = module
        kernel = _KERNELS.get(type(layer)) if direct else None
        self._call = layer if kernel is None else _direct_call(layer, kernel)

    def __call__(self, value: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output and the next states."""
        *states, is_init = rest
        envs = is_init.numel()
        if is_init.any():
            begins = is_init.unsqueeze(-1)
            states = [torch.where(begins, torch.zeros_like(state), state) for state in states]
        hidden = tuple(_rows_first(state, envs) for state in states)
        out, after = self._call(
            value.reshape(envs, 1, -1), hidden if len(hidden) > 1 else hidden[0]
        )
        nexts = (after,) if isinstance(after, torch.Tensor) else after
        batch = is_init.shape[:-1]
        return (
            out.reshape(*batch, -1),
            *(row.transpose(0, 1).reshape(*batch, *row.shape[::2]) for row in nexts),
        )


def _direct_call(layer: nn.RNNBase, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does an RNN layer's `forward` for an input of the right shape."""
    lstm = kernel is torch.lstm

    def call(value: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        # A loss with target networks leaves its parameters in the layer's list of weights.
        weights = [getattr(layer, name) for name in layer._flat_weights_names]
        out, *after = kernel(
            value,
            hidden,
            weights,
            layer.bias,
            layer.num_layers,
            layer.dropout,
            layer.training,
            layer.bidirectional,
            layer.batch_first,
        )
        return out, tuple(after) if lstm else after[0]

    return call


def recurrent_layer(module: nn.Module) -> nn.RNNBase | None:
    """Return the RNN layer of an LSTMModule or GRUModule, ``None`` for any other module."""
    forward: Any = type(module).forward
    name = _LAYERS.get(f"{forward.__module__}.{forward.__qualname__}")
    if name is None or getattr(module, "recurrent_mode", True):
        return None
    layer = getattr(module, name)
    return layer if isinstance(layer, nn.RNNBase) else None


def recurrent_keys(module: Any) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Return the keys that a recurrent module reads, and those that it writes."""
    return tuple(map(as_key, module.in_keys)), tuple(map(as_key, module.out_keys))


def _rows_first(state: torch.Tensor, envs: int) -> torch.Tensor:
    """Return a state [*batch, layers, size] as [layers, envs, size], the layer's own shape."""
    if envs == 1:
        return state.reshape(state.shape[-2], 1, state.shape[-1])
    if state.ndim > 3:
        state = state.flatten(0, -3)
    return state.transpose(0, 1).contiguous()


_TORCHRL_HEAD = (
    "torchrl.modules.tensordict_module.probabilistic",
    "SafeProbabilisticModule.forward",
)
_CALL = nn.Module.__call__, nn.Module._call_impl  # before a program patches them
_HEAD_METHODS = ("forward", "get_dist", "_dist_sample", "log_prob_key", "dist_sample_keys")
_CALL_METHODS = ("_call_module", "_write_to_tensordict")


def unwrap(policy: nn.Module, lead: tuple[int, ...]) -> Program:
    """Return a TensorDictModule, perhaps a sequence, as a Program, or raise CannotUnwrapError."""
    unwrapped = _Unwrapped(lead)
    steps = tuple(unwrapped.steps(policy))
    selected = None
    if isinstance(policy, TensorDictSequential) and policy._select_before_return:
        selected = frozenset(as_key(key) for key in policy.out_keys)
    program = Program(steps, selected, tuple(unwrapped.watched))
    check_kept(program)
    return program


def is_plain(module: nn.Module, has_hooks: bool | None = None) -> bool:
    """Return whether a call of the module runs its class's `forward` and nothing else.

    Backward hooks do not count, because policies run without gradients. `has_hooks` is whether it
    has forward hooks that count; by default, all do.
    """
    kind = type(module)
    return not (
        (bool(module._forward_hooks) if has_hooks is None else has_hooks)
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or "_call_impl" in vars(module)
        or (kind.__call__, kind._call_impl) != _CALL
        or getattr(module, "_compiled_call_impl", None) is not None
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
    )


def forward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a plain module, and any other function itself.

    Checking for hooks at each call takes as long as the arithmetic of a small policy.
    """
    if isinstance(function, nn.Module) and is_plain(function):
        forward: Callable[..., Any] = function.forward
        return forward
    return function


def torchrl_head_forward(head: ProbabilisticTensorDictModule) -> Any:
    """Return TorchRL's `forward` of a probabilistic module, ``None`` if the head has another."""
    forward: Any = type(head).forward
    return forward if (forward.__module__, forward.__qualname__) == _TORCHRL_HEAD else None


class _Unwrapped:
    """Lists the steps of modules, and all modules that must not change.

    An outer module may set the `default` interaction type of its members.
    """

    def __init__(self, lead: tuple[int, ...]) -> None:
        self._lead = lead
        self.watched: list[nn.Module] = []

    def steps(self, module: nn.Module, default: InteractionType | None = None) -> list[Step]:
        self.watched.append(module)
        function = tensor_call(module, self._lead)
        if function is not None and is_plain(module, hooks_of_others(module)):
            self.watched.extend(part for part in module.modules() if part is not module)
            return [function.step]
        if not is_plain(module):
            raise CannotUnwrapError(f"{type(module).__name__} has hooks or its own forward")
        if isinstance(module, ProbabilisticTensorDictModule):
            return [_head(module, default)]
        if isinstance(module, ProbabilisticTensorDictSequential):
            return self._probabilistic_sequence(module, default)
        if isinstance(module, TensorDictSequential):
            names = ("forward", "_run_module", "_module_iter")
            _require_inherited(module, TensorDictSequential, names)
            return self._chain(module, module._module_iter(), default)
        if isinstance(module, TensorDictModule):
            return [_call(module)]
        layer = recurrent_layer(module)
        if layer is not None:
            self.watched.append(layer)
            step = RecurrentStep(module, layer, is_plain(layer))
            return [CallStep(step, *recurrent_keys(module))]
        raise CannotUnwrapError(f"{type(module).__name__} is not a TensorDictModule")

    def _probabilistic_sequence(
        self, module: ProbabilisticTensorDictSequential, default: InteractionType | None
    ) -> list[Step]:
        names = ("forward", "get_dist_params", "det_part", "_last_module", "_module_iter")
        _require_inherited(module, ProbabilisticTensorDictSequential, names)
        if not module._requires_sample:
            raise CannotUnwrapError("a sequence whose samples are outputs of its own modules")
        if module.return_composite:
            return self._chain(module, module._module_iter(), default)
        inner = default or module.default_interaction_type
        first = self._chain(module, [module._det_part], inner)
        return [*first, *self.steps(module._last_module, default)]

    def _chain(
        self,
        module: TensorDictSequential,
        members: Iterable[nn.Module],
        default: InteractionType | None,
    ) -> list[Step]:
        if module.inplace is not None or module.partial_tolerant:
            raise CannotUnwrapError("a sequence with inplace or partial_tolerant")
        if isinstance(module.module, nn.Module):
            self.watched.append(module.module)
        steps: list[Step] = []
        for member in members:
            if isinstance(member, TensorDictSequential) and member._select_before_return:
                raise CannotUnwrapError("a sequence in a sequence that selects its outputs")
            steps.extend(self.steps(member, default))
        return steps


def _call(module: TensorDictModule) -> CallStep:
    _require_inherited(module, TensorDictModule, ("forward", *_CALL_METHODS))
    options = vars(module)
    if module.inplace is not True or options.get("_get_kwargs") or options.get("method_kwargs"):
        raise CannotUnwrapError("TensorDictModule with inplace, get_kwargs or method_kwargs")
    method = options.get("method")
    function = getattr(module.module, method) if method else module.module
    names = getattr(module, "_kwargs", None)
    return CallStep(
        function,
        _keys(module.in_keys),
        _keys(module.out_keys_source),
        names=tuple(names) if names is not None else None,
    )


def _head(head: ProbabilisticTensorDictModule, default: InteractionType | None) -> HeadStep:
    methods = _HEAD_METHODS[1:] if torchrl_head_forward(head) else _HEAD_METHODS
    _require_inherited(head, ProbabilisticTensorDictModule, methods)
    if head.distribution_class is CompositeDistribution:
        raise CannotUnwrapError("a composite distribution")
    if head.num_samples is not None or getattr(head, "_generator_key", None) is not None:
        raise CannotUnwrapError("a probabilistic module with num_samples or a generator key")
    return HeadStep(
        head,
        _keys(head.in_keys),
        _keys(head.dist_sample_keys),
        as_key(head.log_prob_key) if head.return_log_prob else None,
        default or head.default_interaction_type,
    )


def _require_inherited(module: nn.Module, base: type, names: Iterable[str]) -> None:
    """Raise CannotUnwrapError if the module's class overrides one of these methods."""
    for name in names:
        if getattr(type(module), name, None) is not getattr(base, name, None):
            raise CannotUnwrapError(f"{type(module).__name__} overrides {name}")


def _keys(keys: Iterable[Any]) -> tuple[Key, ...]:
    return tuple(as_key(key) for key in keys)
