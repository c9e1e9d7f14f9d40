"""What is to be done once an object is forgotten, whichever thread collects it as garbage.

It may be one of Ray's own. What waits for Ray there would wait for itself, and all others for it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

_CALLS: SimpleQueue[Callable[[], Any]] = SimpleQueue()
_IN_ORDER = threading.Lock()


def when_forgotten(
    owner: Any, function: Callable[..., Any], *arguments: Any
) -> weakref.finalize[Any, Any]:
    """Call a function once nobody has the owner any more; not at exit, where Ray ends by itself.

    Returns:
        What can be detached, by who calls it before.
    """
    final = weakref.finalize(owner, _call, os.getpid(), partial(function, *arguments))
    final.atexit = False
    return final


def _call(process: int, function: Callable[[], Any]) -> None:
    if os.getpid() != process:  # a fork, which has no part in what its parent started
        return
    if threading.get_ident() == threading.main_thread().ident:
        function()
        return
    _CALLS.put(function)
    threading.Thread(target=_next_call, name="pycollect-forgotten", daemon=True).start()


def _next_call() -> None:
    with _IN_ORDER:  # actors end before Ray does
        _CALLS.get()()
