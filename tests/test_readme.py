"""The README does what it says; links in the project's pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks", ROOT / "examples")
    for path in sorted(folder.glob("*.md"))
]


def blocks(language: str) -> list[str]:
    """The code blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.ray
def test_the_example(ray_cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert "frames/s" in capsys.readouterr().out


def test_the_two_commands_set_up_alike() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    set_ups = {line.rpartition(" && ")[0] for line in commands}
    assert [line.rpartition(" && ")[2] for line in commands] == [
        ".venv/bin/python -m pycollect demo",
        ".venv/bin/python -m pytest -n auto --dist loadgroup",
    ]
    assert len(set_ups) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)  # C++ has lambdas
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), link
