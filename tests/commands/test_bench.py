"""`python -m pycollect bench gpu`: its rows, its ratios, its command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda_support import fake_cuda_library, run

pytest.importorskip("gymnasium")

from pycollect.__main__ import main
from pycollect.bench import gpu_trajectories, pixels
from pycollect.bench.copies import Material, Sizes, device_rows, host_cost_rows, host_rows
from pycollect.bench.gpu_trajectories import WIDTHS, Case, Width, gather_rows, split_rows
from pycollect.bench.pixels import SIDES, side_rows
from pycollect.bench.report import (
    Row,
    headline,
    machine,
    markdown,
    missing,
    read_json,
    save_plot,
    table,
    with_ratios,
    write_json,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
            Row("counts", seconds=0.1, frames=20, peer="counts, too"),
            Row("counts, too", seconds=0.1, frames=10),
        ]
    )
    assert rows[0].gigabytes_per_second == pytest.approx(10.0)
    assert rows[1].ratio == pytest.approx(0.5)
    assert rows[1].frames_per_second == pytest.approx(2500)
    assert rows[3].ratio is None
    assert rows[3].times == pytest.approx(0.2)
    assert rows[4].times == pytest.approx(3)
    assert rows[6].times is None
    assert rows[7].times == pytest.approx(2)
    lines = table(rows).splitlines()
    assert "50%" in lines[2]
    assert "not available: no GPU" in lines[3]
    assert len({line.count("|") for line in markdown(rows).splitlines()}) == 1


def test_without_a_device_its_rows_are_marked(tmp_path: Path) -> None:
    sizes = Sizes(frames=4, split_frames=2000, gathered=1e4, seconds=0.0)
    material = Material(sizes.frames)
    rows = [
        *host_rows(sizes, material),
        *device_rows(sizes, material, GPU, "there is none"),
        *split_rows(sizes, GPU, "there is none"),
        *host_cost_rows(sizes, GPU, "there is none"),
        *gather_rows(sizes, GPU, "there is none"),
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
        "gather, 17 float32",
        "gather of 100000 trajectories, host's time on a busy stream",
    }
    write_json(tmp_path / "deep" / "figures.json", rows, machine(), "a command")
    command, facts, read = read_json(tmp_path / "deep" / "figures.json")
    assert command == "a command"
    assert read == rows
    assert facts["torch"]
    assert f"{facts['cores']} cores" in headline(facts)


OVER_THE_FAKE = """
import functools
import torch
from fake_torch_cuda import DEVICE, install
from pycollect.bench import copies
from pycollect.bench.clock import seconds_of
from pycollect.bench.report import with_ratios

accelerator = install()
CPU = torch.device("cpu")

def here(function):
    @functools.wraps(function)
    def made(*args, device=None, **named):
        return function(*args, **named)
    return made

torch.ones, torch.randn = here(torch.ones), here(torch.randn)
torch.cuda.synchronize = lambda _=None: accelerator.drain()
copies.accelerator = copies.StreamAccelerator = lambda _: accelerator
copies.device_seconds = lambda work: seconds_of(work, CPU)
copies.Learner = lambda device, milliseconds: lambda: sum(range(1000))
sizes = copies.Sizes(frames=8, split_frames=0, gathered=0.0, seconds=0.0)
rows = with_ratios(copies.device_rows(sizes, copies.Material(8), DEVICE, ""))
assert [row.name for row in rows] == list(copies._ON_A_DEVICE)
assert all(row.seconds for row in rows), rows
for row in rows:
    is_sent = row.name.startswith("upload") and "learner" not in row.name
    assert (row.ratio is not None) == (is_sent or row.name == "copy, pageable"), row
    assert (row.hidden is not None) == ("learner" in row.name), row
"""


def test_copies_are_measured_over_the_fake_driver() -> None:
    run(OVER_THE_FAKE, fake_cuda_library())


@pytest.mark.parametrize("width", WIDTHS, ids=lambda width: width.name)
def test_the_workload_of_the_kernels_benchmark(width: Width) -> None:
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
    arguments = ["--device", "cuda:99", "--workers", "1", "--parts", "collectors", "host"]
    assert main(["bench", "gpu", "--quick", *arguments]) == 0
    told = capsys.readouterr().out
    assert "collectors " in told
    assert "registering shared memory, 64 MB" in told
    with pytest.raises(SystemExit):
        main(["bench", "gpu", "--parts", "everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--sides", "central", "by magic"], "--sides"),
        (["--workers", "2", "0"], "--workers"),
        (["--device", "somewhere"], "--device"),
    ],
)
def test_unavailable_arguments_are_named(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gpu", "--parts", "collectors", *arguments])
    assert stopped.value.code == 2
    assert f"{name}: expected" in capsys.readouterr().err


def test_a_plot_of_an_unknown_format_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--device", "cpu", "--quick", "--parts", "host"]
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "gpu", *arguments, "--plot", str(tmp_path / "rates.format")])
    assert stopped.value.code == 2
    assert "--plot: " in capsys.readouterr().err


def test_the_script_for_gpus_names_sides_that_exist() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_call.sh"
    if not script.exists():
        pytest.skip("the benchmarks are not beside the tests")
    first_words = "central|a policy|policy alone|AsyncVectorEnv|TorchRL|start|environments"
    names = re.findall(rf'"((?:{first_words})[^"\n]*)"', script.read_text())
    assert len(names) > 8
    assert {*names} <= {*SIDES}


def test_a_failed_part_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(gpu_trajectories, "split_rows", broken)
    parts = ["--parts", "splits", "gathers"]
    assert main(["bench", "gpu", "--quick", "--device", "cpu", *parts]) == 0
    told = capsys.readouterr().out
    assert "splits, which failed" in told
    assert "RuntimeError: the device is lost" in told
    assert "gather, pixels" in told


@pytest.mark.processes
def test_a_side_that_fails_or_takes_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["failed" in row.note for row in side_rows("by magic", 1, 0.0, CPU)] == [True, True]
    monkeypatch.setattr(pixels, "MOST_SECONDS", 0.1)
    assert ["longer" in row.note for row in side_rows("central", 1, 0.0, CPU)] == [True, True]


@pytest.mark.processes
@pytest.mark.parametrize(
    "side",
    [
        "central",
        "environments alone",
        *(
            pytest.param(side, marks=pytest.mark.slow)
            for side in SIDES
            if side not in ("central", "environments alone")
        ),
    ],
)
def test_each_side_has_a_rate_and_a_first_batch(side: str) -> None:
    if "TorchRL" in side:
        pytest.importorskip("torchrl")
    rows = side_rows(side, 1, 0.0, CPU)
    assert [row.name for row in rows] == [f"{side}, 1", f"{side}, 1, first batch"]
    assert all(row.seconds for row in rows), rows
    assert rows[0].frames == pixels.STEPS


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot([Row("limit", 1.0, 0.1), missing("x", "y")], "no GPU", tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.processes
def test_the_quick_benchmark_runs_anywhere(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert main(["bench", "gpu", "--quick", "--workers", "1", "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    on_gpu = [row for row in rows if row["name"] in ("copy, pinned", "upload")]
    assert len(on_gpu) == 2
    assert all(row["available"] is torch.cuda.is_available() for row in on_gpu)
