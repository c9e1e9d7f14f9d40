"""Arguments of TorchRL's constructors, and the collector class that `Collector` chooses."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from raising import refused

import pycollect

pytest.importorskip("torchrl")

import torchrl.collectors as torchrl_collectors
import torchrl.testing.mocking_classes as mock
from torchrl import service_backend
from torchrl.collectors import Collector, MultiSyncCollector

ENV = mock.CountingEnv


class Made(Exception):
    """A collector of another class would have been made."""


# Import paths and kinds of the classes that each library's `Collector` may create.
THEIRS = {
    ("torchrl.collectors._multi_base", "MultiCollector"): "process",
    ("torchrl.collectors.distributed.ray", "RayCollector"): "ray",
    ("torchrl.collectors.distributed.rpc", "RPCCollector"): "rpc",
    ("torchrl.collectors.distributed.generic", "DistributedCollector"): "distributed",
}
OURS = {
    ("pycollect", "MultiSyncDataCollector"): "process, sync",
    ("pycollect", "MultiaSyncDataCollector"): "process, async",
    ("pycollect", "RayCollector"): "ray",
    ("pycollect", "RPCDataCollector"): "rpc",
    ("pycollect", "DistributedDataCollector"): "distributed",
}


# Arguments that Hydra and configs spell out, all of them defaults.
SPELT_OUT: dict[str, Any] = {
    "policy": None,
    "compact_obs": False,
    "track_traj_ids": True,
    "set_truncated": False,
    "max_frames_per_traj": None,
    "init_random_frames": None,
    "split_trajs": None,
}


def stand_in(monkeypatch: pytest.MonkeyPatch, kind: str, module: str, name: str) -> None:
    """Replace a class by one that raises `Made` with its arguments."""
    original = getattr(importlib.import_module(module), name)

    class StandIn:
        __init__ = original.__init__
        __signature__ = inspect.signature(original)

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            sync = kwargs.pop("sync", None)
            told = kind if sync is None else f"{kind}, {'sync' if sync else 'async'}"
            kwargs.update(zip(("create_env_fn", "policy"), args, strict=False))
            entries = kwargs.pop("create_env_fn", None)
            number = kwargs.pop("num_collectors", None)
            if not isinstance(entries, list):
                entries = [entries] * (number or 0)
            raise Made(told, len(entries), set(kwargs) - set(SPELT_OUT))

    monkeypatch.setattr(importlib.import_module(module), name, StandIn)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    for (module, name), kind in {**THEIRS, **OURS}.items():
        stand_in(monkeypatch, kind, module, name)


def made(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return "direct" with a batch's shape, another class, or an error's type."""
    try:
        collector = cls(*args, **kwargs)
    except Made as made:
        return made.args
    except (TypeError, ValueError) as error:
        return type(error)
    try:
        return ("direct", isinstance(collector, cls), collector.next().shape)
    finally:
        collector.shutdown()


FRAMES = {"frames_per_batch": 4, "total_frames": 4}
CHOICES: list[dict[str, Any]] = [
    {},
    {"num_collectors": 1},
    {"num_collectors": 3},
    {"num_collectors": 3, "sync": True},
    {"num_collectors": 3, "sync": False},
    {"num_collectors": 0},
    {"num_collectors": -2},
    {"num_collectors": True},
    {"num_collectors": 2.5},
    {"sync": True},
    {"sync": False},
    {"backend": "direct"},
    {"backend": "direct", "num_collectors": 1},
    {"backend": "direct", "num_collectors": 2},
    {"backend": "direct", "sync": True},
    {"backend": "process"},
    {"backend": "process", "sync": True},
    {"backend": "process", "sync": "yes"},
    {"backend": "multiprocessing", "num_collectors": 2},
    {"backend": "ray"},
    {"backend": "ray", "num_collectors": 2, "sync": True},
    {"backend": "ray", "num_collectors": 2},
    {"backend": "rpc", "num_collectors": 2, "sync": True},
    {"backend": "rpc", "num_collectors": 2, "backend_options": {"launcher": "mp"}},
    {"backend": "rpc", "num_collectors": 2, "backend_options": {"visible_devices": [0, 0]}},
    {"backend": "distributed", "num_collectors": 2, "launcher": "mp"},
    {"backend": "distributed", "num_collectors": 2, "backend_options": {"backend": "gloo"}},
    {"backend": "submitit", "num_collectors": 2},
    {"backend": "submitit", "num_collectors": 2, "backend_options": {"launcher": "submitit"}},
    {"backend": "submitit", "num_collectors": 2, "backend_options": {"launcher": "mp"}},
    {"backend": "threading"},
    {"backend": "thread"},
    {"backend": "monarch"},
    {"backend": "no such"},
    {"backend_options": {}},
    {"backend_options": {"prefetch": 1}},
    {"num_collectors": 2, "backend_options": {"num_threads": 2}},
    {"num_collectors": 2, "backend_options": {"update_at_each_batch": True}},
    {"num_collectors": 2, "backend_options": {"frames_per_batch": 2}},
    {"num_collectors": 2, "backend_options": {"policy": None}},
    {"num_collectors": 2, "backend_options": {"sync": True}},
    {"num_collectors": 2, "backend_options": {"num_workers": 2}},
    {"backend": "ray", "num_collectors": 2, "backend_options": {"num_collectors": 2}},
    {"backend": "ray", "backend_options": {"remote_configs": {"num_cpus": 1}}},
    {"create_env_fn": [ENV]},
    {"create_env_fn": [ENV], "backend": "process"},
    {"create_env_fn": (ENV, ENV), "backend": "process"},
    {"create_env_fn": [ENV, ENV], "num_collectors": 2, "sync": True},
    {"create_env_fn": [ENV, ENV], "num_collectors": 3},
    {"create_env_fn": [], "num_collectors": 3},
    {"create_env_fn": [ENV, ENV], "backend": "ray"},
    {**SPELT_OUT, "num_collectors": 2, "sync": True},
    {**SPELT_OUT, "num_collectors": 2, "backend": "ray"},
]


@pytest.mark.filterwarnings("ignore:split_trajs")
@pytest.mark.parametrize("chosen", CHOICES, ids=str)
@pytest.mark.parametrize("positional", [0, 1, 2])
@pytest.mark.usefixtures("stand_ins")
def test_the_class_of_the_created_collector(chosen: dict[str, Any], positional: int) -> None:
    """Compare the class, the number of workers, the arguments, or the type of error."""
    values = {"create_env_fn": ENV, "policy": None, **FRAMES, **chosen}
    args = tuple(values.pop(name) for name in ("create_env_fn", "policy")[:positional])
    theirs = made(Collector, args, dict(values))
    assert theirs is not None
    assert made(pycollect.Collector, args, dict(values)) == theirs


@pytest.mark.parametrize(
    "backend", ["direct", "process", "multiprocessing", "ray", "rpc", "thread"]
)
@pytest.mark.usefixtures("stand_ins")
def test_the_service_backend_selects_the_class(backend: str) -> None:
    """``with torchrl.service_backend(...)`` chooses, unless the argument does."""
    for own in (None, "direct", "process"):
        with service_backend(backend):
            theirs = made(Collector, (ENV,), {**FRAMES, "backend": own})
            assert made(pycollect.Collector, (ENV,), {**FRAMES, "backend": own}) == theirs


@pytest.mark.parametrize("kind", ["sync", "async", "one"])
def test_the_class_of_the_created_process_collector(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for module in (torchrl_collectors, pycollect):
        names = {"sync": "MultiSyncCollector", "async": "MultiAsyncCollector"}
        for own in {*names.values(), "AsyncCollector"}:
            cls = getattr(module, own)
            monkeypatch.setattr(cls, "__init__", lambda self, *args, **kwargs: None)
            monkeypatch.setattr(cls, "shutdown", lambda self, *args, **kwargs: None)
            monkeypatch.setattr(cls, "__del__", lambda self: None, raising=False)
        if kind == "one":
            made = module.AsyncCollector(ENV, frames_per_batch=4)
            assert isinstance(made, module.MultiAsyncCollector)
        else:
            made = module.MultiCollector([ENV], frames_per_batch=4, sync=kind == "sync")
            assert type(made) is getattr(module, names[kind])
        seen.append(isinstance(made, module.MultiCollector))
    assert seen == [True, True]


def test_a_process_collector_requires_sync() -> None:
    for sync in ({}, {"sync": None}, {"sync": 1}):
        with refused(TypeError, "sync"):
            pycollect.MultiCollector([ENV], frames_per_batch=4, **sync)


CLASSES = {
    "Collector": (Collector, pycollect.Collector),
    "MultiSyncCollector": (MultiSyncCollector, pycollect.MultiSyncCollector),
    # passes all arguments on
    "MultiAsyncCollector": (MultiSyncCollector, pycollect.MultiAsyncCollector),
    "RayCollector": (None, pycollect.RayCollector),  # TorchRL's class needs Ray at import
}


class Started(Exception):
    """All arguments were accepted: a worker would start now."""


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise Started

    for module, name in (
        ("pycollect.api.single", "Worker"),
        ("pycollect.api.multi", "ProcessEngine"),
        ("pycollect.api.ray", "RayEngine"),
    ):
        monkeypatch.setattr(importlib.import_module(module), name, start)


def signatures(name: str) -> tuple[Any, Any]:
    theirs, ours = CLASSES[name]
    if theirs is None:
        pytest.importorskip("ray")
        theirs = importlib.import_module("torchrl.collectors.distributed").RayCollector
    # The metaclass of TorchRL's classes hides the signature of the constructor.
    own = list(inspect.signature(theirs.__init__).parameters.values())[1:]
    # If a class was an actor in this process, Ray has added an argument.
    return inspect.Signature([one for one in own if not one.name.startswith("_")]), ours


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", CLASSES)
def test_all_defaults_are_accepted(name: str) -> None:
    """Pass the defaults one by one and together, in the order of TorchRL's parameters."""
    signature, ours = signatures(name)
    defaults = {
        own.name: own.default
        for own in signature.parameters.values()
        if own.default is not inspect.Parameter.empty and own.kind is not own.VAR_KEYWORD
    }
    defaults.pop("policy")
    assert len(defaults) > 20
    for one in ({}, defaults, *({key: value} for key, value in defaults.items())):
        entries = ENV if name == "Collector" else [ENV, ENV]
        values = {"frames_per_batch": 4, **one}
        if name == "RayCollector" and values.get("collector_class") is Collector:
            del values["collector_class"]
        with pytest.raises(Started):
            ours(entries, None, **values)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_known_by_name(name: str) -> None:
    """Any value is accepted, or refused by an error that names the argument."""
    signature, ours = signatures(name)
    entries = ENV if name == "Collector" else [ENV, ENV]
    for own in signature.parameters.values():
        if own.kind is own.VAR_KEYWORD:
            continue
        values = {"create_env_fn": entries, "frames_per_batch": 4, own.name: Strange()}
        with pytest.raises((Started, TypeError, ValueError)) as caught:
            ours(**values)
        if caught.type is not Started:
            assert own.name in str(caught.value), own.name
            is_unknown = caught.type is TypeError and "not an argument" in str(caught.value)
            assert not is_unknown, own.name


class Strange:
    """A value that no argument expects."""
