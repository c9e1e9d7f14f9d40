"""Warnings while workers import installed packages, and other warnings in workers."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from collect_support import MULTI_ASYNC, NEST_STACK, STACK, Way, collecting, marked
from envs_for_tests import CountingEnv

import pycollect
from pycollect.errors import filter_import_warnings

THEIRS = """
import warnings
warnings.warn("old package", stacklevel={level})
def use():
    warnings.warn("old function")
"""


class ImportingEnv(CountingEnv):
    """An environment that imports an installed and a user's package, and keeps their output."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.said = said_by_imports(folder)


def said_by_imports(folder: Path) -> str:
    """Return the warnings shown for an installed package and for one of the user's own."""
    before, sys.stderr = sys.stderr, io.StringIO()
    sys.path[:0] = [str(folder), str(folder / "site-packages")]
    try:
        importlib.import_module("warning_own")
        importlib.import_module("warning_installed").use()
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before
        del sys.path[:2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site-packages").mkdir()
    installed = tmp_path / "site-packages" / "warning_installed.py"
    installed.write_text(THEIRS.format(level=1))
    own = "import warning_installed, warnings\nwarnings.warn('own module')\n"
    (tmp_path / "warning_own.py").write_text(own)
    return tmp_path


@pytest.fixture(params=[True, False])
def is_filtered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(pycollect, "filter_warnings_subprocess", request.param)
    return bool(request.param)


@pytest.mark.parametrize("way", marked(MULTI_ASYNC[0], STACK, NEST_STACK))
def test_workers_drop_import_warnings_by_default(way: Way, is_filtered: bool, folder: Path) -> None:
    env = partial(ImportingEnv, folder)
    entry = (lambda w: [env, env]) if way is NEST_STACK else (lambda w: env)
    with collecting(way, entry, frames=5) as collector:
        said = collector.getattr_env("said")
    text = said if isinstance(said, str) else repr(said)
    assert ("old package" in text) != is_filtered
    assert "own module" in text
    assert "old function" in text


def shown(*arguments: Any) -> None:
    sys.stderr.write(warnings.formatwarning(*arguments[:4]))


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Show warnings instead of recording them for pytest, and forget the imported modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = shown
        yield
    for name in ("warning_own", "warning_installed"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("level", [1, 2])
def test_the_module_that_warns_decides_not_the_reported_one(level: int, folder: Path) -> None:
    (folder / "site-packages" / "warning_installed.py").write_text(THEIRS.format(level=level))
    with as_in_a_worker():
        filter_import_warnings(True)
        said = said_by_imports(folder)
    assert "old package" not in said
    assert "own module" in said


def test_warnings_configured_as_errors_are_raised(folder: Path) -> None:
    with as_in_a_worker():
        filter_import_warnings(True)
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="old package"):
            said_by_imports(folder)


def test_the_filter_can_be_changed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pycollect, "filter_warnings_subprocess", True)
    with as_in_a_worker():
        before = warnings.showwarning
        filter_import_warnings(True)
        filter_import_warnings(True)
        filter_import_warnings(False)
        assert warnings.showwarning is before
        assert not pycollect.filter_warnings_subprocess
        assert "old package" in said_by_imports(folder)
