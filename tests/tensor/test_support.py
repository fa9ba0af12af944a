"""The support matrix of the docs is what is found, and nothing in it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import FACTS, HEAD, PAGE, SECTIONS, WORKERS, agreed, find, table
from tessel.tensor.table import RULES

Run = Callable[..., list[Any]]

# earlier versions have fewer functions
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="the page is of torch 2.13")

_found: dict[str, list[Any]] = {}  # of each section, what the workers found


def found(run: Run, section: str) -> list[Any]:
    if section not in _found:
        _found[section] = run(find, section, nprocs=WORKERS, timeout=300)
    return _found[section]


@pytest.mark.slow
@pytest.mark.limit(330)  # some ten seconds, on a machine that does nothing else
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_says_what_is_found(run: Run, section: str) -> None:
    text = table(section, agreed(found(run, section)))
    assert text in PAGE.read_text(), f"docs/support.md is not what is found: make support\n{text}"


def test_the_page_has_these_sections() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == list(SECTIONS)


@pytest.mark.slow
@pytest.mark.limit(900)  # if no section was found before
def test_every_rule_of_the_table_has_a_row(run: Run) -> None:
    followed = {name for section in SECTIONS for name in found(run, section)[0][1]}
    missing = {*RULES} - FACTS - followed
    assert not missing, f"no row has {sorted(missing)}"
