"""The example and the act of the demo that reconstruct a blurred, noisy picture."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tessel.cli import main
from tessel.cli.acts import deblur as act
from tessel.cli.acts import picture
from tessel.cli.acts.act import Share

Run = Callable[..., list[Any]]
ROOT = Path(__file__).parent.parent


def curve_of(parts: tuple[int, int] | None) -> list[float]:
    """The PSNR of ten iterations at lr = 1.0, in double precision."""
    sys.path.insert(0, str(ROOT / "examples"))
    example = importlib.import_module("deblur")
    settings = example.Settings(size=60, patch=24, parts=parts, dtype=torch.float64)
    assert settings.iterations == 10 and settings.lr == 1.0
    return example.reconstruct(settings).psnr


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return curve_of(None)


def test_the_psnr_rises(alone: list[float]) -> None:
    assert len(alone) == 10
    assert all(b > a for a, b in pairwise(alone))
    assert alone[-1] > alone[0] + 2


@pytest.mark.parametrize(
    ("nprocs", "parts"), [(2, None), (4, None), (2, (1, 2)), (4, (2, 2)), (4, (4, 1))]
)
def test_the_curve_is_that_of_one_worker(
    run: Run, alone: list[float], nprocs: int, parts: tuple[int, int] | None
) -> None:
    for curve in run(curve_of, parts, nprocs=nprocs):
        assert curve == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 64), (3, 65), (4, 64)])
def test_the_act_compares_with_one_process(run: Run, nprocs: int, size: int) -> None:
    report, *others = run(act.perform, size, nprocs=nprocs)
    assert others == [None] * (nprocs - 1)
    assert report.wrong == [] and report.worst <= act.LIMIT
    assert len(report.psnr) == 1 + act.ITERATIONS
    assert report.layout.shape == (1, 3, max(64, size), max(64, size))
    assert all(sent > 0 for sent in report.sent) == (nprocs > 1)
    if nprocs == 4:
        assert max(report.peaks) < report.alone


def test_the_act_draws_and_tells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told: list[str] = []
    report = act.perform(8, told.append)
    assert report is not None
    assert told == [f"a reconstruction: PSNR {number:.2f} dB" for number in report.psnr[1:]]
    act.draw(report, tmp_path / "some" / "deblur.png")
    assert (tmp_path / "some" / "deblur.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_the_act_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictured, report = picture.perform(8), act.perform(8)
    assert pictured is not None and report is not None
    monkeypatch.setattr("tessel.cli.demo._try_to_draw", lambda *args: "")
    right = Share(0.0, 0.0, 1.0, 1.0, bytes_sent=8, messages=1, seconds=1e-3)
    for changes, code in (
        ({}, 0),
        ({"error": 1e-3}, 1),
        ({"error": float("nan")}, 1),
        ({"psnr": (20.0, 19.0)}, 1),
    ):
        results = [[(right,)] * 4], [], pictured, dataclasses.replace(report, **changes)
        monkeypatch.setattr("tessel.cli.demo._perform", lambda *args, r=results: r)
        assert main(["demo", "--output", str(tmp_path)]) == code
        printed = capsys.readouterr().out
        assert ("wrong: a reconstruction" in printed) == bool(code)
        assert "a reconstruction of a picture of 64 × 64 from 3 blurs" in printed
