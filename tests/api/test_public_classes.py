"""The public classes keep their names, signatures and texts, unless the list says otherwise.

Run ``python tests/api/test_public_classes.py`` to rewrite the list.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pycollect

LIST = Path(__file__).with_suffix(".txt")
CLASSES = {
    name: cls
    for name in pycollect.__all__
    if isinstance(cls := getattr(pycollect, name), type) and cls.__name__ == name
}


def shown(function: Callable[..., Any]) -> str:
    """Format a signature, with keyword-only parameters sorted: their order has no meaning."""
    signature = inspect.signature(function)
    parameters = sorted(
        (own for own in signature.parameters.values() if own.name != "_ray_trace_ctx"),
        key=lambda own: (own.kind, own.name if own.kind is own.KEYWORD_ONLY else ""),
    )
    return str(signature.replace(parameters=parameters)).replace("'", "")


def arguments_told(cls: type) -> dict[str, str]:
    """Return the texts of "Args:" by name."""
    section = re.search(r"^Args:\n((?:(?: .*)?\n)*)", f"{inspect.getdoc(cls)}\n", re.M)
    entries = re.findall(
        r"^ {4}([\w, ]+):((?:.*\n)(?: {8}.*\n)*)", section[1] if section else "", re.M
    )
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def listed() -> list[str]:
    lines, told = [], dict[tuple[str, str], list[str]]()
    for name, cls in CLASSES.items():
        lines.append(f"{name}{shown(cls)}")
        for own in dir(cls):
            if own[0] != "_":
                value = inspect.getattr_static(cls, own)
                lines.append(f"{name}.{own}{shown(value) if inspect.isfunction(value) else ''}")
        for argument, text in arguments_told(cls).items():
            told.setdefault((argument, text), []).append(name)
    texts = (f"{name} [{' '.join(where)}]: {text}" for (name, text), where in told.items())
    return [*lines, *sorted(texts)]


def test_nothing_public_has_changed() -> None:
    assert listed() == LIST.read_text().splitlines()


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in listed()))
