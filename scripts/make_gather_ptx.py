"""Compile csrc/gather/gather.cu to the PTX that the core embeds; needs nvcc and ptxas.

    python scripts/make_gather_ptx.py            # writes csrc/gather/gather_ptx.inc
    python scripts/make_gather_ptx.py --check    # fails if that would change the file

nvcc writes the newest PTX version that it knows, which older drivers refuse: nvcc 13 writes 9.0,
and drivers of CUDA 12 know 8.x. It also cannot compile for GPUs older than Turing. The kernel needs
no newer features, so this script lowers the version to 7.0 (CUDA 11.0) and the target to sm_60
(Pascal). To prove that the result is valid, it assembles it for several generations of GPUs. The
ptxas of nvcc 13 knows none before Turing; the one of CUDA 12.9 has assembled the same PTX for
sm_60, 61, 70 and 72.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "csrc" / "gather" / "gather.cu"
TARGET = ROOT / "csrc" / "gather" / "gather_ptx.inc"
LOWERED = {"version": "7.0", "target": "sm_60"}
"""Versions that drivers must know. They also compile this PTX for newer GPUs."""
OLDEST = "75"  # the oldest architecture that nvcc 13 compiles for
ASSEMBLED_FOR = ("75", "80", "86", "89", "90")


def nvcc_release() -> str:
    """Return the release of nvcc, such as 13.0."""
    text = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise SystemExit(f"nvcc --version: expected a release, got {text!r}")
    return match[1]


def compiled() -> str:
    """Return the kernel's PTX with the lowered version and target, without comments."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "gather.ptx"
        command = ["nvcc", "-ptx", "-std=c++20", "-O3", "-fmad=false", f"-arch=compute_{OLDEST}"]
        subprocess.run([*command, "-o", str(ptx), str(SOURCE)], check=True)
        text = re.sub(r"//.*", "", ptx.read_text())
    for directive, value in LOWERED.items():
        line = f".{directive} {value}"
        text, lowered = re.subn(rf"^\.{directive} \S+", line, text, flags=re.M)
        if lowered != 1:
            raise SystemExit(f"expected one .{directive} in the PTX")
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def assemble(ptx: str) -> None:
    """Raise an error if ptxas refuses the PTX."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gather.ptx"
        path.write_text(ptx)
        for arch in ASSEMBLED_FOR:
            command = ["ptxas", f"-arch=sm_{arch}", "-o", str(path.with_suffix(".cubin"))]
            subprocess.run([*command, str(path)], check=True)


def embedded(ptx: str, release: str) -> str:
    """Return the contents of the file that C++ includes."""
    return (
        "// Written by scripts/make_gather_ptx.py from csrc/gather/gather.cu with "
        f"nvcc {release}.\n"
        f'R"ptx(\n{ptx})ptx"\n'
    )


def committed() -> tuple[str, str]:
    """Return the committed PTX, after the release of the nvcc that wrote it."""
    match = re.fullmatch(r'//.* with nvcc (\S+)\.\nR"ptx\(\n(.*)\)ptx"\n', TARGET.read_text(), re.S)
    if match is None:
        raise SystemExit(f"{TARGET} was not written by this script")
    return match[1], match[2]


def main() -> None:
    """Write the PTX, or check the committed one."""
    ptx = compiled()
    assemble(ptx)
    text = embedded(ptx, nvcc_release())
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() != text:
            raise SystemExit(f"{TARGET} does not match {SOURCE}; run scripts/{Path(__file__).name}")
        return
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
