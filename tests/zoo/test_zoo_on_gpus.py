"""Models of other packages on GPUs: NCCL workers against one process, both on a GPU.

All entries that need two workers, of packages that are installed. Workers share a GPU if there are
not enough of them (`tests/cuda/test_nccl_ranks.py`).

Tests `nn/convert.py`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parents[1] / "cuda"))  # behind tests/common
from entries import FILES, UsesResult, ZooEntry, ZooResult, entries_of, examine
from test_nccl_ranks import over_nccl
from test_uses_of_models import AloneError, check_uses, grid_of

WORKERS = 2
# Torch itself raises: cuDNN computes no gradients in evaluation mode, and some entries make tensors
# with the model, which stay on the CPU.
NOT_THERE = "raises in one process"
POOLS = "MetaFormer, pooling (PoolFormer)"  # see `torch_pools_rightly`
SHARES = 3  # tests of a package, each with some of its entries
SECONDS = 570.0
pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(SECONDS + 20.0),
]


def share_of(package: str, share: int) -> list[ZooEntry]:
    return entries_of(package)[share::SHARES]


def examine_share(package: str, share: int) -> list[ZooResult]:
    """Compare entries on each of their grids of two workers; what raises is a result, too."""
    return [
        examine(package, entry.name, grid, training, "cuda")
        for entry in share_of(package, share)
        for grid, training in entry.splits()
        if math.prod(grid) == WORKERS
    ]


def torch_pools_rightly() -> bool:
    """Whether the gradient of an average pool does not depend on where channels lie in memory."""
    x = torch.rand(1, 2, 5, 5, device="cuda")
    found = []
    for form in (torch.contiguous_format, torch.channels_last):
        part = x.clone(memory_format=form).requires_grad_()
        F.avg_pool2d(part, 3, 1, 1).square().sum().backward()
        assert part.grad is not None
        found.append(part.grad)
    return torch.allclose(*found)


def is_as_expected(result: ZooResult, entry: ZooEntry) -> bool:
    if NOT_THERE in result.said or (entry.name == POOLS and not torch_pools_rightly()):
        return True
    verdict = "raises" if entry.raises else "exact"
    return result.verdict == verdict and {*result.gathered} <= entry.gathers


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("package", FILES)
def test_models_are_exact(package: str, share: int) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make zoo")
    results = over_nccl(examine_share, WORKERS, package, share, timeout=SECONDS)[0]
    entries = {each.name: each for each in share_of(package, share)}
    wrong = [each for each in results if not is_as_expected(each, entries[each.name])]
    assert not wrong, "\n\n".join(f"{each.name}, {each.split}: {each.said}" for each in wrong)


def use_share(package: str, share: int) -> list[UsesResult]:
    """Put entries to all uses, where they are split over two workers."""
    found = []
    for entry in share_of(package, share):
        grid = grid_of(entry)
        if not entry.raises and math.prod(grid) == WORKERS:
            try:
                found.append(check_uses(package, entry.name, grid, "cuda"))
            except AloneError:  # torch itself does not compute its gradients there
                continue
    return found


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("package", FILES)
def test_models_remain_exact_in_use(package: str, share: int) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make zoo")
    results = over_nccl(use_share, WORKERS, package, share, timeout=SECONDS)[0]
    entries = {each.name: each for each in share_of(package, share)}
    failed = [
        f"{each.name}, {use}: {said}"
        for each in results
        for use, said in each.failed.items()
        if use not in entries[each.name].unsupported
        and (each.name != POOLS or torch_pools_rightly())
    ]
    assert not failed, "\n\n".join(failed)
