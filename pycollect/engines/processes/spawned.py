"""Workers that multiprocessing spawns: new processes, children of this one."""

from __future__ import annotations

import os
from typing import Any

from pycollect.engines.processes.child import kill_group


class SpawnedChild:
    """Watches a process that was spawned, and ends it.

    Args:
        native: multiprocessing's, started.
    """

    def __init__(self, native: Any) -> None:
        self.native = native

    @property
    def is_over(self) -> bool:
        """Whether it is gone. Does not wait."""
        try:
            return self._end() is not None
        except ChildProcessError:  # somebody else has taken note of its end
            return True

    def exit_code(self) -> int | None:
        """How it ended."""
        try:
            end = self._end()
        except ChildProcessError:  # multiprocessing takes note of all ends when it starts a process
            code: int | None = self.native.exitcode
            return code
        if end is None:
            return None
        status: int = end.si_status
        return status if end.si_code == os.CLD_EXITED else -status

    def kill(self) -> None:
        """End the process and its group, and take note of its end."""
        try:
            self._end()
            kill_group(self.native.pid, number_is_its_own=True)
        except ChildProcessError:
            kill_group(self.native.pid, number_is_its_own=False)
        self.native.join()
        self.native.close()

    def _end(self) -> Any:
        """How it ended, None if it has not; nobody takes note of it by that.

        Raises:
            ChildProcessError: somebody has.
        """
        return os.waitid(os.P_PID, self.native.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
