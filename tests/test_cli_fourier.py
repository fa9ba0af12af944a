"""The act of the demo that transforms a tensor in pencils and trains an FNO."""

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tessel.cli import main
from tessel.cli.acts import fourier, picture
from tessel.cli.acts.act import Share

Run = Callable[..., list[Any]]
RIGHT = Share(0.0, 0.0, 1.0, 1.0, bytes_sent=8, messages=1, seconds=1e-3)


def shown(report: fourier.Report) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table, legend in zip(fourier.tables(report), fourier.legends(report), strict=True):
        console.print(table)
        console.print(legend, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_the_act_on_workers(run: Run, nprocs: int) -> None:
    report, *others = run(fourier.perform, 40, nprocs=nprocs)
    assert others == [None] * (nprocs - 1)
    assert report.wrong == [] and report.worst < fourier.LIMIT
    transform = report.transform
    assert transform.shape == (10, 12, 15)
    assert transform.foretold == transform.bytes_sent
    assert transform.transfers == ((0, 0, 0) if nprocs == 1 else (1, 2, 2))
    assert len(transform.steps) == (1 if nprocs == 1 else 3)
    assert all(len(step.local_shapes) == nprocs for step in transform.steps)


def test_pencils_are_rearranged_once(run: Run) -> None:
    report, *_ = run(fourier.perform, 40, nprocs=4)
    first, move, last = report.transform.steps
    assert (first.layout, move.layout) == ("[10/2 × 12/2 × 8]", "[10 × 12 × 8/4]")
    assert first.local_shapes == ((5, 6, 8),) * 4
    assert last.local_shapes == ((10, 12, 2),) * 4
    assert move.bytes_sent == 16 * 10 * 12 * 8 * 3 // 4  # a quarter of each part stays
    alone, everyones = report.training.stored
    assert max(everyones) < alone / 2  # the spectral weights are in parts


def test_the_plan_is_printed(run: Run) -> None:
    report, *_ = run(fourier.perform, 40, nprocs=4)
    text = shown(report)
    assert re.search(r"1 transform along 2 +\[10/2 × 12/2 × 8\] +5 × 6 × 8", text)
    assert re.search(r"2 rearrange +\[10 × 12 × 8/4\] +10 × 12 × 2 +11.2 KiB", text)
    assert "rearranged once, twice if the result comes back, twice with the inverse" in text
    assert "11520 bytes by the plan, 11520 counted" in text
    assert "worker 3" in text


def test_the_demo_fails_when_the_transform_or_the_step_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unet, right = picture.perform(8), fourier.perform(8)
    assert unet is not None and right is not None and right.wrong == []
    monkeypatch.setattr("tessel.cli.demo._try_to_draw", lambda *args: "")
    changes = {
        "a Fourier transform": [
            {"transform": dataclasses.replace(right.transform, inverse_error=1e-3)},
            {"transform": dataclasses.replace(right.transform, bytes_sent=1)},
            {"transform": dataclasses.replace(right.transform, gradient_error=float("nan"))},
        ],
        "a step of an FNO": [
            {"training": dataclasses.replace(right.training, parameter_error=1e-3)}
        ],
    }
    for title, cases in changes.items():
        for change in cases:
            wrong = dataclasses.replace(right, **change)
            results = ([[(RIGHT,)] * 4], [], unet, wrong)
            monkeypatch.setattr("tessel.cli.demo._perform", lambda *args, r=results: r)
            assert main(["demo", "--output", str(tmp_path)]) == 1
            assert f"wrong: {title}" in capsys.readouterr().out


def test_the_demo_shows_the_act(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--workers", "1", "--size", "8", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "a Fourier transform of 4 × 6 × 9 numbers on 1 × 1 × 1 workers" in printed
    assert "a step of an FNO" in printed
