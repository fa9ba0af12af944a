"""Heads in shards, solvers, recomputed blocks, empty parts, attention: on CPUs and by NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kinds_of_models import CHECKS, check_all
from test_nccl_ranks import SECONDS, over_nccl


@pytest.mark.parametrize("check", CHECKS)
def test_on_cpus(run: Callable[..., list[Any]], check: Callable[[str], None]) -> None:
    run(check, "cpu", nprocs=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.limit(SECONDS + 20.0)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_on_nccl(nprocs: int) -> None:
    over_nccl(check_all, nprocs, "cuda")
