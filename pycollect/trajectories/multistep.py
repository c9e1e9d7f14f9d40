"""N-step returns of a batch of rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from pycollect._core import Leaf, MultiStepPlan, SplitPlan
from pycollect.batch.extras_in_batches import Parcel, with_extras, without_extras
from pycollect.batch.frame import FLAGS
from pycollect.batch.layout import Key, dotted, dtype_name
from pycollect.batch.tensordicts import (
    NestedKey,
    allocate,
    any_done,
    any_of,
    as_int64,
    as_key,
    as_signal,
    flatten,
    is_plain,
    meta_keys,
    refuse,
    spare_memory,
)
from pycollect.trajectories.by_flag import each_has_its_own, flag_by_flag
from pycollect.trajectories.on_cuda import ahead_on_device, on_one_device

_memory = spare_memory()


class MultiStep(torch.nn.Module):
    """Makes one-step transitions n-step ones, as a collector's `postproc` or a buffer's transform.

    Each frame looks `n_steps` ahead, or to the end of its segment where that comes first. Segments
    end at a done, where the trajectory id changes, and at a row's end: a trajectory that goes on in
    the next batch is bootstrapped from the last frame that this one has of it. Uncollected cells
    (id -1 or mask False) are never looked into. Where ``("next", "done")`` has several flags per
    frame, one per agent, a segment ends where any of them is set; so it does where only nested
    dones exist. But where all leaves begin with done's dimensions, each flag has its own segments.

    Trajectories are split before, as collectors do it: shifted dones would cut earlier.

    Time and memory are linear in the frames, whatever `n_steps`. Sums are made in double precision.
    R. S. Sutton, "Learning to predict by the methods of temporal differences", Machine Learning 3
    (1988).

    Differs from TorchRL's class of this name: ``("next", "done")`` and the other flags are those of
    the frame that ``("next", "observation")`` is of, so that ``reward + gamma * value(next) *
    ~done`` does not bootstrap past a terminal; ids end segments too; `nonterminal` says what it
    says for ``n_steps=1`` as well; rewards and dones of groups of agents are found by their name.

    Args:
        gamma: the discount of one step, in (0, 1].
        n_steps: how many rewards are summed at most, at least 1.
        shift_done: False leaves the flags under "next" as they were, as TorchRL does.
        reward_keys: the rewards under "next". Default: every leaf there that is named "reward", at
            any depth.

    Attributes:
        gamma, n_steps, shift_done, reward_keys: as they were given; they can be set.
        done_key: the flags under "next" that end a segment. Default: "done", or where there is
            none, all nested leaves of this name.
        done_keys: the names of the flags that ``shift_done=False`` leaves alone.
        mask_key: where uncollected cells are said. Default: "mask", beside the trajectory ids.
        gammas: float32 [1, 1, n_steps + 1], the powers of gamma; the one buffer, so that
            `state_dict` is that of TorchRL's class. Sums are not made with it.

    Raises:
        ValueError: gamma or n_steps out of bounds.
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        shift_done: bool = True,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma: expected a number in (0, 1], got {gamma!r}")
        if n_steps != int(n_steps) or n_steps < 1:
            raise ValueError(f"n_steps: expected an integer of at least 1, got {n_steps!r}")
        super().__init__()
        self.gamma = float(gamma)
        self.n_steps = int(n_steps)
        self.shift_done = bool(shift_done)
        self.reward_keys = reward_keys
        self.done_key: NestedKey | None = None
        self.done_keys: Sequence[str] = FLAGS
        self.mask_key: NestedKey | None = None
        powers = [self.gamma**k for k in range(self.n_steps + 1)]
        self.register_buffer("gammas", torch.tensor(powers, dtype=torch.float32)[None, None])

    def extra_repr(self) -> str:
        """What torch writes between the brackets."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}, shift_done={self.shift_done}"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The batch with n-step transitions.

        Args:
            tensordict: batch size [T], [P, T], [B, P, T], or [N, T] as split with a mask: time is
                the last dimension. Leaves may lie anywhere in memory; those of a CUDA device go
                through one launch of the core's kernel, those that need a gradient or lie on
                another device through torch's own indexing.

        Returns:
            A new TensorDict that shares with the input what does not change, all but "next".
            Under "next": "reward" of its dtype (of torch's default one where that is no floating
            type), the sum of ``gamma**k`` times the k-th reward from here on; "original_reward",
            the one-step one; all other leaves are those of the last frame that was summed. At the
            root: "steps_to_next_obs" int64, how many rewards were summed; "gamma", the discount to
            the power of that, of torch's default dtype; "nonterminal" bool, whether another frame
            of the segment follows; all of the batch's shape. Uncollected cells: rewards and steps
            0, gamma 1, not nonterminal, the rest as it was.

        Raises:
            KeyError: no "next", no reward in it, or neither dones nor trajectory ids.
            ValueError: no batch dimension; ids, done or mask of another dtype or shape.
            TypeError: a tensor under "next" that is not a strided one.
        """
        if tensordict.ndim < 1:
            raise ValueError("tensordict: expected at least one batch dimension, got none")
        td, parcel = without_extras(tensordict)
        source = td.get("next", None)
        if source is None:
            raise KeyError('tensordict: expected an entry "next", got none')
        leaves, _, others = flatten(source)
        refuse(others)
        flags = leaves.get(as_key(self.done_key or "done"))
        if flags is not None and not parcel and each_has_its_own(td, flags.shape):
            return flag_by_flag(self.forward, td, flags.shape)
        ahead = _Ahead(MultiStepPlan(self._segments(td, leaves), self.n_steps), td.shape)
        rewards = {key: leaves.pop(key) for key in self._reward_keys(leaves)}
        if not self.shift_done:
            leaves = {key: leaf for key, leaf in leaves.items() if key[-1] not in self.done_keys}
        result = td.clone(False)
        after = source.clone(False)
        for key, leaf in ahead.applied(leaves, rewards, self.gamma).items():
            after.set(key, leaf)
        for key, reward in rewards.items():
            after.set((*key[:-1], "original_reward"), reward)
        result.set("next", after)
        for name, value in ahead.described(self.gamma).items():
            result.set(name, value.to(next(iter(rewards.values())).device))
        return with_extras(result, ahead.carried(parcel)) if parcel else result

    def _reward_keys(self, leaves: dict[Key, torch.Tensor]) -> list[Key]:
        if self.reward_keys is None:
            found = [key for key in leaves if key[-1] == "reward"]
            if not found:
                raise KeyError(
                    'reward_keys: expected a leaf named "reward" under "next", got '
                    f"{', '.join(map(dotted, leaves)) or 'no leaf'}; name the reward"
                )
            return found
        keys = [as_key(key) for key in self.reward_keys]
        for key in keys:
            if key not in leaves:
                raise KeyError(f"reward_keys: expected next.{dotted(key)} in the batch")
        return keys

    def _segments(self, td: TensorDictBase, leaves: dict[Key, torch.Tensor]) -> SplitPlan:
        """The segments within which a frame looks ahead; `leaves` are those under "next"."""
        ids_key, mask_key = meta_keys(td, None, None)
        ids = td.get(ids_key, None)
        done = self._done(leaves, td.ndim)
        if ids is None and done is None:
            raise KeyError("tensordict: expected next.done, or trajectory ids, got neither")
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
            raise KeyError(f"done_key: expected next.{dotted(key)} in the batch")
        return any_of(leaves[key], ndim)


class _Ahead:
    """A plan, and the leaves of a batch by it."""

    def __init__(self, plan: MultiStepPlan, shape: torch.Size) -> None:
        self.plan = plan
        self.shape = tuple(shape)
        self.ndim = len(shape)
        self._cells: torch.Tensor | None = None

    @property
    def cells(self) -> torch.Tensor:
        """int64 [*batch]: the cell that each leads to, counted row after row."""
        if self._cells is None:
            here = torch.arange(math.prod(self.shape), device="cpu").reshape(self.shape)
            self._cells = torch.empty_like(here)
            self.plan.shift([here], [self._cells])
        return self._cells

    def applied(
        self, leaves: dict[Key, torch.Tensor], rewards: dict[Key, torch.Tensor], gamma: float
    ) -> dict[Key, torch.Tensor]:
        """Leaves from the cells that are led to, and the n-step sums of rewards."""
        moved = {key: leaf.detach() for key, leaf in leaves.items() if is_plain(leaf)}
        summed = {
            key: reward.detach()
            for key, reward in rewards.items()
            if is_plain(reward) and not reward.is_complex()
        }
        dtypes = {key: leaf.dtype for key, leaf in moved.items()}
        dtypes |= {key: _sum_dtype(reward.dtype) for key, reward in summed.items()}
        room = allocate(
            _memory,
            self.shape,
            [
                Leaf(key, dtype_name(dtype), tuple((leaves | rewards)[key].shape[self.ndim :]))
                for key, dtype in dtypes.items()
            ],
        )
        self.plan.shift(list(moved.values()), [room[key] for key in moved])
        self.plan.sum(gamma, list(summed.values()), [room[key] for key in summed])
        room |= self._on_device(leaves, rewards, gamma)
        for key in leaves.keys() - room.keys():
            room[key] = self._moved_by_torch(leaves[key])
        for key in rewards.keys() - room.keys():
            room[key] = self._summed_by_torch(rewards[key], gamma)
        return room

    def _on_device(
        self, leaves: dict[Key, torch.Tensor], rewards: dict[Key, torch.Tensor], gamma: float
    ) -> dict[Key, torch.Tensor]:
        """Those that a CUDA device does by one launch."""
        floats = (torch.float32, torch.float64)
        there = on_one_device(
            leaves | {key: reward for key, reward in rewards.items() if reward.dtype in floats}
        )
        if not there:
            return {}
        moved = {key: leaf for key, leaf in there.items() if key in leaves}
        summed = {key: leaf for key, leaf in there.items() if key in rewards}
        return ahead_on_device(self.plan, gamma, moved, summed, self.ndim)

    def carried(self, parcel: Parcel) -> Parcel:
        """The extras: those under "next" from the cells that are led to."""
        moved = parcel.moved(self.cells).extras
        own = {key: moved[key] if key[0] == "next" else parcel.extras[key] for key in moved}
        return Parcel(own, parcel.kinds, parcel.classes)

    def described(self, gamma: float) -> dict[str, torch.Tensor]:
        """What the root is given."""
        steps = torch.empty(self.shape, dtype=torch.int64, device="cpu")
        discounts = torch.empty(self.shape, device="cpu")
        nonterminal = torch.empty(self.shape, dtype=torch.bool, device="cpu")
        self.plan.steps(steps)
        self.plan.nonterminal(nonterminal)
        self.plan.discounts(gamma, discounts)
        return {"steps_to_next_obs": steps, "gamma": discounts, "nonterminal": nonterminal}

    def _summed_by_torch(self, reward: torch.Tensor, gamma: float) -> torch.Tensor:
        """Differentiable, on any device; takes n passes over the reward."""
        steps = torch.empty(self.shape, dtype=torch.int64, device="cpu")
        self.plan.steps(steps)
        frames = reward.flatten(0, self.ndim - 1)
        frames = frames.to(_sum_dtype(frames.dtype))
        ones = [1] * (frames.ndim - 1)
        left = steps.to(frames.device).reshape(-1, *ones)
        here = torch.arange(len(frames), device=frames.device)
        total = torch.zeros_like(frames)
        for k in range(int(steps.max()) if steps.numel() else 0):
            ahead = frames[(here + k).clamp_max(len(frames) - 1)]
            total = total + torch.where(left > k, gamma**k * ahead, torch.zeros_like(ahead))
        return total.reshape(reward.shape)

    def _moved_by_torch(self, leaf: torch.Tensor) -> torch.Tensor:
        """Differentiable, on any device."""
        return leaf.flatten(0, self.ndim - 1)[self.cells.to(leaf.device)]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What rewards of this type are summed up to."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
