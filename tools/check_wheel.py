"""Prove an installed Tessel: two workers compute what one process computes.

`python tools/check_wheel.py --compiled` fails where a compiled part is missing, as builders of
wheels want it; without the option both kinds pass. Run it outside of the source tree, or it proves
that.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import torch

import tessel


def mean_gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of a tensor whose rows are split, and the gradient of its weight."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(1, 2, 3, padding=1).double()
    y = layer(tessel.spread(x, grid))
    y.square().mean().backward()
    assert layer.weight.grad is not None
    return y.full().detach(), layer.weight.grad


def main() -> None:
    parts = ("tessel.transport.engine", "tessel.tensor.loops")
    compiled = all(map(importlib.util.find_spec, parts))
    print(f"tessel {tessel.__version__} in {tessel.__file__}, {'' if compiled else 'not '}compiled")
    if "--compiled" in sys.argv[1:] and not compiled:
        raise SystemExit("a part is missing: its compiler failed, see the log of the build")
    x = torch.arange(42, dtype=torch.float64).reshape(1, 1, 7, 6).sin()
    (alone,), several = tessel.launch(mean_gradient, 1, x), tessel.launch(mean_gradient, 2, x)
    for found in several:
        for value, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    said = subprocess.run(
        [sys.executable, "-m", "tessel", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said == f"tessel {tessel.__version__}\n", said
    print("two workers compute what one process computes")


if __name__ == "__main__":
    main()
