"""Paths of the C++ core's CMake package and headers, for projects that build against it."""

from __future__ import annotations

from pathlib import Path

import pycollect


def cmake_dir() -> Path:
    """Return the folder of `pycollectConfig.cmake`, for CMake's `pycollect_DIR`.

    Raises:
        FileNotFoundError: If pycollect is a checkout that was not installed.
    """
    return _installed("cmake/pycollect")


def include_dir() -> Path:
    """Return the folder that contains `pycollect/pycollect.h`.

    Raises:
        FileNotFoundError: If pycollect is a checkout that was not installed.
    """
    return _installed("pycollect/csrc/include")


def _installed(name: str) -> Path:
    # In an editable install, only the modules are in the checkout; this folder is in site-packages.
    for folder in pycollect.__path__:
        found = Path(folder, "share", name)
        if found.is_dir():
            return found
    raise FileNotFoundError(
        f"pycollect: it is not installed, because {list(pycollect.__path__)} have no share/{name}; "
        "run `pip install .`, or pass the checkout to CMake's add_subdirectory"
    )
