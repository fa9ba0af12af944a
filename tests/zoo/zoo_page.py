"""The page of the zoo: a table of what `make zoo` found, package by package.

Only the sections of packages of which there are results are written anew: `make zoo PACKAGE=timm`
leaves the others as they are.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from pathlib import Path

from entries import FILES, MOST_USED, UsesResult, ZooResult

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

HEAD = """# Models of other packages

Models that nobody here wrote, converted as they are by [`distribute_module`](models.md) and
compared with one process: outputs, gradients of all parameters and of the input, and buffers after
two calls, in float64, with random weights. `make zoo` installs the packages, at the versions in
`pyproject.toml`, runs the models and writes this page; `tests/zoo/` has the entries.

- *split*: the number of parts of each dimension of the input (of pictures: batch, channels, height,
  width), and the mode of the model.
- **✓**: everything is equal to 1e-9 of the largest value of its tensor. Where models of diffusers,
  transformers and neuraloperator ask for single precision whatever their dtype is (norms, softmax,
  positions, losses), they get double. *error*: the largest one that was found, so relative.
- **raises**: on all workers, before anything wrong is computed; a note below the table says why.
- *sent*: what a worker sends in a step, forward and backward, most of which is gradients of weights
  where a model is as small as these are.
- *memory*: of the tensors that are alive at once in a step after `zero_grad()`, on the worker with
  most, relative to one process; parameters do not count. Activations are split. Gradients of
  weights are whole on every worker, and where inputs are as small as these are they may be most of
  it, as in a ResNet-18. While they are summed, those of up to 4 MiB that travel together take their
  memory twice, and a larger one up to twice while the next is computed, as
  [models](models.md#gradients-in-few-messages) says: that can make a worker's peak larger than that
  of one process.
- *gathered*: functions that have no rule, and compute with whole operands on every worker.
- *uses*: what users do with a model around its conversion, each compared with one process: states
  to a file and back; deepcopy and pickle; hooks of modules and of their outputs' gradients;
  `torch.utils.checkpoint` of the model in a lambda, of a module and of a function; averages;
  `torch.compile` of modules inside; autocast with a scaled loss; and steps with a scheduler and
  with gradients that are accumulated and clipped.
"""
USES = "All uses:"
TOOK = "One after the other, these take"
COLUMNS = ("model", "split", "exact", "error", "sent", "memory", "gathered")


def section(package: str, results: list[ZooResult]) -> str:
    """The table of a package, and notes."""
    notes: dict[str, int] = {}
    lines = [
        f"## {package}\n",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * 2}:-:|---:|---:|---:|---|",
    ]
    for each in results:
        exact = {"exact": "✓", "wrong": "**wrong**"}.get(each.verdict, each.verdict)
        if each.because:
            exact += f" ({notes.setdefault(each.because, len(notes) + 1)})"
        measured = not math.isnan(each.error)
        figures = [f"{each.error:.0e}", in_bytes(each.sent), f"{each.share:.0%}"]
        gathered = ", ".join(f"`{name}`" for name in each.gathered)
        cells = [each.name, each.split, exact, *(figures if measured else [""] * 3), gathered]
        lines.append(f"| {' | '.join(cells)} |")
    if notes:
        lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join([*lines, "", f"{TOOK} {sum(each.seconds for each in results):.0f} s.", ""])


def uses(results: list[UsesResult]) -> str:
    """How many models of a package go through all uses, and what the others cannot."""
    whole = sum(not each.failed for each in results)
    lines = [f"{USES} {whole} of {len(results)} models."]
    for each in results:
        for use in each.failed:
            because = each.unsupported.get(use, "**it fails**")
            lines.append(f"\n- {each.name}, {use.replace('_', ' ')}: {because}")
    return "\n".join([*lines, ""])


def in_bytes(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} MB"


def sections_of(text: str) -> dict[str, str]:
    """The sections of a page, by their packages."""
    parts = text.split("\n## ")[1:]
    return {each.partition("\n")[0]: f"## {each.rstrip()}\n" for each in parts}


def totals(sections: dict[str, str]) -> str:
    """Of each package: its models, those exact on all grids, those that gather nothing; seconds."""
    titles = ["package", "models", "exact", "gather nothing", "seconds"]
    rows = []
    for package, text in sections.items():
        found = [each.split(" | ") for each in text.splitlines() if each.startswith("| ")][1:]
        names = {row[0] for row in found}
        inexact = {row[0] for row in found if not row[2].startswith("✓")}
        gathering = {row[0] for row in found if "`" in row[-1]}
        seconds = map(int, re.findall(rf"^{TOOK} (\d+) s\.$", text, re.MULTILINE))
        counts = [len(names), len(names - inexact), len(names - inexact - gathering)]
        rows.append([package, *counts, sum(seconds)])
    if not all(TOOK in text for text in sections.values()):  # not known of all: no sum of them
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
    lines = [f"| {' | '.join(map(str, row))} |" for row in (titles, *rows)]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(titles) - 1)}", *lines[1:], ""])


def shortfalls(text: str) -> list[str]:
    """What the page does not show as it should: 95 % of models exact, and none wrong or late."""
    (row,) = re.findall(r"^\| all \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    models, exact = map(int, row)
    found = [] if exact >= 0.95 * models else [f"only {exact} of {models} models are exact"]
    rows = [each.split(" | ") for each in text.splitlines() if each.startswith("| ")]
    splits = [each for each in rows if len(each) == len(COLUMNS)]
    return found + [
        f"{each[0]}, {each[1]}: {each[2]}" for each in splits if re.match(r"\**wrong|late", each[2])
    ]


def most_used(sections: dict[str, str]) -> str:
    """What the table says of the twenty models that most people use."""
    gathering = [
        f"{package}'s {name}"
        for package, name in MOST_USED
        if f"| {name} | " not in sections.get(package, "")
        or any("`" in row for row in sections[package].splitlines() if row.startswith(f"| {name} "))
    ]
    names = "; ".join(
        f"of {package} "
        + " and ".join(f"*{name}*" for other, name in MOST_USED if other == package)
        for package in dict(MOST_USED)
    )
    verdict = "none gathers" if not gathering else f"these gather ({', '.join(gathering)})"
    return textwrap.fill(f"Of the {len(MOST_USED)} most used, {verdict}: {names}.", 100) + "\n"


def page(results: list[ZooResult], of_uses: list[UsesResult], before: str) -> str:
    """The text of the page; packages without results keep the sections that they have."""
    known = sections_of(before)
    for package in FILES:
        found = [each for each in results if each.package == package]
        if found:
            known[package] = section(package, found)
            found_uses = [each for each in of_uses if each.package == package]
            if found_uses:
                known[package] += f"\n{uses(found_uses)}"
    ordered = {package: known[package] for package in FILES if package in known}
    return "\n".join([HEAD, totals(ordered), most_used(ordered), *ordered.values()])


if __name__ == "__main__":
    text = PAGE.read_text() if PAGE.exists() else ""
    text = page(ZooResult.load_all(), UsesResult.load_all(), text)
    PAGE.write_text(text)
    if found := shortfalls(text):
        sys.exit("\n".join(found))
