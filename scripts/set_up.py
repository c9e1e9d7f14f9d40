"""Installs this checkout into .venv, editable, with what its tests need, unless that is done.

    python3 scripts/set_up.py

It does what

    python3 -m venv .venv && .venv/bin/pip install -v -c constraints.txt -e '.[test]'

does, and nothing where that was done with the same sources, pins and interpreter, and all that was
installed then is still there. pip alone would compile the core again each time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "pycollect-set-up.json"
INSTALL = ["-m", "pip", "install", "-v", "-c", "constraints.txt", "-e", ".[test]"]

# What the core is compiled from, and what says what else is installed.
SOURCES = ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "cmake/**/*", "csrc/**/*")
VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_GENERATOR")

LIST = """import json
from importlib.metadata import distributions
found = {}
for own in distributions():
    missing = [f for f in own.files or () if f.suffix == ".so" and not f.locate().exists()]
    found[own.metadata["Name"]] = own.version if not missing else "incomplete"
print(json.dumps(found))
"""


def digest() -> str:
    """Of everything that decides what is installed."""
    found = hashlib.sha256(sys.version.encode())
    found.update(repr([(name, os.environ.get(name)) for name in VARIABLES]).encode())
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                found.update(str(path.relative_to(ROOT)).encode() + b"\0")
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def installed() -> dict[str, str] | None:
    """The versions of all that is in .venv, by name; None where no Python is."""
    try:
        result = subprocess.run([VENV / "bin/python", "-c", LIST], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    versions: dict[str, str] = json.loads(result.stdout)
    return versions


def is_done(wanted: str) -> bool:
    """Whether it was done for that digest, and what was installed is still there."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    here = installed()
    return (
        here is not None
        and stamp["digest"] == wanted
        and stamp["versions"].items() <= here.items()
        and "incomplete" not in here.values()
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Do what is to be done; returns pip's exit code. There are no arguments but for help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    wanted = digest()
    if is_done(wanted):
        print("set up already: .venv is as the sources, constraints.txt and pyproject.toml say")
        return 0
    STAMP.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    result = subprocess.run([VENV / "bin/python", *INSTALL], cwd=ROOT, check=False)
    if result.returncode == 0:
        STAMP.write_text(json.dumps({"digest": wanted, "versions": installed()}))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
