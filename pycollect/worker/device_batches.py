"""DeviceBatches: the leaves of a batch from the memory of a rollout on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pycollect.data.frame import MASK, TRAJ_IDS, BatchLeaves
from pycollect.data.layout import Key, is_delivered
from pycollect.envs.base import EnvSpec

REWARD, DONE, TERMINATED, TRUNCATED = (
    ("next", name) for name in ("reward", "done", "terminated", "truncated")
)
_VERSION: Key = ("collector", "policy_version")
_STEP_COUNT: Key = ("step_count",)


class DeviceBatches:
    """Makes batches, [P, T, *frame] for each leaf, from the memory of rollouts, [T, P, *frame].

    Args:
        leaves: Leaves of a batch.
        spec: Spec of the P environments.
        set_truncated: Flag the last frame of every environment in every rollout.

    Attributes:
        policy_version: Policy version of the next batches, int64 [] on the device.
    """

    def __init__(self, leaves: BatchLeaves, spec: EnvSpec, set_truncated: bool) -> None:
        self._leaves, self._envs, self._set_truncated = leaves, spec.num_envs, set_truncated
        self._no_flag = torch.zeros((), dtype=torch.bool, device=spec.device)
        self.policy_version = torch.zeros((), dtype=torch.int64, device=spec.device)
        self._constants = {MASK: ~self._no_flag, _VERSION: self.policy_version}

    def batch_of(
        self, memory: Mapping[Key, torch.Tensor], valid: torch.Tensor | None
    ) -> dict[Key, torch.Tensor]:
        """Return the leaves by key, perhaps as views of the memory.

        Args:
            memory: Recorded leaves by key, [T, P, *frame].
            valid: Whether a cell is a frame and not a dummy step, bool [T, P]. ``None`` if no cell
                is a dummy step.
        """
        batch = dict(memory)
        if _STEP_COUNT in batch:
            batch["next", "step_count"] = batch[_STEP_COUNT] + 1
        if self._set_truncated:
            _flag_last_frames(batch, valid)
        shape = self._envs, len(batch[DONE])
        result: dict[Key, torch.Tensor] = {}
        for leaf in self._leaves.all:
            if not is_delivered(leaf.key):
                continue
            if leaf.key in batch:
                values = batch[leaf.key].transpose(0, 1)
            else:
                values = self._constants.get(leaf.key, self._no_flag).expand(*shape, *leaf.shape)
            if leaf.shape == (1,) and values.ndim == 2:
                values = values.unsqueeze(-1)
            result[leaf.key] = (
                values if valid is None else _without_dummies(values, leaf.key, valid)
            )
        return result


def _flag_last_frames(batch: dict[Key, torch.Tensor], valid: torch.Tensor | None) -> None:
    for key in (DONE, TRUNCATED):
        batch[key] = batch[key].clone()
    if valid is None:
        batch[DONE][-1] = batch[TRUNCATED][-1] = True
        return
    for key in (DONE, TRUNCATED):
        batch[key][-1] |= valid[-1]
        if len(valid) > 1:  # the frame before a dummy step
            batch[key][-2] |= ~valid[-1]


def _without_dummies(values: torch.Tensor, key: Key, valid: torch.Tensor) -> torch.Tensor:
    """Clear the cells of dummy steps, because they are not frames."""
    cells = valid.t().view(*values.shape[:2], *[1] * (values.ndim - 2))
    return values.masked_fill(~cells, -1 if key == TRAJ_IDS else 0)
