"""Signatures of collectors are generated from the arguments that options and docstrings define."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from pycollect import DistributedDataCollector, MultiSyncDataCollector, RayCollector
from pycollect.arguments import arguments_of
from pycollect.inference.options import InferenceOptions

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_signatures.py"


def test_the_script_was_run() -> None:
    spec = importlib.util.spec_from_file_location("make_signatures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.made() == script.SIGNATURES.read_text()


def test_the_arguments_of_ranks() -> None:
    ranks, actors = (
        {*inspect.signature(cls).parameters} for cls in (DistributedDataCollector, RayCollector)
    )
    assert ranks - actors == {"launcher", "slurm_kwargs", "backend", "tcp_port", "tcp_address"}
    own = {"ray_init_config", "remote_configs", *arguments_of(InferenceOptions)}
    assert actors - ranks == own


def test_a_call_that_does_not_fit_names_the_class() -> None:
    for cls in (MultiSyncDataCollector, RayCollector):
        with pytest.raises(TypeError, match="frames_per_batch") as caught:
            cls([], None)
        assert cls.__name__ in str(caught.value)
