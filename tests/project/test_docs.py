"""The pages in docs/ name only tests, files and classes that exist, and the example runs."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pycollect

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
CONTRACT = (DOCS / "contract.md").read_text()
COMING = (DOCS / "coming-from-torchrl.md").read_text()
GPU = (DOCS / "gpu.md").read_text()
SCHEME = (DOCS / "scheme.md").read_text()
RELIABILITY = (DOCS / "reliability.md").read_text()
ARCHITECTURE = "".join((DOCS / page).read_text() for page in ("architecture.md", "rules.md"))
ROOT = DOCS.parent
NAMED = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


@cache
def functions_of(path: str) -> set[str]:
    """Return the names of a file's tests, with those in classes as class::name."""
    names = set()
    for node in ast.parse((TESTS / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {f"{prefix}{f.name}" for f in inside if isinstance(f, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    "page",
    [CONTRACT, COMING, GPU, SCHEME, RELIABILITY],
    ids=["contract", "coming from TorchRL", "GPU", "scheme", "reliability"],
)
def test_named_tests_exist(page: str) -> None:
    named = NAMED.findall(page)
    assert len(named) > 10
    for path, name in named:
        assert (TESTS / path).exists(), path
        assert name in functions_of(path), f"{path}::{name}"


def test_every_rule_names_a_test() -> None:
    rules = re.findall(r"^- .*(?:\n  .*)*", CONTRACT, re.M)
    assert len(rules) > 60
    assert [rule for rule in rules if not NAMED.search(rule)] == []


def test_every_difference_names_a_test() -> None:
    tables = re.findall(r"^\| TorchRL .*?\n\n", COMING, re.M | re.S)
    rows = [row for table in tables for row in table.strip().splitlines()[2:]]
    assert len(rows) > 90
    assert [row for row in rows if not NAMED.search(row)] == []


def test_the_programs_before_and_after_migration() -> None:
    """The two programs differ only in their imports; both run and yield the same shapes."""
    pytest.importorskip("torchrl")
    before, after = re.findall(r"^```python\n(.*?)^```$", COMING, re.M | re.S)
    changed = set(before.splitlines()) ^ set(after.splitlines())
    assert all(line.startswith(("from ", "import ")) for line in changed)
    assert len(changed) == 2
    seen: list[list[Any]] = []
    for program in (before, after):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program, "coming-from-torchrl.md", "exec"), names)
        seen.append(names["shapes"])
    assert seen[0] == seen[1]


def test_the_reference_has_every_public_name() -> None:
    """Check the names passed to autodoc; Sphinx itself checks that these exist."""
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    asked = set(re.findall(r"^\.\. auto\w+:: (?:pycollect\.)?(\S+)", pages, re.M))
    mentioned = set(re.findall(r"`(\w+)`", pages))
    aliases = {name for name in pycollect.__all__ if getattr(pycollect, name).__name__ != name}
    assert set(pycollect.__all__) - aliases <= asked
    assert aliases <= mentioned
    assert {"cpp", "cuda", "scheme", "scheme.gym", "scheme.protocols"} <= asked


def in_architecture(pattern: str) -> set[str]:
    """Return the code-styled names on the architecture page that match a pattern."""
    return {
        name for name in re.findall(r"`([^`\n]+)`", ARCHITECTURE) if re.fullmatch(pattern, name)
    }


def test_the_architecture_names_files_that_exist() -> None:
    bases = (ROOT, ROOT / "pycollect", ROOT / "pycollect/transport/processes", ROOT / "csrc/python")
    headers = [ROOT / "csrc" / part / "include/pycollect" for part in ("", "ipc", "gather")]
    named = in_architecture(r"[\w./*]+(/|\.(py|pyi|h|cpp|cu|inc|md))")
    assert len(named) > 100
    assert [
        name for name in named if not any([*base.glob(name)] for base in (*bases, *headers))
    ] == []


def test_the_architecture_names_every_folder() -> None:
    named = in_architecture(r"[\w./]+/")
    package = ROOT / "pycollect"
    folders = {path.parent.relative_to(package) for path in package.rglob("*.py")} - {Path()}
    core = {path for path in (ROOT / "csrc").iterdir() if path.name != "include"}
    assert {f"{path}/" for path in folders} - named == set()
    assert {f"csrc/{path.name}/" for path in core} - named == set()
    files = {path.name for path in (ROOT / "pycollect").glob("*.py*")} - {"__init__.py"}
    assert files - in_architecture(r"\w+\.pyi?") == set()


def test_the_architecture_names_classes_and_methods_that_exist() -> None:
    """Each part of `Class.method`, `function_name` and `CONSTANT` is defined somewhere."""
    package = ROOT / "pycollect"
    paths = [*package.rglob("*.py"), *package.rglob("*.pyi"), *(ROOT / "csrc").rglob("*.h")]
    paths.append(TESTS / "support" / "collect_support.py")
    source = "\n".join(path.read_text() for path in paths)
    named = in_architecture(r"@?[A-Z]\w+(\.\w+)?|_?[a-z]+_\w+")
    parts = {part for name in named for part in name.removeprefix("@").split(".")}
    assert len(parts) > 60
    defined = set(re.findall(r"\b(?:class|def|struct) (\w+)", source))
    assigned = set(re.findall(r"\b(\w+)\s*[:=]", source))
    assert parts - defined - assigned - {"False"} == set()


def test_the_architecture_has_the_layers_of_the_linter() -> None:
    block = re.search(r"layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert block is not None
    layers = [layer for layer in re.findall(r'"(.*)"', block[1]) if layer != "__main__"]
    assert " > ".join(layers) in re.sub(r"\s+", " ", ARCHITECTURE)
