"""Boxes: integers against counting by hand.

Tests `core/boxes.py`.
"""

from __future__ import annotations

import ast
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessel.core import boxes

fast = settings(max_examples=200, derandomize=True, deadline=None, database=None)


def intervals(longest: int = 9) -> st.SearchStrategy[tuple[int, int]]:
    pair = st.tuples(st.integers(0, longest), st.integers(0, longest))
    return pair.map(lambda ends: (min(ends), max(ends)))


def indices(interval: tuple[int, int]) -> set[int]:
    return set(range(*interval))


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (10, 4, [3, 3, 2, 2]),
        (5, 4, [2, 1, 1, 1]),
        (2, 3, [1, 1, 0]),
        (0, 2, [0, 0]),
        (77, 3, [26, 26, 25]),
        (55, 4, [14, 14, 14, 13]),
        (7, 1, [7]),
    ],
)
def test_balanced_lengths(length: int, count: int, expected: list[int]) -> None:
    assert [stop - start for start, stop in boxes.balanced(length, count)] == expected


@fast
@given(st.integers(0, 50), st.integers(1, 12))
def test_balanced_is_torch_tensor_split(length: int, count: int) -> None:
    split = torch.arange(length).tensor_split(count)
    assert [list(range(*part)) for part in boxes.balanced(length, count)] == [
        part.tolist() for part in split
    ]


@fast
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_consecutive_fills_the_line(lengths: list[int]) -> None:
    found = boxes.consecutive(lengths)
    assert [i for part in found for i in range(*part)] == list(range(sum(lengths)))
    assert [stop - start for start, stop in found] == lengths


def test_consecutive_of_nothing() -> None:
    assert boxes.consecutive([]) == ()


@fast
@given(intervals(), intervals())
def test_overlap_is_the_intersection(a: tuple[int, int], b: tuple[int, int]) -> None:
    found = boxes.overlap(a, b)
    assert (set() if found is None else indices(found)) == indices(a) & indices(b)
    assert found is None or found[0] < found[1]


@fast
@given(intervals(), st.integers(0, 4), st.integers(0, 4), st.integers(9, 12))
def test_grow(interval: tuple[int, int], left: int, right: int, length: int) -> None:
    found = boxes.grow(interval, left, right, length)
    field = {i + d for i in indices(interval) for d in range(-left, right + 1)}
    assert indices(found) == field & set(range(length))
    if not indices(interval):
        assert found == interval


@fast
@given(st.lists(intervals(), max_size=4))
def test_disjoint(found: list[tuple[int, int]]) -> None:
    everything = [i for part in found for i in range(*part)]
    assert boxes.disjoint(found) == (len(everything) == len(set(everything)))


def test_shift() -> None:
    assert boxes.shift((2, 5), 3) == (5, 8)
    assert boxes.shift((2, 5), -2) == (0, 3)


@fast
@given(st.lists(intervals(5), max_size=3))
def test_extent_and_volume(box: list[tuple[int, int]]) -> None:
    assert boxes.extent(tuple(box)) == tuple(len(indices(part)) for part in box)
    assert boxes.volume(tuple(box)) == len(list(product(*map(indices, box))))


@st.composite
def part_of_box(draw: st.DrawFn) -> tuple[boxes.Box, boxes.Box]:
    """A box, and a part of it that is not empty."""
    part, box = [], []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, 3))
        length = draw(st.integers(1, 3))
        before, after = draw(st.integers(0, start)), draw(st.integers(0, 2))
        part.append((start, start + length))
        box.append((start - before, start + length + after))
    return tuple(part), tuple(box)


@fast
@given(part_of_box())
def test_within_finds_the_part(drawn: tuple[boxes.Box, boxes.Box]) -> None:
    part, box = drawn
    tensor = torch.arange(10 ** len(box)).reshape((10,) * len(box))  # digits are coordinates
    local = tensor[tuple(slice(*interval) for interval in box)]
    expected = tensor[tuple(slice(*interval) for interval in part)]
    assert torch.equal(local[boxes.within(part, box)], expected)


@fast
@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(1, 40))
def test_runs_are_consecutive_pieces(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    whole = tuple((0, length) for length in shape)
    pieces = [tensor[boxes.within(part, whole)] for part in boxes.runs(shape, limit)]
    assert all(piece.is_contiguous() and piece.numel() <= limit for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))


@fast
@given(st.lists(st.integers(1, 4), max_size=4))
def test_ravel_and_unravel(sizes: list[int]) -> None:
    for position, coordinates in enumerate(product(*map(range, sizes))):
        assert boxes.ravel(coordinates, sizes) == position
        assert boxes.unravel(position, sizes) == coordinates


def test_boxes_are_pure() -> None:
    """No tensors and no communication: nothing but the standard library is imported."""
    tree = ast.parse(Path(boxes.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    assert not [name for name in names if name.split(".")[0] in ("torch", "tessel", "numpy")]
