"""Facts that results depend on: the machine, its GPU, their link, and versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "pycollect-rl",
    "torch",
    "tensordict",
    "torchrl",
    "ray",
    "gymnasium",
    "numpy",
    "pybind11",
)
_CARD = {
    "driver": "driver_version",
    "bus": "pci.bus_id",
    "link generation": "pcie.link.gen.current",
    "link generation at most": "pcie.link.gen.max",
    "link width": "pcie.link.width.current",
    "link width at most": "pcie.link.width.max",
}
"""Facts about a GPU, and their names in nvidia-smi."""
_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def machine() -> dict[str, Any]:
    """Return the facts by name; None for unknown ones.

    An idle GPU may report a slower link than it has, so call this after using it.
    """
    card = _card()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        **card,
        "NUMA nodes": len(list(_NODES.glob("node[0-9]*"))) or None,
        "NUMA node of the GPU": _node_of(card["bus"]),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "huge pages": _text(_PAGES / "enabled"),
        "huge pages of shared memory": _text(_PAGES / "shmem_enabled"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": _first_line([os.environ.get("CXX", "c++"), "--version"]),
        "load average": os.getloadavg()[0],
        **{name: _version(name) for name in _PACKAGES},
    }


def headline(facts: dict[str, Any]) -> str:
    """Return the most important facts in one line."""
    if facts["gpu"] is None:
        return f"no GPU, {facts['cores']} cores"
    return (
        f"{facts['gpu']}, driver {facts['driver']}, PCIe {facts['link generation']} x "
        f"{facts['link width']}, NUMA node {facts['NUMA node of the GPU']} of "
        f"{facts['NUMA nodes']}, {facts['cores']} cores, huge pages of shared memory: "
        f"{facts['huge pages of shared memory']}"
    )


def _card() -> dict[str, str | None]:
    """Return the facts of the first GPU that nvidia-smi lists."""
    query = f"--query-gpu={','.join(_CARD.values())}"
    line = _first_line(["nvidia-smi", query, "--format=csv,noheader", "--id=0"])
    values = [value.strip() for value in (line or "").split(",")]
    if len(values) != len(_CARD):
        return dict.fromkeys(_CARD)
    return dict(zip(_CARD, values, strict=True))


def _node_of(bus: str | None) -> int | None:
    """Return the NUMA node of a PCI device; Linux reports -1 if it has none."""
    if bus is None:
        return None
    domain, _, rest = bus.lower().partition(":")
    found = _text(_PCI / f"{domain[-4:]}:{rest}" / "numa_node")
    return None if found is None else int(found)


def _first_line(command: list[str]) -> str | None:
    """Return the first line of a program's output, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    lines = result.stdout.splitlines()
    return lines[0] if result.returncode == 0 and lines else None


def _field(path: str, name: str) -> str | None:
    """Return the first value of that name in a file of ``name : value`` lines."""
    lines = (_text(Path(path)) or "").splitlines()
    values = (line.split(":", 1)[1].strip() for line in lines if line.startswith(name))
    return next(values, None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
