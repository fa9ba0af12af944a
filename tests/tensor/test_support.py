"""The support matrix of the docs is what is found, and nothing in it is wrong.

Tests `tensor/table.py`, `tensor/gathering.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import FACTS, HEAD, IS_TESTED, PAGE, SECTIONS, find_all, table
from tessel.tensor.rules.pointwise import OF_ELEMENTS
from tessel.tensor.table import RULES

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(not IS_TESTED, reason="the page is of torch 2.13")


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests note which rules were followed, in whichever process of this run they are."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "followed rules"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.slow
@pytest.mark.limit(300)  # half of a minute at most, on a machine that does nothing else
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_says_what_is_found_and_every_rule_has_a_row(
    run: Run, followed: Path, section: str
) -> None:
    lines, followed_here = find_all(run, section)
    text = table(section, lines)
    assert text in PAGE.read_text(), f"docs/support.md is not what is found: make support\n{text}"
    note = followed / f"{list(SECTIONS).index(section)}.unfinished"
    note.write_text("\n".join(followed_here))
    note.rename(note.with_suffix(".txt"))
    notes = list(followed.glob("*.txt"))
    if len(notes) == len(SECTIONS):  # the section that is done last answers for all
        names = {name for each in notes for name in each.read_text().split("\n")}
        # Operators, which code calls that bypasses torch's functions, are in test_torch_func.py.
        # Functions of lists are those of each tensor: they are in rules/test_lists.py.
        of_lists = {name for name in RULES if name.startswith("_foreach_")}
        missing = {*RULES} - FACTS - names - {OF_ELEMENTS} - of_lists
        assert not missing, f"no row has {sorted(missing)}"


def test_the_page_has_these_sections() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == list(SECTIONS)
