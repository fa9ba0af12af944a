"""Window arithmetic for authors of layers, on top of `tessel.core.windows`."""

from __future__ import annotations

from tessel.core.windows import Window


class PoolingMixin:
    """The inputs that an output of a pool reads.

    A pool's window is not centred: its origin is its first entry. Indices are global; those below
    zero and beyond the end are in the padding.

    >>> from tessel.nn.mixins import PoolingMixin
    >>> PoolingMixin().window_range(4, kernel_size=3, stride=2, padding=1, dilation=1)
    (7, 9)
    """

    def leftmost_input_index(
        self, output: int, kernel_size: int, stride: int, padding: int = 0, dilation: int = 1
    ) -> int:
        """The leftmost input index that an output index reads."""
        return Window(kernel_size, stride, dilation, padding).first(output)

    def rightmost_input_index(
        self, output: int, kernel_size: int, stride: int, padding: int = 0, dilation: int = 1
    ) -> int:
        """The rightmost input index that an output index reads."""
        return Window(kernel_size, stride, dilation, padding).last(output)

    def window_range(
        self, output: int, kernel_size: int, stride: int, padding: int = 0, dilation: int = 1
    ) -> tuple[int, int]:
        """The leftmost and rightmost input index that an output index reads."""
        window = Window(kernel_size, stride, dilation, padding)
        return window.first(output), window.last(output)
