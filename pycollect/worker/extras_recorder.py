"""ExtrasRecorder: record the extras of a rollout, which have no place in its slab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from pycollect.data.extras import Extra, Extras, ExtraValues, Kind
from pycollect.data.layout import Key, is_delivered
from pycollect.data.objects import PLAIN_TYPES, private_copies, private_copy
from pycollect.envs.base import Arrays, BoolArray, EnvBatch

_Columns: TypeAlias = dict[Key, list[list[Any]]]
"""Values of a rollout by key: a list per step, with one value per environment."""


class ExtrasRecorder:
    """Record the extras of each frame, at the root and under "next", [P, T] each.

    Args:
        env: Environments, whose extras are read after each reset, step and `reset_done`.
        compact: Whether to omit the extras of observations under "next".
    """

    def __init__(self, env: EnvBatch, compact: bool = False) -> None:
        self._env, self._spec = env, env.spec
        self._following = (*env.spec.extras, *env.spec.step_extras)
        kept = {extra.key for extra in env.spec.step_extras} | env.spec.flag_extras
        self._recorded = tuple(e for e in self._following if not compact or e.key in kept)
        self._ended = np.zeros(env.spec.num_envs, np.bool_)
        self._columns: tuple[_Columns, _Columns] = {}, {}  # at the root and under "next"
        self._output_values: ExtraValues = {}
        self.current: ExtraValues = {}  # extras of the current observation; always the same dict
        self.outputs: tuple[Extra, ...] = ()  # extras that the policy returns, at the root

    @property
    def all(self) -> tuple[Extra, ...]:
        root = (*self._spec.extras, *self.outputs)
        extras = (*root, *(extra.under_next() for extra in self._recorded))
        return tuple({extra.key: extra for extra in extras if is_delivered(extra.key)}.values())

    def restart(self) -> None:
        """Read the extras of the first observation after a reset of all environments."""
        self._ended = np.zeros(self._spec.num_envs, np.bool_)
        values = self._read()
        self.current.update({extra.key: values[extra.key] for extra in self._spec.extras})

    def begin(self) -> None:
        root = (*self._spec.extras, *self.outputs)
        self._columns = {e.key: [] for e in root}, {e.key: [] for e in self._recorded}

    def finish(self, steps: int) -> Extras:
        """Return the extras since `begin`, [P, steps] each.

        Cells after the end of a stopped rollout are ``None``.
        """
        envs, extras = self._spec.num_envs, Extras()
        for lead, columns in zip(((), ("next",)), self._columns, strict=True):
            for key, frames in columns.items():
                if is_delivered(key):
                    values = np.fromiter(chain.from_iterable(frames), np.object_)
                    cells = np.full((envs, steps), None, np.object_)
                    cells[:, : len(frames)] = values.reshape(len(frames), envs).T
                    extras[lead + key] = cells
        self._columns = {}, {}
        return extras

    def wrap_act(
        self, act: Callable[[], Any], extra_values: Callable[[], ExtraValues]
    ) -> Callable[[], Any]:
        """Return `act`, which also keeps the policy's extras and passes them to the environment."""
        if not self.outputs:
            return act

        def act_and_keep() -> Any:
            outputs = act()
            extras = extra_values()
            # Copied before the step, because the environment may write into its arguments.
            self._output_values = {key: private_copies(values) for key, values in extras.items()}
            self._env.pass_extras(extras)
            return outputs

        return act_and_keep

    @property
    def are_entries(self) -> bool:
        """Whether `wrap_record` reads all extras itself, from the dict of one environment.

        Otherwise `FastStep.convert` must see each observation, because it also reads its extras.
        """
        fast_step = self._env.fast_step
        are_objects = all(extra.kind is Kind.OBJECT for extra in self._following)
        has_others = bool(self.outputs or self._spec.step_extras)
        return bool(fast_step and fast_step.extra_names) and are_objects and not has_others

    def wrap_record(self, record: Callable[..., int]) -> Callable[..., int]:
        """Return the recorder's `record`, which also keeps the frame's extras."""
        if self.are_entries:
            return self._recording_entries(record)

        def record_both(result: Sequence[Any]) -> int:
            resets = record(result)
            self._step(result[2], result[3])
            return resets

        return record_both

    def _recording_entries(self, record: Callable[..., int]) -> Callable[..., int]:
        """Return `wrap_record` for one environment, whose extras are entries of a dict."""
        assert self._env.fast_step is not None
        convert, names = self._env.fast_step.convert, self._env.fast_step.extra_names
        current, (roots, followings) = self.current, self._columns
        keys = [extra.key for extra in self._spec.extras]
        columns = [
            (name, key, roots[key].append, followings[key].append if key in followings else _omit)
            for name, key in zip(names, keys, strict=True)
        ]

        def record_both(result: Sequence[Any]) -> int:
            resets = record(result)
            observation = result[0]
            for name, key, add_root, add_following in columns:
                try:
                    value = observation[name]
                except KeyError:
                    convert(observation)  # its error names the entry
                    raise
                add_root(current[key])
                if type(value) in PLAIN_TYPES:
                    current[key] = values = [value]
                    add_following(values)
                else:
                    current[key] = [private_copy(value)]
                    add_following([private_copy(value)])
            return resets

        return record_both

    def wrap_reset_done(
        self, reset_done: Callable[[BoolArray], Arrays]
    ) -> Callable[[BoolArray], Any]:
        """Return the environments' `reset_done`, which also updates the current extras."""

        def reset_both(done: BoolArray) -> Arrays:
            observation = reset_done(done)
            values = self._read()
            for key, current in self.current.items():
                self.current[key] = [
                    new if is_new else old
                    for new, old, is_new in zip(values[key], current, done, strict=True)
                ]
            return observation

        return reset_both

    def _step(self, terminated: Any, truncated: Any) -> None:
        root, following = dict(self.current), self._read()
        for extra in self.outputs:
            output = self._output_values.get(extra.key) or self._absent(extra)
            root[extra.key] = _merged(root.get(extra.key), output)
        # Copies, because users may write into their batches.
        current = {key: private_copies(following[key]) for key in self.current}
        if self._spec.skips_after_done:
            dummies, self._ended = self._ended, (np.asarray(terminated) | truncated) & ~self._ended
            root, following = _cleared(root, dummies), _cleared(following, dummies)
        for values, columns in ((root, self._columns[0]), (following, self._columns[1])):
            for key, column in columns.items():
                column.append(values[key])
        self.current.update(current)

    def _read(self) -> ExtraValues:
        """Return copies of the environments' extras."""
        values = self._env.current_extras()
        return {
            extra.key: private_copies(values.get(extra.key) or self._absent(extra))
            for extra in self._following
        }

    def _absent(self, extra: Extra) -> list[Any]:
        return [extra.absent() for _ in range(self._spec.num_envs)]


def _omit(values: list[Any]) -> None:
    """Record nothing under "next"."""


def _cleared(extras: ExtraValues, dummies: BoolArray) -> ExtraValues:
    """Return the extras with ``None`` in rows without a frame."""
    return {
        key: [None if d else v for v, d in zip(values, dummies, strict=True)]
        for key, values in extras.items()
    }


def _merged(observed: list[Any] | None, outputs: list[Any]) -> list[Any]:
    """Update the environment's nested TensorDicts with the policy's."""
    if observed is None:
        return outputs
    return [
        old if value is None else (value if old is None else old.update(value))
        for old, value in zip(observed, outputs, strict=True)
    ]
