"""Pictures of plans; they need matplotlib, which `pip install 'tessel[viz]'` brings along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tessel.operators.cost import Cost, ExplainedStep
from tessel.operators.units import num_bytes, num_flops, num_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LIGHT = "#22262e", "#6b7280", "#e5e7eb"  # of all pictures
_LOCAL, _TRANSFER = "#4477AA", "#EE6677"
_MOST_CUTS = 64  # the most cuts of a dimension that are drawn
_THICKNESS = 0.72  # the thickness of a row

_COLUMNS: tuple[tuple[str, Callable[[Cost], float], Callable[[float], str]], ...] = (
    ("operations", lambda cost: cost.flops, num_flops),
    ("bytes sent", lambda cost: cost.bytes_sent, num_bytes),
    ("peak memory", lambda cost: cost.memory, num_bytes),
    ("predicted time", lambda cost: cost.time, num_seconds),
)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, independent of matplotlib's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install 'tessel[viz]'"
        ) from error
    return Figure(figsize=(width, height), facecolor="white")


def draw_steps(
    lines: Sequence[ExplainedStep], costs: Sequence[Sequence[Cost]], summary: str
) -> Figure:
    """Draw steps from top to bottom: the layout of the tensor after each, and the costs.

    Every dimension is a bar with a gap at each cut; the part of the first worker is coloured. The
    bars of costs are those of the worker with the highest, the dark line in them marks the lowest.
    with the least.

    Args:
        lines: the steps.
        costs: for each step the cost of each worker.
        summary: what to write below.
    """
    figure = new_figure(15, 1.4 + 0.62 * max(1, len(lines)))
    widths = [1.7, *[1.0] * len(_COLUMNS)]
    axes = figure.subplots(1, len(widths), gridspec_kw={"width_ratios": widths, "wspace": 0.08})
    for ax in axes:
        ax.set_xlim(0, 1)
        ax.set_ylim(len(lines) - 0.4, -0.6)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.tick_params(length=0, labelsize=9, labelcolor=INK)
        for spine in ax.spines.values():
            spine.set_visible(False)
    _draw_layouts(axes[0], lines)
    for ax, (title, value, write) in zip(axes[1:], _COLUMNS, strict=True):
        ax.set_title(title, color=INK, fontsize=10)
        values = [[value(cost) for cost in step] for step in costs]
        longest = max((max(step) for step in values), default=0) or 1
        for row, (line, step) in enumerate(zip(lines, values, strict=True)):
            most, least = max(step), min(step)
            ax.barh(row, 0.5 * most / longest, height=0.45, color=_colour(line), alpha=0.85)
            if least < most:  # workers differ: a mark for the one with the least
                at = 0.5 * least / longest
                ax.plot([at, at], [row - 0.22, row + 0.22], color=INK, linewidth=1.4)
            if most:
                text = write(most) if least == most else f"{write(least)} – {write(most)}"
                ax.text(0.5 * most / longest + 0.02, row, text, va="center", fontsize=8, color=INK)
    figure.text(0.5, 0.04, summary, ha="center", va="bottom", color=FAINT, fontsize=9.5)
    return figure


def _draw_layouts(layout: Axes, lines: Sequence[ExplainedStep]) -> None:
    """Draw a row for each step: the layout of the tensor after it."""
    labels = []
    for number, line in enumerate(lines, 1):
        title = line.title if len(line.title) <= 34 else line.title.replace(", ", ",\n", 1)
        labels.append(f"{number}  {title}\n{line.layout}")
    layout.set_yticks(range(len(lines)), labels)
    layout.set_title("layout after the step", color=INK, fontsize=10)
    for row, line in enumerate(lines):
        here = line.after
        height = _THICKNESS / max(1, len(here.shape))
        style: dict[str, Any] = {"height": 0.8 * height, "align": "edge"}
        first = here.box(here.partition.ranks[0])
        assert first is not None
        for dim, cut in enumerate(here.cuts):
            top = row - _THICKNESS / 2 + dim * height
            layout.barh(top, 0.9, left=0.02, color=LIGHT, **style)
            left, right = (0.02 + 0.9 * edge / here.shape[dim] for edge in first[dim])
            width = max(right - left, 0.003 * (right > left))
            layout.barh(top, width, left=left, color=_colour(line), **style)
            for start, _ in cut.intervals[1:] if len(cut.intervals) <= _MOST_CUTS else ():
                at = 0.02 + 0.9 * start / here.shape[dim]
                layout.plot([at, at], [top, top + 0.8 * height], color="white", linewidth=1)


def _colour(line: ExplainedStep) -> str:
    return _TRANSFER if line.is_transfer else _LOCAL
