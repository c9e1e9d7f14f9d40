"""Vector environments of tensors, collected on their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from pycollect.data.devices import CPU
from pycollect.data.layout import torch_dtype
from pycollect.envs.arrays import AsArrays, as_tensor, mapped
from pycollect.envs.base import Arrays, BoolArray, EnvBatch
from pycollect.envs.info_rows import final_observations, is_list
from pycollect.envs.spaces import key_name, make_flatten, make_unflatten
from pycollect.envs.vector import (
    ENDED_AGAIN,
    OBSERVATION_VALID,
    OTHER_FINAL,
    SameStepEnvBatch,
    VectorEnvBatch,
    check_final_rows,
    lacks_final,
)

Tensors = tuple[torch.Tensor, ...]


class Transition(NamedTuple):
    """A step of P environments, as tensors on their device.

    Attributes:
        successor: The true next observations, then the entries that only a step has, [P, *frame].
            Wrong in rows that ended if `lacks_final`.
        following: The observations for the next action, [P, *frame]. They differ from `successor`
            in rows that the environment has reset.
        reward: [P].
        terminated: bool [P].
        truncated: bool [P].
        done: Whether either is set, bool [P].
        lacks_final: The environment has reset the rows that ended, and did not return their last
            observations.
    """

    successor: Tensors
    following: Tensors
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    done: torch.Tensor
    lacks_final: bool


class TensorVectorEnv(EnvBatch):
    """A vector environment with observations, rewards and flags as tensors.

    They stay on their device, and a step does not wait for it unless the environment does. `step`
    returns a :class:`Transition`.

    Args:
        arrays: The environment.
        host: The same with numpy arrays, which knows how it resets.

    Attributes:
        resets_itself: It resets in the same step.
        tells_validity: It has an entry `OBSERVATION_VALID`.
        is_capturable: A CUDA graph may step it; it has `metadata["cudagraph"]`.
        seen: What the steps so far tell about its autoreset mode, bool [4]: whether the following
            can be told; whether a last observation differs from the observation beside it; whether
            an episode ended, or a reward was not 0, in a step that only resets. See `judge`.
    """

    takes_tensors = True

    def __init__(self, arrays: AsArrays, host: VectorEnvBatch) -> None:
        self.num_envs, self.batched = host.num_envs, True
        self.observation, self.step_only = host.observation, host.step_only
        self.action, self.action_space = host.action, host.action_space
        self.skips_after_done, self.can_reset = host.skips_after_done, host.can_reset
        self.device = arrays.device
        self.staying = frozenset(leaf.key for leaf in self.observation)
        self.resets_itself = isinstance(host, SameStepEnvBatch)
        self.is_capturable = bool((getattr(arrays, "metadata", None) or {}).get("cudagraph"))
        self._arrays, self._host = arrays, host
        self._flatten = make_flatten(host.api.observation_space)
        self._unflatten = make_unflatten(host.api.action_space)
        self._forms = [
            (leaf, torch_dtype(leaf.dtype), torch.Size([self.num_envs, *leaf.shape]))
            for leaf in self.observation
        ]
        self.tells_validity = any(leaf.key == OBSERVATION_VALID for leaf in self.step_only)
        self._is_plain = not isinstance(host.api.observation_space, spaces.Dict | spaces.Tuple)
        self._row_shape = torch.Size([self.num_envs])
        self._all_valid = torch.ones(self.num_envs, 1, dtype=torch.bool, device=self.device)
        self._done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.seen = torch.zeros(4, dtype=torch.bool, device=self.device)
        self._watches_mode = True

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset all rows; see `EnvBatch.reset`."""
        if not self._host.api.reset_clears:
            self._host.api.ended = self._done.cpu().numpy()
        self._host.reset(seeds)
        self._done = torch.zeros_like(self._done)
        return self._shown()

    def _shown(self) -> Tensors:
        return self._conform(self._arrays.shown)

    def step(self, action: Arrays) -> Any:
        """Step all rows; return a Transition."""
        given = self._unflatten([self._arrays.own(own) for own in action])
        shown, reward, terminated, truncated, info = self._arrays.own_step(given)
        following = self._conform(shown)
        reward, terminated, truncated = (
            self._row("reward", reward),
            self._row("terminated", terminated),
            self._row("truncated", truncated),
        )
        before, done = self._done, terminated | truncated
        self._done = done
        successor, final = following, None
        watches = self._watches_mode and not _is_capturing(self.device)
        if self.resets_itself or watches:
            final = _final(info, done)
        if final is not None:
            successor = self._with_final(following, final, done)
        if watches and (final is not None or not self.resets_itself):
            self._watch_mode(following, successor, before, done, reward)
        if not self.resets_itself:
            successor = following
        lacks = self.resets_itself and final is None
        if self.tells_validity:
            successor = (*successor, ~done.unsqueeze(1) if lacks else self._all_valid)
        return Transition(successor, following, reward, terminated, truncated, done, lacks)

    def _watch_mode(
        self,
        following: Tensors,
        successor: Tensors,
        before: torch.Tensor,
        done: torch.Tensor,
        reward: torch.Tensor,
    ) -> None:
        """Update `seen`; `before` has the rows that ended in the step before."""
        resetting = before if self.skips_after_done else torch.zeros_like(before)
        told = before if self.skips_after_done else done
        differs = [
            ((own != last) & ((own == own) | (last == last))).any()  # NaN equals NaN
            for own, last in zip(following, successor, strict=True)
        ]
        self.seen |= torch.stack(
            [
                told.any(),
                torch.stack(differs).any(),
                (done & resetting).any(),
                ((reward != 0) & resetting).any(),
            ]
        )

    def judge(self, seen: Sequence[bool]) -> None:
        """Check the values of `seen`: once, when an episode has ended.

        Raises:
            ValueError: The environment contradicts its autoreset mode.
        """
        told, differs, has_ended, has_reward = seen
        if not self._watches_mode or not (told or differs):
            return
        self._watches_mode = False
        host = self._host
        if isinstance(host, SameStepEnvBatch):
            if not differs:
                host.warn_of_overwritten()
        elif differs:
            host.refuse_mode(OTHER_FINAL)
        elif has_ended:
            host.refuse_mode(ENDED_AGAIN)
        elif has_reward:
            host.warn_of_reward()

    def _with_final(self, following: Tensors, final: Any, ended: torch.Tensor) -> Tensors:
        if isinstance(final, np.ndarray) and final.dtype == object:
            return self._with_rows(following, final, ended)
        values = self._leaves(final)
        check_final_rows(self._arrays, values, self.num_envs)
        pairs = zip(following, self._fitted(values), strict=True)
        if self.device == CPU:  # only a device would have to be waited for
            rows = ended.nonzero().squeeze(1)
            return tuple(own.index_copy(0, rows, last[rows]) for own, last in pairs)
        return tuple(
            torch.where(ended.view(-1, *[1] * (own.ndim - 1)), last, own) for own, last in pairs
        )

    def _with_rows(self, following: Tensors, final: Any, ended: torch.Tensor) -> Tensors:
        """`final` has the observation of one environment per row; it may keep those of before."""
        successor = tuple(own.clone() for own in following)
        for row in ended.nonzero().flatten().tolist():
            if final[row] is None and not self.resets_itself:
                continue
            if final[row] is None:
                raise ValueError(lacks_final(self._arrays, f", got None for environment {row}"))
            for leaf, last in zip(successor, self._flatten(final[row]), strict=True):
                leaf[row] = as_tensor(last)
        return successor

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset rows by mask; see `EnvBatch.reset_done`."""
        self._host.api.reset_rows(done)
        return self._shown()

    def tell_of_lacking_final(self) -> None:
        """Raise ValueError, or warn once, because an episode ended without its last observation."""
        if self.tells_validity and isinstance(self._host, SameStepEnvBatch):
            self._host.warn_of_truncation()
            return
        raise ValueError(lacks_final(self._arrays, ""))

    def close(self) -> None:
        """Close the env; see `EnvBatch.close`."""
        self._host.close()

    def _conform(self, observation: Any) -> Tensors:
        return self._fitted(self._leaves(observation))

    def _leaves(self, observation: Any) -> Tensors:
        if self._is_plain and type(observation) is torch.Tensor:
            return (observation,)
        return tuple(self._flatten(mapped(as_tensor, observation)))

    def _fitted(self, values: Tensors) -> Tensors:
        for value, (_, dtype, shape) in zip(values, self._forms, strict=True):
            if value.shape != shape or value.dtype is not dtype:
                return self._cast(values)
        return values

    def _cast(self, values: Tensors) -> Tensors:
        for value, (leaf, dtype, shape) in zip(values, self._forms, strict=True):
            if value.shape != shape or not torch.can_cast(value.dtype, dtype):
                raise ValueError(
                    f"observation: {key_name(leaf.key)}: expected {dtype} {list(shape)}, as in the "
                    f"observation space, got {value.dtype} {list(value.shape)}"
                )
        return tuple(
            value.to(dtype) for value, (_, dtype, _) in zip(values, self._forms, strict=True)
        )

    def _row(self, name: str, value: Any) -> torch.Tensor:
        is_flag = name != "reward"
        if type(value) is torch.Tensor and value.shape == self._row_shape:
            return value if not is_flag or value.dtype is torch.bool else value.bool()
        row = as_tensor(value).to(self.device)
        if row.numel() != self.num_envs:
            raise ValueError(
                f"{name}: expected shape [{self.num_envs}] from {self._arrays}, got "
                f"{list(row.shape)}"
            )
        row = row.view(self.num_envs)
        return row.bool() if is_flag else row


def _final(info: Any, ended: torch.Tensor) -> Any:
    """Return the last observations; see `final_observations`. Waits if the info is a list."""
    rows = ended.cpu().numpy() if is_list(info) else np.empty(0, np.bool_)
    return final_observations(info, rows)


def _is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured, which would check again with each replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
