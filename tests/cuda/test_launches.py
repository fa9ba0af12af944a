"""What a training step asks of a GPU, as benchmarks/launches.py counts it.

Tests `nn/convert.py`, `core/move.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tessel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind tests/common
import launches

SECONDS = 200.0
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(2 * SECONDS + 20.0),
]


@pytest.mark.parametrize(("name", "most_nccl"), [("ResNet-18", 86), ("3-D U-Net", 42)])
def test_a_step_of_a_model(name: str, most_nccl: int) -> None:
    (case,) = (each for each in launches.MODELS if each.startswith(name))
    found = [
        tessel.launch(
            launches.on_worker,
            workers,
            case,
            workers == 1,
            timeout=SECONDS,
            backend="cpu:gloo,cuda:nccl",
        )[0][0]
        for workers in (1, 2)
    ]
    alone, spread = found
    assert spread["waits"] == 0, found
    assert spread["NCCL"] <= most_nccl, found
    assert spread["launches"] <= 1.6 * alone["launches"], found
