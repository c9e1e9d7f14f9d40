"""Work on a CUDA device as a graph of CUDA's: one launch, whatever it consists of."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

_one_at_a_time = threading.Lock()  # torch allows one capture in a process


class GraphPool:
    """Device memory that several graphs share, of which only one is replayed at a time.

    A graph may write the results of another one. So what a replay returned is copied, by the stream
    that replays, before the next graph is replayed; and all of them are replayed by one stream.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[Any] = WeakSet()
        self._stream: Any = None

    @contextmanager
    def capturing(self, graph: Any, device: torch.device) -> Iterator[None]:
        """Capture the work within as that graph."""
        # Torch frees a pool with its last graph, and fails if it gets the handle afterwards:
        # `known` keeps the pool until this graph has it, too.
        known = next(iter(self._graphs), None)
        pool = None if known is None else known.pool()
        stream = self._stream_of(device)
        # By default whatever another thread does with the device would end the capture.
        mode = "thread_local"
        with (
            _one_at_a_time,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
        ):
            yield
        self._graphs.add(graph)

    def _stream_of(self, device: torch.device) -> Any:
        """Return the stream on which graphs are captured, whose priority their kernels keep.

        Torch uses a pool's memory again only for the stream that it was taken for. Torch's own
        capture stream would also share cuBLAS's workspace with graphs that run at the same time.
        """
        kind: Any = torch.cuda.Stream
        while self._stream in (None, torch.cuda.current_stream(device)):
            self._stream = kind(device, priority=-1)
        return self._stream


class CapturedWork:
    """Work that reads and writes the same memory each time, captured.

    It may copy to and from pinned memory, but not ask the device for values. Other threads may use
    the device meanwhile.

    Args:
        work: returns tensors in any nesting: the very same ones each time, once it is captured.
        device: whose work it is.
        warmup: how often it is called as it is before it is captured.
        pool: Memory of the graph. Defaults to ``None``: it has its own.
    """

    def __init__(
        self,
        work: Callable[[], Any],
        device: torch.device,
        warmup: int,
        pool: GraphPool | None = None,
    ) -> None:
        self._work, self._device = work, device
        self._pool = pool or GraphPool()
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
        with self._pool.capturing(graph, self._device):
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
        pool: as of `CapturedWork`.
    """

    def __init__(
        self, function: Callable[..., Any], warmup: int = 2, pool: GraphPool | None = None
    ) -> None:
        self._function, self._pool = function, pool
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
            work = functools.partial(self._function, *kept, **kept_named)
            self._captured = CapturedWork(work, device, 0, self._pool)
        for mine, value in zip(self._inputs, given, strict=True):
            if mine.shape != value.shape or mine.dtype != value.dtype:  # copy_ would broadcast
                raise ValueError(
                    f"inputs: expected {mine.dtype}{list(mine.shape)}, as in the captured call, "
                    f"got {value.dtype}{list(value.shape)}"
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
