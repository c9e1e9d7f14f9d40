"""Settable attributes of a collector, and errors for read-only ones."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrl.collectors")

from reads_support import BOTH, made, pendulum

import pycollect

pytestmark = pytest.mark.filterwarnings("ignore")


def test_hooks_can_be_set_and_removed() -> None:
    for home in BOTH:
        called: list[str] = []
        with made(home, "Collector", total_frames=36) as collector:
            stream = iter(collector)
            collector.pre_collect_hook = lambda called=called: called.append("pre")
            collector.post_collect_hook = lambda td, called=called: called.append(len(td))
            next(stream)
            assert called == ["pre", 12]
            collector.pre_collect_hook = None
            next(stream)
            assert called == ["pre", 12, 12]
            collector.set_post_collect_hook(None)
            next(stream)
            assert called == ["pre", 12, 12]


def test_a_postproc_is_set() -> None:
    for home in BOTH:
        with made(home, "Collector") as collector:
            collector.postproc = lambda td: td[:5]
            assert next(iter(collector)).shape == (5,)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("post_collect_hok", print, AttributeError),
        ("post_colect_hook", print, AttributeError),
        ("postprocess", print, AttributeError),
        ("anything", 1, AttributeError),
        ("total_frames", 1, AttributeError),
        ("post_collect_hook", 3, TypeError),
        ("pre_collect_hook", "f", TypeError),
        ("postproc", 3, TypeError),
    ],
)
def test_read_only_attributes_raise(name: str, value: Any, error: type[Exception]) -> None:
    with made(pycollect, "Collector") as collector, pytest.raises(error, match=name):
        setattr(collector, name, value)


def test_a_class_of_the_users_sets_its_own() -> None:
    class Mine(pycollect.Collector):
        postproc_count: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.before = 1
            super().__init__(*args, **kwargs)
            self.after, self._hidden, self.postproc_count = 2, 3, 4

    collector = Mine(pendulum, None, frames_per_batch=2, total_frames=2)
    assert (collector.before, collector.after, collector.postproc_count) == (1, 2, 4)
    with pytest.raises(AttributeError, match="'post_collect_hook'"):
        collector.post_collect_hoook = print
    collector.shutdown()


def test_an_empty_name_is_refused() -> None:
    with made(pycollect, "Collector") as collector, pytest.raises(AttributeError, match="''"):
        setattr(collector, "", 1)


@pytest.mark.parametrize("home", BOTH)
def test_the_class_of_a_collector_can_be_set(home: Any) -> None:
    class Mine(home.Collector):  # type: ignore[misc] # a base that is a variable
        pass

    with made(home, "Collector") as collector:
        collector.__class__ = Mine
        assert type(collector) is collector.__class__ is Mine
        assert next(iter(collector)).numel()
