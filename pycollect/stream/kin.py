"""Make collectors instances of TorchRL's and torch's base classes."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

from torch.utils.data import IterableDataset

_related: WeakSet[type] = WeakSet()


class TorchRLKin:
    """Instances count as instances of TorchRL's BaseCollector, without inheriting from it.

    TorchRL is not imported for that: when it is present, the class is registered with it. An
    abstract class that is asked ``isinstance(collector, cls)`` reads ``collector.__class__`` first,
    and this property does the registration, whichever package was imported first. ``issubclass``
    reads nothing of the collector. It is correct if TorchRL was imported before a collector class
    or a collector was made, or after an ``isinstance`` call.
    """

    # super() without arguments needs the compiler's __class__, which the property below replaces.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(TorchRLKin, cls).__init_subclass__(**kwargs)  # noqa: UP008
        relate()

    def __init__(self) -> None:
        relate()

    def _noticed(self) -> type:
        relate()
        return type(self)

    def _become(self, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    __class__ = property(_noticed, _become)


IterableDataset.register(TorchRLKin)  # like TorchRL's collectors, so that a DataLoader works


def relate() -> None:
    """Register the collectors with TorchRL's base class, if it is imported."""
    base = getattr(sys.modules.get("torchrl.collectors._base"), "BaseCollector", None)
    if base is not None and base not in _related:
        base.register(TorchRLKin)
        _related.add(base)
