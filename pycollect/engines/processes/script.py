"""The program's script, which multiprocessing imports in spawned processes."""

from __future__ import annotations

import os
from multiprocessing import spawn
from typing import Any

_SCRIPT = "init_main_from_path"
"""What multiprocessing calls its path."""


def preparation(name: str) -> dict[str, Any]:
    """What a spawned process of that name begins with; a script that is no file is left out."""
    prepared = spawn.get_preparation_data(name)
    if _stream(prepared):
        del prepared[_SCRIPT]
    return prepared


def check_spawned(name: str) -> None:
    """Refuse a program whose script new interpreters cannot import.

    Raises:
        ValueError: The script was read from a stream.
    """
    if stream := _stream(spawn.get_preparation_data(name)):
        raise ValueError(
            "start_method: spawned workers import the program's script, but it was read from the "
            f"stream {os.path.basename(stream)}; write the program to a file"
        )


def _stream(prepared: dict[str, Any]) -> str:
    """The name of the stream that the script was read from; empty where it was none."""
    path: str = prepared.get(_SCRIPT, "")
    return "" if not path or os.path.isfile(path) else path
