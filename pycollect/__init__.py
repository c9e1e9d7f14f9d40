"""A compiled-core data collector for reinforcement learning.

``__init__.pyi`` lists the public names, for type checkers and for the code below. A name is
imported on first use: the core works without torch, splitting without Gymnasium, and ``import
pycollect`` is fast.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from pycollect.compiler_later import import_compiler_later

import_compiler_later()


def _homes() -> dict[str, tuple[str | None, str]]:
    """Return the module of each name, None for a module itself, and the name in it."""
    homes: dict[str, tuple[str | None, str]] = {}
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            homes.update({alias.name: (node.module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            homes.update({ast.unparse(new): homes[node.value.id] for new in node.targets})
    return homes


filter_warnings_subprocess = True
"""Whether worker processes hide warnings of other packages during their import."""

_HOMES = _homes()
__all__ = sorted(name for name, (module, _) in _HOMES.items() if module is not None)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(f"{__name__}._core").__version__
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        if module is None:
            return import_module(f"{__name__}.{attribute}")
        value = getattr(import_module(f"{__name__}.{module}"), attribute)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise ImportError(f"{name} needs Gymnasium: pip install gymnasium") from error
    except AttributeError as error:  # `from pycollect import` would report a missing name
        raise ImportError(f"{name} cannot be imported: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", "filter_warnings_subprocess", *_HOMES]
