"""ExtrasRecorder: keeps the extras of a rollout, beside the Recorder that writes its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pycollect.data.extras import Extra, Extras, ExtraValues, private_copy
from pycollect.data.layout import Key, is_delivered
from pycollect.envs.base import Arrays, BoolArray, EnvBatch


class ExtrasRecorder:
    """Keeps per frame what does not fit into a slab: root and "next", [P, T] each.

    Args:
        env: whose last reset, step or `reset_done` is asked for what it gave.

    Attributes:
        current: the extras of the current observation; one and the same dict all the time.
        outputs: those that the policy gives, at the root.
    """

    def __init__(self, env: EnvBatch) -> None:
        self._env = env
        self._ended = np.zeros(env.num_envs, np.bool_)
        self._frames: list[tuple[ExtraValues, ExtraValues]] = []
        self._said: ExtraValues = {}
        self.current: ExtraValues = {}
        self.outputs: tuple[Extra, ...] = ()

    @property
    def all(self) -> tuple[Extra, ...]:
        """Every extra of a batch, by its key there."""
        root = (*self._env.extras, *self.outputs)
        following = (*self._env.extras, *self._env.step_extras)
        extras = (*root, *(extra.under_next() for extra in following))
        return tuple({extra.key: extra for extra in extras if is_delivered(extra.key)}.values())

    def restart(self) -> None:
        """Every environment was reset."""
        self._ended = np.zeros(self._env.num_envs, np.bool_)
        self.current.update(self._read(self._env.extras))

    def begin(self) -> None:
        """A rollout begins."""
        self._frames = []

    def finish(self, steps: int) -> Extras:
        """What was kept since `begin`, [P, steps] each; None behind a stopped rollout's end."""
        envs, frames = range(self._env.num_envs), self._frames
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

    def beside_act(
        self, act: Callable[[], Any], said: Callable[[], ExtraValues]
    ) -> Callable[[], Any]:
        """`act`, with what the policy said kept and given to the environment."""

        def act_and_keep() -> Any:
            outputs = act()
            heard = said()
            # Copied before the step, in which the environment may write into what it hears.
            self._said = {key: [private_copy(value) for value in heard[key]] for key in heard}
            self._env.pass_extras(heard)
            return outputs

        return act_and_keep

    def beside_step(self, record: Callable[..., int]) -> Callable[..., int]:
        """The recorder's `record`, with the frame's extras kept."""

        def record_both(result: Sequence[Any]) -> int:
            due = record(result)
            self._step(result[2], result[3])
            return due

        return record_both

    def beside_reset(self, reset_done: Callable[[BoolArray], Arrays]) -> Callable[[BoolArray], Any]:
        """The environments' `reset_done`, with the new current extras kept."""

        def reset_both(done: BoolArray) -> Arrays:
            observation = reset_done(done)
            for key, values in self._read(self._env.extras).items():
                own = self.current[key]
                self.current[key] = [
                    new if is_new else old
                    for new, old, is_new in zip(values, own, done, strict=True)
                ]
            return observation

        return reset_both

    def _step(self, terminated: Any, truncated: Any) -> None:
        root = dict(self.current)
        for extra in self.outputs:
            said = self._said.get(extra.key) or self._absent(extra)
            root[extra.key] = _merged(root.get(extra.key), said)
        following = self._read((*self._env.extras, *self._env.step_extras))
        # Copies of their own, since batches are the user's to write into.
        current = {
            extra.key: [private_copy(value) for value in following[extra.key]]
            for extra in self._env.extras
        }
        if self._env.skips_after_done:
            self._leave_out_dummies(root, following, np.asarray(terminated) | truncated)
        self._frames.append((root, following))
        self.current.update(current)

    def _leave_out_dummies(
        self, root: ExtraValues, following: ExtraValues, ended: BoolArray
    ) -> None:
        dummies = self._ended
        for values in (root, following):
            for key, own in values.items():
                values[key] = [None if d else v for v, d in zip(own, dummies, strict=True)]
        self._ended = ended & ~dummies

    def _read(self, extras: Iterable[Extra]) -> ExtraValues:
        shown = self._env.current_extras()
        return {
            extra.key: [
                private_copy(value) for value in shown.get(extra.key) or self._absent(extra)
            ]
            for extra in extras
        }

    def _absent(self, extra: Extra) -> list[Any]:
        return [extra.absent() for _ in range(self._env.num_envs)]


def _merged(observed: list[Any] | None, said: list[Any]) -> list[Any]:
    """A policy's part of nested TensorDicts goes into the environment's."""
    if observed is None:
        return said
    return [
        own if value is None else (value if own is None else own.update(value))
        for own, value in zip(observed, said, strict=True)
    ]
