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

from tessel.examples import classes, deblur, gpt

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.slow

SMALL: dict[str, dict[str, int]] = {
    "classes": {"classes": 1001, "features": 8, "steps": 4},
    "darcy": {"epochs": 1, "points": 16, "samples": 20},
    "deblur": {"size": 48, "iterations": 3},
    "gpt": {"dim": 16, "length": 16, "batch": 4, "steps": 4},
}
PICTURES = {
    "check": ("--output", "cleaned.png"),
    "classes": ("--output", "head.png"),
    "darcy": ("--out", "loss.png", "prediction.png"),
    "deblur": ("--output", "result.png"),
    "gpt": ("--output", "loss.png"),
}
LAUNCHED = {  # by which launcher, and with which options besides; each start imports torch thrice
    "check": [("tessel", "")],
    "classes": [("torchrun", "")],
    "darcy": [("tessel", ""), ("torchrun", "")],  # it asks who has started it
    "deblur": [("tessel", "--parts 2 1"), ("torchrun", "--deepinv")],
    "gpt": [("torchrun", "")],
}
LAUNCHERS = {
    "python": (),
    "tessel": ("-m", "tessel", "run", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def start(script: str, launcher: str, folder: Path, *more: str, draws: bool = True) -> str:
    """What an example prints; the pictures that it says it draws are there."""
    options = [str(each) for name, n in SMALL.get(script, {}).items() for each in (f"--{name}", n)]
    option, *pictures = PICTURES.get(script, ("",))
    if pictures and draws:
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
    for name in pictures if draws else ():
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


CASES = [
    (script, launcher, options)
    for script in SCRIPTS
    for launcher, options in [("python", ""), *LAUNCHED.get(script, [("tessel", "")])]
]


@pytest.mark.limit(230)
@pytest.mark.parametrize(("script", "launcher", "options"), CASES)
def test_the_script_runs(
    tmp_path: Path, folder: Path, script: str, launcher: str, options: str
) -> None:
    if script in PICTURES:
        pytest.importorskip("matplotlib")
    once = alone(script, folder)
    again = [] if launcher == "python" else options.split()
    printed = once if launcher == "python" else start(script, launcher, tmp_path, *again)
    assert numbers(printed), f"{script} does not say how it went:\n{printed}"
    limit = (
        0.5 if "--deepinv" in again else 2e-4
    )  # four digits, or two of a %; others at the border
    assert numbers(printed) == pytest.approx(numbers(once), abs=limit)
    workers = re.findall(r"^(\d+) workers?\b", printed, re.MULTILINE)
    assert set(workers) <= {"1" if launcher == "python" else "2"}
    if script in SMALL:
        said = "100.00%" if launcher == "python" else "50.05%"  # 501 of 1001 classes
        assert said in printed if script == "classes" else workers


def in_this_process(script: str) -> list[float]:
    """The numbers that a script should print."""
    small = SMALL[script]
    if script == "classes":
        return classes.train(classes.Settings(**small)).losses
    if script == "deblur":
        return deblur.run(deblur.Settings(**small)).psnr[1:]
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


def test_deblur_gets_better(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = numbers(alone("deblur", folder))
    assert len(whole) == 3 and all(a < b for a, b in pairwise(whole))


def test_check_names_the_module_that_is_wrong(tmp_path: Path) -> None:
    assert "bottom" in start("check", "tessel", tmp_path, "--wrong", draws=False)


def test_classes_takes_torchs_own_layers(tmp_path: Path, folder: Path) -> None:
    plain = numbers(start("classes", "python", tmp_path, "--whole"))
    assert plain == pytest.approx(numbers(alone("classes", folder)), abs=2e-4)
