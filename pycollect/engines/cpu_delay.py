"""How long a process was ready to run and had no CPU: a busy machine's share of its time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pycollect.engines.descendants import children_of

_NANOSECONDS = 1e9


def seconds_without_cpu(pid: int) -> float:
    """Seconds for which the main thread of that process, or of one below it, waited for a CPU.

    Of several processes the one that waited longest: whoever started them waits for that one. 0.0
    where the system does not tell, or there is no such process. Does not wait.
    """
    return max(_waited(pid), *(seconds_without_cpu(child) for child in children_of(pid)), 0.0)


def _waited(pid: int) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / _NANOSECONDS
    return 0.0
