"""TorchRL's LSTMModule and GRUModule, one step at a time, without a TensorDict.

They are told by the names of their `forward`, so that TorchRL is not imported, and each step is
proven on a first call to give the module's own bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pycollect.batch.layout import Key
from pycollect.policy.program.steps import as_key

_RNN = "torchrl.modules.tensordict_module.rnn"
_LAYERS = {f"{_RNN}.LSTMModule.forward": "lstm", f"{_RNN}.GRUModule.forward": "gru"}
_KERNELS: dict[type, Callable[..., Any]] = {nn.LSTM: torch.lstm, nn.GRU: torch.gru}


class RecurrentStep:
    """One step of the RNN layer in such a module: (value, states..., is_init) to (out, states...).

    Shapes as TorchRL's collectors have them, `[*batch, layers, size]` for states; a state is taken
    as zero where `is_init`. What it returns is in memory of its own.

    Args:
        module: an LSTMModule or a GRUModule.
        layer: its RNN layer.
        direct: a call of the layer does what its class does and no more: `forward`, half of the
            time in small layers, is then left out.
    """

    def __init__(self, module: nn.Module, layer: nn.RNNBase, direct: bool) -> None:
        self.module = module
        kernel = _KERNELS.get(type(layer)) if direct else None
        self._call = layer if kernel is None else _direct_call(layer, kernel)

    def __call__(self, value: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
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
    """What `forward` of an RNN layer comes to for an input of the right shape."""
    lstm = kernel is torch.lstm

    def call(value: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        out, *after = kernel(
            value,
            hidden,
            layer._flat_weights,
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
    """The RNN layer of a module that is known, None for any other."""
    forward: Any = type(module).forward
    name = _LAYERS.get(f"{forward.__module__}.{forward.__qualname__}")
    if name is None or getattr(module, "recurrent_mode", True):
        return None
    layer = getattr(module, name)
    return layer if isinstance(layer, nn.RNNBase) else None


def recurrent_keys(module: Any) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """What such a module reads and writes."""
    return tuple(map(as_key, module.in_keys)), tuple(map(as_key, module.out_keys))


def _rows_first(state: torch.Tensor, envs: int) -> torch.Tensor:
    """[*batch, layers, size] as [layers, envs, size], which is what the layer takes."""
    if envs == 1:
        return state.reshape(state.shape[-2], 1, state.shape[-1])
    if state.ndim > 3:
        state = state.flatten(0, -3)
    return state.transpose(0, 1).contiguous()
