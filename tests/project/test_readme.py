"""The README's code works, and links in the project's pages resolve."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from raising import refused

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def blocks(language: str) -> list[str]:
    """Return the code blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert "frames/s" in capsys.readouterr().out


def test_the_table_of_real_programs_equals_the_results() -> None:
    page = (ROOT / "benchmarks" / "results" / "real.md").read_text()
    table = re.search(r"^\|.*?\n\n", page, re.M | re.S)
    assert table is not None
    assert table.group() in README
    column = table.group().splitlines()[0].split("|").index(" times TorchRL ")
    cells = [line.split("|")[column].strip() for line in table.group().splitlines()[2:] if line]
    times = [float(cell) for cell in cells if cell]
    for page in (README, (ROOT / "docs" / "index.md").read_text()):
        claim = re.search(r"collectors take ([\d.]+) to ([\d.]+) times the CPU time", page)
        assert claim is not None
        assert [float(own) for own in claim.groups()] == [round(min(times), 1), round(max(times))]


def test_the_chart_shows_the_published_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = runpy.run_path(str(ROOT / "benchmarks" / "chart.py"))
    rows = json.loads((ROOT / "benchmarks" / "results" / "results.json").read_text())["rows"]
    for bars in chart["bars"](rows):
        for side, ratio in bars.sides.items():
            assert f"{ratio:.2f}" in (ROOT / "docs" / "benchmarks.svg").read_text(), side
    path = tmp_path / "chart.svg"
    chart["main"](["--to", str(path)])
    assert path.read_text().startswith("<?xml")
    with refused(ValueError, "results") as caught:
        chart["bars"]([])
    assert "'plain loop'" in str(caught.value)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_both_commands_have_the_same_set_up() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    set_ups = {line.rpartition(" && ")[0] for line in commands}
    assert [line.rpartition(" && ")[2] for line in commands] == [
        ".venv/bin/python -m pycollect demo",
        ".venv/bin/python -m pytest -n auto --dist loadgroup",
    ]
    assert len(set_ups) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page: Path) -> None:
    # removes code, because C++ lambdas look like links
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" in link:
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[^\s<>]*)?", link), link
        else:
            assert (page.parent / link).exists(), link
