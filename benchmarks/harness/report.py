"""Reports: the table of a result, and its picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from harness.claim import TESSEL
from harness.results import CaseResult, Result
from harness.samples import MET, MISSED, NOISY, REPORTED, Comparison

COLOURS = {MET: "green", MISSED: "red", NOISY: "yellow", REPORTED: "blue"}
_SHADES = {MET: "#2a9d5c", MISSED: "#c8453b", NOISY: "#d9a441", REPORTED: "#5b7fa6"}


def quantity(value: float, unit: str) -> str:
    """A number with a unit that suits it."""
    if unit == "s":
        scales = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")]
    elif unit == "bytes":
        scales = [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")]
    else:
        return f"{value:.4g} {unit}"
    scale, name = next((each for each in scales if value >= each[0]), scales[-1])
    return f"{value / scale:.3g} {name}"


def ratio(value: float) -> str:
    """A ratio with two digits at least."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def tables(result: Result) -> list[Table]:
    """The ratios, and where Tessel's time goes."""
    split = [case for case in result.cases if case.parts.get(TESSEL)]
    return [_ratios(result), *([_parts(split)] if split else [])]


def _ratios(result: Result) -> Table:
    table = Table("case", title=f"{result.claim}: {result.title}")
    for heading in ("Tessel", "peer", "its median", "ratio", "ratio p5", "aim", "verdict"):
        table.add_column(heading, justify="left" if heading in ("peer", "verdict") else "right")
    for case in result.cases:
        mine = quantity(case.summaries[TESSEL].median, case.unit)
        for number, each in enumerate(case.comparisons):
            first = [case.name, mine] if number == 0 else ["", ""]
            table.add_row(*first, *_cells(case, each))
        if not case.comparisons:
            table.add_row(case.name, mine)
    return table


def _cells(case: CaseResult, each: Comparison) -> list[str]:
    colour = COLOURS[each.verdict]
    return [
        each.peer,
        quantity(case.summaries[each.peer].median, case.unit),
        ratio(each.median),
        ratio(each.p5),
        "–" if each.aim is None else f"{each.aim:.3g}",
        f"[{colour}]{each.verdict}[/{colour}]",
    ]


def _parts(cases: Sequence[CaseResult]) -> Table:
    table = Table("case", title="where Tessel's time goes, mean over the workers")
    names = list(cases[0].parts[TESSEL])
    for name in names:
        table.add_column(name, justify="right")
    for case in cases:
        spent = case.parts[TESSEL]
        table.add_row(case.name, *(quantity(spent[name], "s") for name in names))
    return table


def summary(result: Result) -> str:
    """One line on the machine, and one on the noise."""
    machine = result.machine
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}, "
        f"{machine['kernel']}, torch {machine['torch']}, {machine['MPI']}, {machine['date']}, "
        f"commit {machine['commit']}\n{result.rounds} rounds, {result.seconds:.0f} s, others used "
        f"{100 * result.others:.0f} % of the processors meanwhile: {result.verdict}"
    )


def picture(result: Result, folder: Path) -> Path:
    """Draw the ratios of each peer, a bar a case with its aim, into `<claim>.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = list(dict.fromkeys(c.peer for case in result.cases for c in case.comparisons))
    columns = max(1, len(peers))
    figure, panels = pyplot.subplots(
        1,
        columns,
        squeeze=False,
        sharey=True,
        figsize=(4.0 + 3.0 * columns, 1.8 + 0.24 * len(result.cases)),
        layout="constrained",
    )
    for peer, panel in zip(peers, panels[0], strict=False):
        _draw(panel, peer, result.cases)
    panels[0][0].set_yticks(
        range(len(result.cases)), [case.name for case in result.cases], fontsize=7
    )
    panels[0][0].set_ylim(len(result.cases) - 0.4, -0.6)
    how = "bar: ratio of medians, dot: of 5th percentiles, line: aim; less is better"
    about = [
        line for text in (f"{result.title} ({how})", summary(result)) for line in text.split("\n")
    ]
    wrapped = [part for line in about for part in textwrap.wrap(line, 45 * columns + 50)]
    figure.suptitle("\n".join(wrapped), fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.claim}.png"
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _draw(panel: object, peer: str, cases: Sequence[CaseResult]) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter

    assert isinstance(panel, Axes)
    found = [
        (place, each)
        for place, case in enumerate(cases)
        for each in case.comparisons
        if each.peer == peer
    ]
    for place, each in found:
        panel.barh(place, each.median, height=0.7, color=_SHADES[each.verdict])
        panel.plot(each.p5, place, marker="o", markersize=3, color="black")
        if each.aim is not None:
            panel.plot([each.aim] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5)
        panel.annotate(
            f" {ratio(each.median)}", (max(each.median, each.p5), place), va="center", fontsize=7
        )
    panel.set_xscale("log")
    panel.margins(x=0.2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    panel.axvline(1.0, color="grey", linewidth=0.5)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title(f"Tessel / {peer}", fontsize=8)
