"""ExtrasRecorder: record the extras of a rollout, which have no place in its slab."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pycollect.data.extras import Extra, Extras, ExtraValues, private_copy
from pycollect.data.layout import Key, is_delivered
from pycollect.envs.base import Arrays, BoolArray, EnvBatch


class ExtrasRecorder:
    """Record the extras of each frame, at the root and under "next", [P, T] each.

    Args:
        env: Environments, whose extras are read after each reset, step and `reset_done`.

    Attributes:
        current: Extras of the current observation; always the same dict.
        outputs: Extras that the policy returns, at the root.
    """

    def __init__(self, env: EnvBatch) -> None:
        self._env, self._spec = env, env.spec
        self._ended = np.zeros(env.spec.num_envs, np.bool_)
        self._frames: list[tuple[ExtraValues, ExtraValues]] = []
        self._output_values: ExtraValues = {}
        self.current: ExtraValues = {}
        self.outputs: tuple[Extra, ...] = ()

    @property
    def all(self) -> tuple[Extra, ...]:
        """All extras of a batch."""
        root = (*self._spec.extras, *self.outputs)
        following = (*self._spec.extras, *self._spec.step_extras)
        extras = (*root, *(extra.under_next() for extra in following))
        return tuple({extra.key: extra for extra in extras if is_delivered(extra.key)}.values())

    def restart(self) -> None:
        """Read the extras of the first observation after a reset of all environments."""
        self._ended = np.zeros(self._spec.num_envs, np.bool_)
        self.current.update(self._read(self._spec.extras))

    def begin(self) -> None:
        """Begin a rollout."""
        self._frames = []

    def finish(self, steps: int) -> Extras:
        """Return the extras since `begin`, [P, steps] each.

        Cells after the end of a stopped rollout are ``None``.
        """
        envs, frames = range(self._spec.num_envs), self._frames
        extras: Extras = {}
        leads: tuple[Key, ...] = ((), ("next",))
        for place, lead in enumerate(leads):
            for key in frames[0][place]:
                if is_delivered(key):
                    cells = np.full((len(envs), steps), None, np.object_)
                    for t, frame in enumerate(frames):
                        for p in envs:
                            cells[p, t] = frame[place][key][p]
                    extras[lead + key] = cells
        self._frames = []
        return extras

    def wrap_act(
        self, act: Callable[[], Any], extra_values: Callable[[], ExtraValues]
    ) -> Callable[[], Any]:
        """Return `act`, which also keeps the policy's extras and passes them to the environment."""

        def act_and_keep() -> Any:
            outputs = act()
            extras = extra_values()
            # Copied before the step, because the environment may write into its arguments.
            self._output_values = {
                key: [private_copy(value) for value in values] for key, values in extras.items()
            }
            self._env.pass_extras(extras)
            return outputs

        return act_and_keep

    def wrap_record(self, record: Callable[..., int]) -> Callable[..., int]:
        """Return the recorder's `record`, which also keeps the frame's extras."""

        def record_both(result: Sequence[Any]) -> int:
            resets = record(result)
            self._step(result[2], result[3])
            return resets

        return record_both

    def wrap_reset_done(
        self, reset_done: Callable[[BoolArray], Arrays]
    ) -> Callable[[BoolArray], Any]:
        """Return the environments' `reset_done`, which also updates the current extras."""

        def reset_both(done: BoolArray) -> Arrays:
            observation = reset_done(done)
            for key, values in self._read(self._spec.extras).items():
                self.current[key] = [
                    new if is_new else old
                    for new, old, is_new in zip(values, self.current[key], done, strict=True)
                ]
            return observation

        return reset_both

    def _step(self, terminated: Any, truncated: Any) -> None:
        root = dict(self.current)
        for extra in self.outputs:
            output = self._output_values.get(extra.key) or self._absent(extra)
            root[extra.key] = _merged(root.get(extra.key), output)
        following = self._read((*self._spec.extras, *self._spec.step_extras))
        # Copies, because users may write into their batches.
        current = {
            extra.key: [private_copy(value) for value in following[extra.key]]
            for extra in self._spec.extras
        }
        if self._spec.skips_after_done:
            self._clear_dummies(root, following, np.asarray(terminated) | truncated)
        self._frames.append((root, following))
        self.current.update(current)

    def _clear_dummies(self, root: ExtraValues, following: ExtraValues, ended: BoolArray) -> None:
        dummies = self._ended
        for extras in (root, following):
            for key, values in extras.items():
                extras[key] = [None if d else v for v, d in zip(values, dummies, strict=True)]
        self._ended = ended & ~dummies

    def _read(self, extras: Iterable[Extra]) -> ExtraValues:
        values = self._env.current_extras()
        return {
            extra.key: [
                private_copy(value) for value in values.get(extra.key) or self._absent(extra)
            ]
            for extra in extras
        }

    def _absent(self, extra: Extra) -> list[Any]:
        return [extra.absent() for _ in range(self._spec.num_envs)]


def _merged(observed: list[Any] | None, outputs: list[Any]) -> list[Any]:
    """Update the environment's nested TensorDicts with the policy's."""
    if observed is None:
        return outputs
    return [
        old if value is None else (value if old is None else old.update(value))
        for old, value in zip(observed, outputs, strict=True)
    ]
