"""Work on a CUDA device as a graph of CUDA's: one launch, whatever it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


class CapturedWork:
    """Work that reads and writes the same memory each time, captured.

    It may copy to and from pinned memory, but not ask the device for values. Other threads may use
    the device meanwhile.

    Args:
        work: returns tensors in any nesting: the very same ones each time, once it is captured.
        device: whose work it is.
        warmup: how often it is called as it is before it is captured.
    """

    def __init__(self, work: Callable[[], Any], device: torch.device, warmup: int) -> None:
        self._work, self._device = work, device
        self._left = warmup
        self._graph: Any = None
        self._outputs: Any = None

    def __call__(self) -> Any:
        """Have the work done behind what the current stream was given; what it returns."""
        with torch.cuda.device(self._device):
            if self._left:
                self._left -= 1
                return called_beside(self._work)
            if self._graph is None:
                self._capture()
            self._graph.replay()
            return self._outputs

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # By default whatever another thread does with the device would end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._outputs = self._work()
        self._graph = graph


class CapturedCall:
    """A function over CUDA tensors, captured.

    The shapes and dtypes of its inputs must not change, nor may it ask the device for values; what
    is no tensor among them counts as it was when it was captured. Results are in memory of their
    own.

    Args:
        function: positional and named tensors to tensors in any nesting.
        warmup: how often it is called as it is before it is captured, at least once.
    """

    def __init__(self, function: Callable[..., Any], warmup: int = 2) -> None:
        self._function = function
        self._left = max(warmup, 1)
        self._inputs: list[torch.Tensor] = []
        self._captured: CapturedWork | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The function's result for these inputs."""
        leaves, form = tree_flatten((inputs, named))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = given[0].device
        if self._left:
            self._left -= 1
            with torch.cuda.device(device):
                return called_beside(lambda: self._function(*inputs, **named))
        if self._captured is None:
            own = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._inputs = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
            kept, kept_named = tree_unflatten(own, form)
            self._captured = CapturedWork(lambda: self._function(*kept, **kept_named), device, 0)
        for mine, value in zip(self._inputs, given, strict=True):
            if mine.shape != value.shape or mine.dtype != value.dtype:  # copy_ would broadcast
                raise ValueError(
                    f"inputs: expected the {mine.dtype}{list(mine.shape)} that was captured, got "
                    f"{value.dtype}{list(value.shape)}"
                )
            mine.copy_(value)
        return tree_map_only(torch.Tensor, torch.clone, self._captured())


def called_beside(work: Callable[[], Any]) -> Any:
    """Call it on a stream of its own, as a capture wants the calls before it to be."""
    kind: Any = torch.cuda.Stream
    current, beside = torch.cuda.current_stream(), kind()
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        result = work()
    current.wait_stream(beside)

    def keep(tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda":
            tensor.record_stream(current)

    tree_map_only(torch.Tensor, keep, result)
    return result
