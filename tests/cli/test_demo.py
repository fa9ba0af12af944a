"""`tessel demo`: what it prints and draws, and that it fails when a number is wrong."""

from __future__ import annotations

import io
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessel.cli import main
from tessel.cli.demos import DEMOS, classes, deblur, fourier, movements, unet
from tessel.cli.demos.movements import Row, Share
from tessel.cli.demos.report import Report
from tessel.core import boxes

Run = Callable[..., list[Any]]
LIMIT = 90
PICTURES = {"demo.png": 800, "unet.png": 400, "deblur.png": 400}  # and their least heights


def silent(text: str) -> None:
    """What a demo tells while it runs is for the progress bar."""


def reported(name: str, size: int) -> Report | None:
    """The report of a demo, on a worker of the pool."""
    (demo,) = [each for each in DEMOS if each.__name__.endswith(f".{name}")]
    return demo.run(size, silent)


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table, legend in report.tables():
        console.print(table)
        console.print(legend, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def alone(pool: Any) -> dict[str, Report]:
    """The reports of a small demo on one worker."""
    names = [demo.__name__.rpartition(".")[2] for demo in DEMOS]
    return {name: pool.run(reported, name, 8, nprocs=1)[0] for name in names}


# --- as a user starts it


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tessel", "demo", "--output", "pictures", "--size", "64"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout
    assert "4 workers compute what one process computes" in printed
    assert "worker 3" in printed and "U-Net" in printed
    assert "a Fourier transform of 16 × 18 × 21 numbers on 2 × 2 × 1 workers" in printed
    assert "a step of an FNO" in printed
    assert "a step of a classifier with 6401 classes" in printed
    assert "a reconstruction of a picture of 64 × 64 from 3 blurs" in printed
    for name in movements.STEPS:
        (row,) = [line for line in printed.splitlines() if line.strip().startswith(name)]
        assert max(map(float, row.split(name)[1].split()[:3])) < 1e-12
    for name, least in PICTURES.items():
        assert f"pictures/{name}" in printed
        picture = (tmp_path / "pictures" / name).read_bytes()
        width, height = struct.unpack(">II", picture[16:24])
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert width > 800 and height > least and len(picture) > 50_000


def test_demo_without_matplotlib(
    alone: dict[str, Report],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: list(alone.values()))
    assert main(["demo", "--output", str(tmp_path / "pictures")]) == 0
    assert "pip install 'tessel[viz]'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# --- the demos


def test_a_row_puts_shares_together() -> None:
    row = Row.of(
        "x", [Share(0.1, 0.0, 3.0, 1.0, 8, 1, 1e-3), Share(0.0, 0.2, 1.0, 2.0, 8, 2, 2e-3)]
    )
    assert row == Row("x", 0.25, 0.1, 0.2, 16, 3, 2e-3)
    assert row.worst == 0.25


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_does_not_lose_what_is_not_a_number(place: int) -> None:
    shares = [Share(0.1, 0.0, 3.0, 3.0, 8, 1, 1e-3) for _ in range(2)]
    shares[place] = replace(shares[place], value_error=NAN)
    assert math.isnan(Row.of("x", shares).worst)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_movements_and_the_model(run: Run, nprocs: int) -> None:
    for name in ("movements", "unet"):
        report, *others = run(reported, name, 16, nprocs=nprocs)
        assert others == [None] * (nprocs - 1)
        assert report.wrong == []
        assert report.worst <= {"movements": movements, "unet": unet}[name].LIMIT


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_the_transform_and_the_step_of_an_fno(run: Run, nprocs: int) -> None:
    report, *others = run(reported, "fourier", 40, nprocs=nprocs)
    assert others == [None] * (nprocs - 1)
    assert report.wrong == [] and report.worst < fourier.LIMIT
    transform = report.transform
    assert transform.shape == (10, 12, 15)
    assert transform.foretold == transform.bytes_sent
    assert transform.transfers == ((0, 0, 0) if nprocs == 1 else (1, 2, 2))
    assert len(transform.steps) == (1 if nprocs == 1 else 3)
    assert all(len(step.local_shapes) == nprocs for step in transform.steps)
    if nprocs < 4:
        return
    first, move, last = transform.steps
    assert (first.layout, move.layout) == ("[10/2 × 12/2 × 8]", "[10 × 12 × 8/4]")
    assert first.local_shapes == ((5, 6, 8),) * 4
    assert last.local_shapes == ((10, 12, 2),) * 4
    assert move.bytes_sent == 16 * 10 * 12 * 8 * 3 // 4  # a quarter of each part stays
    everything, parts = report.training.stored
    assert max(parts) < everything / 2  # the spectral weights are in parts
    text = shown(report)
    assert re.search(r"1 transform along 2 +\[10/2 × 12/2 × 8\] +5 × 6 × 8", text)
    assert re.search(r"2 rearrange +\[10 × 12 × 8/4\] +10 × 12 × 2 +11.2 KiB", text)
    assert re.search(r"3 transform along 0, 1 ", text)
    assert "rearranged once, twice if the result comes back, twice with the inverse" in text
    assert "11520 bytes by the plan, 11520 counted" in text
    assert "worker 3" in text


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 8), (3, 8), (4, 8), (4, 64)])
def test_the_classifier(run: Run, nprocs: int, size: int) -> None:
    report, *others = run(reported, "classes", size, nprocs=nprocs)
    assert others == [None] * (nprocs - 1)
    assert report.worst <= classes.LIMIT and report.wrong == []
    parts = [stop - start for start, stop in boxes.balanced(100 * size + 1, nprocs)]
    row = 8 * (1 + classes.FEATURES)
    assert [(each.classes, each.head) for each in report.holdings] == [
        (part, row * part) for part in parts
    ]
    assert (report.alone.classes, report.alone.head) == (100 * size + 1, row * (100 * size + 1))
    most = max(each.peak for each in report.holdings)
    excess = 1.5 if size > 8 else 2.0  # beside few classes the features, which all have, count
    assert most == report.alone.peak if nprocs == 1 else most < excess * report.alone.peak / nprocs
    facts = 8 * classes.SAMPLES * 3  # three numbers for each sample, to each of the others
    gradient = 8 * classes.SAMPLES * classes.FEATURES  # of the head's input, all-reduced
    assert sum(report.sent) == (nprocs - 1) * (nprocs * facts + 2 * gradient)


def reconstructed(size: int) -> tuple[Report | None, list[str]]:
    """The report, and what is told meanwhile."""
    told: list[str] = []
    return deblur.run(size, told.append), told


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 64), (3, 65), (4, 64)])
def test_the_reconstruction(run: Run, nprocs: int, size: int) -> None:
    (report, told), *others = run(reconstructed, size, nprocs=nprocs)
    assert others == [(None, told)] * (nprocs - 1)
    assert report.wrong == [] and report.worst <= deblur.LIMIT
    assert told == [f"a reconstruction: PSNR {number:.2f} dB" for number in report.result.psnr[1:]]
    assert len(told) == deblur.ITERATIONS == len(deblur.STEPS)
    assert report.layout.shape == (1, 3, max(64, size), max(64, size))
    assert all(sent > 0 for sent in report.sent) == (nprocs > 1)
    if nprocs == 4:
        assert max(report.peaks) < report.alone


# --- what is wrong is seen

NAN = float("nan")
WRONG: list[tuple[str, str, Callable[[Any], Report]]] = [
    (
        "movements",
        "wrong: all-sum-reduce (largest",
        lambda r: replace(r, rows=(replace(r.rows[0], value_error=0.5), *r.rows[1:])),
    ),
    ("unet", "wrong: a U-Net", lambda r: replace(r, gradient_error=1e-3)),
    ("unet", "wrong: a U-Net", lambda r: replace(r, value_error=NAN)),
    ("unet", "wrong: a U-Net", lambda r: replace(r, peaks=(r.alone,) * 4, sent=(0,) * 4)),
    *(
        (
            "fourier",
            "wrong: a Fourier transform",
            lambda r, change=change: replace(r, transform=replace(r.transform, **change)),
        )
        for change in ({"inverse_error": 1e-3}, {"bytes_sent": 1}, {"gradient_error": NAN})
    ),
    (
        "fourier",
        "wrong: a step of an FNO",
        lambda r: replace(r, training=replace(r.training, parameter_error=1e-3)),
    ),
    ("classes", "wrong: a step of a classifier", lambda r: replace(r, loss_error=1e-9)),
    ("classes", "wrong: a step of a classifier", lambda r: replace(r, gradient_error=NAN)),
    (
        "classes",
        "wrong: a step of a classifier",
        lambda r: replace(r, holdings=(replace(r.alone, head=r.alone.head - 8),)),
    ),
    ("deblur", "wrong: a reconstruction", lambda r: replace(r, error=1e-3)),
    ("deblur", "wrong: a reconstruction", lambda r: replace(r, error=NAN)),
    (
        "deblur",
        "wrong: a reconstruction",
        lambda r: replace(r, result=replace(r.result, psnr=[20.0, 19.0])),
    ),
]


@pytest.mark.parametrize(("name", "said", "change"), WRONG)
def test_the_demo_fails_when_a_number_is_wrong(
    alone: dict[str, Report],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
    change: Callable[[Any], Report],
) -> None:
    monkeypatch.setattr("tessel.cli.demo._try_to_draw", lambda *args: "")
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: list(alone.values()))
    assert main(["demo"]) == 0
    assert "wrong" not in capsys.readouterr().out
    if name == "unet":  # its layout is that of one worker, the changed report has four
        monkeypatch.setattr(unet.Cleaned, "tables", lambda self: [])
    changed = [change(report) if each == name else report for each, report in alone.items()]
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: changed)
    assert main(["demo"]) == 1
    assert said in capsys.readouterr().out
