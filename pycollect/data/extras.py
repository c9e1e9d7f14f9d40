"""Extras: values without a fixed shape and numeric dtype, kept per frame and put into batches."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)

from pycollect.data.layout import Key
from pycollect.data.objects import (
    Cells,
    cells_of,
    is_object,
    object_stack,
    private_copies,
    value_of,
)
from pycollect.data.slabs import set_unchecked

Extras: TypeAlias = dict[Key, Cells]
"""Extras of a rollout or a batch by key, including "next"; ``None`` in cells without a frame."""

ExtraValues: TypeAlias = dict[Key, list[Any]]
"""Values of one step by key of the extra, one per environment."""


class Kind(enum.Enum):
    """Kind of an extra's values."""

    OBJECT = "object"
    """Any Python object, such as a string; delivered as NonTensorData."""
    RAGGED = "ragged"
    """Tensors with different shapes; their TensorDict becomes a lazy stack over time."""
    NODE = "node"
    """TensorDicts [a, ...] whose rows differ in keys or shapes; delivered as lazy stacks [*, a]."""


@dataclass(frozen=True)
class Extra:
    """An entry that cannot be recorded in a slab."""

    key: Key  # key path, as for a Leaf
    kind: Kind = Kind.OBJECT
    dtype: torch.dtype = torch.float32  # dtype of a ragged extra
    shape: tuple[int, ...] = ()  # frame shape of a ragged extra, with -1 for a varying extent

    def under_next(self) -> Extra:
        return Extra(("next", *self.key), self.kind, self.dtype, self.shape)

    def absent(self) -> Any:
        """Return a placeholder: ``None``, or if ragged a tensor with 0 for varying extents."""
        if self.kind is not Kind.RAGGED:
            return None
        shape = [max(extent, 0) for extent in self.shape]
        return torch.zeros(shape, dtype=self.dtype, device="cpu")


def fitted(rollout: Extras, steps: int) -> Extras:
    """Return a rollout's extras [P, T] with `steps` steps, cut or padded with ``None``."""
    result = {}
    for key, cells in rollout.items():
        result[key] = np.full((len(cells), steps), None, np.object_)
        kept = min(steps, cells.shape[1])
        result[key][:, :kept] = cells[:, :kept]
    return result


def joined(rollouts: Sequence[Extras], join: str | int, envs: Sequence[int]) -> Extras:
    """Join the extras [P, T] of several workers, in their order, into the extras of one batch.

    T may differ if they are joined along time. `join` is "stack", 0 or -1, as `cat_results`. `envs`
    are the batch dimensions of one worker's environments: (), (P,) or more.
    """
    result = {}
    for key in rollouts[0]:
        parts = [rollout[key].reshape(*envs, rollout[key].shape[-1]) for rollout in rollouts]
        if join == "stack":
            result[key] = np.stack(parts)
        else:
            result[key] = np.concatenate(parts, axis=-1 if join == -1 or not envs else 0)
    return result


@dataclass
class ExtrasBatch:
    """The extras of a batch, with the information to deliver them."""

    extras: Extras = field(default_factory=dict)  # cells by key, in the shape of the batch
    kinds: dict[Key, Extra] = field(default_factory=dict)  # description of each extra, by key
    classes: dict[Key, Any] = field(default_factory=dict)  # tensorclasses of nested TensorDicts

    def __bool__(self) -> bool:
        return bool(self.extras or self.classes)

    def moved(self, cells: torch.Tensor, mask: torch.Tensor | None = None) -> ExtrasBatch:
        """Return the extras of cells (row-major indices); ``None`` where `mask` is ``False``."""
        indices = cells.numpy()
        empty = None if mask is None else ~mask.numpy()
        extras = {}
        for key, values in self.extras.items():
            extras[key] = values.reshape(-1)[indices]
            if empty is not None:
                extras[key][empty] = None
        return ExtrasBatch(extras, self.kinds, self.classes)


def with_extras(td: TensorDictBase, extras_batch: ExtrasBatch) -> TensorDictBase:
    """Return a batch with its extras; do not use `td` afterwards.

    Objects become stacks of NonTensorData. A TensorDict with a ragged entry, which may be the batch
    itself, becomes a lazy stack over time; ``td.get(key, as_list=True)`` or ``td[..., t][key]``
    reads the entry.
    """
    if 0 in td.batch_size:
        return td
    parents = {key[:-1] for key in extras_batch.extras}
    for parent in sorted(parents, key=lambda key: (-len(key), key)):
        children = {key[-1]: key for key in extras_batch.extras if key[:-1] == parent}
        node = td if not parent else td.get(parent, None)
        if node is None:
            node = TensorDict({}, batch_size=td.batch_size, names=td.names, device=td.device)
        for name, key in children.items():
            node = _filled(node, name, extras_batch.extras[key], extras_batch.kinds[key])
        if parent:
            td.set(parent, node)
        else:
            td = node
    for key, cls in extras_batch.classes.items():
        td.set(key, cls.from_tensordict(td.get(key)))
    return td


def with_current(
    td: TensorDictBase, values: ExtraValues, extras: Iterable[Extra], envs: tuple[int, ...]
) -> TensorDictBase:
    """Return a policy's input, a TensorDict with batch size `envs`, with one step's extras."""
    for extra in extras:
        *parent, name = extra.key
        cells = cells_of(private_copies(values[extra.key]), envs)
        node = td.get(tuple(parent), None) if parent else td
        if node is None:
            node = TensorDict({}, batch_size=envs)
        node = _filled(node, name, cells, extra, lazily=False)
        td = td.set(tuple(parent), node) if parent else node
    return td


def _filled(
    node: TensorDictBase, name: str, cells: Cells, extra: Extra, lazily: bool = True
) -> TensorDictBase:
    if extra.kind is Kind.OBJECT:
        stack = object_stack(cells, node.names, node.device)
        if type(node) is not TensorDict or not isinstance(stack, NonTensorStack):
            return node.set(name, stack)
        set_unchecked(node, name, stack)  # `set` copies each object, because objects have no names
        return node
    if extra.kind is Kind.RAGGED:
        for index in np.ndindex(cells.shape):
            if cells[index] is None:
                cells[index] = extra.absent()
        return _ragged(node, name, cells, lazily)
    return node.set(name, _nodes(cells, node.get(name, None)))


def _ragged(node: TensorDictBase, name: str, cells: Cells, lazily: bool) -> TensorDictBase:
    """Return the node with a ragged entry, as a lazy stack over the last dimension.

    If `lazily`, also for equal shapes, so that the class of a batch does not depend on its values.
    """
    if cells.ndim == 0:
        return node.set(name, cells.item())
    values = list(cells.flat)
    if not lazily and len({value.shape for value in values}) == 1:
        return node.set(name, torch.stack(values).reshape(*cells.shape, *values[0].shape))
    last = cells.ndim - 1
    parts = [_ragged(part, name, cells[..., i], False) for i, part in enumerate(node.unbind(last))]
    return LazyStackedTensorDict(*parts, stack_dim=last, stack_dim_name=node.names[last])


def _nodes(cells: Cells, dense: TensorDictBase | None) -> TensorDictBase | None:
    """Stack nested TensorDicts, and add the `dense` leaves that were recorded in the slab.

    Rows with different entries, such as different agents, remain a lazy stack.
    """
    first = next((cell for cell in cells.flat if cell is not None), None)
    if first is None:
        return dense
    empty = first.clone().zero_()
    values = [empty if cell is None else cell for cell in cells.flat]
    if not cells.ndim:
        (node,) = values
    else:
        node = _reshaped(LazyStackedTensorDict.maybe_dense_stack(values, 0), cells.shape)
    if dense is None:
        return node
    if isinstance(node, LazyStackedTensorDict):
        for part, leaves in zip(node.tensordicts, dense.unbind(node.stack_dim), strict=True):
            part.update(leaves)
    else:
        node.update(dense)
    node.names = dense.names
    return node


def _reshaped(node: TensorDictBase, lead: tuple[int, ...]) -> TensorDictBase:
    """Reshape the first dimension of a stack to the dimensions `lead`."""
    if not isinstance(node, LazyStackedTensorDict):
        return node.reshape(*lead, *node.batch_size[1:])
    if node.stack_dim:
        parts = [_reshaped(part, lead) for part in node.tensordicts]
        return LazyStackedTensorDict(*parts, stack_dim=node.stack_dim + len(lead) - 1)
    if len(lead) == 1:
        return node
    steps = lead[-1]
    columns = [
        _reshaped(LazyStackedTensorDict.maybe_dense_stack(node.tensordicts[t::steps], 0), lead[:-1])
        for t in range(steps)
    ]
    return LazyStackedTensorDict(*columns, stack_dim=len(lead) - 1)


def read_values(td: TensorDictBase, extras: Iterable[Extra], envs: tuple[int, ...]) -> ExtraValues:
    """Read extras from a TensorDict with batch size `envs`, one value per environment."""
    values: ExtraValues = {}
    for extra in extras:
        try:
            entry = td.get(extra.key, None)
        except RuntimeError:  # the shapes differ between environments
            values[extra.key] = [td[index].get(extra.key, None) for index in np.ndindex(*envs)]
        else:
            if entry is not None:
                each = (entry[index] for index in np.ndindex(*envs)) if envs else (entry,)
                values[extra.key] = [value_of(value) for value in each]
    return values


def write_values(td: TensorDictBase, key: Key, values: list[Any], envs: tuple[int, ...]) -> None:
    """Write values from `read_values` into a TensorDict; do nothing if they are ``None``.

    A nested TensorDict is updated, not replaced.
    """
    first = values[0]
    if first is None:
        return
    cells = cells_of(values, envs)
    if isinstance(first, torch.Tensor):
        td.set(key, torch.stack(values).reshape(*envs, *first.shape))
    elif isinstance(first, TensorDictBase) and not is_object(first):
        node, existing = _nodes(cells, None), td.get(key, None)
        if existing is None:
            td.set(key, node)
        else:
            existing.update(node)
    else:
        td.set(key, object_stack(cells))


def without_extras(td: TensorDictBase) -> tuple[TensorDictBase, ExtrasBatch]:
    """Split a TensorDict into tensors and extras; return `td` itself if it has no extras."""
    if not _has_extras(td):
        return td, ExtrasBatch()
    extras_batch = ExtrasBatch()
    return _dense(td, (), td.ndim, extras_batch), extras_batch


def _has_extras(td: TensorDictBase) -> bool:
    if isinstance(td, LazyStackedTensorDict):
        return True
    return any(
        is_object(value)
        or is_tensorclass(value)
        or (isinstance(value, TensorDictBase) and _has_extras(value))
        for value in td.values()
    )


def _dense(node: TensorDictBase, path: Key, ndim: int, extras_batch: ExtrasBatch) -> TensorDict:
    """Return the tensors of a node, and add its other entries to the extras."""
    dense = TensorDict({}, batch_size=node.batch_size, names=node.names, device=node.device)
    lead = node.batch_size[:ndim]
    for name in _names(node):
        key = (*path, name)
        value = None
        with suppress(RuntimeError):  # of torch.stack, for a ragged entry
            value = node.get(name, None)
        if value is None:
            cells = _ragged_cells(node, name)
            extras_batch.extras[key], extras_batch.kinds[key] = cells, _ragged_extra(key, cells)
        elif is_object(value):
            extras_batch.extras[key] = _cells(value, lead)
            extras_batch.kinds[key] = Extra(key)
        elif isinstance(value, LazyStackedTensorDict) and value.stack_dim >= ndim:
            extras_batch.extras[key] = _cells(value, lead)
            extras_batch.kinds[key] = Extra(key, Kind.NODE)
        elif is_tensorclass(value):
            extras_batch.classes[key] = type(value)
            plain = value.to_tensordict(retain_none=False)
            dense.set(name, _dense(plain, key, ndim, extras_batch))
        elif isinstance(value, TensorDictBase):
            dense.set(name, _dense(value, key, ndim, extras_batch))
        else:
            dense.set(name, value)
    return dense


def _names(node: TensorDictBase) -> list[str]:
    """Return all names, including names that only some TensorDicts of a lazy stack have."""
    if not isinstance(node, LazyStackedTensorDict):
        return list(node.keys())
    return list(dict.fromkeys(name for part in node.tensordicts for name in _names(part)))


def _cells(value: Any, lead: torch.Size) -> Cells:
    return cells_of([value_of(value[index]) for index in np.ndindex(*lead)], lead)


def _ragged_cells(node: TensorDictBase, name: str) -> Cells:
    if isinstance(node, LazyStackedTensorDict):
        parts = [_ragged_cells(part, name) for part in node.tensordicts]
        return np.stack(parts, axis=node.stack_dim)
    value = node.get(name, None)
    if value is None:
        return cells_of([None] * node.batch_size.numel(), node.batch_size)
    return cells_of([value[index] for index in np.ndindex(*node.batch_size)], node.batch_size)


def _ragged_extra(key: Key, cells: Cells) -> Extra:
    tensors = [cell for cell in cells.flat if cell is not None]
    extents = zip(*(tensor.shape for tensor in tensors), strict=True)
    shape = tuple(e[0] if len(set(e)) == 1 else -1 for e in map(list, extents))
    return Extra(key, Kind.RAGGED, tensors[0].dtype, shape)
