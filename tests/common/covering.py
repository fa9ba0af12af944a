"""Fewer cases where all are too many: pairs of options, and the first of random ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from math import ceil
from typing import Any


def pairs(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of all combinations of options some, in which any two values of two options come together.

    Faults are of one option or of two that meet, as a rule. All combinations belong into one test;
    where the same code runs once more, on other workers or in another dtype, these are enough.
    """
    found = {
        case: {(a, case[a], b, case[b]) for a, b in combinations(range(len(case)), 2)}
        for case in product(*(range(len(each)) for each in options))
    }
    left = set().union(*found.values())
    assert left, "two options at least"
    chosen = []
    while left:
        chosen.append(max(found, key=lambda case: len(found[case] & left)))
        left -= found[chosen[-1]]
    return [tuple(options[k][i] for k, i in enumerate(case)) for case in sorted(chosen)]


def repeats(count: int) -> int:
    """How many of so many random cases are tried: all of them with TESSEL_TEST_FUZZ=1, or more.

    They are drawn one after the other from a seed: fewer are the first of more.
    """
    return ceil(count * float(os.environ.get("TESSEL_TEST_FUZZ", "0.25")))
