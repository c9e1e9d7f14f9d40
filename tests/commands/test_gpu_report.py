"""`python -m benchmarks.gpu_report`: combine result files into one table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from raising import refused

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

from pycollect.bench.report import Row, read_json, write_json

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_report.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    if not _SCRIPT.exists():
        pytest.skip("the benchmarks are not beside the tests")
    spec = importlib.util.spec_from_file_location("gpu_report", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(path: Path, rows: list[Row], gpu: str = "a card") -> Path:
    facts = {"gpu": gpu, "memory": len(path.name), "torchrl": None}
    write_json(path, rows, facts, f"bench {path.stem} --json {path}")
    return path


def test_files_are_merged_into_one_table(script: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    written(first / "limit.json", [Row("copy, pinned", 100.0, 0.01), Row("call", seconds=1.0)])
    written(
        second / "rest.json",
        [Row("upload", 100.0, 0.02, limit="copy, pinned"), Row("call", seconds=0.5)],
    )
    folder = tmp_path / "results"
    script.main(["abc123", str(first), str(second), "--to", str(folder)])
    text = (folder / "gpu.md").read_text()
    assert "Commit abc123." in text
    assert "- `bench limit`\n- `bench rest`" in text
    assert "- gpu: a card" in text
    assert "- memory: 10; 9" in text  # the machines' memory may differ
    assert "| upload | 100 | 20 | 5 |  | 50% |" in text
    assert "| upload: of a pinned copy | 0.95 | 0.50 | no |" in text
    assert "| call | 2.00 |" in text  # the first run's time divided by the second's
    command, facts, rows = read_json(folder / "gpu.json")
    assert command == "bench limit; bench rest"
    assert facts["commit"] == "abc123"
    assert {row.name: row.seconds for row in rows}["call"] == 0.5
    assert (folder / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_collectors_are_compared_with_each_limit(script: ModuleType, tmp_path: Path) -> None:
    rates = {
        "central": 900,
        "policy alone": 1000,
        "environments alone": 5000,
        "TorchRL": 100,
        "TorchRL, storing there": 300,
        "AsyncVectorEnv loop": 450,
    }
    rows = [Row(f"{side}, 8", seconds=1.0, frames=rate) for side, rate in rates.items()]
    written(tmp_path / "rows.json", rows)
    script.main(["abc123", str(tmp_path), "--to", str(tmp_path)])
    text = (tmp_path / "gpu.md").read_text()
    limit = "policy alone, or of environments alone if slower"
    assert f"| central, 8: of {limit} | 0.9 | 0.90 | yes |" in text
    assert "| central, 8: of TorchRL's best way | 3 | 3.00 | yes |" in text
    assert "| central, 8: of AsyncVectorEnv loop | 1.5 | 2.00 | yes |" in text


def test_files_of_two_cards_are_refused(script: ModuleType, tmp_path: Path) -> None:
    for gpu in "ab":
        written(tmp_path / f"{gpu}.json", [Row("x", 1.0, 1.0)], gpu)
    with pytest.raises(ValueError, match=r"b\.json"):
        script.main(["abc123", str(tmp_path), "--to", str(tmp_path)])


def test_a_folder_without_figures_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with refused(ValueError, "folders"):
        script.main(["abc123", str(tmp_path)])
