"""TorchRL's public names, and the base classes of collectors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrl.collectors")

import torchrl.collectors
from reads_support import SEVERAL, made, pendulum

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")

KIN = """
import sys
import threading
import time
{first}
import pycollect
from pycollect import Collector, MultiSyncCollector, RayCollector
{second}
import gymnasium
collector = Collector(lambda: gymnasium.make("Pendulum-v1"), None, frames_per_batch=2)
assert "torchrl" not in sys.modules or {early}
import torchrl.collectors
from torchrl.collectors import BaseCollector
assert isinstance(collector, BaseCollector)
assert issubclass(Collector, BaseCollector) and issubclass(MultiSyncCollector, BaseCollector)
assert not isinstance(collector, torchrl.collectors.Collector)
assert not isinstance(object(), BaseCollector)
assert type(collector) is collector.__class__ is Collector
import torch
assert isinstance(collector, torch.utils.data.IterableDataset)
"""


ALSO = [pytest.param(when, marks=pytest.mark.slow) for when in ("before", "between")]


@pytest.mark.parametrize("when", ["after", *ALSO])
def test_collectors_are_instances_of_torchrls_classes(when: str) -> None:
    """The order of imports does not matter, and TorchRL is not imported for the check."""
    theirs = "import torchrl.collectors"
    first, second = theirs if when == "before" else "", theirs if when == "between" else ""
    program = KIN.format(first=first, second=second, early=when != "after")
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


DOCS = Path(__file__).parents[2] / "docs" / "coming-from-torchrl.md"


@pytest.mark.parametrize("name", ["Collector", *SEVERAL])
def test_every_public_name_exists_or_is_in_the_table(name: str) -> None:
    table = DOCS.read_text()
    with made(torchrl.collectors, name, pendulum if name == "Collector" else [pendulum]) as theirs:
        names = {own for own in dir(theirs) if not own.startswith("_")}
    with made(pycollect, name, pendulum if name == "Collector" else [pendulum]) as ours:
        missing = {own for own in names if not hasattr(ours, own)}
    assert {own for own in missing if f"`{own}`" not in table} == set()


def test_every_public_name_of_raycollector_exists_or_is_in_the_table() -> None:
    """Check names of the class, because an instance needs a cluster."""
    pytest.importorskip("ray")
    from torchrl.collectors.distributed import RayCollector

    table = DOCS.read_text()
    names = {own for own in dir(RayCollector) if not own.startswith("_")}
    missing = {own for own in names if not hasattr(pycollect.RayCollector, own)}
    assert {own for own in missing if f"`{own}`" not in table} == set()
