"""The message about an actor's death is one sentence, for every text of Ray's."""

from __future__ import annotations

import pytest

from pycollect.transport.ray.session import end_of

HEADER = """\
The actor died unexpectedly before finishing this task.
\tclass_name: RayWorker
\tactor_id: cddc262447655f084c76c1bf01000000
\tpid: 1394
\tnamespace: 9590d32a-d2f3-4ba5-b77c-49311b4c60b7
\tip: 192.0.2.2
"""
OF_PROCESS = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: "
)
ADVICE = (
    "Some common causes include: (1) the process was killed by the OOM killer due to high memory "
    "usage, (2) ray stop --force was called. Consider enabling resource isolation."
)
PLACE = " (process 1394 on node 192.0.2.2)"
TEXTS = {
    "killed": (
        f"{HEADER}{OF_PROCESS}Worker unexpectedly exits with a connection error code 2. "
        f"End of file. {ADVICE}",
        "it was killed, or it crashed" + PLACE,
    ),
    "exit": (
        f"{HEADER}{OF_PROCESS}Worker exits unexpectedly. Worker exits with an exit code 37.",
        "it ended with exit code 37" + PLACE,
    ),
    "another end": (
        f"{HEADER}{OF_PROCESS}Worker exits by an user request. exit_actor() is called.",
        "Worker exits by an user request" + PLACE,
    ),
    "by Ray": (
        f"{HEADER}The actor is dead because it was killed by `ray.kill`.",
        "The actor is dead because it was killed by `ray.kill`" + PLACE,
    ),
    "lost node": (
        f"{HEADER}The actor died because its node has died. Node Id: cfd8\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too "
        "many heartbeats",
        "the actor's node was terminated unexpectedly: health check failed due to missing too "
        "many heartbeats" + PLACE,
    ),
    "lost node, while it started": (
        f"{HEADER}The actor died because its node has died. Node Id: cfd8\n"
        "\tthe actor's node was terminated unexpectedly: health check failed due to missing too "
        "many heartbeats\n"
        "The actor never ran - it was cancelled before it started running.",
        "the actor's node was terminated unexpectedly: health check failed due to missing too "
        "many heartbeats" + PLACE,
    ),
    "constructor": (
        "The actor died because of an error raised in its creation task, \x1b[36mray::RayWorker."
        "__init__()\x1b[39m (pid=1394, ip=192.0.2.2, actor_id=91e7, repr=<serve.RayWorker>)\n"
        '  File "serve.py", line 12, in __init__\nRuntimeError: no display',
        "RuntimeError: no display" + PLACE,
    ),
    "nothing more": ("", "Exception"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_cause_in_one_sentence(text: str) -> None:
    rays_own, expected = TEXTS[text]
    assert end_of(Exception(rays_own)).summary == expected


class OutOfMemoryError(Exception):
    """An error named like Ray's."""


def test_a_node_without_memory() -> None:
    error = OutOfMemoryError(
        "Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 192.0.2.2, ID: cfd8) where the task was running was 15.1GB / 16GB,"
        " which exceeds the memory usage threshold of 0.95.\n"
        "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io"
    )
    line = end_of(error).summary
    assert "memory" in line
    assert "192.0.2.2" in line
