"""Every script in examples/ runs as a user starts it, unmodified, and says the same each time.

A new example is found by itself. It runs without options, or with those that `SMALL` has for it;
what it prints after "loss", "error" or "PSNR" must be the same however it is started.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))

Run = Callable[..., list[Any]]

SMALL: dict[str, dict[str, int]] = {
    "classes": {"classes": 1001, "features": 8, "steps": 4},
    "darcy": {"epochs": 1, "points": 16, "samples": 20},
    "deblur": {"size": 48, "iterations": 3},
    "gpt": {"dim": 16, "length": 16, "batch": 4, "steps": 4},
}
PICTURES = {"darcy": ("--out", "loss.png", "prediction.png"), "deblur": ("--output", "result.png")}
LAUNCHERS = {
    "python": (),
    "tessel": ("-m", "tessel", "run", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def start(script: str, launcher: str, folder: Path, *more: str) -> str:
    """What an example prints."""
    options = [str(each) for name, n in SMALL.get(script, {}).items() for each in (f"--{name}", n)]
    option, *pictures = PICTURES.get(script, ("",))
    if pictures:
        options += [option, str(folder if len(pictures) > 1 else folder / pictures[0])]
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(EXAMPLES / f"{script}.py"), *options, *more],
        cwd=folder,  # what an example saves elsewhere does not stay
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    return done.stdout


def numbers(printed: str) -> list[float]:
    """What it says of its success, in the order of its steps."""
    return [float(each) for each in re.findall(r"(?:loss|error|PSNR) +(\d+\.\d+)", printed)]


@cache
def alone(script: str, folder: Path) -> str:
    return start(script, "python", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.limit(230)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs(tmp_path: Path, folder: Path, script: str, launcher: str) -> None:
    if script in PICTURES:
        pytest.importorskip("matplotlib")
    once = alone(script, folder)
    printed = once if launcher == "python" else start(script, launcher, tmp_path)
    assert numbers(printed), f"{script} does not say how it went:\n{printed}"
    assert numbers(printed) == pytest.approx(numbers(once), abs=2e-4)  # four digits, or two of a %
    workers = re.findall(r"^(\d+) workers?\b", printed, re.MULTILINE)
    assert set(workers) <= {"1" if launcher == "python" else "2"}
    if script in SMALL:
        said = "100.00%" if launcher == "python" else "50.05%"  # 501 of 1001 classes
        assert said in printed if script == "classes" else workers


def in_this_process(script: str) -> list[float]:
    """The numbers that a script should print."""
    torch.set_num_threads(1)  # until the next call of the pool
    small = SMALL[script]
    if script == "classes":
        import classes

        return classes.train(classes.Settings(**small)).losses
    if script == "deblur":
        import deblur

        return deblur.reconstruct(deblur.Settings(**small)).psnr
    import gpt

    return gpt.train(gpt.Settings(**small), gpt.make_text(2000, gpt.Settings.seed)).losses


@pytest.mark.parametrize("script", ["classes", "deblur", "gpt"])
def test_the_script_does_what_its_functions_do(run: Run, folder: Path, script: str) -> None:
    (expected,) = run(in_this_process, script, nprocs=1)
    assert numbers(alone(script, folder)) == pytest.approx(expected, abs=5e-4)  # as printed


# --- what single scripts say besides


def test_darcy_compares_numbers_of_workers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = start("darcy", "python", tmp_path, "--workers", "1", "2")
    assert "losses on 1 and 2 workers" in printed
    first, second = numbers(printed)[-2:]
    assert first == second


def test_deblur_gets_better_whole_and_in_parts(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = numbers(alone("deblur", folder))
    assert len(whole) == 3 and all(a < b for a, b in pairwise(whole))
    printed = start("deblur", "tessel", tmp_path, "--parts", "2", "1")
    assert numbers(printed) == pytest.approx(whole, abs=2e-3)
