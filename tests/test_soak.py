"""The short form of `make soak`: a case of each kind that is over in seconds."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools/soak.py"
SHORT = ("movements", "models", "bad calls", "raise", "kill", "resumed solver")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.limit(300)
def test_a_short_soak_is_right() -> None:
    cases = [word for name in SHORT for word in ("--case", name)]
    done = subprocess.run(
        [sys.executable, str(TOOL), "--minutes=0", "--seed=7", "--workers=2", *cases],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "misfortunes were over" in done.stdout


def test_verdicts_are_counted_by_their_kind() -> None:
    kind_of = runpy.run_path(str(TOOL))["kind_of"]
    texts = ("right", "wrong: 1 is not 2", "hung: no end", "slow to end: 50 s", "unlike errors: …")
    assert [kind_of(text) for text in texts] == [text.partition(":")[0] for text in texts]
    assert kind_of("something else") == "wrong"
