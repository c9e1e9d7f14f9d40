"""How a policy is called: with what, and its modules as they are, compiled or as CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycollect.devices import is_available
from pycollect.errors import warn_user
from pycollect.policy.graphs import CapturedCall, GraphPool
from pycollect.policy.program.exploration import TensorCall
from pycollect.policy.program.steps import CallStep, Program

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
