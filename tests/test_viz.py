"""Pictures of layouts and movements: no box hides another, and every movement can be drawn.

Tests `viz.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.core.partition import world
from tessel.viz import _drawn_dims as drawn_dims
from tessel.viz import _Paper as Paper
from tessel.viz import draw_layout, draw_move

Run = Callable[..., list[Any]]


def layouts() -> Iterator[Layout]:
    """Layouts of every kind on four workers: bars, planes, three dimensions, copies, halos."""
    P = world()
    grids = {shape: P.create_cartesian_topology_partition(shape) for shape in GRIDS}
    yield Layout.balanced(P, (10,))
    yield Layout.balanced(P, (10,)).grow([(3, 3)])
    yield Layout.balanced(P, (3,))
    yield Layout.whole(P, (6, 4))
    yield Layout.balanced(grids[4, 1], (8, 6))
    yield Layout.balanced(grids[2, 2], (8, 6)).grow([(1, 2), (2, 1)])
    yield Layout.balanced(grids[1, 2, 2], (3, 6, 400))
    yield Layout.balanced(grids[2, 2, 1], (0, 6, 4))


GRIDS: list[tuple[int, ...]] = [(4, 1), (2, 2), (1, 2, 2), (2, 2, 1)]


def places_on_paper() -> list[list[tuple[float, float, float, float]]]:
    return [
        [Paper(layout, drawn_dims(layout)).rectangle(worker) for worker in range(4)]
        for layout in layouts()
    ]


def test_no_box_is_drawn_over_another(run: Run) -> None:
    for places in run(places_on_paper, nprocs=4)[0]:
        for (x, y, w, h), (u, v, s, t) in itertools.combinations(places, 2):
            apart = x + w <= u or u + s <= x or y + h <= v or v + t <= y
            assert apart or not (w and h and s and t)


def draw_all(folder: str) -> list[str]:
    every = list(layouts())
    pairs = [(a, b) for a in every for b in every if a.shape == b.shape]
    texts = []
    for k, (a, b) in enumerate(pairs):
        figure = draw_move(Move(a, b), f"{folder}/{k}.png" if world().rank == 0 else None)
        texts.append(figure.axes[1].texts[-1].get_text())
        draw_layout(a, figure.axes[0], title="again")
    return texts


@pytest.mark.slow
def test_every_move_can_be_drawn(run: Run, tmp_path: Path) -> None:
    captions = run(draw_all, str(tmp_path), nprocs=4)[0]
    pictures = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem))
    assert len(captions) == len(pictures) == 12
    assert captions[0] == "nothing is sent"
    assert captions[1] == "8 messages, 68 B in all: 3 of 12 B, 3 of 8 B, 2 of 4 B"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.filterwarnings("error")
def test_a_layout_of_nothing_is_drawn_without_a_warning() -> None:
    axes = draw_layout(Layout.whole(world(), (0, 5)))
    assert axes.get_ylim() == (1.0, 0.0) and not axes.patches
