"""Import tensordict without torch's compiler, which costs each process a CPU-second and 70 MB.

While tensordict is imported, it marks some functions for the compiler. For each mark, torch imports
the whole compiler (``torch._dynamo``, and with it sympy and torch.distributed). Most workers never
compile anything, so the marks are kept and made when the compiler is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")
"""Functions of ``torch.compiler`` that tensordict calls during its import."""

Mark = Callable[[Any], Any]


def import_compiler_later() -> None:
    """Import tensordict without the compiler from now on, unless tensordict is imported already."""
    is_hooked = any(isinstance(finder, _Hook) for finder in sys.meta_path)
    if "tensordict" not in sys.modules and not is_hooked:
        sys.meta_path.insert(0, _Hook("tensordict", _marks_kept))


@contextmanager
def _marks_kept() -> Iterator[None]:
    """Keep the marks that are made within the block."""
    from torch import compiler

    if _COMPILER in sys.modules:
        yield
        return
    kept: list[tuple[Mark, Any]] = []
    marks = {name: getattr(compiler, name) for name in _MARKS if hasattr(compiler, name)}
    hook = _Hook(_COMPILER, partial(_marks_made, kept))
    sys.meta_path.insert(0, hook)
    for name, mark in marks.items():
        setattr(compiler, name, partial(_keep, kept, mark))
    try:
        yield
    except BaseException:  # a second import makes the marks again
        hook.leave()
        raise
    finally:
        for name, mark in marks.items():
            setattr(compiler, name, mark)


def _keep(kept: list[tuple[Mark, Any]], mark: Mark, function: Any) -> Any:
    if _COMPILER in sys.modules:
        return mark(function)
    kept.append((mark, function))
    return function


@contextmanager
def _marks_made(kept: Sequence[tuple[Mark, Any]]) -> Iterator[None]:
    """Make the kept marks after the block."""
    yield
    for mark, function in kept:
        mark(function)


class _Hook:
    """An entry of ``sys.meta_path`` that runs the import of module `name` within a context.

    It removes itself after a successful import.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name, self._around = name, around

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module that the later finders find."""
        finders = [*sys.meta_path]  # at once: other threads may import
        if name != self._name or self not in finders:
            return None
        others = finders[finders.index(self) + 1 :]
        finders = [own for own in others if hasattr(own, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            loader: Any = spec.loader  # it loads only this module
            loader.exec_module = partial(self._run, loader.exec_module)
        return spec

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        with self._around():
            run(module)
        self.leave()

    def leave(self) -> None:
        """Remove the entry from ``sys.meta_path``. Idempotent."""
        with suppress(ValueError):
            sys.meta_path.remove(self)
