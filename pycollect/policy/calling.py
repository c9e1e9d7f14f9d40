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


Function = Callable[..., Any]


@dataclass(frozen=True)
class Calling:
    """What `compile_policy`, `cudagraph_policy` and `trust_policy` ask for.

    Each call of a module or function in the policy is compiled, or captured, by itself;
    distributions are sampled as ever. Where there are none, and inputs and outputs cross between
    the device and the host, the step is captured as a whole. A policy that needs a TensorDict is
    compiled as a whole.

    Attributes:
        compiled: arguments of ``torch.compile``, and "warmup", the calls before; None: not at all.
        graphed: "warmup", the calls before the capture; None: not at all.
        trusted: the policy takes a TensorDict, whatever its signature says.
        pool: Memory that all graphs share. Defaults to ``None``: each has its own.
        within: The caller captures whole rollouts, so the calls in them are not captured.
    """

    compiled: Mapping[str, Any] | None = None
    graphed: Mapping[str, Any] | None = None
    trusted: bool = False
    pool: GraphPool | None = None
    within: bool = False

    @classmethod
    def checked(cls, compile_policy: Any, cudagraph_policy: Any, trust_policy: Any) -> Calling:
        """Check all three arguments.

        Raises:
            TypeError, ValueError: by the argument's name.
        """
        compiled = _checked("compile_policy", compile_policy, inspect.signature(torch.compile))
        graphed = _checked("cudagraph_policy", cudagraph_policy, inspect.signature(CapturedCall))
        if trust_policy not in (None, True, False):
            raise TypeError(f"trust_policy: expected a bool, got {trust_policy!r}")
        return cls(compiled, graphed, bool(trust_policy))

    def on(self, device: torch.device) -> Calling:
        """What of this is possible where the policy lies.

        Without CUDA nothing is captured, and a warning says so.

        Raises:
            ValueError: a policy on another device, though there is CUDA.
        """
        if self.graphed is None or device.type == "cuda":
            return self
        if is_available("cuda"):
            raise ValueError(
                f"cudagraph_policy: expected a policy on a CUDA device, got one on {device}; "
                "pass policy_device"
            )
        warn_user(
            "cudagraph_policy: ignored, because CUDA is not available",
        )
        return replace(self, graphed=None)

    def of_calls_alone(self, program: Program) -> bool:
        """Whether a step of the program can be captured as a whole: nothing is drawn in it."""
        return self.graphed is not None and all(
            isinstance(step, CallStep) and not isinstance(step.function, TensorCall)
            for step in program.steps
        )

    def of_program(self, program: Program) -> Program:
        """The program, its calls compiled or captured."""
        if self.compiled is None and (self.graphed is None or self.within):
            return program
        steps = tuple(
            replace(step, function=self.of(step.function))
            if isinstance(step, CallStep) and not isinstance(step.function, TensorCall)
            else step
            for step in program.steps
        )
        return replace(program, steps=steps)

    def of(self, function: Function) -> Function:
        """The function over tensors, compiled or captured."""
        function = self.of_whole(function)
        return (
            function
            if self.graphed is None or self.within
            else CapturedCall(function, pool=self.pool, **self.graphed)
        )

    def of_whole(self, policy: Function) -> Function:
        """A policy over a TensorDict, compiled."""
        if self.compiled is None:
            return policy
        arguments = dict(self.compiled)
        return _Compiled(policy, arguments.pop("warmup", 1), arguments)


AS_IT_IS = Calling()


class _Compiled:
    """A function that is compiled after so many calls, as TorchRL's collectors do it."""

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
