"""Arguments of the command line: any of them are understood, or refused with exit code 2.

Tests `cli/run.py`, `cli/plan.py`, `cli/demo.py`, `cli/doctor.py`, `cli/bench.py`.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessel.cli import COMMANDS, build_parser, main

OPTIONS = [
    *("-n", "-m", "--threads", "--nnodes", "--rdzv-endpoint", "--rdzv-id", "--token-file", "--"),
    *("--shape", "--workers", "--help", "--measure", "--no-measure", "--list", "--version"),
]
words = st.sampled_from(OPTIONS) | st.text(max_size=8) | st.integers(-3, 2**70).map(str)


def outcome(act: Any) -> tuple[Any, str]:
    """What a command gives, or its exit code, and what it prints as errors."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(errors):
        try:
            return act(), errors.getvalue()
        except SystemExit as end:
            return end.code, errors.getvalue()


@settings(max_examples=150, deadline=None)
@given(argv=st.tuples(st.sampled_from([*COMMANDS, "", "absent"]), st.lists(words, max_size=6)))
def test_arguments_are_understood_or_refused(argv: tuple[str, list[str]]) -> None:
    parser = build_parser()
    found, errors = outcome(lambda: parser.parse_args([argv[0], *argv[1]]))
    assert found in (0, 2) or hasattr(found, "execute")
    assert "Traceback" not in errors and (found != 2 or "error: " in errors)


@settings(max_examples=60, deadline=None)
@given(argv=st.lists(words.filter(lambda word: not os.path.exists(word)), max_size=5))
def test_run_refuses_what_it_cannot_run(argv: list[str]) -> None:
    """The script is not there: nothing is started, and it is said why."""
    found, errors = outcome(lambda: main(["run", *argv, "absent-script.py"]))
    assert found in (0, 2) and "Traceback" not in errors  # 0 for --help
    assert found == 0 or "error: " in errors


@pytest.mark.parametrize("count", ["0", "-1", "1_0", "١", "1e3", "99999999999", " 2", ""])
@pytest.mark.parametrize("option", ["-n", "--threads", "--nnodes"])
def test_counts_are_whole_numbers(option: str, count: str) -> None:
    found, errors = outcome(lambda: main(["run", f"{option}={count}", __file__]))
    assert found == 2 and "expected 1 or more, got" in errors


def test_a_picture_needs_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "absent" / "plan.png"
    options = ["--shape=4,4", "--workers=2", f"--picture={target}"]
    found, errors = outcome(lambda: main(["plan", *options]))
    assert found == 2 and "tessel plan: " in errors and str(target) in errors


texts = st.text("0123456789,x -", max_size=6) | st.sampled_from(["64,64", "8", "4", "0,0", "-1"])


@settings(max_examples=40, deadline=None)
@given(shape=texts, workers=texts)
def test_plans_are_made_or_refused(shape: str, workers: str) -> None:
    found, errors = outcome(lambda: main(["plan", f"--shape={shape}", f"--workers={workers}"]))
    assert found in (0, 1, 2) and "Traceback" not in errors
