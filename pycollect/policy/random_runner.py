"""Random actions as a policy, and RandomPolicy."""

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
from pycollect.data.layout import Key, torch_dtype
from pycollect.envs.base import EnvBatch, Sampler
from pycollect.policy.outputs import fits
from pycollect.policy.program.steps import show


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
    """Draws the actions of a whole rollout at once: drawing one by one costs more than a policy.

    Where the env's sampler cannot draw ahead, it is asked before each step.

    Args:
        env: its action space and number of envs.
        rng: one generator, or one per env; None: one that torch's own decides, when it is first
            needed. May be set anew between rollouts.
        outputs: what is recorded; keys other than the actions are zeros (as `init_random_frames`
            needs, with the policy's `outputs`), or what the env shows there. None: the actions.
            Theirs may have other dtypes, and dimensions of one that are there or not.
        current: the current observation by key, in rows.

    Offers what a PolicyRunner does, see there.
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
        rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
        outputs: tuple[Leaf, ...] | None = None,
        current: Mapping[Key, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.rng = rng
        self.outputs = env.action if outputs is None else outputs
        self._env = env
        self._to_rows = partial(_tensor_rows, env.device) if env.takes_tensors else _array_rows
        self._batch = (env.num_envs,) if env.batched else ()
        places = {leaf.key: place for place, leaf in enumerate(env.action)}
        self._places = [places.get(leaf.key) for leaf in self.outputs]
        self.extra_outputs = env.action_extras
        self.said = env.draw_extras
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._absent = [self._shown(leaf, current) for leaf in self.outputs]
        self._dtypes = [torch_dtype(leaf.dtype) for leaf in self.outputs]
        self._reshapes = [
            place is not None and leaf.shape != env.action[place].shape
            for leaf, place in zip(self.outputs, self._places, strict=True)
        ]
        self._has_other_shapes = any(self._reshapes)
        self._sampler = env.action_sampler() if env.draws_ahead else None
        self.act: Callable[[], tuple[Row, ...]] = self._showing(self._draw_next)

    def refresh(self, steps: int) -> None:
        """Draw the actions of the next `steps` steps (>= 1) and drop unused earlier ones.

        Raises ValueError if random actions differ in shape from the policy's recorded actions.
        """
        if self._has_other_shapes:
            self._check_shapes()
        if self._sampler is not None:
            rows = self._draw(self._sampler, steps)
            rows.reverse()
            self.act = self._showing(rows.pop)

    def _check_shapes(self) -> None:
        for leaf, place, reshapes in zip(self.outputs, self._places, self._reshapes, strict=True):
            own = self._env.action[place] if reshapes and place is not None else leaf
            if not fits(leaf.shape, own, ()):
                raise ValueError(
                    f"init_random_frames: random actions have the shape {list(own.shape)} of the "
                    f"environment's spec, but the policy returns {show(leaf.key)} of shape "
                    f"{list(leaf.shape)}; return the spec's shape"
                )

    def forget(self) -> None:
        """Random actions note nothing for the next one."""

    def _draw_next(self) -> tuple[Row, ...]:
        if self._sampler is not None:
            return self._draw(self._sampler, 1)[0]
        drawn = self._env.random_action()
        values = [
            absent if place is None else _as(drawn[place], dtype)
            for place, dtype, absent in zip(self._places, self._dtypes, self._absent, strict=True)
        ]
        if self._has_other_shapes:
            pairs = zip(values, self._absent, strict=True)
            values = [value.reshape(absent.shape) for value, absent in pairs]
        return tuple(values)

    def _draw(self, sampler: Sampler, steps: int) -> list[tuple[Row, ...]]:
        """Per step its actions, in memory of their own, and zeros for other outputs."""
        if self.rng is None:  # as TorchRL's are: torch.manual_seed makes a run one that is repeated
            self.rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        arrays = sampler.draw(steps, self.rng)
        columns = [
            (absent,) * steps
            if place is None
            else self._to_rows(arrays[place].reshape((steps, *absent.shape)), leaf)
            for leaf, place, absent in zip(self.outputs, self._places, self._absent, strict=True)
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * steps

    def _shown(self, leaf: Leaf, current: Mapping[Key, torch.Tensor]) -> torch.Tensor:
        """What stands there beside a random action: the observation itself, where it fits."""
        shape, dtype = (*self._batch, *leaf.shape), torch_dtype(leaf.dtype)
        own = current.get(leaf.key)
        if own is not None and (own.shape, own.dtype) == (shape, dtype):
            return own
        place = self._env.device if self._env.takes_tensors else "cpu"
        value = torch.zeros(shape, dtype=dtype, device=place)
        if own is not None and own.shape == shape:
            self._casts.append((value, own))
        return value

    def _showing(self, act: Callable[[], tuple[Row, ...]]) -> Callable[[], tuple[Row, ...]]:
        """`act`, with the observation as it is now where that stands in another dtype."""
        casts = self._casts
        if not casts:
            return act

        def show_and_act() -> tuple[Row, ...]:
            for target, source in casts:
                target.copy_(source)
            return act()

        return show_and_act


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype is dtype else value.to(dtype)


def _tensor_rows(device: torch.device, actions: npt.NDArray[Any], leaf: Leaf) -> Sequence[Row]:
    """A tensor per step; a policy's leaf may have another dtype than what was drawn."""
    return torch.from_numpy(actions).to(device, torch_dtype(leaf.dtype)).unbind(0)


def _array_rows(actions: npt.NDArray[Any], leaf: Leaf) -> Sequence[Row]:
    """The same as arrays: made, read and given to an env in a third of the time."""
    if leaf.dtype == "bfloat16":  # unknown to numpy
        return _tensor_rows(CPU, actions, leaf)
    cast = actions.astype(leaf.dtype, copy=False)
    return [cast[step, ...] for step in range(len(cast))]
