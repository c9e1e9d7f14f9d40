"""The program's script, which worker processes import as multiprocessing has it."""

from __future__ import annotations

import os
from multiprocessing import spawn
from typing import Any


def preparation(name: str) -> dict[str, Any]:
    """What a spawned process of that name begins with. A script that is no file is left out."""
    prepared = spawn.get_preparation_data(name)
    if not os.path.isfile(prepared.get("init_main_from_path", __file__)):
        del prepared["init_main_from_path"]
    return prepared


def check_spawned(name: str) -> None:
    """Refuse a program that new interpreters cannot import, as multiprocessing has them do.

    Raises:
        ValueError: it was read from a stream.
    """
    path = spawn.get_preparation_data(name).get("init_main_from_path", __file__)
    if not os.path.isfile(path):
        raise ValueError(
            "start_method: workers that are spawned import the program's script; expected a file, "
            f"got {os.path.basename(path)}, a stream; write the program to a file"
        )
