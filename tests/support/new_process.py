"""Code that needs a process of its own, run in a fork of multiprocessing's fork server.

The fork server has imported torch, Gymnasium and TorchRL, on which a new interpreter would spend
seconds, but nothing of pycollect.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection

SECONDS = 300.0
FORKING = multiprocessing.get_context("forkserver")


def run_code(code: str, **environment: str) -> str:
    """Run code with these environment variables in addition, and return its output.

    Raises:
        AssertionError: The code raised, the process crashed, or it took too long.
    """
    ours, theirs = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=_run, args=(theirs, code, environment))
    process.start()
    theirs.close()
    error, output = "it crashed or took too long", ""
    with contextlib.suppress(EOFError):
        if ours.poll(SECONDS):
            error, output = ours.recv()
        else:
            process.kill()
    process.join()
    assert not error, error
    assert process.exitcode == 0
    return output.strip()


def _run(pipe: Connection, code: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    output, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output):
            exec(code, {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    pipe.send((error, output.getvalue()))
