"""Who submits jobs to a cluster: executors of submitit's, and what they may be told."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pycollect.errors import warn_user

DEFAULT_SLURM_CONF: dict[str, Any] = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
"""Of the jobs that collect."""

DEBUG = "debug"
"""submitit's cluster that runs a job where, and only when, it is asked for its result."""

DEFAULT_FOLDER = "log_test"
"""Where jobs and the driver find each other's files, which both must see."""


def import_submitit() -> Any:
    """Import submitit; raise ImportError with the install command if it is missing."""
    try:
        import submitit
    except ImportError as error:
        raise ImportError(
            "launcher: 'submitit' needs the package submitit; run `pip install submitit`, or pass "
            "launcher='mp' to start processes on this machine"
        ) from error
    return submitit


def check_job_parameters(name: str, value: Any) -> Mapping[str, Any]:
    """Check the parameters of jobs, as far as possible without submitit.

    Raises:
        TypeError: The value is not a dict with string keys, or a parameter has a wrong type.
        ValueError: A job would have several nodes or tasks.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict, got {value!r}")
    folder = value.get("folder", DEFAULT_FOLDER)
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{name}: expected a path for 'folder', got {folder!r}")
    for key, own in value.items():
        if not isinstance(key, str):
            raise TypeError(f"{name}: expected strings as parameter names, got {key!r}")
        if key.endswith("setup") and (isinstance(own, str) or not isinstance(own, Sequence)):
            raise TypeError(f"{name}: expected a list of commands for {key!r}, got {own!r}")
        if key.endswith(("nodes", "tasks_per_node")) and own not in (None, 1):
            raise ValueError(
                f"{name}: expected 1 for {key!r}, because each job is one rank, got {own!r}"
            )
    return value


def executor_of(name: str, parameters: Mapping[str, Any] | None) -> Any:
    """The executor that submits jobs.

    Args:
        name: of the argument.
        parameters: the executor's, checked; None: DEFAULT_SLURM_CONF. Two of them are ours:
            "folder", of its files, and "cluster", None for what is found here, "slurm", "local" or
        "debug".

    Raises:
        ImportError: submitit is not installed.
        ValueError: a parameter that it does not know, or a cluster that cannot be used.
    """
    submitit = import_submitit()
    own = dict(DEFAULT_SLURM_CONF if parameters is None else parameters)
    folder = Path(own.pop("folder", DEFAULT_FOLDER)).absolute()
    cluster = own.pop("cluster", None)
    try:
        if cluster != DEBUG:  # which writes no file
            folder = private_folder(folder)
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**own)
    except (ValueError, NameError, TypeError, AssertionError, RuntimeError, OSError) as error:
        raise ValueError(f"{name}: {error}; got {dict(parameters or own)}") from error
    return executor


def private_folder(folder: Path) -> Path:
    """Create a subfolder that only this user can open.

    Job files hold the secret of a run, and run as code when they are unpickled. Submitit creates
    them with modes that follow the umask. Submitit's placeholders, such as "%j", stay the last
    parts of the path.
    """
    fixed = import_submitit().core.utils.JobPaths.get_first_id_independent_folder(folder)
    for part in reversed([fixed, *fixed.parents]):
        part.mkdir(mode=0o700, exist_ok=True)
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            warn_user(
                f"folder: every user can replace job files in {str(part)!r}, and these files run "
                "as code; choose a folder that only you can write to"
            )
    return Path(tempfile.mkdtemp(prefix="pycollect-", dir=fixed)) / folder.relative_to(fixed)


def is_of_this_machine(executor: Any) -> bool:
    """Whether its jobs are processes of this machine."""
    return executor.cluster in ("local", DEBUG)
