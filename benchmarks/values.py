"""Whether two ways to compute something give the same values, and what memory one needs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tessel.testing import count_memory


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


def peak(step: Callable[[], object]) -> int:
    """The most bytes of tensors that a step creates and has at once."""
    step()  # what is kept between calls is there
    with count_memory() as memory:
        step()
    return memory.peak
