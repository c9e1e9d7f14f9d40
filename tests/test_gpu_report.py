"""`python -m benchmarks.gpu_report`: files of figures become one table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("matplotlib")

from pycollect.bench.rows import Row, read_json, write_json

_SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_report.py"


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
    write_json(
        path, rows, {"gpu": gpu, "load average": float(len(path.name))}, f"bench {path.stem}"
    )
    return path


def test_files_become_one_table(script: ModuleType, tmp_path: Path) -> None:
    limit = written(tmp_path / "limit.json", [Row("limit", 100.0, 0.01)])
    rest = written(
        tmp_path / "rest.json", [Row("ours", 100.0, 0.02, limit="limit"), Row("call", seconds=1.0)]
    )
    again = written(tmp_path / "again.json", [Row("ours", 50.0, 0.02), Row("call", seconds=0.5)])
    folder = tmp_path / "results"
    script.main(["abc123", str(limit), str(rest), "--again", str(again), "--to", str(folder)])
    text = (folder / "gpu.md").read_text()
    assert "Commit abc123." in text
    assert "- `bench limit`\n- `bench rest`" in text
    assert "- gpu: a card" in text
    assert "| ours | 100 | 20 | 5 |  | 50% |" in text
    assert "| ours | 0.50 |" in text  # the second run's rate
    assert "| call | 2.00 |" in text
    command, facts, rows = read_json(folder / "gpu.json")
    assert command == "bench limit; bench rest"
    assert facts["commit"] == "abc123"
    assert rows[1].ratio == pytest.approx(0.5)
    assert (folder / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_two_machines_are_refused(script: ModuleType, tmp_path: Path) -> None:
    files = [str(written(tmp_path / f"{gpu}.json", [Row("x", 1.0, 1.0)], gpu)) for gpu in "ab"]
    with pytest.raises(ValueError, match=r"b\.json: expected the machine of .*with gpu a, got b"):
        script.main(["abc123", *files, "--to", str(tmp_path)])
