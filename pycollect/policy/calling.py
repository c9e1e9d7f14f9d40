"""Call a policy as it is, compiled, or as CUDA graphs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from pycollect.data.devices import is_available
from pycollect.errors import warn_user
from pycollect.policy.program.exploration import TensorCall
from pycollect.policy.program.steps import CallStep, Program

_one_at_a_time = threading.Lock()  # torch allows one capture in a process
_LARGE_BLOCK = (32 << 20) - (1 << 16)  # bytes; blocks above 32 MiB do not change the thresholds


def keep_freed_memory() -> None:
    """Let malloc keep what a call of the policy frees, for the next call.

    If a process frees a large block, glibc raises its thresholds for returning memory to the
    system; see M_MMAP_THRESHOLD in mallopt(3). Otherwise the activations of a large batch can be
    new pages in every call, and page faults then take a tenth of each step.
    """
    torch.empty(_LARGE_BLOCK, dtype=torch.uint8, device="cpu")


class GraphPool:
    """Device memory that several graphs share. Only one graph is replayed at a time.

    A graph may overwrite the results of another graph. Replay all graphs of a pool on one stream,
    and copy the results of a replay on that stream before the next replay.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[Any] = WeakSet()
        self._stream: Any = None

    @contextmanager
    def capturing(self, graph: Any, device: torch.device) -> Iterator[None]:
        """Capture the body of the ``with`` statement as the graph."""
        # Torch frees a pool with its last graph, and then refuses the pool's handle. `known` keeps
        # the pool alive until this graph uses it.
        known = next(iter(self._graphs), None)
        pool = None if known is None else known.pool()
        stream = self._stream_of(device)
        # In the default mode, work of other threads on the device would end the capture.
        mode = "thread_local"
        with (
            _one_at_a_time,
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
        ):
            yield
        self._graphs.add(graph)

    def _stream_of(self, device: torch.device) -> Any:
        """Return the stream on which graphs are captured; their kernels keep its priority.

        Torch reuses a pool's memory only for the stream that allocated it. Torch's own capture
        stream would also share cuBLAS's workspace with graphs that run at the same time.
        """
        kind: Any = torch.cuda.Stream
        while self._stream in (None, torch.cuda.current_stream(device)):
            self._stream = kind(device, priority=-1)
        return self._stream


class CapturedWork:
    """Capture a function that reads and writes the same memory at each call, and replay it.

    The function may copy to and from pinned memory, but must not wait for values of the device.
    Other threads may use the device during the capture.

    Args:
        work: Function that returns tensors in any nesting. After the capture, each call returns the
            same tensor objects.
        warmup: Number of plain calls before the capture.
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
        self.is_captured = False  # whether the last call has replayed the graph
        self._graph: Any = None
        self._outputs: Any = None

    def __call__(self) -> Any:
        """Queue the work on the current stream and return its outputs."""
        with torch.cuda.device(self._device):
            if self._left:
                result = call_on_new_stream(self._work)
                self._left -= 1  # not if it was interrupted
                return result
            if self._graph is None:
                self._capture()
            self._graph.replay()
            self.is_captured = True
            return self._outputs

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with self._pool.capturing(graph, self._device):
            self._outputs = self._work()
        self._graph = graph


class CapturedCall:
    """Capture a function of CUDA tensors, and replay it on new inputs.

    The shapes and dtypes of its inputs must not change, and it must not wait for values of the
    device. Arguments other than tensors keep the values that they had at the capture. Every call
    returns new tensors.

    Args:
        function: Takes positional and named arguments; returns tensors in any nesting.
        warmup: Number of plain calls before the capture, at least one (default: 2).
        pool: Memory of the graph, as for `CapturedWork`.
    """

    def __init__(
        self, function: Callable[..., Any], warmup: int = 2, pool: GraphPool | None = None
    ) -> None:
        self._function, self._pool = function, pool
        self._left = max(warmup, 1)
        self._inputs: list[torch.Tensor] = []
        self._captured: CapturedWork | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves, tree = tree_flatten((inputs, named))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = tensors[0].device
        if self._left:
            self._left -= 1
            with torch.cuda.device(device):
                return call_on_new_stream(lambda: self._function(*inputs, **named))
        if self._captured is None:
            static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._inputs = [leaf for leaf in static if isinstance(leaf, torch.Tensor)]
            positional, keywords = tree_unflatten(static, tree)
            work = functools.partial(self._function, *positional, **keywords)
            self._captured = CapturedWork(work, device, 0, self._pool)
        for target, value in zip(self._inputs, tensors, strict=True):
            if target.shape != value.shape or target.dtype != value.dtype:  # copy_ would broadcast
                raise ValueError(
                    f"inputs: expected {target.dtype}{list(target.shape)}, as in the captured "
                    f"call, got {value.dtype}{list(value.shape)}"
                )
            target.copy_(value)
        return tree_map_only(torch.Tensor, torch.clone, self._captured())


def call_on_new_stream(work: Callable[[], Any]) -> Any:
    """Call a function on a new stream, as torch requires of the calls before a capture."""
    kind: Any = torch.cuda.Stream
    current, side = torch.cuda.current_stream(), kind()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = work()
    current.wait_stream(side)

    def record_use(tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda":
            tensor.record_stream(current)

    tree_map_only(torch.Tensor, record_use, result)
    return result


Function = Callable[..., Any]


@dataclass(frozen=True)
class CallOptions:
    """The arguments `compile_policy`, `cudagraph_policy` and `trust_policy`.

    Each call of a module or function in the policy is compiled or captured separately; sampling
    from distributions is neither. If a policy samples nothing, and its inputs and outputs are
    copied between host and device, the whole step is captured. A policy that needs a TensorDict is
    compiled as a whole.

    Attributes:
        compiled: Arguments of ``torch.compile``, and "warmup", the number of calls before it.
            ``None``: do not compile.
        graphed: "warmup", the number of calls before the capture. ``None``: do not capture.
        trusted: Call the policy with a TensorDict, regardless of its signature.
        pool: Memory that all graphs share. Defaults to ``None``: each graph has its own.
        in_captured_rollout: The caller captures whole rollouts, so single calls are not captured.
    """

    compiled: Mapping[str, Any] | None = None
    graphed: Mapping[str, Any] | None = None
    trusted: bool = False
    pool: GraphPool | None = None
    in_captured_rollout: bool = False

    @classmethod
    def checked(cls, compile_policy: Any, cudagraph_policy: Any, trust_policy: Any) -> CallOptions:
        compiled = _checked("compile_policy", compile_policy, inspect.signature(torch.compile))
        graphed = _checked("cudagraph_policy", cudagraph_policy, inspect.signature(CapturedCall))
        if trust_policy not in (None, True, False):
            raise TypeError(f"trust_policy: expected a bool, got {trust_policy!r}")
        return cls(compiled, graphed, bool(trust_policy))

    def for_device(self, device: torch.device) -> CallOptions:
        """Return the options for a policy on the device.

        Without CUDA, nothing is captured, with a warning.
        """
        if self.graphed is None or device.type == "cuda":
            return self
        if is_available("cuda"):
            raise ValueError(
                f"cudagraph_policy: expected a policy on a CUDA device, got one on {device}; "
                "pass policy_device"
            )
        warn_user("cudagraph_policy: ignored, because CUDA is not available")
        return replace(self, graphed=None)

    def can_capture_step(self, program: Program) -> bool:
        """Return whether a whole step of the program can be captured: it samples nothing."""
        return self.graphed is not None and all(
            isinstance(step, CallStep) and not isinstance(step.function, TensorCall)
            for step in program.steps
        )

    def wrap_program(self, program: Program) -> Program:
        """Return the program with its calls compiled or captured."""
        if self.compiled is None and (self.graphed is None or self.in_captured_rollout):
            return program
        steps = tuple(
            replace(step, function=self.wrap(step.function))
            if isinstance(step, CallStep) and not isinstance(step.function, TensorCall)
            else step
            for step in program.steps
        )
        return replace(program, steps=steps)

    def wrap(self, function: Function) -> Function:
        """Return a function over tensors, compiled and captured as configured."""
        function = self.compile(function)
        if self.graphed is None or self.in_captured_rollout:
            return function
        return CapturedCall(function, pool=self.pool, **self.graphed)

    def compile(self, policy: Function) -> Function:
        """Return a function or a policy over a TensorDict, compiled if configured."""
        if self.compiled is None:
            return policy
        arguments = dict(self.compiled)
        return _Compiled(policy, arguments.pop("warmup", 1), arguments)


UNCHANGED = CallOptions()


class _Compiled:
    """Compile a function after a number of calls, as TorchRL's collectors do."""

    def __init__(self, function: Function, warmup: int, arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._warmup = warmup
        self._compile: Function = torch.compile
        self._arguments = arguments

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._warmup == 0:
            self._function = self._compile(self._function, **self._arguments)
        self._warmup -= 1
        return self._function(*inputs, **named)


def _checked(name: str, value: Any, signature: inspect.Signature) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a bool or a dict, got {value!r}")
    known = sorted({*signature.parameters, "warmup"} - {"model", "function", "pool"})
    unknown = [key for key in value if key not in known]
    if unknown:
        raise TypeError(f"{name}: expected keys among {known}, got {unknown}")
    warmup = value.get("warmup", 1)
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ValueError(f"{name}: expected an int >= 0 for 'warmup', got {warmup!r}")
    return dict(value)
