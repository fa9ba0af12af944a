"""What tests of the transport share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import stress
from tessel.testing.pool import WorkerPool


@pytest.fixture
def in_new_job(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`in_new_job(fn, *args, nprocs=2, timeout=60, engine="python")`: with TESSEL_ENGINE and such.

    A job reads these variables when it begins: so the workers leave the one that they are in.
    """

    def run(
        fn: Callable[..., Any], *args: Any, nprocs: int, timeout: float, **settings: str
    ) -> list[Any]:
        for name, value in settings.items():
            monkeypatch.setenv(f"TESSEL_{name.upper()}", value)
        pool.run(stress.leave_job, nprocs=nprocs)
        return pool.run(fn, *args, nprocs=nprocs, timeout=timeout)

    return run
