"""tensordict without torch's compiler, which costs each process a CPU-second and 70 MB.

While tensordict is imported, it marks some functions for the compiler, and to do so torch imports
all of that (``torch._dynamo``, and with it sympy and torch.distributed). Most workers never compile
anything. So the marks are kept, and made as soon as somebody imports the compiler.
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
"""Of ``torch.compiler``: what tensordict calls as it is imported; it returns what it is given."""

Mark = Callable[[Any], Any]


def import_compiler_later() -> None:
    """From now on, to import tensordict does not import the compiler; where it is not there yet."""
    there = any(isinstance(finder, _Hook) for finder in sys.meta_path)
    if "tensordict" not in sys.modules and not there:
        sys.meta_path.insert(0, _Hook("tensordict", _marks_kept))


@contextmanager
def _marks_kept() -> Iterator[None]:
    """Within, what is marked is noted."""
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
    except BaseException:  # who tries again marks again
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
    """Afterwards, what was noted is marked."""
    yield
    for mark, function in kept:
        mark(function)


class _Hook:
    """Has a module imported within a context, until that has succeeded: for ``sys.meta_path``.

    Args:
        name: of the module.
        around: makes the context.
    """

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name, self._around = name, around

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of that module, what the finders behind this one find."""
        finders = [*sys.meta_path]  # at once: other threads may import
        if name != self._name or self not in finders:
            return None
        others = finders[finders.index(self) + 1 :]
        asked = (own for own in others if hasattr(own, "find_spec"))
        found = (finder.find_spec(name, path, target) for finder in asked)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            loader: Any = spec.loader  # of this module alone
            loader.exec_module = partial(self._run, loader.exec_module)
        return spec

    def _run(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        with self._around():
            run(module)
        self.leave()

    def leave(self) -> None:
        """Have it imported as others are. Idempotent."""
        with suppress(ValueError):
            sys.meta_path.remove(self)
