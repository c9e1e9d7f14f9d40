"""What a frame of a batch has: its leaves, by key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pycollect._core import Layout, Leaf
from pycollect.data.extras import Extra, Extras, Parcel
from pycollect.data.layout import Key, Node, is_delivered

TRAJ_IDS: Key = ("collector", "traj_ids")


MASK: Key = ("collector", "mask")


IS_INIT: Key = ("is_init",)


FLAGS = ("done", "terminated", "truncated")

ONE_REWARD = Leaf(("reward",), "float32", (1,))


class NoLeaves:
    """The leaves of a slab if all leaves of a batch are recorded on a device: only a filler."""

    all = (Leaf(("_filler",), "uint8", ()),)
    keys: tuple[Key | None, ...] = (None,)

    def layout(self) -> Layout:
        """The layout of the slab."""
        return Layout(self.all)


@dataclass(frozen=True)
class BatchLeaves:
    """What one worker's frames consist of: the leaves, and which of them come from where.

    Attributes:
        observation: of the environment, at the root and under "next".
        outputs: of the policy, at the root; there in place of an observation or state of that key.
        states: what the policy passes on to its next call, at the root and under "next".
        step_only: of the environment, under "next" alone.
        root_only: keys of observations whose ("next", key), if any, is among `step_only`.
        reward: of the environment, under "next" alone; unused with `own_flags`.
        own_flags: reward and flags are among `observation` and `step_only`.
        is_init: whether a frame is the first of its trajectory.
        extras: what lies beside the slab, by its key in a batch.
        dummies: cells of steps that only reset an environment are among them.
        nodes: nested TensorDicts of a form of their own, by the environment's key.
        compact: ("next", key) of observations and states is left out; flags stay. The count of
            steps is recorded there, as it is at the root, and not delivered.
    """

    observation: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[Leaf, ...] = ()
    step_only: tuple[Leaf, ...] = ()
    root_only: frozenset[Key] = frozenset()
    reward: Leaf = ONE_REWARD
    own_flags: bool = False
    is_init: bool = False
    step_count: bool = False
    policy_version: bool = False
    mask: bool = False
    dummies: bool = False
    extras: tuple[Extra, ...] = ()
    nodes: Mapping[Key, Node] = field(default_factory=dict)
    compact: bool = False

    def without(self, observations: Collection[Key]) -> BatchLeaves:
        """These leaves without those observations and without what the policy returns."""
        rest = tuple(leaf for leaf in self.observation if leaf.key not in observations)
        return replace(self, observation=rest, outputs=(), states=())

    def layout(self) -> Layout:
        """All leaves of a frame, in the order in which a slab holds them."""
        return Layout(self.all)

    @cached_property
    def all(self) -> tuple[Leaf, ...]:
        """All leaves of a frame, in the order of the layout."""
        flags = () if self.own_flags else tuple(Leaf((flag,), "bool", (1,)) for flag in FLAGS)
        reward = () if self.own_flags else (self.reward,)
        outputs = {leaf.key for leaf in self.outputs}
        shown = (leaf for leaf in (*self.observation, *self.states) if leaf.key not in outputs)
        leaves = [*shown, *self.outputs, *flags]
        if self.is_init:
            leaves += [Leaf(IS_INIT, "bool", (1,))]
        step = (*self._successors, *reward, *self._steps_own, *flags)
        leaves += [Leaf(("next", *leaf.key), leaf.dtype, leaf.shape) for leaf in step]
        leaves += [Leaf(TRAJ_IDS, "int64", ())]
        if self.step_count:
            leaves += [Leaf((*at, "step_count"), "int64", (1,)) for at in ((), ("next",))]
        if self.policy_version:
            leaves += [Leaf(("collector", "policy_version"), "int64", ())]
        if self.mask:
            leaves += [Leaf(MASK, "bool", ())]
        return tuple(leaves)

    @property
    def _successors(self) -> tuple[Leaf, ...]:
        """What the root and "next" both have."""
        shown = [leaf for leaf in self.observation if leaf.key not in self.root_only]
        if not self.compact:
            return (*shown, *self.states)
        return tuple(leaf for leaf in shown if leaf.key[-1] in FLAGS)

    @property
    def _steps_own(self) -> tuple[Leaf, ...]:
        """What "next" alone has."""
        if not self.compact:
            return self.step_only
        return tuple(leaf for leaf in self.step_only if leaf.key not in self.root_only)

    @cached_property
    def keys(self) -> tuple[Key | None, ...]:
        """The keys of all leaves, in the order of the layout; None for what is not delivered."""
        left_out = {("next", "step_count")} if self.compact and self.step_count else set()
        return tuple(
            leaf.key if is_delivered(leaf.key) and leaf.key not in left_out else None
            for leaf in self.all
        )

    @cached_property
    def shapes(self) -> dict[Key, tuple[int, ...]]:
        """The batch dimensions that nested TensorDicts have behind those of the batch, by key.

        Only where every leaf inside begins with them, which a policy's need not.
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
        """The tensorclasses that nested TensorDicts are delivered as, by key."""
        return {key: node.data_cls for key, node in self._nodes.items() if node.data_cls}

    @cached_property
    def _nodes(self) -> dict[Key, Node]:
        return {(*at, *key): node for at in ((), ("next",)) for key, node in self.nodes.items()}

    def parcel(self, extras: Extras | None) -> Parcel:
        """The extras of a batch, ready for delivery."""
        return Parcel(extras or {}, {extra.key: extra for extra in self.extras}, self.classes)
