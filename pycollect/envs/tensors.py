"""Vector environments of tensors, collected on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from pycollect.data.layout import show, torch_dtype
from pycollect.data.tensordicts import rows_like
from pycollect.envs.arrays import NumpyVectorEnv, as_tensor, mapped
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.envs.info_rows import final_mask, final_observations, is_list
from pycollect.envs.spaces import make_flatten, make_unflatten
from pycollect.envs.vector import (
    OBSERVATION_VALID,
    OTHER_FINAL,
    SameStepEnvBatch,
    VectorEnvBatch,
    check_final_rows,
    check_reset_step,
    lacks_final,
    refuse_mode,
)

Tensors = tuple[torch.Tensor, ...]
_NO_ROWS = np.empty(0, np.bool_)


class Transition(NamedTuple):
    """A step of P environments, as tensors on their device.

    Attributes:
        following: The observations for the next action, [P, *frame].
        final: Last observations of the rows that ended, which the environment has reset, [P,
            *frame]; other rows have no meaning. ``None`` if no row was reset, or no last
            observation is known.
        step_only: The `step_only` entries, [P, *frame].
        reward: [P].
        terminated: bool [P].
        truncated: bool [P].
        done: Terminated or truncated, bool [P].
        lacks_final: Rows that must be reported because the environment has reset them without
            returning their last observations, bool [P]; ``None`` if there are none.
    """

    following: Tensors
    final: Tensors | None
    step_only: Tensors
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    done: torch.Tensor
    lacks_final: torch.Tensor | None


class TensorVectorEnv(EnvBatch):
    """A vector environment with observations, rewards and flags as tensors.

    The tensors remain on their device. A step synchronizes with the device only if the environment
    itself does. `step` returns a :class:`Transition`.

    Args:
        arrays: The environment.
        host: The same environment with numpy arrays, for its resets and its autoreset mode.

    Attributes:
        resets_itself: Whether the environment resets finished rows in the same step.
        has_validity: Whether there is an entry `OBSERVATION_VALID`.
        is_capturable: Whether a CUDA graph may step the environment (``metadata["cudagraph"]``).
        mode_evidence: Evidence about the autoreset mode, bool [4], for `check_mode`: whether an
            episode has ended so that the other values count; whether a terminal observation differs
            from the returned observation; whether an episode ended in a step that only resets;
            whether such a step had a reward other than 0.
    """

    def __init__(self, arrays: NumpyVectorEnv, host: VectorEnvBatch) -> None:
        self.spec = spec = replace(
            host.spec,
            takes_tensors=True,
            device=arrays.device,
            device_keys=frozenset(leaf.key for leaf in host.spec.observation),
        )
        self._device = arrays.device
        self.resets_itself = isinstance(host, SameStepEnvBatch)
        self.is_capturable = bool((getattr(arrays, "metadata", None) or {}).get("cudagraph"))
        self._arrays, self._host = arrays, host
        self._flatten = make_flatten(host.api.observation_space)
        self._unflatten = make_unflatten(host.api.action_space)
        self._forms = [
            (leaf, torch_dtype(leaf.dtype), torch.Size([spec.num_envs, *leaf.shape]))
            for leaf in spec.observation
        ]
        self.has_validity = any(leaf.key == OBSERVATION_VALID for leaf in spec.step_only)
        self._is_plain = not isinstance(host.api.observation_space, spaces.Dict | spaces.Tuple)
        self._row_shape = torch.Size(spec.batch_size)
        self._all_valid = torch.ones(spec.num_envs, 1, dtype=torch.bool, device=spec.device)
        self._done = torch.zeros(spec.num_envs, dtype=torch.bool, device=spec.device)
        self.mode_evidence = torch.zeros(4, dtype=torch.bool, device=spec.device)
        self._watches_mode = True

    def waits_for_device(self, cut: int) -> bool:
        """Return whether each step waits for the device to know which rows to reset."""
        return bool(cut) or not (self.resets_itself or self.spec.skips_after_done)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        if not self._host.api.reset_clears:
            self._host.api.ended = self._done.cpu().numpy()
        self._host.reset(seeds)
        self._done = torch.zeros_like(self._done)
        return self._last_observation()

    def _last_observation(self) -> Tensors:
        return self._conform(self._arrays.last_observation)

    def step(self, action: Arrays) -> Any:
        native = self._unflatten([self._arrays.to_native(leaf) for leaf in action])
        observation, reward, terminated, truncated, info = self._arrays.step_native(native)
        following = self._conform(observation)
        reward, terminated, truncated = (
            self._row("reward", reward),
            self._row("terminated", terminated),
            self._row("truncated", truncated),
        )
        before, done = self._done, terminated | truncated
        self._done = done
        watches = self._watches_mode and not _is_capturing(self._device)
        final = lacks = None
        if self.resets_itself or watches:
            final, lacks = self._final(info, following, done)
        if watches and (final is not None or not self.resets_itself):
            self._watch_mode(following, final, before, done, reward)
        if not self.resets_itself:
            final = lacks = None
        step_only: Tensors = ()
        if self.has_validity:
            step_only = (self._all_valid if lacks is None else ~lacks.unsqueeze(1),)
            if lacks is not None:  # a termination needs no last observation
                lacks = truncated if lacks is done else lacks & truncated
        return Transition(following, final, step_only, reward, terminated, truncated, done, lacks)

    def _watch_mode(
        self,
        following: Tensors,
        final: Tensors | None,
        before: torch.Tensor,
        done: torch.Tensor,
        reward: torch.Tensor,
    ) -> None:
        """Update `mode_evidence`; `before` marks the rows that ended in the previous step."""
        resetting = before if self.spec.skips_after_done else torch.zeros_like(before)
        counts = before if self.spec.skips_after_done else done
        successor = with_rows_of(following, final, done)
        differs = [
            ((new != last) & ((new == new) | (last == last))).any()  # NaN equals NaN
            for new, last in zip(following, successor, strict=True)
        ]
        self.mode_evidence |= torch.stack(
            [
                counts.any(),
                torch.stack(differs).any(),
                (done & resetting).any(),
                ((reward != 0) & resetting).any(),
            ]
        )

    def check_mode(self, evidence: Sequence[bool]) -> None:
        """Raise ValueError if the first end of an episode contradicts the autoreset mode."""
        counts, differs, has_ended, has_reward = evidence
        if not self._watches_mode or not (counts or differs):
            return
        self._watches_mode = False
        host = self._host
        if isinstance(host, SameStepEnvBatch):
            if not differs:
                host.warn_of_overwritten()
        elif differs:
            refuse_mode(host.api.env, OTHER_FINAL)
        else:
            check_reset_step(host.api.env, has_ended, has_reward)

    def _final(
        self, info: Any, following: Tensors, ended: torch.Tensor
    ) -> tuple[Tensors | None, torch.Tensor | None]:
        """Return terminal observations in the rows that `ended`, and which of them lack one.

        A row that lacks one is copied from `following`. The first value is ``None`` without any
        terminal observation, the second one if no row can lack one.
        """
        # Entries of a list are rows of Python objects, for which the host has to wait.
        rows = ended.cpu().numpy() if is_list(info) else _NO_ROWS
        final = final_observations(info, rows, self._host.api.observation_space)
        if final is None:
            return None, ended
        has = None
        if (mask := final_mask(info)) is not None:
            name = "final_observation: info['_final_obs']"
            has = self._row(name, as_tensor(mask).to(self._device))
        if isinstance(final, np.ndarray) and final.dtype == object:
            return self._with_rows(following, final, ended if has is None else ended & has, ended)
        values = self._leaves(final)
        if not self._fit(values):
            check_final_rows(self._arrays, values, self.spec.num_envs)
            values = self._cast(values)
        if has is None:
            return values, None
        return with_rows_of(following, values, has), ended & ~has

    def _with_rows(
        self, following: Tensors, final: Any, has: torch.Tensor, ended: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor]:
        """Return the result of `_final` for terminal observations in `final`, one object per row.

        Only rows of `has` are read, because the others may hold earlier observations.
        """
        check_final_rows(self._arrays, [final], self.spec.num_envs)
        successor = tuple(leaf.clone() for leaf in following)
        rows = has.cpu().numpy() & np.array([one is not None for one in final])
        for row in np.flatnonzero(rows):
            for leaf, last in zip(successor, self._flatten(final[row]), strict=True):
                leaf[row] = as_tensor(last)
        return successor, ended & ~as_tensor(rows).to(self._device)

    def reset_done(self, done: BoolArray) -> Arrays:
        self._host.api.reset_rows(done)
        return self._last_observation()

    def report_lacking_final(self) -> None:
        """Raise a ValueError, or warn once, because an episode lacks its last observation."""
        if self.has_validity and isinstance(self._host, SameStepEnvBatch):
            self._host.warn_of_truncation()
            return
        raise ValueError(lacks_final(self._arrays, ""))

    def close(self) -> None:
        self._host.close()

    def _conform(self, observation: Any) -> Tensors:
        values = self._leaves(observation)
        return values if self._fit(values) else self._cast(values)

    def _leaves(self, observation: Any) -> Tensors:
        if self._is_plain and type(observation) is torch.Tensor:
            return (observation,)
        return tuple(self._flatten(mapped(as_tensor, observation)))

    def _fit(self, values: Tensors) -> bool:
        for value, (_, dtype, shape) in zip(values, self._forms, strict=True):
            if value.shape != shape or value.dtype is not dtype:
                return False
        return True

    def _cast(self, values: Tensors) -> Tensors:
        for value, (leaf, dtype, shape) in zip(values, self._forms, strict=True):
            if value.shape != shape or not torch.can_cast(value.dtype, dtype):
                raise ValueError(
                    f"observation: {show(leaf.key)}: expected {dtype} {list(shape)}, as in the "
                    f"observation space, got {value.dtype} {list(value.shape)}"
                )
        return tuple(
            value.to(dtype) for value, (_, dtype, _) in zip(values, self._forms, strict=True)
        )

    def _row(self, name: str, value: Any) -> torch.Tensor:
        is_flag = name != "reward"
        if type(value) is torch.Tensor and value.shape == self._row_shape:
            return value if not is_flag or value.dtype is torch.bool else value.bool()
        row = as_tensor(value).to(self._device)
        if row.shape.numel() != self._row_shape.numel():
            raise ValueError(
                f"{name}: expected shape {list(self._row_shape)} from {self._arrays}, got "
                f"{list(row.shape)}"
            )
        row = row.view(self._row_shape)
        return row.bool() if is_flag else row


def with_rows_of(following: Tensors, final: Tensors | None, rows: torch.Tensor) -> Tensors:
    """Return observations with these rows (bool, one or more dimensions) from `final`."""
    if final is None:
        return following
    return tuple(
        torch.where(rows_like(rows, new), last, new)
        for last, new in zip(final, following, strict=True)
    )


def _is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured; its replays would repeat the checks."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
