"""Pictures of layouts: which worker stores which box, and what a move sends.

The pictures need matplotlib, which `pip install 'tessel[viz]'` installs. Every worker has its
colour. A tensor with one dimension is drawn as a bar, one with two as a plane; of a tensor with
more, the first two split dimensions are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import sqrt
from os import PathLike
from typing import TYPE_CHECKING, Any

from tessel.core import boxes
from tessel.core.boxes import Box
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.core.plan import plan, route
from tessel.operators.distributed import Distributed
from tessel.operators.explanation import Explanation, explain
from tessel.operators.picture import FAINT, INK, draw_steps
from tessel.operators.picture import new_figure as new_figure  # noqa: PLC0414
from tessel.operators.units import num_bytes as num_bytes  # noqa: PLC0414

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Point = tuple[float, float]

_COLOURS = (
    "#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE8866", "#44BB99",
    "#997700", "#99DDFF", "#BB5566", "#AAAA00",
)  # fmt: skip
_MOST_LABELLED_ARROWS = 8
_FILL = {"edgecolor": "white", "linewidth": 0.6, "alpha": 0.85}
_PILL = {"boxstyle": "round,pad=0.3,rounding_size=0.5", "facecolor": "white", "edgecolor": "none"}


def colour(worker: int) -> str:
    """The colour of a worker, the same in every picture."""
    return _COLOURS[worker % len(_COLOURS)]


def draw_layout(layout: Layout, ax: Axes | None = None, *, title: str = "") -> Axes:
    """Draw the box that each worker stores; overlapping boxes and copies are side by side.

    Args:
        layout: the layout.
        ax: the matplotlib axes to draw on; new ones by default.
        title: the title above the picture.

    >>> import tessel
    >>> from tessel.viz import draw_layout
    >>> layout = tessel.Layout.balanced(tessel.world(), (8,))
    >>> draw_layout(layout).figure.savefig("layout.png")  # doctest: +SKIP
    """
    # A separate figure, not pyplot's: the user's session does not change.
    axes = new_figure(4.8, 4.8).subplots() if ax is None else ax
    _Canvas(axes, _Paper(layout, _drawn_dims(layout)), title).show_owners()
    return axes


def mark_parts(ax: Axes, layout: Layout, dims: tuple[int, int]) -> None:
    """Mark the parts of the workers on an image.

    Args:
        ax: the matplotlib axes of the image.
        layout: the layout of a tensor that contains the image in two of its dimensions.
        dims: these dimensions, rows and columns.
    """
    from matplotlib.patches import Rectangle

    for worker in layout.partition.ranks:
        box = layout.box(worker)
        assert box is not None
        (top, bottom), (left, right) = (box[dim] for dim in dims)
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 2, "alpha": 0.45}
        corner, size = (left - 0.5, top - 0.5), (right - left, bottom - top)
        ax.add_patch(Rectangle(corner, *size, facecolor=colour(worker), **style))
        middle = ((left + right - 1) / 2, (top + bottom - 1) / 2)
        ax.text(*middle, f"worker {worker}", ha="center", va="center", color=INK, bbox=_PILL)


def draw_move(
    move: Move, path: str | PathLike[str] | None = None, *, element_size: int = 4
) -> Figure:
    """Draw a tensor before and after a move, with an arrow for everything that is sent.

    After the move, the colours of every box show which workers sent its content; stripes are sums.

    Args:
        move: the move.
        path: where to save the picture (PNG, PDF, SVG); it is only returned by default.
        element_size: the bytes of one element of the tensor.

    >>> import tessel
    >>> from tessel.viz import draw_move
    >>> layout = tessel.Layout.balanced(tessel.world(), (8,))
    >>> figure = draw_move(tessel.Move(layout, layout), "move.png")  # doctest: +SKIP
    """
    figure = new_figure(10.5, 5.2)
    before, after = figure.subplots(1, 2, gridspec_kw={"wspace": 0.28})
    draw_exchange(before, after, move.domain, move.codomain, element_size=element_size)
    if path is not None:
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.3)
    return figure


def draw_plan(plan: Distributed | Explanation, path: str | PathLike[str] | None = None) -> Figure:
    """Draw the steps of a distributed operator: layouts, bytes, memory, times.

    Args:
        plan: the operator, or its explanation.
        path: where to save the picture (PNG, PDF, SVG); it is only returned by default.

    >>> import tessel, torch
    >>> from tessel.viz import draw_plan
    >>> F = tessel.distribute(tessel.ParDFT(torch.complex64, 8), [1])
    >>> figure = draw_plan(F, "plan.png")  # doctest: +SKIP
    """
    explanation = plan if isinstance(plan, Explanation) else explain(plan)
    if path is not None:
        explanation.save(path)
    return draw_steps(explanation.lines, explanation.costs, explanation.summary)


def draw_exchange(
    before: Axes,
    after: Axes,
    domain: Layout,
    codomain: Layout,
    *,
    element_size: int = 4,
    titles: tuple[str, str] = ("before", "after"),
) -> None:
    """Draw the move from `domain` to `codomain` on two axes; the workers need not exist.

    Args:
        before: the axes for the domain.
        after: the axes for the codomain.
        domain: the layout of the tensor before the move.
        codomain: the layout after the move.
        element_size: the bytes of one element of the tensor.
        titles: the titles of the two.
    """
    dims = _drawn_dims(domain, codomain)
    start = _Canvas(before, _Paper(domain, dims), titles[0])
    end = _Canvas(after, _Paper(codomain, dims), titles[1])
    pieces = list(_SentPiece.all_of(domain, codomain))
    moved = [piece for piece in pieces if piece.giver != piece.taker]
    start.show_owners()
    for piece in moved:
        start.mark(piece.giver, piece.box)
    end.show_origins(pieces)
    # With a halo, neighbours exchange what both hold afterwards: one drawing shows it.
    has_halo = domain.partition == codomain.partition and all(
        wide[0] <= own[0] and own[1] <= wide[1]
        for worker in domain.partition.ranks
        for own, wide in zip(domain.box(worker) or (), codomain.box(worker) or (), strict=True)
    )
    _draw_arrows(end if has_halo else start, end, moved, element_size)
    # The messages of the route, which may have several stages.
    sizes = [
        element_size * sent.numel
        for worker in {*domain.partition.ranks, *codomain.partition.ranks}
        for exchange in route(domain, codomain, worker)
        for sent in exchange.gives
    ]
    end.caption(_summary(sizes))


@dataclass(frozen=True)
class _SentPiece:
    """A box of the global tensor that one worker takes from another."""

    giver: int
    taker: int
    box: Box

    @classmethod
    def all_of(cls, domain: Layout, codomain: Layout) -> Iterator[_SentPiece]:
        """The pieces that all workers take in a move, including those of their own boxes."""
        for taker in codomain.partition.ranks:
            box = codomain.box(taker)
            assert box is not None
            for taken in plan(domain, codomain, taker).takes:
                spans = zip(box, taken.region, strict=True)
                part = tuple((at + region.start, at + region.stop) for (at, _), region in spans)
                yield cls(taken.peer, taker, part)


def _summary(sizes: Sequence[int]) -> str:
    """The number and the sizes of messages, in words.

    >>> _summary([4096, 4096, 512])
    '3 messages, 8.5 KiB in all: 2 of 4 KiB, 1 of 512 B'
    """
    if not sizes:
        return "nothing is sent"
    total = f"{len(sizes)} messages, {num_bytes(sum(sizes))} in all"
    counts = Counter(sizes).most_common()
    if len(counts) > 3:
        return total
    return total + ": " + ", ".join(f"{count} of {num_bytes(size)}" for size, count in counts)


def _drawn_dims(*layouts: Layout) -> tuple[int, ...]:
    """The one or two dimensions to draw: split ones have priority."""
    dims = range(len(layouts[0].shape))
    split = [d for d in dims if any(len(layout.cuts[d].intervals) > 1 for layout in layouts)]
    chosen = [*split, *(d for d in dims if d not in split)][:2]
    return tuple(sorted(chosen))


class _Paper:
    """The positions of a layout's boxes on paper: side by side in order, each copy separately.

    The longest dimension is one unit long, the other at least a third of it.
    """

    def __init__(self, layout: Layout, dims: tuple[int, ...]) -> None:
        self.layout, self.dims = layout, dims
        longest = max((layout.shape[d] for d in dims), default=0) or 1
        self.scales = [max(1 / longest, 1 / (3 * max(layout.shape[d], 1))) for d in dims]
        disjoint = all(boxes.disjoint(layout.cuts[d].intervals) for d in dims)
        self.gap = 0.02 if disjoint else 0.11  # boxes that overlap are drawn apart
        used = {axis for d in dims for axis in layout.cuts[d].axes}
        self.copy_axes = [axis for axis in range(layout.partition.dim) if axis not in used]

    @cached_property
    def starts(self) -> list[list[float]]:
        """For each drawn dimension, the starts of its intervals and the end of their row."""
        return [
            [0.0, *accumulate(scale * (b - a) + self.gap for a, b in self.layout.cuts[d].intervals)]
            for d, scale in zip(self.dims, self.scales, strict=True)
        ]

    @cached_property
    def size(self) -> tuple[float, float]:
        """Height and width of one copy."""
        lengths = [starts[-1] - self.gap for starts in self.starts] or [1.0]
        return (lengths[0], lengths[1]) if len(lengths) == 2 else (1 / 6, lengths[0])

    @cached_property
    def extent(self) -> tuple[float, float]:
        """Height and width of everything."""
        spans = [self.rectangle(worker) for worker in self.layout.partition.ranks]
        return max(y + h for _, y, _, h in spans), max(x + w for x, _, w, _ in spans)

    def rectangle(self, worker: int, part: Box | None = None) -> tuple[float, float, float, float]:
        """Left, top, width and height of a worker's box, or of a part of it."""
        coordinates = self.layout.partition.coordinates(worker)
        assert coordinates is not None
        places = self.layout.places(coordinates)
        at = [starts[places[d]] for d, starts in zip(self.dims, self.starts, strict=True)]
        top, left = at if len(at) == 2 else (0.0, *(at or [0.0]))
        # The number of copies in a row makes the drawing about square; 3 gaps between them, so that
        # copies are further apart than the boxes of one.
        across = self.size[1] + 3 * self.gap
        down = self.size[0] + 3 * self.gap
        count = self._copy([size - 1 for size in self.layout.partition.shape]) + 1
        in_a_row = max(1, round(sqrt(count * self.size[0] / max(self.size[1], 1e-9))))
        rows = len(self.layout.partition.ranks)
        row, column = boxes.unravel(self._copy(coordinates), (rows, in_a_row))
        top, left = top + row * down, left + column * across
        own = self.layout.box(worker) or ()
        part = own if part is None else part
        spans = [
            (scale * (part[d][0] - own[d][0]), scale * (part[d][1] - part[d][0]))
            for d, scale in zip(self.dims, self.scales, strict=True)
        ]
        if len(spans) < 2:  # a bar
            spans = [(0.0, self.size[0]), *(spans or [(0.0, 1.0)])]
        (down, height), (right, width) = spans
        return left + right, top + down, width, height

    def _copy(self, coordinates: Sequence[int]) -> int:
        sizes = [self.layout.partition.shape[axis] for axis in self.copy_axes]
        return boxes.ravel([coordinates[axis] for axis in self.copy_axes], sizes)

    def middle(self, worker: int, part: Box) -> _Point:
        """The middle of a part of a worker's box."""
        left, top, width, height = self.rectangle(worker, part)
        return left + width / 2, top + height / 2


class _Canvas:
    """Axes on which a layout is drawn."""

    def __init__(self, ax: Axes, paper: _Paper, title: str) -> None:
        self.ax, self.paper = ax, paper
        height, width = (length or 1.0 for length in paper.extent)  # also of an empty tensor
        ax.set_xlim(0, width)
        ax.set_ylim(height, 0)
        ax.set_aspect("equal")
        ax.axis("off")
        ax.set_title(title, color=INK, fontsize=12, pad=10)
        ax.apply_aspect()  # the axes get their final place, in which names are fitted

    def show_owners(self) -> None:
        """Paint every worker's box in its colour."""
        for worker in self.paper.layout.partition.ranks:
            self._add(self.paper.rectangle(worker), facecolor=colour(worker), **_FILL)
            self._name(worker)

    def show_origins(self, pieces: Iterable[_SentPiece]) -> None:
        """Paint every worker's box in the colours of the workers that sent it."""
        # Small pieces are drawn over large ones, so that both are visible.
        large_first = sorted(pieces, key=lambda p: (p.taker, -boxes.volume(p.box), p.box))
        for (taker, box), group in groupby(large_first, key=lambda p: (p.taker, p.box)):
            givers = [piece.giver for piece in group]
            left, top, width, height = self.paper.rectangle(taker, box)
            stripe = width / len(givers)  # one stripe for each term of a sum
            for k, giver in enumerate(givers):
                place = (left + k * stripe, top, stripe, height)
                self._add(place, facecolor=colour(giver), **_FILL)
        for worker in self.paper.layout.partition.ranks:
            frame = self.paper.rectangle(worker)
            self._add(frame, fill=False, edgecolor=colour(worker), linewidth=3, clip_on=False)
            self._name(worker)

    def mark(self, worker: int, part: Box) -> None:
        """Draw a dashed line around a part that leaves a worker."""
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.2, "linestyle": (0, (4, 3))}
        self._add(self.paper.rectangle(worker, part), fill=False, **style)

    def caption(self, text: str) -> None:
        """Write a line below the drawing."""
        style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 9.5, "color": FAINT}
        style |= {"xycoords": "axes fraction", "xytext": (0, -12), "textcoords": "offset points"}
        self.ax.annotate(text, (0.5, 0), **style)

    def _add(self, rectangle: tuple[float, float, float, float], **style: Any) -> None:
        from matplotlib.patches import Rectangle

        left, top, width, height = rectangle
        if width and height:
            self.ax.add_patch(Rectangle((left, top), width, height, **style))

    def _name(self, worker: int) -> None:
        """Write the worker's number and the shape of its tensor into its box, if they fit."""
        left, top, width, height = self.paper.rectangle(worker)
        if not (width and height):
            return
        wide, newline = width > 2 * height, "\n"
        shape = "×".join(map(str, self.paper.layout.shape_on(worker)))
        texts = (f"worker {worker}{'  ' if wide else newline}{shape}", f"worker {worker}")
        # Points on paper; a character of this size is about 5.4 wide and 12 high.
        corners = self.ax.transData.transform([(0, 0), (width, height)])
        across, down = abs(corners[1] - corners[0]) * 72 / self.ax.figure.dpi
        text = str(worker)
        for longer in reversed(texts):
            lines = longer.split("\n")
            if max(map(len, lines)) * 5.4 + 14 < across and len(lines) * 12 + 8 < down:
                text = longer
        at = (left + width / 2, top + (0.25 if wide else 0.5) * height)
        _write(self.ax, at, text, fontsize=9 if len(text) > 3 else 7)


def _write(ax: Axes, at: _Point, text: str, **style: Any) -> None:
    """Write on a white label, above the arrows, which belong to the figure."""
    style |= {"ha": "center", "va": "center", "color": INK, "bbox": _PILL, "zorder": 7}
    ax.figure.text(at[0], at[1], text, transform=ax.transData, **style)


def _draw_arrows(
    start: _Canvas, end: _Canvas, moved: Sequence[_SentPiece], element_size: int
) -> None:
    """Draw an arrow for each piece, in the colour of its sender; those of one sender fan out."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import ConnectionPatch
    from matplotlib.patheffects import Normal, withStroke

    for giver, group in groupby(sorted(moved, key=lambda p: p.giver), key=lambda p: p.giver):
        pieces = list(group)
        ink = [0.6 * part for part in to_rgb(colour(giver))]  # darker than the boxes it crosses
        for k, piece in enumerate(pieces):
            bend = 0.28 if start is end else 0.1 * ((len(pieces) - 1) / 2 - k)
            tail = start.paper.middle(giver, piece.box)
            head = end.paper.middle(piece.taker, piece.box)
            start.ax.plot(*tail, "o", markersize=4.5, color="white", zorder=6)
            arrow = ConnectionPatch(
                tail,
                head,
                start.ax.transData,
                end.ax.transData,
                arrowstyle="-|>,head_length=0.5,head_width=0.25",
                connectionstyle=f"arc3,rad={bend}",
                mutation_scale=12,
                linewidth=1.5,
                color=ink,
                path_effects=[withStroke(linewidth=3.5, foreground="white"), Normal()],
                zorder=5,
            )
            # On the figure, not on one of the axes, which would clip it.
            end.ax.figure.add_artist(arrow)
            if len(moved) <= _MOST_LABELLED_ARROWS and start is not end:
                label = num_bytes(element_size * boxes.volume(piece.box))
                _write(end.ax, _between(start.ax, end.ax, tail, head, bend), label, fontsize=8)


def _between(before: Axes, after: Axes, tail: _Point, head: _Point, bend: float) -> _Point:
    """The point where an arrow crosses the middle between two drawings, in axes of the second."""
    (x0, y0), (x2, y2) = before.transData.transform(tail), after.transData.transform(head)
    # matplotlib's arc3 is the quadratic curve with this point in the middle
    x1, y1 = (x0 + x2) / 2 + bend * (y2 - y0), (y0 + y2) / 2 - bend * (x2 - x0)
    middle = (before.transAxes.transform((1, 0))[0] + after.transAxes.transform((0, 0))[0]) / 2
    curve = [
        (
            (1 - t) ** 2 * x0 + 2 * t * (1 - t) * x1 + t**2 * x2,
            (1 - t) ** 2 * y0 + 2 * t * (1 - t) * y1 + t**2 * y2,
        )
        for t in (k / 100 for k in range(101))
    ]
    x, y = after.transData.inverted().transform(min(curve, key=lambda p: abs(p[0] - middle)))
    return float(x), float(y)
