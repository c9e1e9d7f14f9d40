"""What our collectors are to those who ask for a class of TorchRL's or of torch's."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

from torch.utils.data import IterableDataset

_related: WeakSet[type] = WeakSet()


class TorchRLKin:
    """Its instances are instances of TorchRL's BaseCollector, of which it is not made.

    TorchRL is not imported for that: once it is there the class is registered with it, at the
    latest when somebody asks. An abstract class that is asked ``isinstance(collector, cls)`` looks
    at ``collector.__class__`` first; that is where it is noticed, whichever was imported first.
    ``issubclass`` looks at nothing of ours: it is right where TorchRL was there when the class, or
    a collector, was made, or once ``isinstance`` was asked.
    """

    # The compiler's own __class__, which super() without arguments needs, has this name, too.
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


IterableDataset.register(TorchRLKin)  # as TorchRL's collectors are: a DataLoader iterates them


def relate() -> None:
    """Register our collectors with TorchRL's base class, if TorchRL's collectors are there."""
    base = getattr(sys.modules.get("torchrl.collectors._base"), "BaseCollector", None)
    if base is not None and base not in _related:
        base.register(TorchRLKin)
        _related.add(base)
