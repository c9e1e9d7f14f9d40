"""A fixture for errors in arguments, which must come before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from pycollect.transport.processes.engine import ProcessEngine


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a process starts."""

    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ProcessEngine, "start", start)
