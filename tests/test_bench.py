"""`python -m pycollect bench gpu`: its rows, its ratios, its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium")

from pycollect.__main__ import main
from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
from pycollect.bench.rows import Row, missing, table, with_ratios, write_json
from pycollect.bench.splits import split_rows

GPU = torch.device("cuda", 0)


def test_rates_and_their_ratios_to_the_limits() -> None:
    rows = with_ratios(
        [
            Row("limit", 100.0, 0.01),
            Row("ours", 100.0, 0.02, limit="limit", frames=50),
            missing("not here", "no GPU"),
            Row("beside it", 100.0, 0.1, limit="not here", peer="ours"),
        ]
    )
    assert rows[0].gigabytes_per_second == pytest.approx(10.0)
    assert rows[1].ratio == pytest.approx(0.5)
    assert rows[1].frames_per_second == pytest.approx(2500)
    assert rows[3].ratio is None
    assert rows[3].times == pytest.approx(0.2)
    lines = table(rows).splitlines()
    assert "50%" in lines[2]
    assert "not available: no GPU" in lines[3]


def test_without_a_device_its_rows_say_so(tmp_path: Path) -> None:
    sizes = Sizes(frames=4, split_frames=2000, seconds=0.0)
    material = Material(sizes.frames)
    rows = [
        *host_rows(sizes, material),
        *device_rows(sizes, material, GPU, "there is none"),
        *split_rows(sizes, GPU, "there is none"),
    ]
    assert all(row.seconds for row in rows if row.available)
    assert {row.name for row in rows if not row.available} >= {
        "copy, pinned",
        "upload",
        "upload, by torch",
        "upload, shared slab",
        "split",
        "split, the launch alone",
        "split, TorchRL",
    }
    write_json(tmp_path / "deep" / "figures.json", rows, True)
    written = json.loads((tmp_path / "deep" / "figures.json").read_text())
    assert {row["available"] for row in written["rows"]} == {True, False}
    assert written["machine"]["torch"]


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pycollect.bench.plot import save_plot

    save_plot([Row("limit", 1.0, 0.1), missing("x", "y")], "no GPU", tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.ray
def test_the_quick_benchmark_runs_anywhere(tmp_path: Path) -> None:
    assert main(["bench", "gpu", "--quick", "--json", str(tmp_path / "figures.json")]) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    on_gpu = [row for row in rows if row["name"] in ("copy, pinned", "upload")]
    assert len(on_gpu) == 2
    assert all(row["available"] is torch.cuda.is_available() for row in on_gpu)
    assert any(row["name"].startswith("pycollect, processes") for row in rows)
