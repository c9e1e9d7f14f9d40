"""Extras: values without a fixed shape and dtype, kept per frame and put into batches."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)

from pycollect.data.layout import Key, dotted

Cells: TypeAlias = npt.NDArray[np.object_]
"""One value per cell, of the shape of the batch: [P, T] in a rollout."""

Extras: TypeAlias = dict[Key, Cells]
"""The extras of a rollout or a batch by key, those under "next" with it; None where no frame is."""

ExtraValues: TypeAlias = dict[Key, list[Any]]
"""What one step has of each extra: a value per env."""


class Kind(enum.Enum):
    """What the values of an extra are."""

    OBJECT = "object"
    """Any Python object, text first of all: delivered as NonTensorData."""
    RAGGED = "ragged"
    """Tensors of different shapes: the TensorDict that holds them is a lazy stack over time."""
    NODE = "node"
    """TensorDicts [a, ...] whose rows differ in keys or shapes: delivered as lazy stacks [*, a]."""


@dataclass(frozen=True)
class Extra:
    """One leaf (or one nested TensorDict) that does not fit into a slab.

    Attributes:
        key: as that of a Leaf.
        dtype: of a ragged one.
        shape: of a ragged one's frames; -1 for an extent that varies.
    """

    key: Key
    kind: Kind = Kind.OBJECT
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()

    def under_next(self) -> Extra:
        """The same under "next"."""
        return Extra(("next", *self.key), self.kind, self.dtype, self.shape)

    def absent(self) -> Any:
        """What stands where there is no value: None, or a tensor without elements."""
        if self.kind is not Kind.RAGGED:
            return None
        return torch.zeros(
            [max(extent, 0) for extent in self.shape], dtype=self.dtype, device="cpu"
        )


def private(value: Any) -> Any:
    """A copy of what its giver may write again; what cannot be copied, as it is."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a lock: nothing that a copy is asked of
        return value


def cells_of(values: Sequence[Any], shape: Sequence[int]) -> Cells:
    """ExtraValues in row-major order as cells of that shape."""
    cells = np.empty(len(values), np.object_)
    for place, value in enumerate(values):
        cells[place] = value
    return cells.reshape(tuple(shape))


def fitted(rollout: Extras, steps: int) -> Extras:
    """A rollout's extras, [P, T] each, with so many steps: cut, or None behind its end."""
    result = {}
    for key, cells in rollout.items():
        result[key] = np.full((len(cells), steps), None, np.object_)
        kept = min(steps, cells.shape[1])
        result[key][:, :kept] = cells[:, :kept]
    return result


def joined(rollouts: Sequence[Extras], join: str | int, envs: Sequence[int]) -> Extras:
    """The extras of several workers as those of one batch.

    Args:
        rollouts: [P, T] each, in worker order; T may differ where they are joined along time.
        join: "stack", 0 or -1, as `cat_results`.
        envs: the batch dimensions of one worker's environments: (), (P,) or more.
    """
    result = {}
    for key in rollouts[0]:
        parts = [rollout[key].reshape(*envs, rollout[key].shape[-1]) for rollout in rollouts]
        if join == "stack":
            result[key] = np.stack(parts)
        else:
            result[key] = np.concatenate(parts, axis=-1 if join == -1 or not envs else 0)
    return result


def value_of(entry: Any) -> Any:
    """The value of one cell: the object inside NonTensorData, anything else as it is."""
    if isinstance(entry, NonTensorData) and not entry.batch_size:
        return entry.data
    return entry


def per_env(entry: Any, envs: Sequence[int]) -> list[Any]:
    """An entry of a TensorDict of the batch size `envs` ((), (P,) or more) as one value per env."""
    if not envs:
        return [value_of(entry)]
    return [value_of(entry[place]) for place in np.ndindex(*envs)]


def pickled_extras(extras: Extras) -> bytes:
    """Return the pickled extras of a rollout; raise TypeError that names a failing one."""
    try:
        data: bytes = cloudpickle.dumps(extras)
        return data
    except Exception:
        for key, cells in extras.items():
            try:
                cloudpickle.dumps(cells)
            except Exception as error:
                raise TypeError(
                    f"{dotted(key)}: expected values that can be pickled, because they are sent to "
                    f"another process: {error}"
                ) from error
        raise


_PLAIN = (str, bytes, int, float, bool, type(None))
_ATTRIBUTES: dict[str, Any] = vars(NonTensorData(""))
_OTHERS: dict[str, Any] = _ATTRIBUTES["_non_tensordict"]
_EMPTY: dict[str, Any] = vars(_ATTRIBUTES["_tensordict"])
# The constructor looks at the batch size of each part, which takes longer than to make it.
_stack = getattr(NonTensorStack, "_new_lazy_unsafe", NonTensorStack)


@dataclass
class Parcel:
    """The extras of a batch with what is needed to deliver them.

    Attributes:
        extras: of the batch's shape each.
        kinds: of each of them.
        classes: the tensorclasses that nested TensorDicts are to become.
    """

    extras: Extras = field(default_factory=dict)
    kinds: dict[Key, Extra] = field(default_factory=dict)
    classes: Mapping[Key, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.extras or self.classes)

    def moved(self, cells: torch.Tensor, mask: torch.Tensor | None = None) -> Parcel:
        """Those of other cells, in their order.

        Args:
            cells: row-major places in the batch, of the shape that the result is to have.
            mask: False where there is no frame.
        """
        places = cells.numpy()
        empty = None if mask is None else ~mask.numpy()
        extras = {}
        for key, own in self.extras.items():
            extras[key] = own.reshape(-1)[places]
            if empty is not None:
                extras[key][empty] = None
        return Parcel(extras, self.kinds, self.classes)


def with_extras(td: TensorDictBase, parcel: Parcel) -> TensorDictBase:
    """A batch and its extras; `td` is not to be used any more.

    Objects become stacks of NonTensorData. The TensorDict that holds a ragged entry becomes a lazy
    stack over time, at the root the batch itself: ``td.get(key, as_list=True)`` or
    ``td[..., t][key]`` reads it.
    """
    if 0 in td.batch_size:
        return td
    parents = {key[:-1] for key in parcel.extras}
    for parent in sorted(parents, key=lambda key: (-len(key), key)):
        own = {key[-1]: key for key in parcel.extras if key[:-1] == parent}
        node = td if not parent else td.get(parent, None)
        if node is None:
            node = TensorDict({}, batch_size=td.batch_size, names=td.names, device=td.device)
        for name, key in own.items():
            node = _filled(node, name, parcel.extras[key], parcel.kinds[key])
        if parent:
            td.set(parent, node)
        else:
            td = node
    for key, cls in parcel.classes.items():
        td.set(key, cls.from_tensordict(td.get(key)))
    return td


def with_current(
    td: TensorDictBase, values: ExtraValues, extras: Iterable[Extra], envs: tuple[int, ...]
) -> TensorDictBase:
    """One step's extras in the TensorDict, of the batch size `envs`, that a policy is given."""
    for extra in extras:
        *parent, name = extra.key
        cells = cells_of([private(value) for value in values[extra.key]], envs)
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
        return _set(node, name, _objects(cells, node.names, node.device))
    if extra.kind is Kind.RAGGED:
        for place in np.ndindex(cells.shape):
            if cells[place] is None:
                cells[place] = extra.absent()
        return _ragged(node, name, cells, lazily)
    return node.set(name, _nodes(cells, node.get(name, None)))


def _set(node: TensorDictBase, name: str, stack: Any) -> TensorDictBase:
    """Set a stack of the node's own shape and names.

    `TensorDict.set` would copy each object of the stack, since objects have no names.
    """
    if type(node) is not TensorDict or not isinstance(stack, NonTensorStack):
        return node.set(name, stack)
    node._set_str(name, stack, validated=True, inplace=False, non_blocking=False)
    return node


def _objects(
    cells: Cells,
    names: Sequence[str | None] | None = None,
    device: torch.device | None = None,
) -> Any:
    """Return NonTensorData, or a stack of it of the shape of the cells."""
    if cells.ndim == 0:
        return _object(cells.item(), device)
    last = cells.ndim - 1
    if last:
        first = None if names is None else names[:last]
        parts = [_objects(cells[..., place], first, device) for place in range(cells.shape[-1])]
    else:
        parts = [_object(value, device) for value in cells]
    return _stack(*parts, stack_dim=last, stack_dim_name=None if names is None else names[last])


def _object(value: Any, device: torch.device | None) -> Any:
    """Return NonTensorData, in a tenth of its constructor's time if the value is plain.

    Values share no attribute that tensordict writes, such as lock, batch size and names.
    """
    if type(value) not in _PLAIN:
        return value if isinstance(value, NonTensorStack) else NonTensorData(value, device=device)
    made, empty = object.__new__(NonTensorData), object.__new__(TensorDict)
    vars(empty).update(_EMPTY, _tensordict={}, _device=device)
    vars(made).update(_ATTRIBUTES, _tensordict=empty, _non_tensordict={**_OTHERS, "data": value})
    return made


def _ragged(node: TensorDictBase, name: str, cells: Cells, lazily: bool) -> TensorDictBase:
    """`lazily`: a stack also where all shapes agree, so that a batch's form does not hang on it."""
    if cells.ndim == 0:
        return node.set(name, cells.item())
    values = list(cells.flat)
    if not lazily and len({value.shape for value in values}) == 1:
        return node.set(name, torch.stack(values).reshape(*cells.shape, *values[0].shape))
    last = cells.ndim - 1
    parts = [
        _ragged(part, name, cells[..., place], False)
        for place, part in enumerate(node.unbind(last))
    ]
    return LazyStackedTensorDict(*parts, stack_dim=last, stack_dim_name=node.names[last])


def _nodes(cells: Cells, dense: TensorDictBase | None) -> TensorDictBase | None:
    """Nested TensorDicts stacked, with the leaves that lie in the slab.

    Rows of different kinds (of agents, say) stay a lazy stack over these.
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
        for part, own in zip(node.tensordicts, dense.unbind(node.stack_dim), strict=True):
            part.update(own)
    else:
        node.update(dense)
    node.names = dense.names
    return node


def _reshaped(node: TensorDictBase, lead: tuple[int, ...]) -> TensorDictBase:
    """The first dimension of a stack as the dimensions `lead`."""
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
    """What a TensorDict of the batch size `envs` has of these extras, a value per env."""
    values: ExtraValues = {}
    for extra in extras:
        try:
            entry = td.get(extra.key, None)
        except RuntimeError:  # of different shapes in different envs
            values[extra.key] = [td[place].get(extra.key, None) for place in np.ndindex(*envs)]
        else:
            if entry is not None:
                values[extra.key] = per_env(entry, envs)
    return values


def write_values(td: TensorDictBase, key: Key, values: list[Any], envs: tuple[int, ...]) -> None:
    """Write what was read by `read_values`; nested TensorDicts are updated. None: nothing."""
    first = values[0]
    if first is None:
        return
    cells = cells_of(values, envs)
    if isinstance(first, torch.Tensor):
        td.set(key, torch.stack(values).reshape(*envs, *first.shape))
    elif isinstance(first, TensorDictBase) and not _is_object(first):
        node, own = _nodes(cells, None), td.get(key, None)
        if own is None:
            td.set(key, node)
        else:
            own.update(node)
    else:
        td.set(key, _objects(cells))


def without_extras(td: TensorDictBase) -> tuple[TensorDictBase, Parcel]:
    """A TensorDict's tensors alone, and its extras; `td` itself where it has none."""
    if not _has_extras(td):
        return td, Parcel()
    classes: dict[Key, Any] = {}
    parcel = Parcel(classes=classes)
    return _dense(td, (), td.ndim, parcel, classes), parcel


def _has_extras(td: TensorDictBase) -> bool:
    if isinstance(td, LazyStackedTensorDict):
        return True
    return any(
        _is_object(value)
        or is_tensorclass(value)
        or (isinstance(value, TensorDictBase) and _has_extras(value))
        for value in td.values()
    )


def _dense(
    node: TensorDictBase, path: Key, ndim: int, parcel: Parcel, classes: dict[Key, Any]
) -> TensorDict:
    dense = TensorDict({}, batch_size=node.batch_size, names=node.names, device=node.device)
    lead = node.batch_size[:ndim]
    for name in _names(node):
        key = (*path, name)
        value = _get(node, name)
        if value is None:
            cells = _ragged_cells(node, name)
            parcel.extras[key], parcel.kinds[key] = cells, _ragged_extra(key, cells)
        elif _is_object(value):
            parcel.extras[key] = _cells(value, lead)
            parcel.kinds[key] = Extra(key)
        elif isinstance(value, LazyStackedTensorDict) and value.stack_dim >= ndim:
            parcel.extras[key] = _cells(value, lead)
            parcel.kinds[key] = Extra(key, Kind.NODE)
        elif is_tensorclass(value):
            classes[key] = type(value)
            dense.set(
                name, _dense(value.to_tensordict(retain_none=False), key, ndim, parcel, classes)
            )
        elif isinstance(value, TensorDictBase):
            dense.set(name, _dense(value, key, ndim, parcel, classes))
        else:
            dense.set(name, value)
    return dense


def _is_object(value: Any) -> bool:
    return bool(getattr(value, "_is_non_tensor", False))


def _names(node: TensorDictBase) -> list[str]:
    """All names, of a lazy stack those also that only some of its TensorDicts have."""
    if not isinstance(node, LazyStackedTensorDict):
        return list(node.keys())
    return list(dict.fromkeys(name for part in node.tensordicts for name in _names(part)))


def _get(node: TensorDictBase, name: str) -> Any:
    """The entry; None where it is ragged."""
    try:
        return node.get(name, None)
    except RuntimeError:  # of torch.stack
        return None


def _cells(value: Any, lead: torch.Size) -> Cells:
    return cells_of([value_of(value[place]) for place in np.ndindex(*lead)], lead)


def _ragged_cells(node: TensorDictBase, name: str) -> Cells:
    if isinstance(node, LazyStackedTensorDict):
        parts = [_ragged_cells(part, name) for part in node.tensordicts]
        return np.stack(parts, axis=node.stack_dim)
    value = node.get(name, None)
    if value is None:
        return cells_of([None] * node.batch_size.numel(), node.batch_size)
    return cells_of([value[place] for place in np.ndindex(*node.batch_size)], node.batch_size)


def _ragged_extra(key: Key, cells: Cells) -> Extra:
    tensors = [cell for cell in cells.flat if cell is not None]
    extents = zip(*(tensor.shape for tensor in tensors), strict=True)
    shape = tuple(e[0] if len(set(e)) == 1 else -1 for e in map(list, extents))
    return Extra(key, Kind.RAGGED, tensors[0].dtype, shape)
