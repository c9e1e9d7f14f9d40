"""`help()` of the public classes is self-contained: arguments, results and errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pycollect
from pycollect.arguments import completed_by
from pycollect.compat.torchrl import TorchRLCollector

PUBLIC = [getattr(pycollect, name) for name in pycollect.__all__]
COLLECTORS = [
    cls
    for cls in dict.fromkeys(PUBLIC)
    if isinstance(cls, type) and issubclass(cls, TorchRLCollector)
]
HELD = [
    *COLLECTORS,
    pycollect.Evaluator,
    pycollect.StatsWriter,
    pycollect.RandomPolicy,
    pycollect.cuda.Uploader,
    pycollect.scheme.CWorker,
    pycollect.scheme.CWorkerSet,
]
NOT_TOLD = {"self", "_ray_trace_ctx"}  # Ray adds the second to a class
PLAIN = ("None", "bool", "int", "float", "str")  # results that need no section
SENDS_ELSEWHERE = re.compile(
    r"^(See\b|The same|As `|As the other)|^`\w+`\.$|: as :\w+:`|^The argument"
)


def own_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that this package defines on a class, with their names."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name[0] != "_" and method.__module__.startswith("pycollect."):
            yield name, method


def told(doc: str, section: str) -> str:
    """Return one section of a docstring."""
    found = re.search(rf"^{section}:\n((?:(?: .*)?\n)*)", f"{doc}\n", re.M)
    return found[1] if found else ""


def arguments_told(doc: str) -> set[str]:
    names = re.findall(r"^ {4}([\w, ]+):", told(doc, "Args"), re.M)
    return {name.strip() for entry in names for name in entry.split(",")}


def raised(method: Callable[..., Any]) -> set[str]:
    """Return the error types in the method's own raise statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}


@pytest.mark.parametrize("cls", HELD)
def test_every_argument_of_a_class_is_documented(cls: type) -> None:
    arguments = {*inspect.signature(cls).parameters} - NOT_TOLD
    assert arguments <= arguments_told(inspect.getdoc(cls) or "")


@pytest.mark.parametrize("cls", COLLECTORS)
def test_a_collector_documents_the_shape_of_its_batches(cls: type) -> None:
    if cls is pycollect.MultiCollector:  # creates one of two other classes
        pytest.skip("it creates one of two other classes, which document their batches")
    assert re.search(r"\[(B, )?T\]", told(inspect.getdoc(cls) or "", "Yields"))


@pytest.mark.parametrize("cls", HELD)
def test_methods_document_their_arguments_results_and_errors(cls: type) -> None:
    wrong = []
    for name, method in own_methods(cls):
        doc, signature = inspect.getdoc(method) or "", inspect.signature(method)
        wrong += [
            f"{name}({one})" for one in {*signature.parameters} - NOT_TOLD - arguments_told(doc)
        ]
        wrong += [f"{name} raises {error}" for error in raised(method) if error not in doc]
        is_plain = signature.return_annotation in PLAIN
        if not is_plain and not told(doc, "Returns") and "NotImplementedError" not in doc:
            wrong.append(f"{name} returns {signature.return_annotation}")
    assert wrong == []


@pytest.mark.parametrize("cls", HELD)
def test_docstrings_are_self_contained(cls: type) -> None:
    members = [*own_methods(cls), *inspect.getmembers(cls, lambda one: isinstance(one, property))]
    texts = {name: inspect.getdoc(one) or "" for name, one in members if name[0] != "_"}
    assert {name: text for name, text in texts.items() if len(text.split()) < 3} == {}
    assert [name for name, text in texts.items() if SENDS_ELSEWHERE.search(text)] == []


def test_methods_that_return_batches_document_their_shape() -> None:
    for cls, name in [
        *((cls, "next") for cls in COLLECTORS),
        (pycollect.SyncDataCollector, "rollout"),
        (pycollect.SyncDataCollector, "fake_tensordict"),
    ]:
        assert "[T]" in told(inspect.getdoc(getattr(cls, name)) or "", "Returns"), (cls, name)


def test_a_docstring_is_completed_by_another() -> None:
    def base(a: int, b: int, c: int) -> int:
        """Base.

        Args:
            a, b: of the base,
                in two lines.
            c: of the base.

        Returns:
            A number.

        Raises:
            ValueError: in the base.
            OSError: likewise.
        """
        return a + b + c

    @completed_by(base)
    def own(c: int, a: int) -> int:
        """Own.

        Args:
            c: its own.
            ...: those of `base`.

        Raises:
            ValueError: its own.
        """
        return a + c

    assert own.__doc__ == inspect.cleandoc(
        """Own.

        Args:
            c: its own.
            a, b: of the base,
                in two lines.

        Returns:
            A number.

        Raises:
            ValueError: its own.
            OSError: likewise.
        """
    )
