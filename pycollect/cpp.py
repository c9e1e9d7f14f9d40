"""Where the C++ core lies for who builds against it: its CMake package, and its headers."""

from __future__ import annotations

from pathlib import Path

import pycollect


def cmake_dir() -> Path:
    """The folder of `pycollectConfig.cmake`, for CMake's `pycollect_DIR`.

    Raises:
        FileNotFoundError: this is a checkout that was not installed.
    """
    return _installed("cmake/pycollect")


def include_dir() -> Path:
    """The folder in which `pycollect/pycollect.h` lies.

    Raises:
        FileNotFoundError: this is a checkout that was not installed.
    """
    return _installed("pycollect/csrc/include")


def _installed(name: str) -> Path:
    # An editable install has its modules in the checkout and the rest in site-packages.
    for folder in pycollect.__path__:
        found = Path(folder, "share", name)
        if found.is_dir():
            return found
    raise FileNotFoundError(
        f"share/{name}: expected pycollect to be installed (pip install), got the folders "
        f"{list(pycollect.__path__)}; CMake's add_subdirectory takes a checkout as it is"
    )
