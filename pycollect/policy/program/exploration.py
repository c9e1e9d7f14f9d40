"""TorchRL's Q-value and exploration modules as functions over tensors, without a TensorDict.

The classes are recognized by name, so that TorchRL is not imported; a subclass is called with a
TensorDict. Each function is compared with its module on a first call, see `is_exact`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from pycollect.data.layout import Key, as_key
from pycollect.data.tensordicts import rows_like
from pycollect.policy.program.steps import CallStep, CannotUnwrapError, Program, Tensors

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_Form: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]

_PACKAGE = "torchrl.modules.tensordict_module."
_PROJECTING_HOOK = f"{_PACKAGE}common._forward_hook_safe_action"
_EXPLORING = (InteractionType.RANDOM, None)


class TensorCall(ABC):
    """Base of functions over tensors that replace a module over TensorDicts.

    A call may overwrite the tensors that the last call returned.

    Args:
        module: The module, whose buffers are read at each call.
        lead: Batch shape of the tensors, as `EnvBatch.batch_size`.

    Attributes:
        kept: Values that the last call kept for the next one, by their private keys `kept_keys`;
            empty before the first call.
    """

    extra_in_keys: tuple[str, ...] = ()
    kept_keys: tuple[Key, ...] = ()
    _spec: Any = None

    def __init__(self, module: Any, lead: tuple[int, ...]) -> None:
        self.module = module
        self.lead = lead
        self.kept: dict[Key, torch.Tensor] = {}

    @property
    def step(self) -> CallStep:
        """Step of a program that calls this function."""
        in_keys = (*self.module.in_keys, *self.extra_in_keys)
        return CallStep(self, tuple(map(as_key, in_keys)), tuple(map(as_key, self._out_keys)))

    def is_current(self) -> bool:
        """Return whether the module still has the spec that this function was made for."""
        if self._spec is None:
            return True
        try:
            return _spec_of(self.module) is self._spec
        except CannotUnwrapError:
            return False

    @property
    def _out_keys(self) -> Any:
        return self.module.out_keys[:1]  # the others are private to the module

    @abstractmethod
    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the tensors that the module writes."""


class QValues(TensorCall):
    """`QValueModule` without an action mask: (values) to (action, values, chosen value)."""

    def __init__(self, module: Any, lead: tuple[int, ...]) -> None:
        super().__init__(module, lead)
        if module.action_mask_key is not None:
            raise CannotUnwrapError("a Q-value module with an action mask")
        space = module.action_space
        _refuse_projection(module)
        self._is_index, self._is_one_hot = space == "categorical", space == "one_hot"
        self._choose = module.action_func_mapping[space]
        self._value_of = module.action_value_func_mapping.get(space, module._default_action_value)
        self._form: _Form | None = None

    @property
    def _out_keys(self) -> Any:
        return self.module.out_keys

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return action, values and the chosen value for values [*lead, actions]."""
        (values,) = inputs
        if not (self._is_index or self._is_one_hot):
            action = self._choose(values)
            return action, values, self._value_of(values, action)
        if _form_of(values) != self._form:
            self._prepare(values)
        torch.max(values, -1, keepdim=True, out=(self._chosen, self._index))
        if self._is_one_hot:
            torch.eq(values, self._chosen, out=self._action)
            torch.mul(self._action, values, out=self._product)
            torch.sum(self._product, -1, keepdim=True, out=self._chosen)
        return self._action, values, self._chosen

    @torch.inference_mode(False)  # a later call may be outside of it
    def _prepare(self, values: torch.Tensor) -> None:
        """Allocate the outputs for values of this shape, dtype and device."""
        self._form = _form_of(values)
        self._chosen = values.new_empty((*values.shape[:-1], 1))
        self._index = torch.empty_like(self._chosen, dtype=torch.int64)
        self._action = self._index.squeeze(-1)
        if self._is_one_hot:
            self._action = torch.empty_like(values, dtype=torch.int64)
            self._product = torch.empty_like(values)


class EpsilonGreedy(TensorCall):
    """`EGreedyModule` without an action mask."""

    def __init__(self, module: Any, lead: tuple[int, ...]) -> None:
        super().__init__(module, lead)
        if module.action_mask_key is not None:
            raise CannotUnwrapError("an epsilon-greedy module with an action mask")
        if len(as_key(module.action_key)) > 1:  # drawn for each row of the nested TensorDict
            raise CannotUnwrapError("an epsilon-greedy module of a nested action")
        _refuse_projection(module)
        self._spec = _spec_of(module)
        self._form: _Form | None = None

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the action [*lead, *frame], replaced by a random one with probability eps."""
        (action,) = inputs
        if interaction_type() not in _EXPLORING:
            return (action,)
        epsilon = self.module._buffers["eps"]
        if _form_of(action) != self._form:
            self._prepare(action, epsilon.device)
        uniform = self._uniform.uniform_()
        drawn = self._draw()
        if self._is_one:
            return (drawn.to(action) if uniform.item() < epsilon.item() else action,)
        if drawn.device != epsilon.device:
            drawn = drawn.to(epsilon.device)
        is_random = rows_like(uniform < epsilon, action)
        return (torch.where(is_random, drawn, action),)

    @torch.inference_mode(False)
    def _prepare(self, action: torch.Tensor, device: torch.device) -> None:
        """Allocate the random numbers for actions of this shape, dtype and device."""
        self._form = _form_of(action)
        self._draw = _random_actions(self._spec, action.shape)
        self._uniform = torch.empty(self.lead, device=device)
        on_host = action.device.type == device.type == "cpu"
        keeps_dtype = torch.promote_types(self._spec.dtype, action.dtype) is action.dtype
        self._is_one = not self.lead and on_host and keeps_dtype


class GaussianNoise(TensorCall):
    """`AdditiveGaussianModule`."""

    def __init__(self, module: Any, lead: tuple[int, ...]) -> None:
        super().__init__(module, lead)
        self._spec = _spec_of(module)
        self._project, self._projects = _projection(self._spec), _projects(module)
        if not all(module._buffers[name].is_floating_point() for name in ("mean", "std")):
            raise CannotUnwrapError("a Gaussian noise with integers")

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the action [*lead, *frame] with noise."""
        (action,) = inputs
        if interaction_type() in _EXPLORING:
            buffers = self.module._buffers
            mean, std = buffers["mean"].expand(action.shape), buffers["std"].expand(action.shape)
            noise = torch.normal(mean=mean, std=std).to(action.device)
            return (self._project(action + noise * buffers["sigma"]),)
        return (self._project(action) if self._projects else action,)


class OrnsteinUhlenbeckNoise(TensorCall):
    """`OrnsteinUhlenbeckProcessModule`: (action, is_init) to action. Keeps the noise itself."""

    def __init__(self, module: Any, lead: tuple[int, ...]) -> None:
        super().__init__(module, lead)
        if module.is_init_key != "is_init":  # may be missing, or have another shape
            raise CannotUnwrapError("an Ornstein-Uhlenbeck process with its own is_init_key")
        self.extra_in_keys = (module.is_init_key,)
        self.kept_keys = as_key(module.ou.noise_key), as_key(module.ou.steps_key)
        self._spec = _spec_of(module)
        self._project, self._projects = _projection(self._spec), _projects(module)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the action [*lead, *frame] with noise; is_init [*lead, 1] restarts the noise."""
        action, is_init = inputs
        if interaction_type() not in _EXPLORING:
            return (self._project(action) if self._projects else action,)
        process = self.module.ou
        begins = is_init.reshape(self.lead)
        if self.kept:
            noise, steps = (self.kept[key] for key in self.kept_keys)
        else:
            noise = torch.zeros(action.shape, device=action.device)
            steps = torch.zeros(self.lead, dtype=torch.long, device=action.device)
        noise = noise.masked_fill(rows_like(begins, noise), 0) + process.x0
        steps = steps.masked_fill(begins, 0)
        sigma = process.current_sigma(rows_like(steps, noise).expand(noise.shape))
        noise = (
            noise
            + process.theta * (process.mu - noise) * process.dt
            + sigma * math.sqrt(process.dt) * torch.randn_like(noise)
        )
        self.kept = dict(zip(self.kept_keys, (noise - process.x0, steps + 1), strict=True))
        action = action + self.module._buffers["eps"] * noise
        return (self._project(action) if self._projects else action,)


_CALLS: dict[str, Callable[[Any, tuple[int, ...]], TensorCall]] = {
    f"{_PACKAGE}actors.QValueModule": QValues,
    f"{_PACKAGE}exploration.EGreedyModule": EpsilonGreedy,
    f"{_PACKAGE}exploration.AdditiveGaussianModule": GaussianNoise,
    f"{_PACKAGE}exploration.OrnsteinUhlenbeckProcessModule": OrnsteinUhlenbeckNoise,
}


def tensor_call(module: nn.Module, lead: tuple[int, ...]) -> TensorCall | None:
    """Return the function that replaces a known module, or ``None`` for any other class."""
    kind = type(module)
    make = _CALLS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if make is None else make(module, lead)


def check_kept(program: Program) -> None:
    """Raise CannotUnwrapError if modules share the private keys of their noise."""
    if sum(isinstance(call, OrnsteinUhlenbeckNoise) for call in tensor_calls(program)) > 1:
        raise CannotUnwrapError("several Ornstein-Uhlenbeck processes")


def tensor_calls(program: Program | None) -> list[TensorCall]:
    """Return the functions of a program that replace modules over TensorDicts."""
    steps = () if program is None else program.steps
    functions = (step.function for step in steps if isinstance(step, CallStep))
    return [function for function in functions if isinstance(function, TensorCall)]


def hooks_of_others(module: nn.Module) -> bool:
    """Return whether the module has forward hooks other than TorchRL's projection."""
    names = (
        f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
        for hook in module._forward_hooks.values()
    )
    return any(name != _PROJECTING_HOOK for name in names)


def _form_of(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype, tensor.device


def _spec_of(module: Any) -> Any:
    spec = module._spec
    if spec is None or module.out_keys[0] not in spec.keys(True):
        raise CannotUnwrapError(f"{type(module).__name__} without a spec of its action")
    return spec[module.out_keys[0]]


def _projects(module: Any) -> bool:
    """Return whether TorchRL's hook projects the action, and nothing else."""
    if not module._forward_hooks:
        return False
    keys = (key for key in module._spec.keys(True, True) if module._spec[key] is not None)
    if any(as_key(key) != as_key(module.out_keys[0]) for key in keys):
        raise CannotUnwrapError("a module that projects other keys than its action")
    return True


def _refuse_projection(module: nn.Module) -> None:
    if module._forward_hooks:
        raise CannotUnwrapError(f"a {type(module).__name__} that projects its outputs")


def _random_actions(spec: Any, shape: torch.Size) -> Callable[[], torch.Tensor]:
    """Return a function that draws actions of this shape, as the spec does.

    The next call may overwrite them.
    """

    def draw_by_spec() -> torch.Tensor:
        expanded = spec if spec.shape == shape else spec.expand(shape)
        drawn: torch.Tensor = expanded.rand()
        return drawn

    kind = type(spec).__name__
    if kind not in ("OneHot", "Categorical"):
        return draw_by_spec
    n, drawn = spec.space.n, torch.empty(shape, device=spec.device, dtype=spec.dtype)
    if kind == "OneHot":
        index = torch.empty((*shape[:-1], 1), device=spec.device, dtype=torch.int64)

        def draw_one_hot() -> torch.Tensor:
            if spec.mask is not None:
                return draw_by_spec()
            return drawn.zero_().scatter_(-1, index.random_(0, n), 1)

        return draw_one_hot
    if n < 0:
        return draw_by_spec
    return lambda: drawn.random_(0, n) if spec.mask is None else draw_by_spec()


def _projection(spec: Any) -> Function:
    """Return a function that projects floating-point actions as the spec's `project` does."""
    kind = type(spec).__name__
    if kind in ("UnboundedContinuous", "Unbounded"):
        return lambda action: action
    if kind not in ("BoundedContinuous", "Bounded"):
        raise CannotUnwrapError(f"an exploration module with a {kind} spec")
    low, high = spec.space.low, spec.space.high

    def clamp(action: torch.Tensor) -> torch.Tensor:
        return torch.clamp(action, low.to(action.device), high.to(action.device))

    return clamp
