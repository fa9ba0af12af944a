"""The support matrix of the docs is what is found, and nothing in it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import FACTS, PAGE, SECTIONS, WORKERS, find, gathered, page, wrongs
from tessel.tensor.table import RULES

Run = Callable[..., list[Any]]


@pytest.mark.limit(300)
def test_the_page_says_what_is_found(run: Run) -> None:
    results = [run(find, section, nprocs=WORKERS, timeout=100) for section in SECTIONS]
    found, followed = gathered(results)
    assert not wrongs(found), "\n".join(wrongs(found))
    assert not (missing := {*RULES} - FACTS - followed), f"no row has {sorted(missing)}"
    assert page(found) == PAGE.read_text(), "docs/support.md is not what is found: make support"
