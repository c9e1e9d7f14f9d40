"""Install this checkout into .venv in editable mode, with the packages that its tests need.

    python3 scripts/set_up.py

This has the same effect as

    python3 -m venv .venv && .venv/bin/pip install -v -c constraints.txt -e '.[test]'

but does nothing if the sources, pins and interpreter are those of the last run and the installed
packages are still there. pip alone would compile the core each time.
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

# Sources of the core, and files that list the packages to install.
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
    """Return a digest of the sources, pins, interpreter and variables that affect the install."""
    found = hashlib.sha256(sys.version.encode())
    found.update(repr([(name, os.environ.get(name)) for name in VARIABLES]).encode())
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                found.update(str(path.relative_to(ROOT)).encode() + b"\0")
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def installed() -> dict[str, str] | None:
    """Return the version of each package in .venv by name, or None if .venv has no Python."""
    try:
        result = subprocess.run([VENV / "bin/python", "-c", LIST], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    versions: dict[str, str] = json.loads(result.stdout)
    return versions


def is_done(wanted: str) -> bool:
    """Return whether the last install had this digest and all its packages are still there."""
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
    """Install if necessary and return pip's exit status. The only argument is --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    wanted = digest()
    if is_done(wanted):
        print("nothing to do: .venv matches the sources, constraints.txt and pyproject.toml")
        return 0
    STAMP.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    result = subprocess.run([VENV / "bin/python", *INSTALL], cwd=ROOT, check=False)
    if result.returncode == 0:
        STAMP.write_text(json.dumps({"digest": wanted, "versions": installed()}))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
