"""Calling a policy without leaving a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pycollect.devices import CPU, generator_state, set_generator_state


@contextmanager
def undisturbed(policy: Any, device: torch.device = CPU) -> Iterator[None]:
    """Put back random generators and the module's buffers when the block ends.

    The generators are torch's on the CPU and on `device`, numpy's and Python's global ones, and
    those kept as attributes of the policy's modules. A buffer gets its old tensor and its old
    contents back.
    """
    torch_state, device_state = torch.get_rng_state(), generator_state(device)
    numpy_state = np.random.get_state(legacy=False)
    python_state = random.getstate()
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    generators = [
        (generator, _state(generator))
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
        for generator, state in generators:
            _restore(generator, state)
        with torch.no_grad():
            for module, name, buffer, contents in buffers:
                buffer.copy_(contents)
                module._buffers[name] = buffer


def _state(generator: torch.Generator | np.random.Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state


def _restore(generator: torch.Generator | np.random.Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
