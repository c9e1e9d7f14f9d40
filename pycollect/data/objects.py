"""Objects in cells of a batch, and stacks of NonTensorData that are made when they are used."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from pycollect.data.layout import signed_view

Cells: TypeAlias = npt.NDArray[np.object_]
"""One value per cell, in the shape of the batch: [P, T] for a rollout."""

PLAIN_TYPES = frozenset((str, bytes, int, float, bool, type(None)))
"""Types whose values cannot change, so that they need no copies."""


def private_copy(value: Any) -> Any:
    """Return a copy of a value that its producer may overwrite, or the value if it has no copy."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)
    except Exception:  # for example an open file or a lock
        return value


def private_copies(values: Iterable[Any]) -> list[Any]:
    """Return `private_copy` of each value."""
    return [value if type(value) in PLAIN_TYPES else private_copy(value) for value in values]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors of any dtype, including dtypes that torch cannot unpickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and (signed := signed_view(value)).dtype != value.dtype:
            return torch.Tensor.view, (signed, value.dtype)
        return super().reducer_override(value)


def pickled_tensors(value: Any) -> bytes:
    """Return the pickle of tensors of any dtype, and of other objects."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def cells_of(values: Sequence[Any], shape: Sequence[int]) -> Cells:
    """Return values in row-major order as cells with a shape."""
    cells = np.empty(len(values), np.object_)
    for i, value in enumerate(values):
        cells[i] = value
    return cells.reshape(tuple(shape))


def is_object(entry: Any) -> bool:
    """Return whether an entry of a TensorDict, or its class, is NonTensorData or a stack of it."""
    return bool(getattr(entry, "_is_non_tensor", False))


def value_of(entry: Any) -> Any:
    """Return the value of one cell: the object inside NonTensorData, or the entry itself."""
    if isinstance(entry, NonTensorData) and not entry.batch_size:
        return entry.data
    return entry


def object_stack(
    cells: Cells, names: Sequence[str | None] | None = None, device: torch.device | None = None
) -> Any:
    """Return NonTensorData, or a stack of it, in the shape of the cells."""
    if cells.ndim == 0:
        return _object(cells.item(), device)
    return _late_stack(cells, names, device)


def _object(value: Any, device: torch.device | None) -> Any:
    """Return NonTensorData; for plain values, ten times as fast as its constructor.

    The objects share no attribute that tensordict writes, such as lock, batch size and names.
    """
    if type(value) not in PLAIN_TYPES:
        return value if isinstance(value, NonTensorStack) else NonTensorData(value, device=device)
    made, empty = object.__new__(NonTensorData), object.__new__(TensorDict)
    vars(empty).update(_EMPTY, _tensordict={}, _device=device)
    vars(made).update(_ATTRIBUTES, _tensordict=empty, _non_tensordict={**_OTHERS, "data": value})
    return made


_ATTRIBUTES: dict[str, Any] = vars(NonTensorData(""))
_OTHERS: dict[str, Any] = _ATTRIBUTES["_non_tensordict"]
_EMPTY: dict[str, Any] = vars(_ATTRIBUTES["_tensordict"])
_STACK: dict[str, Any] = NonTensorStack(NonTensorData("")).__dict__
_LATE = frozenset(("tolist", "__class__", "__dict__"))
"""Attributes of a late stack that do not make its parts."""


class _LateStack(NonTensorStack):  # type: ignore[misc]
    """A stack that has only the cells until it is used; it then becomes a NonTensorStack.

    Making the parts takes several microseconds for each cell, but learners read objects as a list
    (`tolist`), or not at all.
    """

    def __getattribute__(self, name: str) -> Any:
        if name not in _LATE:
            _make_parts(self)
        return object.__getattribute__(self, name)

    def tolist(self, *args: Any, as_linked_list: bool = False, **kwargs: Any) -> Any:
        cells = (vars(self).get("_cells") or [None])[0]
        if cells is None or args or kwargs or not set(map(type, cells.flat)) <= PLAIN_TYPES:
            _make_parts(self)
            option = {"as_linked_list": True} if as_linked_list else {}
            return NonTensorStack.tolist(self, *args, **option, **kwargs)
        return _linked(cells, self) if as_linked_list else cells.tolist()


def _late_stack(cells: Cells, names: Sequence[str | None] | None, device: Any) -> Any:
    """Return a stack over the last dimension of the cells."""
    stack = object.__new__(_LateStack)
    attributes: dict[str, Any] = stack.__dict__
    attributes.update(_STACK, stack_dim=cells.ndim - 1, _batch_size=torch.Size(cells.shape))
    attributes["_cells"] = cells, names, device
    del attributes["tensordicts"]
    if names is not None and names[-1] is not None:
        attributes["_td_dim_name"] = names[-1]
    return stack


def _make_parts(stack: Any) -> None:
    attributes = vars(stack)
    held = attributes.get("_cells")
    if held is None:
        return
    cells, names, device = held
    first = None if names is None else names[:-1]
    # Copies, because a part may outlive the batch.
    parts = [object_stack(cells[..., i].copy(), first, device) for i in range(cells.shape[-1])]
    # In this order, because another thread may also be here.
    attributes.setdefault("tensordicts", parts)
    stack.__class__ = NonTensorStack
    attributes.pop("_cells", None)


def _linked(cells: Cells, stack: Any) -> Any:
    """Return the cells as a list that writes changes to the stack, as tensordict does."""
    from tensordict.utils import LinkedList  # not in tensordict 0.9

    if cells.ndim == 1:
        return LinkedList(cells.tolist(), td=stack)
    rows = [_late_stack(row, None, None).tolist(as_linked_list=True) for row in cells]
    return LinkedList(rows, td=stack)
