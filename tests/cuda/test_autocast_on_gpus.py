"""Under autocast on GPUs functions give the dtypes of one process, which are others than on CPUs.

Tests `tensor/autocasting.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "tensor"))  # behind tests/common
from test_autocasting import SHARES, check_cases
from test_nccl_ranks import SECONDS, over_nccl


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.limit(SECONDS + 20.0)
@pytest.mark.parametrize("share", range(SHARES))
def test_all_functions_have_the_dtypes_of_one_process(share: int) -> None:
    over_nccl(check_cases, 2, "cuda", share)
