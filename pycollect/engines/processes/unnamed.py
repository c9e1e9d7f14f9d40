"""A file without a name: in memory, or on disk if the system forbids that."""

from __future__ import annotations

import errno
import os
import tempfile

_FORBIDDEN = (errno.ENOSYS, errno.EPERM, errno.EACCES)


def unnamed_file(name: str) -> int:
    """Open a new file that ends with its last descriptor; return the descriptor.

    Args:
        name: Name under ``/proc/<pid>/fd``, for debugging.

    Raises:
        OSError: No descriptor or no memory is free.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
