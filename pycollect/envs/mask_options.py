"""The options with which rows of a vector env are reset, and others go on."""

from __future__ import annotations

from typing import Any

from .base import BoolArray

_MASK = "reset_mask"


class MaskOptions(dict[str, Any]):
    """``{"reset_mask": mask}``, whose mask is told to all who ask for it by name.

    Gymnasium's vector envs take the mask out of the dict, so that their sub-environments do not
    see it. Wrappers around them look for it afterwards, and where it is gone, they reset what they
    keep of all rows: RecordEpisodeStatistics of 1.4.0 forgets the returns of those that go on. So
    it is no item any more once it was taken out, but still found by its name.
    """

    def __init__(self, reset_mask: BoolArray) -> None:
        """Make them; Gymnasium's wrappers for other libraries' arrays do so by name, too."""
        super().__init__({_MASK: reset_mask})
        self._mask = reset_mask

    def pop(self, key: str, *default: Any) -> Any:
        """See `dict.pop`."""
        if key == _MASK:
            super().pop(key, None)
            return self._mask
        return super().pop(key, *default)

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict.get`."""
        return self._mask if key == _MASK else super().get(key, default)

    def __missing__(self, key: str) -> Any:
        if key == _MASK:
            return self._mask
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key == _MASK or super().__contains__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sub-environments in other processes get its items."""
        return dict, (dict(self),)
