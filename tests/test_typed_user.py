"""What `make types` checks as a user's code runs, too, on one worker and on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import typed_user

Run = Callable[..., list[Any]]


@pytest.mark.slow
def test_the_code_of_a_user_runs(run: Run) -> None:
    (alone,) = run(typed_user.main, nprocs=1)
    for found in run(typed_user.main, nprocs=2):
        assert found.keys() == alone.keys()
