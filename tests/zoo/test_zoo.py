"""Models of other packages do over workers what they do in one process.

`make zoo` runs this; no other command does. What is found is kept for the page `docs/zoo.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from entries import MOST_USED, Grid, ZooEntry, ZooResult, all_entries, examine, split_name
from zoo_page import PAGE, shortfalls

Run = Callable[..., list[Any]]

pytestmark = pytest.mark.zoo


def cases() -> Iterator[Any]:
    """Every entry on each of its grids, with the number of workers and a time limit."""
    for entry in all_entries():
        for grid, training in entry.splits():
            nprocs = 1
            for length in grid:
                nprocs *= length
            case = f"{entry.package}: {entry.name}, {split_name(grid, training)}"
            limit = pytest.mark.limit(entry.limit + 30)  # the pool's own limit comes first
            yield pytest.param(entry, grid, training, nprocs, id=case, marks=limit)


@pytest.mark.parametrize(("entry", "grid", "training", "nprocs"), list(cases()))
def test_a_model_is_exact(
    run: Run, entry: ZooEntry, grid: Grid, training: bool, nprocs: int
) -> None:
    pytest.importorskip(entry.package, reason=f"{entry.package} is not installed: make zoo")
    name = (entry.package, entry.name, grid, training)
    try:
        result = run(examine, *name, nprocs=nprocs, timeout=entry.limit)[0]
    except TimeoutError:
        ZooResult(entry.package, entry.name, split_name(grid, training), "late").save()
        raise
    result.save()
    if entry.raises:
        assert result.verdict == "raises" and entry.raises in result.said, result.said
        return
    assert result.verdict == "exact", result.said
    gathered = {*result.gathered}
    assert gathered <= entry.gathers, f"gathers {sorted(gathered)}"
    assert result.error <= entry.tolerance


def test_of_the_most_used_none_gathers() -> None:
    """In their entries, which `test_a_model_is_exact` holds them to, and on the page."""
    entries = {(each.package, each.name): each for each in all_entries()}
    assert len(MOST_USED) == len({*MOST_USED}) == 20
    for each in MOST_USED:
        assert not entries[each].gathers and not entries[each].raises, each
    assert "Of the 20 most used, none gathers:" in PAGE.read_text()


def test_every_entry_has_a_name_of_its_own_and_a_reason() -> None:
    names = [(each.package, each.name) for each in all_entries()]
    assert len(names) == len(set(names))
    for entry in all_entries():
        assert (entry.raises != "" or bool(entry.gathers)) == (entry.because != ""), entry.name


def test_of_all_models_the_page_has_95_percent_exact_and_none_wrong() -> None:
    text = PAGE.read_text()
    assert shortfalls(text) == []
    # what it would say
    assert len(shortfalls(text.replace("| ✓ |", "| **wrong** |", 1))) == 1
    assert len(shortfalls(text.replace("| ✓ |", "| late |", 1))) == 1
    assert len(shortfalls(re.sub(r"^(\| all \| \d+ \|) \d+", r"\1 3", text, flags=re.M))) == 1
