"""RandomPolicy, and RandomRunner, which draws random actions for a collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NestedKey, TensorDictBase

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.layout import Key, show, torch_dtype
from pycollect.envs.base import EnvBatch
from pycollect.envs.random_actions import Rng, Sampler
from pycollect.policy.outputs import fits


class RandomPolicy:
    """Draw random actions from a spec.

    Without a spec, a collector draws actions from its environment's action space, as with
    ``policy=None``.

    Args:
        action_spec: A TorchRL spec, or any object with `rand()` and `clone()`. Defaults to
            ``None``: the action space of the collector's environment.
        action_key: Key of the action (default: "action").

    Raises:
        TypeError: `action_spec` is not a spec, for example a Gymnasium space.
    """

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        methods = (getattr(action_spec, name, None) for name in ("rand", "clone"))
        if action_spec is not None and not all(map(callable, methods)):
            raise TypeError(
                "action_spec: expected a TorchRL spec, or None for the environment's own actions, "
                f"got {type(action_spec).__name__}"
            )
        self.action_spec = None if action_spec is None else action_spec.clone()
        self.action_key = action_key

    def set_action_spec_from_env(self, env: Any) -> None:
        """Take the action spec of an environment, unless the policy already has one.

        Args:
            env: A TorchRL environment with a `full_action_spec`.
        """
        if self.action_spec is None:
            self.action_spec = env.full_action_spec.clone()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action into the TensorDict.

        Raises:
            RuntimeError: The policy has no spec.
        """
        if self.action_spec is None:
            raise RuntimeError(
                "action_spec: RandomPolicy has no spec to draw from; pass action_spec, or pass the "
                "policy to a collector"
            )
        drawn = self.action_spec.rand()
        if isinstance(drawn, TensorDictBase):  # a spec of several actions
            return td.update(drawn)
        return td.set(self.action_key, drawn)


Row: TypeAlias = torch.Tensor | npt.NDArray[Any]


class RandomRunner:
    """Draw the random actions of a whole rollout at once.

    Drawing them one by one would take longer than calling a policy. If the environment cannot draw
    ahead, actions are drawn before each step. It has the methods of :class:`PolicyRunner`.

    Args:
        outputs: Leaves to record. With `init_random_frames` these are the policy's. Leaves other
            than actions are zeros, or the observation if they have its key and shape. Actions may
            have other dtypes than the environment's, or other dimensions of size 1. Defaults to
            ``None``: the environment's actions.

    Attributes:
        rng: One generator, or one per environment. It may be replaced between rollouts. If it is
            ``None``, the first use sets it to a generator seeded from torch's global generator.
    """

    slow_path = False
    reuses_memory = False
    inputs: tuple[Key, ...] = ()
    states: tuple[Any, ...] = ()
    through_env: tuple[Leaf, ...] = ()
    is_init: torch.Tensor | None = None
    step_count: torch.Tensor | None = None

    def __init__(
        self,
        env: EnvBatch,
        outputs: tuple[Leaf, ...] | None = None,
        current: Mapping[Key, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.rng: Rng | None = None
        self._env, self._spec = env, (spec := env.spec)
        self.outputs = spec.action if outputs is None else outputs
        self._to_rows = partial(_tensor_rows, spec.device) if spec.takes_tensors else _array_rows
        places = {leaf.key: place for place, leaf in enumerate(spec.action)}
        self._places = [places.get(leaf.key) for leaf in self.outputs]
        self.extra_outputs = spec.action_extras
        self.extra_values = env.draw_extras
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fillers = [self._filler(leaf, current) for leaf in self.outputs]
        self._dtypes = [torch_dtype(leaf.dtype) for leaf in self.outputs]
        self._reshapes = [
            place is not None and leaf.shape != spec.action[place].shape
            for leaf, place in zip(self.outputs, self._places, strict=True)
        ]
        self._has_other_shapes = any(self._reshapes)
        self._sampler = env.action_sampler() if env.draws_ahead else None
        self.act: Callable[[], tuple[Row, ...]] = self._with_casts(self._draw_next)

    def refresh(self, steps: int) -> None:
        """Draw the actions of the next `steps` steps (>= 1) and drop unused earlier ones.

        Raises ValueError if random actions differ in shape from the policy's recorded actions.
        """
        if self._has_other_shapes:
            self._check_shapes()
        if self._sampler is not None:
            rows = self._draw(self._sampler, steps)
            rows.reverse()
            self.act = self._with_casts(rows.pop)

    def _check_shapes(self) -> None:
        for leaf, place, reshapes in zip(self.outputs, self._places, self._reshapes, strict=True):
            drawn = self._spec.action[place] if reshapes and place is not None else leaf
            if not fits(leaf.shape, drawn, ()):
                raise ValueError(
                    f"init_random_frames: random actions have the shape {list(drawn.shape)} of the "
                    f"environment's spec, but the policy returns {show(leaf.key)} of shape "
                    f"{list(leaf.shape)}; return the spec's shape"
                )

    def forget(self) -> None:
        """Do nothing: random actions do not depend on earlier ones."""

    def _draw_next(self) -> tuple[Row, ...]:
        if self._sampler is not None:
            return self._draw(self._sampler, 1)[0]
        drawn = self._env.random_action()
        values = [
            filler if place is None else _as(drawn[place], dtype)
            for place, dtype, filler in zip(self._places, self._dtypes, self._fillers, strict=True)
        ]
        if self._has_other_shapes:
            pairs = zip(values, self._fillers, strict=True)
            values = [value.reshape(filler.shape) for value, filler in pairs]
        return tuple(values)

    def _draw(self, sampler: Sampler, steps: int) -> list[tuple[Row, ...]]:
        """Return the outputs of each step, in new memory, with fillers for other leaves."""
        if self.rng is None:  # torch.manual_seed makes a run repeatable, as with TorchRL
            self.rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        arrays = sampler(steps, self.rng)
        columns = [
            (filler,) * steps
            if place is None
            else self._to_rows(arrays[place].reshape((steps, *filler.shape)), leaf)
            for leaf, place, filler in zip(self.outputs, self._places, self._fillers, strict=True)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * steps

    def _filler(self, leaf: Leaf, current: Mapping[Key, torch.Tensor]) -> torch.Tensor:
        """Return the value of a leaf that is not an action: the observation if it fits, or zeros.

        If only the dtypes differ, `act` casts the observation into the returned tensor.
        """
        shape, dtype = (*self._spec.rows, *leaf.shape), torch_dtype(leaf.dtype)
        observed = current.get(leaf.key)
        if observed is not None and (observed.shape, observed.dtype) == (shape, dtype):
            return observed
        device = self._spec.device if self._spec.takes_tensors else "cpu"
        value = torch.zeros(shape, dtype=dtype, device=device)
        if observed is not None and observed.shape == shape:
            self._casts.append((value, observed))
        return value

    def _with_casts(self, act: Callable[[], tuple[Row, ...]]) -> Callable[[], tuple[Row, ...]]:
        """Return `act` with casts of the current observation before each call."""
        casts = self._casts
        if not casts:
            return act

        def cast_and_act() -> tuple[Row, ...]:
            for target, source in casts:
                target.copy_(source)
            return act()

        return cast_and_act


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype is dtype else value.to(dtype)


def _tensor_rows(device: torch.device, actions: npt.NDArray[Any], leaf: Leaf) -> Sequence[Row]:
    """Return a tensor per step, cast to the leaf's dtype."""
    return torch.from_numpy(actions).to(device, torch_dtype(leaf.dtype)).unbind(0)


def _array_rows(actions: npt.NDArray[Any], leaf: Leaf) -> Sequence[Row]:
    """Return an array per step; arrays take a third of the time of tensors."""
    if leaf.dtype == "bfloat16":  # numpy has no such dtype
        return _tensor_rows(CPU, actions, leaf)
    cast = actions.astype(leaf.dtype, copy=False)
    return [cast[step, ...] for step in range(len(cast))]
