"""`tessel demo`: what it prints and draws, and that it fails when a number is wrong.

Tests `cli/demo.py`, `cli/demos/movements.py`, `cli/demos/unet.py`, `cli/demos/fourier.py`,
`cli/demos/classes.py`, `cli/demos/deblur.py`, `cli/demos/report.py`.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tessel
from scripts import python
from tessel.cli import main
from tessel.cli.demos import classes, deblur, demos, fourier, movements, unet
from tessel.cli.demos.movements import together
from tessel.cli.demos.report import Report
from tessel.core import boxes

Run = Callable[..., list[Any]]
LIMIT = 90
GRADIENTS = "gradients of all parameters"
TITLES = ("a U-Net", "a Fourier transform", "a step of a classifier", "a reconstruction")
PICTURES = {"demo.png": 800, "unet.png": 400, "deblur.png": 400}  # and their least heights


def silent(text: str) -> None:
    """What a demo tells while it runs is for the progress bar."""


def reported(name: str, size: int) -> list[Report]:
    """The reports of a demo, on a worker of the pool."""
    (demo,) = [each for each in demos() if each.__name__.endswith(f".{name}")]
    return demo.run(size, silent)


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(report.table)
    console.print(report.text, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def alone(pool: Any) -> list[Report]:
    """The reports of a small demo on one worker."""
    names = [demo.__name__.rpartition(".")[2] for demo in demos()]
    return [report for name in names for report in pool.run(reported, name, 8, nprocs=1)[0]]


# --- as a user sees it


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    words = ("demo", "--output", "pictures", "--size", "64")
    done = python("-m", "tessel", *words, cwd=tmp_path, timeout=LIMIT)
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
    alone: list[Report],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: alone)
    assert main(["demo", "--output", str(tmp_path / "pictures")]) == 0
    assert "pip install 'tessel[viz]'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# --- the demos


def test_a_row_puts_together_what_workers_saw() -> None:
    seen = (0.1, 0.0, 3.0, 1.0, 8, 1, 1e-3), (0.0, 0.2, 1.0, 2.0, 8, 2, 2e-3)
    assert together(seen) == (0.25, 0.1, 0.2, 16, 3, 2e-3)


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_does_not_lose_what_is_not_a_number(place: int) -> None:
    rest = 0.0, 3.0, 3.0, 8, 1, 1e-3
    seen = [(NAN if worker == place else 0.1, *rest) for worker in range(2)]
    _, value_error, *_ = together(seen)
    assert math.isnan(value_error)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_movements_and_the_model(run: Run, nprocs: int) -> None:
    for name in ("movements", "unet"):
        (report,), *others = run(reported, name, 16, nprocs=nprocs)
        assert others == [[]] * (nprocs - 1)
        assert report.wrong == []
        assert report.worst <= {"movements": movements, "unet": unet}[name].LIMIT


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_the_transform_and_the_step_of_an_fno(run: Run, nprocs: int) -> None:
    (transform, training), *others = run(reported, "fourier", 40, nprocs=nprocs)
    assert others == [[]] * (nprocs - 1)
    assert transform.wrong == training.wrong == []
    assert max(transform.worst, training.worst) < fourier.LIMIT
    assert transform.subject.startswith("of 10 × 12 × 15 numbers")
    assert len(transform.rows) == (1 if nprocs == 1 else 3)
    text = shown(transform)
    ways = "never, never" if nprocs == 1 else "once, twice"
    assert f"rearranged {ways} if the result comes back, {ways.split()[1]} with" in text
    foretold, counted = re.search(r"(\d+) bytes by the plan, (\d+) counted", text).groups()  # type: ignore[union-attr]
    assert foretold == counted
    if nprocs < 4:
        return
    first, move, last = transform.rows
    assert first[1:3] == ("[10/2 × 12/2 × 8]", ((5, 6, 8),))
    assert move[1] == "[10 × 12 × 8/4]" and last[2] == ((10, 12, 2),)
    assert move[3] == int(counted) == 16 * 10 * 12 * 8 * 3 // 4  # a quarter of each part stays
    (_, _, everything, *_), *parts = training.rows
    assert max(row[2] for row in parts) < everything / 2  # the spectral weights are in parts
    assert re.search(r"1 ParDFT along 2 +\[10/2 × 12/2 × 8\] +5 × 6 × 8", text)
    assert re.search(r"2 transfer +\[10 × 12 × 8/4\] +10 × 12 × 2 +11.2 KiB", text)
    assert re.search(r"3 ParDFT along 0, ParDFT along 1 ", text)
    assert "worker 3" in shown(training)


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 8), (3, 8), (4, 8), (4, 64)])
def test_the_classifier(run: Run, nprocs: int, size: int) -> None:
    (report,), *others = run(reported, "classes", size, nprocs=nprocs)
    assert others == [[]] * (nprocs - 1)
    assert report.worst <= classes.LIMIT and report.wrong == []
    parts = [stop - start for start, stop in boxes.balanced(100 * size + 1, nprocs)]
    row = 8 * (1 + classes.FEATURES)
    # of one process, and then of each worker
    held = [(100 * size + 1, row * (100 * size + 1)), *((part, row * part) for part in parts)]
    assert [(each[1], each[2]) for each in report.rows] == held
    peak, *peaks = (each[4] for each in report.rows)
    excess = 1.5 if size > 8 else 2.0  # beside few classes the features, which all have, count
    assert max(peaks) == peak if nprocs == 1 else max(peaks) < excess * peak / nprocs
    facts = 8 * classes.SAMPLES * 3  # three numbers for each sample, to each of the others
    gradient = 8 * classes.SAMPLES * classes.FEATURES  # of the head's input, all-reduced
    sent = sum(each[5] for each in report.rows[1:])
    assert sent == (nprocs - 1) * (nprocs * facts + 2 * gradient)


def reconstructed(size: int) -> tuple[list[Report], list[str]]:
    """The report, and what is told meanwhile."""
    told: list[str] = []
    return deblur.run(size, told.append), told


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 64), (3, 65), (4, 64)])
def test_the_reconstruction(run: Run, nprocs: int, size: int) -> None:
    ((report,), told), *others = run(reconstructed, size, nprocs=nprocs)
    assert others == [([], told)] * (nprocs - 1)
    assert report.wrong == [] and report.worst <= deblur.LIMIT
    assert all(re.fullmatch(r"a reconstruction: PSNR \d+\.\d\d dB", each) for each in told)
    assert len(told) == deblur.ITERATIONS == len(deblur.STEPS)
    last = float(told[-1].split()[-2])
    assert abs(float(re.search(r"([\d.]+) dB after", report.text).group(1)) - last) < 0.06  # type: ignore[union-attr]
    assert f"picture of {max(64, size)} × {max(64, size)}" in report.subject
    (_, _, alone, *_), *workers = report.rows
    assert all(row[4] > 0 for row in workers) == (nprocs > 1)
    if nprocs == 4:
        assert max(row[2] for row in workers) < alone


# --- what is wrong is seen

NAN = float("nan")
WRONG = [  # a title, an error of what was compared, and what is said
    ("1 workers,", "all-sum-reduce", 0.5, "all-sum-reduce (largest"),
    *(("a U-Net", name, error, "a U-Net") for name, error in (("output", NAN), (GRADIENTS, 1e-3))),
    *(
        ("a Fourier transform", name, error, "a Fourier transform")
        for name, error in (("inverse", 1e-3), ("gradient", NAN))
    ),
    ("a step of an FNO", "all parameters after two steps", 1e-3, "a step of an FNO"),
    ("a step of a classifier", "loss", 1e-9, "a step of a classifier"),
    ("a step of a classifier", GRADIENTS, NAN, "a step of a classifier"),
    *(("a reconstruction", "picture", error, "a reconstruction") for error in (1e-3, NAN)),
    # not an error, but a head or bytes that are missing, or a picture that is no better
    *((title, "", 0.0, title) for title in TITLES),
]


@pytest.mark.parametrize(("title", "what", "error", "said"), WRONG)
def test_the_demo_fails_when_a_number_is_wrong(
    alone: list[Report],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    title: str,
    what: str,
    error: float,
    said: str,
) -> None:
    monkeypatch.setattr("tessel.cli.demo._try_to_draw", lambda *args: "")
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: alone)
    assert main(["demo"]) == 0
    assert "wrong" not in capsys.readouterr().out
    changed = []
    for report in alone:
        if report.title == title and what:
            assert what in report.errors
            report = replace(report, errors={**report.errors, what: error})
        elif report.title == title:
            report = replace(report, is_wrong=True)
        changed.append(report)
    assert changed != alone
    monkeypatch.setattr("tessel.cli.demo.run_demos", lambda *args: changed)
    assert main(["demo"]) == 1
    assert f"wrong: {said}" in capsys.readouterr().out


def test_what_is_wrong_besides_errors(run: Run) -> None:
    assert unet.exceeds((1, 1, 1, 9), budget=8) and not unet.exceeds((1, 1, 1, 8), budget=8)
    assert not unet.exceeds((9, 9, 9), budget=8)  # on few workers
    assert run(spoiled, nprocs=2)[0] == list(TITLES[1:])


def spoiled() -> list[str]:
    """What is found wrong if other bytes are sent than planned, if a process says that its head is
    smaller than it is, and if the picture does not get better."""
    compared, measured = fourier.compared_with_torch, classes.measured

    def sends_more(*args: Any) -> Any:
        errors, sent, seconds = compared(*args)
        return errors, sent + 1, seconds

    def holds_less(*args: Any) -> Any:
        loss, (number, head, peak), *others = measured(*args)
        return loss, (number, head - 8, peak), *others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fourier, "compared_with_torch", sends_more)
        patch.setattr(classes, "measured", holds_less)
        patch.setattr(deblur.deblur.solvers, "PSNR", lambda *args: lambda x: 20.0)
        reports = [each for demo in (fourier, classes, deblur) for each in demo.run(8, silent)]
    return [title for report in reports for title in report.wrong]


@pytest.mark.slow
def test_a_copy_of_src_has_all_other_commands(tmp_path: Path) -> None:
    """`src/tessel/examples` is a link out of it."""
    source = Path(tessel.__file__).parent
    shutil.copytree(source, tmp_path / "tessel", ignore=shutil.ignore_patterns("examples"))
    plan = ["plan", "--shape", "8,8", "--workers", "2"]
    code = "import sys, tessel.cli as c; print(c.main({}), c.__file__); sys.exit(c.main({}))"
    done = subprocess.run(  # both in one interpreter: to start one takes long
        [sys.executable, "-c", code.format(plan, ["demo"])],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    planned, _, last = done.stdout.rstrip().rpartition("\n")
    assert "workers" in planned and last == f"0 {tmp_path / 'tessel' / 'cli' / '__init__.py'}", done
    assert done.returncode == 2 and "the demos need the folder examples/" in done.stderr, done
