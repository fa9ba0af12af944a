"""Whether two ways to compute something give the same values."""

from __future__ import annotations

from torch import Tensor


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless the largest difference is at most this share of the largest
    value that is expected."""
    assert found.shape == expected.shape, f"{what}: {found.shape} is not {expected.shape}"
    if expected.numel() == 0:
        return
    difference = float((found.detach() - expected.detach()).abs().max())
    largest = float(expected.detach().abs().max())
    assert difference <= tolerance * largest, (
        f"{what} is wrong by {difference:.1e}, where the largest value is {largest:.1e}"
    )
