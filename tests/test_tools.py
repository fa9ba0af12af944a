"""tools/: what `make venv` does to the virtual environment that it made, and to nothing else.

And tests that must not be skipped, `tests/common/no_skips.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import scripts

pytestmark = pytest.mark.limit(400)  # imports of torch, which a busy disk makes slow
TOOL = Path(__file__).parents[1] / "tools" / "mend_torchvision.py"
MODULE = """
from . import extension
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets
"""
EXTENSION = """
import torch

def _has_ops():
    return False
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with the packages of `folder` before all others."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def make_torchvision(folder: Path, module: str) -> Path:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(module)
    extension = folder / "torchvision" / "extension.py"
    extension.write_text(EXTENSION)
    return extension


in_an_environment = pytest.mark.skipif(
    sys.prefix == sys.base_prefix, reason="runs in virtual environments only"
)


@pytest.mark.slow
@in_an_environment
def test_a_torchvision_without_its_operators_loads_once_mended(tmp_path: Path) -> None:
    extension = make_torchvision(tmp_path, MODULE)
    kept = tmp_path / "cache.py"
    os.link(extension, kept)  # as installers link a package to their cache
    done = python(tmp_path, str(TOOL))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert kept.read_text() == EXTENSION
    script = tmp_path / "script.py"  # by a process that has imported torch, but not torchvision
    script.write_text(
        "import torch, torchvision; print('loaded'); x = torch.ones(1)\n"
        "assert torchvision.__file__.startswith(__file__.removesuffix('script.py'))\n"
        "torch.ops.torchvision.nms(x, x, 0.5)"
    )
    done = scripts.python(script)
    assert done.stdout == "loaded\n" and "NotImplementedError" in done.stderr
    mended = extension.read_text()
    assert python(tmp_path, str(TOOL)).returncode == 0 and extension.read_text() == mended


@in_an_environment
def test_another_failure_is_told_and_nothing_changed(tmp_path: Path) -> None:
    extension = make_torchvision(tmp_path, "raise ImportError('no such thing')")
    done = python(tmp_path, str(TOOL))
    assert done.returncode == 0 and "no such thing" in done.stderr
    assert extension.read_text() == EXTENSION
    assert {each.name for each in extension.parent.iterdir()} == {"__init__.py", "extension.py"}


def test_outside_of_a_virtual_environment_nothing_is_changed(tmp_path: Path) -> None:
    extension = make_torchvision(tmp_path, MODULE)
    code = (
        "import sys, runpy; sys.prefix = sys.base_prefix; "
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    done = python(tmp_path, "-c", code, str(TOOL))
    assert done.returncode == 1 and "not in a virtual environment" in done.stderr
    assert extension.read_text() == EXTENSION


@pytest.mark.slow
def test_deepinv_is_imported_plainly_here() -> None:
    done = python(Path(__file__).parent, "-W", "error::UserWarning", "-c", "import deepinv")
    assert done.returncode == 0, f"{done.stderr}\nrun `make venv` again"


SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="no network")
def test_of_mark(): pass

def test_of_call(): pytest.skip("no card")

@pytest.mark.xfail
def test_that_fails(): assert False

def test_that_runs(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "passes", "counts", "said"),
    [
        ("", True, "1 passed, 3 skipped, 1 xfailed", "no library"),
        ("test_other", True, "1 passed, 3 skipped, 1 xfailed", "no library"),
        ("of_call|that", False, "1 failed, 1 passed, 2 skipped, 1 xfailed", "no card"),
        ("test_some", False, "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error", "no network"),
        ("test_library", False, "1 error", "no library"),
    ],
)
def test_tests_that_must_not_be_skipped(
    tmp_path: Path, pattern: str, passes: bool, counts: str, said: str
) -> None:
    (tmp_path / "test_some.py").write_text(SKIPPED)
    (tmp_path / "test_library.py").write_text(
        'import pytest\npytest.skip("no library", allow_module_level=True)\n'
    )
    common = Path(__file__).parent / "common"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no_skips", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(common), "TESSEL_TEST_NO_SKIPS": pattern},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (ended.returncode == 0) is passes, ended.stdout
    assert counts in ended.stdout and said in ended.stdout
    assert (f"TESSEL_TEST_NO_SKIPS={pattern} says that it must run" in ended.stdout) is not passes
