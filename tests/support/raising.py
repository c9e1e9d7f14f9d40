"""Checks of errors and warnings by class and named arguments, not by their wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAME = r"`?[A-Za-z_][\w.]*(?:\[[^\]]*\])?`?"
_HEAD = re.compile(rf"({_NAME}(?:(?:, | and ){_NAME})*): ")


def named(text: object) -> list[str]:
    """Return the arguments that a message names before its first colon, without indices.

    ``"create_env_fn[0], num_workers: ..."`` gives ``["create_env_fn", "num_workers"]``.
    """
    if isinstance(text, KeyError) and text.args:
        (text, *_) = text.args  # str() of a KeyError quotes its text
    head = _HEAD.match(str(text))
    if head is None:
        return []
    return [re.sub(r"`|\[.*?\]", "", name) for name in re.split(r", | and ", head[1])]


@contextmanager
def refused(
    kind: type[Exception] | tuple[type[Exception], ...], *names: str
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an exception of `kind`; its message must start with these argument names."""
    with pytest.raises(kind) as caught:
        yield caught
    assert named(caught.value) == list(names), f"expected '{', '.join(names)}: ...': {caught.value}"


@contextmanager
def raised(kind: type[Exception], **attributes: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an exception of `kind` with these attributes."""
    with pytest.raises(kind) as caught:
        yield caught
    found = {name: getattr(caught.value, name) for name in attributes}
    assert found == attributes, caught.value


@contextmanager
def warned(*names: str, kind: type[Warning] = UserWarning) -> Iterator[pytest.WarningsRecorder]:
    """Expect a warning of `kind`; its message must start with these argument names."""
    with pytest.warns(kind) as caught:
        yield caught
    heads = [named(w.message) for w in caught if issubclass(w.category, kind)]
    assert list(names) in heads, [str(w.message) for w in caught]
