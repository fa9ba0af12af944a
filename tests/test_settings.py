"""Environment variables: each is right, or named in one sentence; misspelt ones warn.

Tests `settings.py`, `limits.py`.
"""

import datetime
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tessel
from tessel import settings
from tessel.cli import main
from tessel.imaging import DistributedContext
from tessel.operators.rates import known_machine

SOURCE = Path(__file__).parents[1] / "src" / "tessel"


@pytest.mark.parametrize("said", ["abc", "0", "-5", "1e999", "-inf", "nan", "1e-9", "1e300", "5 s"])
def test_time_limits_that_are_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TIMEOUT", said)
    text = f"TESSEL_TIMEOUT must be a number of seconds from 0.001 to 1e+09, got '{said}'"
    with pytest.raises(ValueError, match=re.escape(text)):
        settings.time_limit()


@pytest.mark.parametrize(("said", "seconds"), [("5", 5), (" 2.5 ", 2.5), ("1e3", 1000), ("", None)])
def test_time_limits(said: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TIMEOUT", said)
    expected = None if seconds is None else datetime.timedelta(seconds=seconds)
    assert settings.time_limit() == expected


@given(said=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12))
def test_any_text_is_a_limit_or_refused(said: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSEL_TIMEOUT", said)
        try:
            limit = settings.time_limit()
        except ValueError as error:
            assert str(error).endswith(f"got {said!r}")
        else:
            assert limit is None or limit.total_seconds() > 0
        patch.setenv("LOCAL_RANK", said)
        try:
            assert settings.whole_number("LOCAL_RANK", 0) >= 0
        except ValueError as error:
            assert "LOCAL_RANK must be a whole number of 0 or more" in str(error)


@pytest.mark.parametrize(
    "name",
    ["TESSEL_TIMEOUT", "TESSEL_TRANSPORT", "TESSEL_ENGINE", "TESSEL_ALLOCATOR", "TESSEL_CHECK"],
)
def test_run_refuses_nonsense_before_any_worker_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(SystemExit) as end:
        main(["run", "-n", "1", __file__])
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"{name} must be " in said and "got 'nonsense'" in said


def test_the_debug_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_DEBUG", "yes")
    with pytest.raises(ValueError, match="TESSEL_DEBUG must be one of 0, 1, got 'yes'"):
        DistributedContext()


def test_the_machine_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSEL_MACHINE", str(tmp_path))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        known_machine()
    for content in (b"\xff\xfe", b"[" * 100000, b'{"rates": 1}', b'{"cores": 1e999, "rates": []}'):
        (tmp_path / "file").write_bytes(content)
        monkeypatch.setenv("TESSEL_MACHINE", str(tmp_path / "file"))
        with pytest.raises(ValueError, match="is not a machine model"):
            known_machine()


def test_misspelt_variables_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("TESSEL_TIMEUOT", "5")
    monkeypatch.setenv("TESSEL_TEST_OWN", "5")
    with pytest.warns(UserWarning, match="TESSEL_TIMEUOT; did you mean TESSEL_TIMEOUT"):
        settings.warn_of_unknown()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.warn_of_unknown()
        monkeypatch.setattr(settings, "_warned", set())
        monkeypatch.setenv("RANK", "1")  # the first worker says it
        settings.warn_of_unknown()


def test_only_one_module_reads_our_variables() -> None:
    """And it knows all that are read, and that the documents name."""
    reads = re.compile(r"environ(?:\.get\(|\[)\"TESSEL_|getenv\(\"TESSEL_")
    assert [p.name for p in SOURCE.rglob("*.py") if reads.search(p.read_text())] == []
    pages = [*SOURCE.rglob("*.py"), *(SOURCE.parents[1] / "docs").rglob("*.md")]
    named = {n for p in pages for n in re.findall(r"\bTESSEL_[A-Z]+\b", p.read_text())}
    assert named - {"TESSEL_EXAMPLE"} <= {*settings.KNOWN}


# --- arrays of numpy, which would multiply themselves with an operator, element by element


def test_operators_take_arrays() -> None:
    F = tessel.ParDFT(torch.complex128, 4)
    x = np.arange(4) + 0j
    want = F * torch.from_numpy(x)
    for array in (x, x[::-1][::-1], np.arange(8)[::2] // 2 + 0j):
        found = F * array
        assert isinstance(found, torch.Tensor) and torch.equal(found, want)
        assert torch.equal(F(array), want)
    reverse = F * x[::-1]
    assert torch.equal(reverse, F * torch.from_numpy(x).flip(0))
    assert torch.equal((np.float32(2) * F) * x, 2 * want)
    assert torch.equal((np.int64(2) * F) * x, 2 * want)
    with pytest.raises(TypeError, match="an array cannot be multiplied by"):
        x * F
    with pytest.raises(TypeError, match="take arrays of real or complex numbers"):
        F * np.array(["a", "b", "c", "d"])
    with pytest.raises(ValueError):
        F * np.arange(3.0)
