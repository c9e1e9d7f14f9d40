"""Locations of the C++ core, for programs that build against it."""

from __future__ import annotations

from pathlib import Path

import pycollect


def cmake_dir() -> Path:
    """Return the folder of `pycollectConfig.cmake`, the value of CMake's `pycollect_DIR`.

    Raises:
        FileNotFoundError: The package is a checkout that was not installed.
    """
    return _installed("cmake/pycollect")


def include_dir() -> Path:
    """Return the folder that contains `pycollect/pycollect.h`.

    Raises:
        FileNotFoundError: The package is a checkout that was not installed.
    """
    return _installed("pycollect/csrc/include")


def _installed(name: str) -> Path:
    # An editable install has its modules in the checkout and the rest in site-packages.
    for folder in pycollect.__path__:
        found = Path(folder, "share", name)
        if found.is_dir():
            return found
    raise FileNotFoundError(
        f"share/{name}: not found in {list(pycollect.__path__)}; install pycollect with pip, or "
        "use CMake's add_subdirectory with the checkout"
    )
