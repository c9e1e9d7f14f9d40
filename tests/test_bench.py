"""`python -m pycollect bench gpu`: its rows, its ratios, its command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")

from pycollect.__main__ import main
from pycollect.bench import gpu, nature
from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
from pycollect.bench.gathers import WIDTHS, Case, Width, gather_rows
from pycollect.bench.host_costs import host_cost_rows
from pycollect.bench.machine import headline, machine
from pycollect.bench.nature import nature_rows
from pycollect.bench.rows import Row, markdown, missing, read_json, table, with_ratios, write_json
from pycollect.bench.splits import split_rows

GPU = torch.device("cuda", 0)


def test_rates_and_their_ratios_to_the_limits() -> None:
    rows = with_ratios(
        [
            Row("limit", 100.0, 0.01),
            Row("ours", 100.0, 0.02, limit="limit", frames=50),
            missing("not here", "no GPU"),
            Row("beside it", 100.0, 0.1, limit="not here", peer="ours"),
            Row("moves nothing", seconds=0.1, peer="nor does this"),
            Row("nor does this", seconds=0.3),
            Row("not to be compared", seconds=0.1, peer="ours"),
        ]
    )
    assert rows[0].gigabytes_per_second == pytest.approx(10.0)
    assert rows[1].ratio == pytest.approx(0.5)
    assert rows[1].frames_per_second == pytest.approx(2500)
    assert rows[3].ratio is None
    assert rows[3].times == pytest.approx(0.2)
    assert rows[4].times == pytest.approx(3)
    assert rows[6].times is None
    lines = table(rows).splitlines()
    assert "50%" in lines[2]
    assert "not available: no GPU" in lines[3]
    assert len({line.count("|") for line in markdown(rows).splitlines()}) == 1


def test_without_a_device_its_rows_say_so(tmp_path: Path) -> None:
    sizes = Sizes(frames=4, split_frames=2000, gathered=1e4, seconds=0.0)
    material = Material(sizes.frames)
    rows = [
        *host_rows(sizes, material),
        *device_rows(sizes, material, GPU, "there is none"),
        *split_rows(sizes, GPU, "there is none"),
        *host_cost_rows(sizes, GPU, "there is none"),
        *gather_rows(sizes, GPU, "there is none"),
        *nature_rows(GPU, "there is none", quick=True),
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
        "upload, host's time",
        "registering shared memory, 1024 MB",
        "gather, 17 float32, the kernel",
        "gather of 100000 trajectories, host's time on a busy stream",
        "TorchRL, Nature CNN, 14, first batch",
    }
    write_json(tmp_path / "deep" / "figures.json", rows, machine(), "a command")
    command, facts, read = read_json(tmp_path / "deep" / "figures.json")
    assert command == "a command"
    assert read == rows
    assert facts["torch"]
    assert f"{facts['cores']} cores" in headline(facts)


@pytest.mark.parametrize("width", WIDTHS, ids=lambda width: width.name)
def test_what_the_kernel_is_measured_with(width: Width) -> None:
    case = Case(width, 300_000, torch.device("cpu"))
    assert case.plan.count * 100 == case.leaf.shape[0] * case.leaf.shape[1]
    assert case.leaf[0, 0].nbytes == width.bytes
    padded = case.by_torch().reshape(case.plan.count, case.plan.longest, width.items)
    target = torch.zeros_like(padded)
    case.plan.padded([case.leaf], [target])
    for ours, torchs, length in zip(target, padded, case.plan.lengths, strict=True):
        assert torch.equal(ours[:length], torchs[:length])
    assert case.megabytes == pytest.approx((case.leaf.nbytes + target.nbytes) / 1e6)


def test_the_parts_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--quick", "--parts", "nature", "host"]) == 0
    assert "Nature CNN, 1 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["bench", "gpu", "--parts", "everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err


def test_what_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setitem(nature._SIDES, "pycollect", broken)
    monkeypatch.setattr(gpu, "split_rows", broken)
    monkeypatch.setattr(gpu, "why_not", lambda _: "there is none")
    rows = [row for part in gpu.measure(("splits", "nature"), quick=True) for row in part]
    assert rows[0].note == "RuntimeError: the device is lost"
    assert len(rows) > 3
    rows = nature_rows(GPU, "", quick=True, workers=(1,), sides=("pycollect",))
    assert [row.note for row in rows] == ["it failed: RuntimeError: the device is lost"] * 2


@pytest.mark.processes
@pytest.mark.parametrize("side", ["pycollect", "TorchRL"])
def test_a_policy_of_convolutions_beside_torchrls(side: str) -> None:
    pytest.importorskip("torchrl")
    rows = nature_rows(torch.device("cpu"), "", quick=True, workers=(1,), sides=(side,))
    assert [row.name for row in rows] == [
        f"{side}, Nature CNN, 1",
        f"{side}, Nature CNN, 1, first batch",
    ]
    assert all(row.seconds for row in rows)


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
