"""Leaves of a batch, as recorded in a slab and delivered in a TensorDict."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pycollect._core import Layout, Leaf, Placement
from pycollect.data.extras import Extra, Extras, ExtrasBatch
from pycollect.data.layout import Key, Node, is_delivered

TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
IS_INIT: Key = ("is_init",)

FLAGS = ("done", "terminated", "truncated")

ONE_REWARD = Leaf(("reward",), "float32", (1,))


class NoLeaves:
    """Leaves of a slab if a batch is recorded entirely on a device: one empty filler."""

    all = (Leaf(("_filler",), "uint8", ()),)
    keys: tuple[Key | None, ...] = (None,)

    def layout(self) -> Layout:
        return Layout(self.all)


@dataclass(frozen=True)
class BatchLeaves:
    """Leaves of one worker's frames, grouped by origin.

    Attributes:
        observation: The environment's observations, at the root and under "next".
        outputs: The policy's outputs, at the root. An output replaces an observation or a state
            with the same key there.
        states: Recurrent states that the policy passes to its next call, at the root and under
            "next".
        step_only: Leaves that only a step of the environment returns, under "next".
        root_only: Keys of observations that a step does not record under "next"; a leaf with such a
            key may be one of `step_only`.
        reward: The environment's reward, under "next"; unused if there are `ends`.
        ends: Keys of flags in `observation`. If there are any, the reward is one of `step_only`.
        is_init: Whether to record "is_init", which marks the first frame of a trajectory.
        step_count: Whether to record "step_count".
        policy_version: Whether to record the policy version.
        mask: Whether to record the mask of collected cells.
        dummies: Whether there may be cells of steps that only reset an environment.
        extras: Entries that are not recorded in the slab.
        nodes: Nested TensorDicts with their own batch dimensions or class, by the environment's
            key.
        compact: Whether to omit ("next", key) of observations and states, except flags. The entry
            ("next", "step_count") is recorded but not delivered.
    """

    observation: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[Leaf, ...] = ()
    step_only: tuple[Leaf, ...] = ()
    root_only: frozenset[Key] = frozenset()
    reward: Leaf = ONE_REWARD
    ends: tuple[Key, ...] = ()
    is_init: bool = False
    step_count: bool = False
    policy_version: bool = False
    mask: bool = False
    dummies: bool = False
    extras: tuple[Extra, ...] = ()
    nodes: Mapping[Key, Node] = field(default_factory=dict)
    compact: bool = False

    def without(self, observations: Collection[Key]) -> BatchLeaves:
        """Return these leaves without the given observations and without the policy's leaves."""
        rest = tuple(leaf for leaf in self.observation if leaf.key not in observations)
        return replace(self, observation=rest, outputs=(), states=())

    def layout(self) -> Layout:
        return Layout(self.all)

    @cached_property
    def all(self) -> tuple[Leaf, ...]:
        """All leaves of a frame, in the order of the layout."""
        flags = () if self.ends else tuple(Leaf((flag,), "bool", (1,)) for flag in FLAGS)
        reward = () if self.ends else (self.reward,)
        outputs = {leaf.key for leaf in self.outputs}
        inputs = (leaf for leaf in (*self.observation, *self.states) if leaf.key not in outputs)
        leaves = [*inputs, *self.outputs, *flags]
        if self.is_init:
            leaves += [Leaf(IS_INIT, "bool", (1,))]
        left_out = self.root_only if self.compact else frozenset()
        step_only = [leaf for leaf in self.step_only if leaf.key not in left_out]
        step = (*self._successors, *reward, *step_only, *flags)
        leaves += [Leaf(("next", *leaf.key), leaf.dtype, leaf.shape) for leaf in step]
        leaves += [Leaf(TRAJ_IDS, "int64", ())]
        if self.step_count:
            leaves += [Leaf((*root, "step_count"), "int64", (1,)) for root in ((), ("next",))]
        if self.policy_version:
            leaves += [Leaf(("collector", "policy_version"), "int64", ())]
        if self.mask:
            leaves += [Leaf(MASK, "bool", ())]
        return tuple(leaves)

    @property
    def _successors(self) -> tuple[Leaf, ...]:
        """Leaves that are recorded at the root and under "next"."""
        observations = [leaf for leaf in self.observation if leaf.key not in self.root_only]
        if not self.compact:
            return (*observations, *self.states)
        return tuple(
            leaf for leaf in observations if leaf.key[-1] in FLAGS or leaf.key in self.ends
        )

    @cached_property
    def keys(self) -> tuple[Key | None, ...]:
        """Keys of all leaves in the order of the layout, ``None`` if a leaf is not delivered."""
        left_out = {("next", "step_count")} if self.compact and self.step_count else set()
        return tuple(
            leaf.key if is_delivered(leaf.key) and leaf.key not in left_out else None
            for leaf in self.all
        )

    @cached_property
    def shapes(self) -> dict[Key, tuple[int, ...]]:
        """Further batch dimensions of nested TensorDicts, by key.

        A node is left out if not all leaves inside it begin with these dimensions, because a policy
        may write others.
        """
        shapes = {key: node.shape for key, node in self._nodes.items() if node.shape}
        return {
            key: shape
            for key, shape in shapes.items()
            if all(
                leaf.shape[: len(shape)] == shape
                for leaf in self.all
                if leaf.key[: len(key)] == key
            )
        }

    @cached_property
    def classes(self) -> dict[Key, Any]:
        """Tensorclasses of nested TensorDicts in a delivered batch, by key."""
        return {key: node.data_cls for key, node in self._nodes.items() if node.data_cls}

    @cached_property
    def _nodes(self) -> dict[Key, Node]:
        """Nested TensorDicts of a batch that contain entries, by key."""
        entries = [*(leaf.key for leaf in self.all), *(extra.key for extra in self.extras)]
        nodes = {
            (*root, *key): node for root in ((), ("next",)) for key, node in self.nodes.items()
        }
        return {
            key: node
            for key, node in nodes.items()
            if any(entry[: len(key)] == key for entry in entries)
        }

    def extras_batch(self, extras: Extras | None) -> ExtrasBatch:
        """Return the extras of a batch, ready for delivery."""
        return ExtrasBatch(extras or {}, {extra.key: extra for extra in self.extras}, self.classes)


def placement_of(leaves: BatchLeaves | NoLeaves, envs: int, steps: int) -> Placement:
    """Return the placement of a rollout; ValueError if it is larger than this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        placement = Placement(leaves.layout(), 1, envs, steps)
    except ValueError as error:  # of the slab's size, in bytes
        raise ValueError(f"frames_per_batch: {envs * steps} frames: {error}") from None
    if placement.bytes > memory:
        raise ValueError(
            f"frames_per_batch: {envs * steps} frames take {placement.bytes} bytes, but this "
            f"machine has {memory}; use a smaller frames_per_batch"
        )
    return placement
