"""N-step returns of a batch of rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase

from pycollect._core import Leaf, MultiStepPlan, SplitPlan
from pycollect.arguments import check_flag, naming
from pycollect.checks import check_positive
from pycollect.data.extras import ExtrasBatch, with_extras, without_extras
from pycollect.data.frame import FLAGS
from pycollect.data.gather_cuda import ahead_on_device, on_one_device
from pycollect.data.layout import Key, as_key, dotted, dtype_name
from pycollect.data.tensordicts import (
    NestedKey,
    allocate,
    any_done,
    any_of,
    as_int64,
    as_signal,
    flatten,
    is_plain,
    meta_keys,
    rows_like,
    spare_memory,
)


def flags_are_separate(td: TensorDictBase, flags: torch.Size) -> bool:
    """Return whether frames have several flags, and all entries begin with their dimensions."""
    return (
        flags[: td.ndim] == td.shape
        and flags[td.ndim :].numel() > 1
        and all(leaf.shape[: len(flags)] == flags for leaf in td.values(True, True))
    )


def flag_by_flag(
    step: Callable[[TensorDictBase], TensorDictBase], td: TensorDictBase, flags: torch.Size
) -> TensorDictBase:
    """Apply `step` to the trajectories of each flag [*batch, T, *K] of `td` [*batch, T].

    All entries begin with the shape of the flags. `step` takes a batch with time as its last
    dimension. In the result [*batch, T], entries with one value per frame and flag are [*batch, T,
    *K].
    """
    time = td.ndim - 1
    wide = td.clone(False)
    wide.batch_size = flags
    result = step(wide.transpose(time, -1)).transpose(time, -1)
    leaves = set(td.keys(True, True))
    for key in [None, *(key for key in td.keys(True) if key not in leaves)]:
        source, target = (td, result) if key is None else (td.get(key), result.get(key))
        target.batch_size = source.batch_size
    result.names = td.names
    return result


_memory = spare_memory()


class MultiStep(torch.nn.Module):
    """Turn one-step transitions into n-step transitions.

    Use it as a collector's `postproc` or as a transform of a replay buffer.

    Each frame looks up to `n_steps` frames ahead, but not past the end of its segment. A segment
    ends at a done flag, at a change of the trajectory id and at the end of a row. A trajectory that
    continues in the next batch is therefore bootstrapped from its last frame in this batch.
    Uncollected cells (id -1 or mask ``False``) are never used.

    If ``("next", "done")`` has several flags per frame, such as one per agent, any of them ends a
    segment; so does any nested done if only nested ones exist. Exception: if all entries begin with
    the dimensions of done, each flag has its own segments.

    Split trajectories before this step, as collectors do: shifted done flags would cut them too
    early.

    Time and memory are linear in the number of frames, for any `n_steps`. Sums use double
    precision. Source: R. S. Sutton, "Learning to predict by the methods of temporal differences",
    Machine Learning 3 (1988).

    Differences from TorchRL's MultiStep:

    - ``("next", "done")`` and the other flags belong to the same frame as ``("next",
      "observation")``, so ``reward + gamma * value(next) * ~done`` does not bootstrap past a
      terminal state.
    - Trajectory ids also end segments.
    - `nonterminal` has the same meaning for ``n_steps=1``.
    - Rewards and done flags of groups of agents are found by their names.

    Args:
        gamma: Discount factor of one step, in (0, 1].
        n_steps: Maximum number of rewards to sum, at least 1.
        shift_done: ``False`` keeps the flags under "next" unchanged, as TorchRL does (default:
            ``True``).
        reward_keys: Keys of the rewards under "next". Defaults to ``None``: every entry named
            "reward" there, at any depth.

    Attributes:
        gamma, n_steps, shift_done, reward_keys: The arguments; they can be set.
        done_key: Flags under "next" that end a segment. Defaults to ``None``: "done", or all nested
            entries of that name if there is none at the top.
        done_keys: Names of the flags that ``shift_done=False`` keeps unchanged.
        mask_key: Key of the mask of collected cells. Defaults to ``None``: "mask", next to the
            trajectory ids.
        gammas: Powers of gamma, float32 [1, 1, n_steps + 1]. The only buffer, so that `state_dict`
            matches TorchRL's class; it is not used in sums.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `gamma` or `n_steps` is out of range.
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        shift_done: bool = True,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        with naming("gamma"):  # adds the name to the error of a string
            if not 0 < gamma <= 1:
                raise ValueError(f"gamma: expected a number in (0, 1], got {gamma!r}")
        super().__init__()
        self.gamma = float(gamma)
        self.n_steps = check_positive("n_steps", n_steps)
        self.shift_done = check_flag("shift_done", shift_done)
        self.reward_keys = reward_keys
        self.done_key: NestedKey | None = None
        self.done_keys: Sequence[str] = FLAGS
        self.mask_key: NestedKey | None = None
        powers = [self.gamma**k for k in range(self.n_steps + 1)]
        self.register_buffer("gammas", torch.tensor(powers, dtype=torch.float32)[None, None])

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, n_steps={self.n_steps}, shift_done={self.shift_done}"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch with n-step transitions.

        Args:
            tensordict: Batch of size [T], [P, T], [B, P, T], or [N, T] if split with a mask. Time
                is the last dimension. Tensors may have any memory layout. CUDA tensors are
                processed by one kernel launch. Tensors that require gradients, or are on another
                device, are processed by torch indexing.

        Returns:
            A new TensorDict. It shares all unchanged entries with the input, which is not modified.

            Under "next": "reward" is the sum of ``gamma**k`` times the reward k steps ahead, in its
            own dtype, or torch's default dtype if that is not floating point. "original_reward" is
            the one-step reward. All other entries come from the last frame in the sum.

            At the root, all of the batch's shape: "steps_to_next_obs" (int64) is the number of
            rewards in the sum. "gamma" (torch's default dtype) is the discount factor to that
            power. "nonterminal" (bool) is whether another frame of the segment follows this one.

            In uncollected cells, rewards and steps are 0, gamma is 1 and nonterminal is ``False``;
            other entries are unchanged.

        Raises:
            KeyError: The batch has no "next", no reward in it, or neither done nor trajectory ids.
            ValueError: The batch has no batch dimension, or ids, done or mask have another dtype or
                shape.
            TypeError: A tensor under "next" is not strided.
        """
        if tensordict.ndim < 1:
            raise ValueError("tensordict: expected at least one batch dimension, got none")
        td, extras_batch = without_extras(tensordict)
        source = td.get("next", None)
        if source is None:
            raise KeyError('tensordict: expected an entry "next", got none')
        leaves, _ = flatten(source)
        flags = leaves.get(as_key(self.done_key or "done"))
        if flags is not None and not extras_batch and flags_are_separate(td, flags.shape):
            return flag_by_flag(self.forward, td, flags.shape)
        ahead = _Ahead(MultiStepPlan(self._segments(td, leaves), self.n_steps), td.shape)
        rewards = {key: leaves.pop(key) for key in self._reward_keys(leaves)}
        if not self.shift_done:
            leaves = {key: leaf for key, leaf in leaves.items() if key[-1] not in self.done_keys}
        result = td.clone(False)
        following = source.clone(False)
        for key, leaf in ahead.entries(leaves, rewards, self.gamma).items():
            following.set(key, leaf)
        for key, reward in rewards.items():
            following.set((*key[:-1], "original_reward"), reward)
        result.set("next", following)
        for name, value in ahead.root_entries(self.gamma).items():
            result.set(name, value.to(next(iter(rewards.values())).device))
        return with_extras(result, ahead.extras(extras_batch)) if extras_batch else result

    def _reward_keys(self, leaves: dict[Key, torch.Tensor]) -> list[Key]:
        if self.reward_keys is None:
            found = [key for key in leaves if key[-1] == "reward"]
            if not found:
                raise KeyError(
                    'reward_keys: expected a leaf named "reward" under "next", got '
                    f"{', '.join(map(dotted, leaves)) or 'no leaf'}; pass reward_keys"
                )
            return found
        keys = [as_key(key) for key in self.reward_keys]
        for key in keys:
            if key not in leaves:
                raise KeyError(
                    f"reward_keys: expected an entry next.{dotted(key)} in the batch, got none"
                )
        return keys

    def _segments(self, td: TensorDictBase, leaves: dict[Key, torch.Tensor]) -> SplitPlan:
        """Return the segments within which a frame looks ahead."""
        ids_key, mask_key = meta_keys(td, None, None)
        ids = td.get(ids_key, None)
        done = self._done(leaves, td.ndim)
        if ids is None and done is None:
            raise KeyError("tensordict: expected an entry next.done or trajectory ids, got neither")
        return SplitPlan(
            as_signal(done),
            as_signal(as_int64(ids_key, ids)),
            as_signal(td.get(self.mask_key or mask_key, None)),
            batch_dims=td.ndim,
        )

    def _done(self, leaves: dict[Key, torch.Tensor], ndim: int) -> torch.Tensor | None:
        if self.done_key is None:
            return any_done(leaves, ndim)
        key = as_key(self.done_key)
        if key not in leaves:
            raise KeyError(f"done_key: expected an entry next.{dotted(key)} in the batch, got none")
        return any_of(leaves[key], ndim)


class _Ahead:
    """Applies a plan to the tensors of a batch."""

    def __init__(self, plan: MultiStepPlan, shape: torch.Size) -> None:
        self.plan = plan
        self.shape = tuple(shape)
        self.ndim = len(shape)
        self._cells: torch.Tensor | None = None

    @property
    def cells(self) -> torch.Tensor:
        """Target cell of each cell, counted in row-major order, int64 [*batch]."""
        if self._cells is None:
            cells = torch.arange(math.prod(self.shape), device="cpu").reshape(self.shape)
            self._cells = torch.empty_like(cells)
            self.plan.shift([cells], [self._cells])
        return self._cells

    def entries(
        self, leaves: dict[Key, torch.Tensor], rewards: dict[Key, torch.Tensor], gamma: float
    ) -> dict[Key, torch.Tensor]:
        """Return entries from the target cells, and n-step sums of rewards."""
        moved = {key: leaf.detach() for key, leaf in leaves.items() if is_plain(leaf)}
        summed = {
            key: reward.detach()
            for key, reward in rewards.items()
            if is_plain(reward) and not reward.is_complex()
        }
        dtypes = {key: leaf.dtype for key, leaf in moved.items()}
        dtypes |= {key: _sum_dtype(reward.dtype) for key, reward in summed.items()}
        result = allocate(
            _memory,
            self.shape,
            [
                Leaf(key, dtype_name(dtype), tuple((leaves | rewards)[key].shape[self.ndim :]))
                for key, dtype in dtypes.items()
            ],
        )
        self.plan.shift(list(moved.values()), [result[key] for key in moved])
        self.plan.sum(gamma, list(summed.values()), [result[key] for key in summed])
        result |= self._on_device(leaves, rewards, gamma)
        for key in leaves.keys() - result.keys():
            frames = leaves[key].flatten(0, self.ndim - 1)
            result[key] = frames[self.cells.to(frames.device)]
        for key in rewards.keys() - result.keys():
            result[key] = self._summed_by_torch(rewards[key], gamma)
        return result

    def _on_device(
        self, leaves: dict[Key, torch.Tensor], rewards: dict[Key, torch.Tensor], gamma: float
    ) -> dict[Key, torch.Tensor]:
        """Return the entries that one launch on a CUDA device can compute."""
        floats = (torch.float32, torch.float64)
        real = {key: reward for key, reward in rewards.items() if reward.dtype in floats}
        on_device = on_one_device(leaves | real)
        if not on_device:
            return {}
        moved = {key: leaf for key, leaf in on_device.items() if key in leaves}
        summed = {key: leaf for key, leaf in on_device.items() if key in rewards}
        return ahead_on_device(self.plan, gamma, moved, summed, self.ndim)

    def extras(self, extras_batch: ExtrasBatch) -> ExtrasBatch:
        """Return the extras; those under "next" come from the target cells."""
        moved = extras_batch.moved(self.cells).extras
        extras = {
            key: moved[key] if key[0] == "next" else extras_batch.extras[key] for key in moved
        }
        return ExtrasBatch(extras, extras_batch.kinds, extras_batch.classes)

    def root_entries(self, gamma: float) -> dict[str, torch.Tensor]:
        """Return the new entries at the root."""
        steps = torch.empty(self.shape, dtype=torch.int64, device="cpu")
        discounts = torch.empty(self.shape, device="cpu")
        nonterminal = torch.empty(self.shape, dtype=torch.bool, device="cpu")
        self.plan.steps(steps)
        self.plan.nonterminal(nonterminal)
        self.plan.discounts(gamma, discounts)
        return {"steps_to_next_obs": steps, "gamma": discounts, "nonterminal": nonterminal}

    def _summed_by_torch(self, reward: torch.Tensor, gamma: float) -> torch.Tensor:
        """Sum a reward differentiably, on any device, in n passes."""
        steps = torch.empty(self.shape, dtype=torch.int64, device="cpu")
        self.plan.steps(steps)
        frames = reward.flatten(0, self.ndim - 1)
        frames = frames.to(_sum_dtype(frames.dtype))
        left = rows_like(steps.to(frames.device).flatten(), frames)
        index = torch.arange(len(frames), device=frames.device)
        total = torch.zeros_like(frames)
        for k in range(int(steps.max()) if steps.numel() else 0):
            ahead = frames[(index + k).clamp_max(len(frames) - 1)]
            total = total + torch.where(left > k, gamma**k * ahead, torch.zeros_like(ahead))
        return total.reshape(reward.shape)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
