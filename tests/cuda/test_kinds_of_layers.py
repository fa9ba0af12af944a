"""All layers of `tessel.nn`, losses, recurrences, operators, imaging: on CPUs and by NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from kinds_of_layers import CHECKS, LOSSES, check_all, layer_cases
from test_nccl_ranks import SECONDS, over_nccl


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_on_cpus(run: Callable[..., list[Any]], check: Callable[[str], None], nprocs: int) -> None:
    run(check, "cpu", nprocs=nprocs)


def test_all_layers_are_there() -> None:
    """Whatever `tessel.nn` has of torch's names is in a list."""
    tried = {case.name for case in layer_cases(1)} | {name for name, _ in LOSSES} | {"Linear"}
    names = {name.removeprefix("Distributed") for name in dir(tessel.nn) if "Distributed" in name}
    others = {"BatchNorm", "InstanceNorm", "PoolingBase"}  # of any dimensions; what pools share
    assert names - tried == others


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.limit(SECONDS + 20.0)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_on_nccl(nprocs: int) -> None:
    over_nccl(check_all, nprocs, "cuda")
