"""The support matrix of the docs is what is found, and nothing in it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import FACTS, HEAD, IS_TESTED, PAGE, SECTIONS, WORKERS, agreed, find, table
from tessel.tensor.rules.pointwise import OF_ELEMENTS
from tessel.tensor.table import RULES

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(not IS_TESTED, reason="the page is of torch 2.13")


@pytest.mark.slow
@pytest.mark.limit(900)  # a minute or two, on a machine that does nothing else
def test_the_page_says_what_is_found_and_every_rule_has_a_row(run: Run) -> None:
    # one test: what is found is needed whole, and takes long
    found = {section: run(find, section, nprocs=WORKERS, timeout=300) for section in SECTIONS}
    page = PAGE.read_text()
    for section, results in found.items():
        text = table(section, agreed(results))
        assert text in page, f"docs/support.md is not what is found: make support\n{text}"
    followed = {name for results in found.values() for name in results[0][1]}
    # Operators, which code calls that bypasses torch's functions, are in test_torch_func.py.
    missing = {*RULES} - FACTS - followed - {OF_ELEMENTS}
    assert not missing, f"no row has {sorted(missing)}"


def test_the_page_has_these_sections() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    heads = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert heads == list(SECTIONS)
