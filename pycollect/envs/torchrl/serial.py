"""Step the environments of TorchRL's SerialEnv directly, without its TensorDict operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchrl.envs import GymEnv, GymWrapper, SerialEnv, Transform, TransformedEnv

from pycollect._core import Leaf
from pycollect.data.layout import Key, torch_dtype
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.envs.random_actions import Sampler
from pycollect.envs.single import CallablesEnv, same
from pycollect.envs.torchrl.adapter import TorchRLEnv, has_hooks, set_seed
from pycollect.envs.torchrl.gym import InnerSpec, action_leaf, inner_spec, one_hot_sampler
from pycollect.envs.torchrl.specs import check_device, draw, name_of
from pycollect.envs.torchrl.stepping import is_torchrl_transform

_REPLACEABLE = ("_reset", "_step", "rand_action", "reset", "set_seed", "step")


def split_serial(env: Any) -> EnvBatch | None:
    """Return an EnvBatch that steps the environments of a SerialEnv separately, or ``None``.

    The Gymnasium environments inside are stepped if all have a `gym.inner_spec`; otherwise each
    environment is stepped with its own TensorDict. The SerialEnv is started if necessary; it still
    seeds and closes its environments.

    The result is ``None`` if this could change any result: for a subclass or a view of SerialEnv,
    unequal specs, or environments other than GymEnv and GymWrapper with only TorchRL's transforms.
    """
    if type(env) is not SerialEnv or any(name in vars(env) for name in _REPLACEABLE):
        return None
    check_device(env)
    if env.is_closed:
        env.start()
    envs = env._envs
    if not env._owns_workers or env.run_type_checks or not all(map(_is_known, envs)):
        return None
    specs = [inner_spec(child) for child in envs]
    first = specs[0]
    if first is not None and all(_are_alike(first, spec) for spec in specs):
        spaces = [child._env.action_space for child in envs]
        if all(space == spaces[0] for space in spaces):
            return UnwrappedRows(env, first)
    rows = [TorchRLEnv(child) for child in envs]
    return SerialRows(env, rows) if all(_is_plain(row, rows[0]) for row in rows) else None


def _is_known(env: Any) -> bool:
    """Return whether each step has exactly the entries of the specs, like SerialEnv's buffers."""
    if has_hooks(env):  # SerialEnv calls `_step` without hooks
        return False
    while type(env) is TransformedEnv:
        transforms = [part for part in env.transform.modules() if isinstance(part, Transform)]
        if env.run_type_checks or not all(map(is_torchrl_transform, transforms)):
            return False
        env = env.base_env
    return type(env) in (GymEnv, GymWrapper) and not env.batch_size and not env.run_type_checks


def _are_alike(spec: InnerSpec, other: InnerSpec | None) -> bool:
    if other is None:
        return False
    leaves = [[leaf for leaf, _ in each.observation] for each in (spec, other)]
    return leaves[0] == leaves[1] and spec.action == other.action


def _is_plain(row: TorchRLEnv, first: TorchRLEnv) -> bool:
    spec = row.spec
    return (
        row.resets_separately
        and not (spec.extras or spec.step_extras or spec.action_extras or spec.nodes)
        and spec.observation == first.spec.observation
        and spec.step_only == first.spec.step_only
        and spec.action == first.spec.action
    )


class UnwrappedRows(CallablesEnv):
    """The Gymnasium environments inside a SerialEnv's GymEnvs, in TorchRL's keys and encodings."""

    def __init__(self, env: Any, spec: InnerSpec) -> None:
        super().__init__([child._env for child in env._envs])
        self._serial, self.owned = env, [env]
        self.spec = spec.applied_to(self.spec)
        self._allocate()
        self._decode = spec.decode
        self.bind_outputs(self.spec.action)
        for row in self._rows:
            row.to_arrays = spec.encoded(row.to_arrays)

    def bind_outputs(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        for row in self._rows:
            row.to_action = self._decode(action_leaf(outputs)) or same
        self._step_each = None
        return super().bind_outputs(outputs)

    def action_sampler(self) -> Sampler:
        return one_hot_sampler(super().action_sampler(), self.spec)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        if seeds is not None:
            set_seed(self._serial, seeds, self.num_seeds)
        return super().reset()


class SerialRows(EnvBatch):
    """The environments of a SerialEnv, each with its own TensorDict, as a batch [P, ...]."""

    def __init__(self, env: Any, rows: Sequence[TorchRLEnv]) -> None:
        self._serial = env
        self._rows = rows
        self.owned = [env]
        self._take_spec()

    def _take_spec(self) -> None:
        """Copy the spec of the first row, and allocate buffers for all rows."""
        count = len(self._rows)
        self.spec = replace(self._rows[0].spec, batch_size=(count,))
        self.time_limit = self._rows[0].time_limit
        self._buffers = tuple(
            torch.zeros((count, *leaf.shape), dtype=torch_dtype(leaf.dtype), device="cpu")
            for leaf in (*self.spec.observation, *self.spec.step_only)
        )
        self._views = [tuple(buffer[i] for buffer in self._buffers) for i in range(count)]

    def truncate_after(self, frames: int) -> bool:
        for row in self._rows:
            row.truncate_after(frames)
        self._take_spec()
        return True

    def bind_outputs(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        (keys, *_) = [row.bind_outputs(outputs) for row in self._rows]
        return keys

    @property
    def draws_ahead(self) -> bool:
        return False

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """Return one step's actions of all rows, drawn as the SerialEnv draws them."""
        spec = self._serial.input_spec["full_action_spec"]
        return tuple(draw(spec[name_of(leaf.key)]) for leaf in self.spec.action)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset all environments, after TorchRL's `set_seed` if there are seeds."""
        if seeds is not None:
            set_seed(self._serial, seeds, self.num_seeds)
        for row, views in zip(self._rows, self._views, strict=True):
            _write(views, row.reset())
        return self._buffers

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        columns = [value.unbind(0) for value in action]
        for i, (row, views) in enumerate(zip(self._rows, self._views, strict=True)):
            values, *_ = row.step([column[i] for column in columns])
            _write(views, values)
        return self._buffers, None, None, None

    def reset_done(self, done: BoolArray) -> Arrays:
        for i in np.flatnonzero(done).tolist():
            _write(self._views[i], self._rows[i].reset_done(done[i : i + 1]))
        return self._buffers


def _write(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
