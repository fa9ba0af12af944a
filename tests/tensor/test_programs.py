"""Random programs of 5 to 20 torch functions on spread tensors: results and gradients of torch.

Tests `tensor/table.py`, `tensor/call.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from covering import repeats
from programs import run_programs

COUNT = 60  # programs; `run_programs(first, count)` tries others


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4, 5, 6])
def test_random_programs(run: Callable[..., list[Any]], nprocs: int) -> None:
    for wrong in run(run_programs, 1000 * nprocs, repeats(COUNT), nprocs=nprocs, timeout=100):
        assert not wrong, "\n".join(wrong)
