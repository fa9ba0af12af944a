"""Every script in examples/ runs unmodified, and says the same on one worker and on two.

A new example is found by itself. It runs without options, or with those that `SMALL` has for it;
what it prints after "loss", "error" or "PSNR" must be the same on any number of workers. One script
is a program of its own, in one process, which is started as users start it, and under `tessel run`;
the others run on the workers of the pool, which have the environment that torchrun gives.
"""

from __future__ import annotations

import importlib
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

from scripts import main_program, python
from tessel.examples import classes, deblur, gpt
from tessel.testing.pool import WorkerPool

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.slow

SMALL: dict[str, dict[str, int]] = {
    "accelerate_unet": {"epochs": 2},
    "classes": {"classes": 1001, "features": 8, "steps": 4},
    "darcy": {"epochs": 1, "points": 16, "samples": 20},
    "deblur": {"size": 48, "iterations": 3},
    "gpt": {"dim": 16, "length": 16, "batch": 4, "steps": 4},
    "lightning_unet": {"epochs": 2},
    "llama": {"length": 40, "steps": 3, "width": 16},
    "segment": {"steps": 2, "width": 12},
    "vae": {"size": 16},
}
PICTURES = {
    "check": ("--output", "cleaned.png"),
    "classes": ("--output", "head.png"),
    "darcy": ("--out", "loss.png", "prediction.png"),
    "deblur": ("--output", "result.png"),
    "gpt": ("--output", "loss.png"),
    "llama": ("--output", "losses.png"),
    "segment": ("--output", "segmented.png"),
    "vae": ("--output", "decoded.png"),
}
NEEDS = {
    "accelerate_unet": "accelerate",
    "lightning_unet": "lightning",
    "llama": "transformers",
    "segment": "monai",
    "vae": "diffusers",
}
MORE = {  # options besides, on two workers
    "accelerate_unet": ["--replicas 1", "--replicas 2"],
    "deblur": ["--parts 2 1", "--deepinv"],
    "lightning_unet": ["--replicas 1", "--replicas 2"],
}
STARTED = "darcy"  # by launchers: it asks who has started it
LAUNCHERS = {
    "python": (),
    "tessel": ("-m", "tessel", "run", "-n", "2"),
}


def arguments(script: str, folder: Path) -> list[str]:
    """Of a small run of an example, which draws its pictures into a folder."""
    options = [str(each) for name, n in SMALL.get(script, {}).items() for each in (f"--{name}", n)]
    option, *pictures = PICTURES.get(script, ("",))
    if pictures:
        options += [option, str(folder if len(pictures) > 1 else folder / pictures[0])]
    return [str(EXAMPLES / f"{script}.py"), *options]


def assert_drawn(script: str, folder: Path) -> None:
    for name in PICTURES.get(script, ("",))[1:]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def start(script: str, launcher: str, folder: Path, *more: str) -> str:
    """What an example prints that a user starts; the pictures that it says it draws are there."""
    words = *LAUNCHERS[launcher], *arguments(script, folder), *more
    env = {**os.environ, "COLUMNS": "200"}
    # in `folder`: what an example saves elsewhere does not stay
    if launcher == "python":  # its workers import its main module, and a fork has another
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=100
        )
    else:
        done = python(*words, cwd=folder, env=env, timeout=100)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    assert_drawn(script, folder)
    return done.stdout


def perform(run: Run, script: str, nprocs: int, folder: Path, *more: str) -> str:
    """What an example prints on workers of the pool; the pictures that it draws are there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        asked = str(folder), *arguments(script, folder), *more
        printed = "".join(run(main_program, *asked, nprocs=nprocs, timeout=100))
    assert_drawn(script, folder)
    return printed


def numbers(printed: str) -> list[float]:
    """What it says of its success, in the order of its steps."""
    found = re.findall(r"(?:loss|error|PSNR) +(\d+\.\d+(?:e[+-]\d+)?)", printed)
    return [float(each) for each in found]


Alone = Callable[[str], str]


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What a script prints in one process; each runs once."""

    @cache
    def printed(script: str) -> str:
        if script in PICTURES:
            pytest.importorskip("matplotlib")
        if script in NEEDS:
            pytest.importorskip(NEEDS[script])
        folder = tmp_path_factory.mktemp("alone")
        if script == STARTED:
            return start(script, "python", folder)
        return perform(pool.run, script, 1, folder)

    return printed


def assert_same(script: str, printed: str, once: str, nprocs: int, limit: float = 2e-4) -> None:
    """Four digits, or two of a percentage, and the number of workers."""
    assert numbers(printed), f"{script} does not say how it went:\n{printed}"
    assert numbers(printed) == pytest.approx(numbers(once), abs=limit)
    workers = re.findall(r"^(\d+) workers?\b", printed, re.MULTILINE)
    assert set(workers) <= {str(nprocs)}
    if script in SMALL:
        said = "100.00%" if nprocs == 1 else "50.05%"  # 501 of 1001 classes
        assert said in printed if script == "classes" else workers


@pytest.mark.limit(300)  # segment takes most of a minute on a machine that does nothing else
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_runs(run: Run, tmp_path: Path, alone: Alone, script: str) -> None:
    once = alone(script)
    assert_same(script, once, once, 1)
    for options in MORE.get(script, [""]) if script != STARTED else ():
        printed = perform(run, script, 2, tmp_path, *options.split())
        limit = 0.5 if "--deepinv" in options else 2e-4  # others at the border
        assert_same(script, printed, once, 2, limit)


@pytest.mark.limit(230)
def test_the_script_runs_under_tessel(tmp_path: Path, alone: Alone) -> None:
    assert_same(STARTED, start(STARTED, "tessel", tmp_path), alone(STARTED), 2)


def in_this_process(script: str) -> list[float]:
    """The numbers that a script should print."""
    small = SMALL[script]
    if script == "classes":
        return classes.train(classes.Settings(**small)).losses
    if script == "deblur":
        return deblur.run(deblur.Settings(**small)).psnr[1:]
    return gpt.train(gpt.Settings(**small), gpt.make_text(2000, gpt.Settings.seed)).losses


@pytest.mark.parametrize("script", ["classes", "deblur", "gpt"])
def test_the_script_does_what_its_functions_do(run: Run, alone: Alone, script: str) -> None:
    (expected,) = run(in_this_process, script, nprocs=1)
    assert numbers(alone(script)) == pytest.approx(expected, abs=5e-4)  # as printed


# --- what single scripts say besides


def test_darcy_compares_numbers_of_workers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = start("darcy", "python", tmp_path, "--workers", "1", "2")
    assert "losses on 1 and 2 workers" in printed
    first, second = numbers(printed)[-2:]
    assert first == second


def test_deblur_gets_better(alone: Alone) -> None:
    whole = numbers(alone("deblur"))
    assert len(whole) == 3 and all(a < b for a, b in pairwise(whole))


def test_check_names_the_module_that_is_wrong(run: Run, tmp_path: Path) -> None:
    script = str(EXAMPLES / "check.py")
    first, second = run(main_program, str(tmp_path), script, "--wrong", nprocs=2, timeout=100)
    assert "bottom" in first and not second
    assert not any(tmp_path.iterdir())  # nothing is drawn


def test_classes_takes_torchs_own_layers(run: Run, tmp_path: Path, alone: Alone) -> None:
    plain = numbers(perform(run, "classes", 1, tmp_path, "--whole"))
    assert plain == pytest.approx(numbers(alone("classes")), abs=2e-4)


def test_vae_decodes_a_film(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    printed = perform(run, "vae", 2, tmp_path, "--film")
    tiles, parts = numbers(printed)
    assert parts < 1e-12 and tiles > 0.01
    (share,) = re.findall(r"parts: at most (\d+)%", printed)
    assert int(share) < 60


def test_vae_has_weights_of_a_folder(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    vae = importlib.import_module("tessel.examples.vae").autoencoder(False)
    vae.decoder.conv_in.weight.data.mul_(2)
    vae.save_pretrained(tmp_path / "weights")
    theirs = numbers(perform(run, "vae", 2, tmp_path))
    ours = numbers(perform(run, "vae", 2, tmp_path, "--weights", str(tmp_path / "weights")))
    assert ours[1] < 1e-12 and ours[0] > 0.01
    assert ours[0] != theirs[0]  # of tiles, which depends on the weights


@pytest.mark.limit(230)
@pytest.mark.parametrize("film", [False, True])
def test_vae_decodes_in_a_third_of_the_memory(run: Run, tmp_path: Path, film: bool) -> None:
    pytest.importorskip("diffusers")
    printed = perform(run, "vae", 4, tmp_path, *["--size", "24"], *["--film"] * film)
    (share,) = re.findall(r"parts: at most (\d+)%", printed)
    assert int(share) <= 35  # 25 and 28 were measured
    tiles, parts = numbers(printed)
    assert parts < 1e-12 and tiles > 0.01  # relative, in float64; 1e-15 was measured
    (sent,) = re.findall(r"sent by each worker: (.+)", printed)
    assert all(float(each.split()[0]) > 0 for each in sent.split(", ")) and sent.count(",") == 3


def test_llama_learns_as_one_process_does(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = perform(run, "llama", 3, tmp_path)
    pairs = re.findall(r"loss (\d+\.\d+), in one process (\d+\.\d+)", printed)
    assert len(pairs) == 3
    for ours, theirs in pairs:
        assert float(ours) == pytest.approx(float(theirs), abs=2e-4)


@pytest.mark.limit(300)
def test_segment_reads_files_in_parts(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("monai")
    segment = importlib.import_module("tessel.examples.segment")
    segment.write_volume(tmp_path, (64, 32, 32))
    files = [str(tmp_path / f"{name}.npy") for name in ("values", "labels")]
    once = numbers(perform(run, "segment", 1, tmp_path, "--volume", *files, "--parts-only"))
    printed = perform(run, "segment", 2, tmp_path, "--volume", *files)
    assert numbers(printed) == pytest.approx(once, abs=2e-4)
    (share,) = re.findall(r"memory: at most (\d+)%", printed)
    assert int(share) < 65
