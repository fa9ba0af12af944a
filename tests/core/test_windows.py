"""Windows: which inputs each output reads, against sliding a window over a tensor of indices.

Tests `core/windows.py`, `nn/mixins.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from tessel.core.windows import (
    AdaptiveWindow,
    Groups,
    Mirrored,
    TransposedWindow,
    Window,
    reads,
)
from tessel.nn.mixins import PoolingMixin
from windowed_cases import read_by

Numbers = tuple[int, int, int, int]  # kernel, stride, dilation, padding


def settings(count: int, seed: int) -> Iterator[tuple[int, Numbers]]:
    """Random lengths and windows."""
    rng = Random(seed)
    for _ in range(count):
        numbers = rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 3)
        yield rng.randint(1, 40), numbers


def slid(length: int, kernel: int, stride: int, dilation: int, padding: int) -> torch.Tensor:
    """The indices that each output reads, in order, also those in the padding."""
    indices = torch.arange(-padding, length + padding)
    return indices.unfold(0, dilation * (kernel - 1) + 1, stride)[:, ::dilation]


def test_a_window_reads_what_a_sliding_window_covers() -> None:
    """First and last index of every output, and the hull of every interval of outputs."""
    checked = 0
    for length, numbers in settings(300, 1):
        kernel, _, dilation, padding = numbers
        if dilation * (kernel - 1) + 1 > length + 2 * padding:
            continue
        window, table = Window(*numbers), slid(length, *numbers)
        for output, places in enumerate(table.tolist()):
            assert (window.first(output), window.last(output)) == (places[0], places[-1])
        for start, stop in intervals(len(table)):
            part = table[start:stop]
            assert window.hull((start, stop)) == (int(part.min()), int(part.max()) + 1)
            checked += 1
    assert checked > 2000


def intervals(length: int, most: int = 12) -> Iterator[tuple[int, int]]:
    """All non-empty intervals of the first `most` outputs."""
    limit = min(length, most)
    return ((a, b) for a, b in product(range(limit), range(1, limit + 1)) if a < b)


def test_the_mixin_counts_as_a_sliding_window_does() -> None:
    """`PoolingMixin` gives the left- and rightmost index of each output, in global indices."""
    mixin = PoolingMixin()
    for length, numbers in settings(300, 2):
        kernel, stride, dilation, padding = numbers
        if dilation * (kernel - 1) + 1 > length + 2 * padding:
            continue
        for output, places in enumerate(slid(length, *numbers).tolist()):
            asked = output, kernel, stride, padding, dilation
            assert mixin.leftmost_input_index(*asked) == places[0]
            assert mixin.rightmost_input_index(*asked) == places[-1]
            assert mixin.window_range(*asked) == (places[0], places[-1])


def test_the_mixin_has_the_defaults_of_a_pool() -> None:
    assert PoolingMixin().window_range(3, 2, 2) == (6, 7)
    assert issubclass(tessel.nn.DistributedPoolingBase, PoolingMixin)


def test_reads_are_the_hull_of_all_indices_within_the_tensor() -> None:
    """What outputs read is clipped to the tensor, and empty where they see padding only."""
    for length, numbers in settings(300, 3):
        kernel, stride, dilation, padding = numbers
        if dilation * (kernel - 1) + 1 > length + 2 * padding:
            continue
        count = (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        sets = read_by(length, kernel, stride, padding, dilation, count)
        for start, stop in intervals(count, 8):
            window = Window(*numbers)
            got = reads(window, (start, stop), length)
            found = set().union(*sets[start:stop])
            if found:
                assert got[0] <= min(found) and max(found) < got[1]
                assert got[0] >= 0 and got[1] <= length
            if stride <= kernel and dilation == 1 and found:
                assert got == (min(found), max(found) + 1)
            if dilation == 1 and stride <= kernel and not found:
                assert got[0] == got[1]


def test_empty_outputs_read_nothing() -> None:
    for start in range(4):
        assert reads(Window(3, 2, 1, 1), (start, start), 9) == (0, 0)
        assert reads(None, (start, start), 9) == (0, 0)
    assert reads(None, (2, 5), 9) == (2, 5)


def test_transposed_windows_read_the_inputs_that_torch_writes_to_their_outputs() -> None:
    """Found by where the values of single inputs arrive in torch's transposed convolution."""
    for length, (kernel, stride, dilation, padding) in settings(150, 4):
        length = min(length, 12)
        size = (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        if size < 1:
            continue
        each = torch.eye(length).unsqueeze(1)
        weight = torch.ones(1, 1, kernel)
        written = F.conv_transpose1d(each, weight, None, stride, padding, 0, 1, dilation)[:, 0]
        window = TransposedWindow(kernel, stride, dilation, padding)
        for start, stop in intervals(size, 10):
            sources = written[:, start:stop].sum(1).nonzero().flatten().tolist()
            got = reads(window, (start, stop), length)
            assert all(got[0] <= source < got[1] for source in sources)
            if dilation == 1 and kernel >= stride and sources:
                assert got == (min(sources), max(sources) + 1)
        for start, stop in intervals(length, 8):
            targets = written[start:stop].sum(0).nonzero().flatten().tolist()
            first, last = window.writes((start, stop))
            assert all(first <= target < last for target in targets)


def test_adaptive_windows_are_torchs() -> None:
    """Found by which outputs of torch's adaptive pool see a single input."""
    for inputs, outputs in product(range(1, 13), range(1, 13)):
        seen = F.adaptive_avg_pool1d(torch.eye(inputs).unsqueeze(1), outputs)[:, 0]
        for start, stop in intervals(outputs):
            places = seen[:, start:stop].sum(1).nonzero().flatten().tolist()
            got = AdaptiveWindow(inputs, outputs).hull((start, stop))
            assert got == (places[0], places[-1] + 1)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_read_the_inputs_that_a_grouped_convolution_reads(groups: int) -> None:
    """Found by which outputs of torch's grouped convolution see a single input channel."""
    for per_in, per_out in product(range(1, 4), range(1, 4)):
        inputs, outputs = groups * per_in, groups * per_out
        weight = torch.ones(outputs, per_in, 1)
        seen = F.conv1d(torch.eye(inputs).unsqueeze(-1), weight, groups=groups)[:, :, 0]
        for start, stop in intervals(outputs, 20):
            places = seen[:, start:stop].sum(1).nonzero().flatten().tolist()
            got = Groups(groups, inputs, outputs).hull((start, stop))
            assert got == (places[0], places[-1] + 1)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_mirrored_windows_read_what_torch_pads(mode: str) -> None:
    """Found by torch's own padding of a tensor of indices."""
    checked = 0
    for length, (kernel, stride, dilation, padding) in settings(300, 5):
        if mode == "reflect" and padding >= length:
            continue
        indices = torch.arange(length, dtype=torch.float64)[None]
        padded = F.pad(indices, (padding, padding), mode)[0].long()
        span = dilation * (kernel - 1) + 1
        if span > len(padded):
            continue
        rule = Mirrored(Window(kernel, stride, dilation, padding), length, mode)
        windows = padded.unfold(0, span, stride)
        for output, places in enumerate(windows.tolist()):
            assert rule.places((output, output + 1)) == places
        for start, stop in intervals(len(windows), 6):
            covered = padded[start * stride : (stop - 1) * stride + span].tolist()
            assert rule.places((start, stop)) == covered
            assert rule.hull((start, stop)) == (min(covered), max(covered) + 1)
            checked += 1
    assert checked > 500
