"""Strong scaling: the same work on more and more workers of one thread, beside torch's threads.

Training steps of a 3-D U-Net, a ResNet-18 and a Fourier neural operator, and a Fourier transform,
on 1, 2, 4, … workers up to the number of cores, in slabs and in blocks; torch itself has as many
threads as there are workers. Values are checked by the scripts that have these steps. The curves
are drawn into `scaling-curves.png`, with the ideal line of each.

    python benchmarks/scaling.py [--rounds 2] [--least 1] [--most 16] [--quick] [--only TEXT]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fft
import fno
import training
from harness.claim import TESSEL, Case, Claim, Settings
from harness.command import QUICK_RESULTS, RESULTS, parser, run
from harness.contenders import InOneProcess, OnWorkers
from harness.results import Result

from tessel.machine import usable_cores

THREADS = "torch, P threads"
APART = "nothing exchanged"  # P processes that train torch's own model, each on its part
SCRIPTS: dict[str, Any] = {"training": training, "fft": fft, "fno": fno}
# By name: the script that has the step, its settings, and for some numbers of workers other grids
# than slabs: blocks, and where there is a batch the grid that `tessel plan --model` names.
WORK: dict[str, tuple[str, Settings, dict[int, list[list[int]]]]] = {
    "3-D U-Net 128×96×96": (
        "training",
        {"model": "UNet", "shape": [1, 1, 128, 96, 96]},
        {8: [[1, 1, 2, 2, 2]], 16: [[1, 1, 4, 2, 2]]},
    ),
    "ResNet-18 8×512²": (
        "training",
        {"model": "ResNet18", "shape": [8, 3, 512, 512]},
        {8: [[1, 1, 4, 2], [8, 1, 1, 1]], 16: [[1, 1, 4, 4], [8, 1, 2, 1]]},
    ),
    "FFT 256³ complex64": ("fft", {"length": 256, "dtype": "complex64"}, {}),
    "FNO 96³, width 16": ("fno", {"size": 96, "width": 16, "modes": 8, "blocks": 4}, {}),
}


def by_tessel(settings: Settings) -> Callable[[], object]:
    made: Callable[[], object] = SCRIPTS[settings["script"]].by_tessel(settings)
    return made


def by_torch(settings: Settings) -> Callable[[], object]:
    made: Callable[[], object] = SCRIPTS[settings["script"]].by_torch(settings)
    return made


def cases(least: int, most: int) -> list[Case]:
    found = []
    for name, (script, given, others) in WORK.items():
        for workers in (1 << k for k in range(most.bit_length())):
            if workers < least:
                continue
            for grid in (None, *others.get(workers, [])):
                settings = {"script": script, "work": name, **given}
                text = "slabs" if grid is None else "×".join(map(str, grid))
                if script == "fft":
                    settings["grid"] = [workers, 1, 1]
                elif grid is not None:
                    settings["grid"] = grid
                full = workers == most
                found.append(
                    Case(
                        f"{name}, {workers} × {text}",
                        workers,
                        settings,
                        aims={THREADS: 1.0} if full else {},
                        seconds=0.2,
                        most=3,
                    )
                )
    return found


def claim(least: int, most: int) -> Claim:
    return Claim(
        "scaling",
        "the same work on more and more workers of one thread, beside torch's threads",
        cases(least, most),
        [
            OnWorkers(TESSEL, by_tessel, split=True),
            InOneProcess(THREADS, by_torch),
            OnWorkers(APART, by_torch, covers=lambda case: case.settings["script"] == "training"),
        ],
        rounds=2,
        note="float32; the efficiency on P workers is the time of one over P times that of P.",
    )


def draw(result: Result, folder: Path) -> Path:
    """Seconds over the number of workers, of each work, with the ideal line from one worker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(case.settings["work"] for case in result.cases))
    figure, panels = pyplot.subplots(
        1, len(names), squeeze=False, figsize=(3.4 * len(names), 3.4), layout="constrained"
    )
    for name, panel in zip(names, panels[0], strict=True):
        here = [case for case in result.cases if case.settings["work"] == name]
        slabs = [case for case in here if case.name.endswith("slabs")]
        others = [case for case in here if case not in slabs]
        numbers = [case.workers for case in slabs]
        alone = slabs[0].summaries[TESSEL].median * slabs[0].workers
        panel.plot(numbers, [alone / n for n in numbers], ":", color="#888888", label="ideal")
        for text, given, who, style, colour in (
            ("Tessel, slabs", slabs, TESSEL, "o-", "#1f6fb4"),
            ("Tessel, other grids", others, TESSEL, "s", "#2a9d5c"),
            (THREADS, slabs, THREADS, "o-", "#d9822b"),
        ):
            if given:
                times = [case.summaries[who].median for case in given]
                where = [case.workers for case in given]
                panel.plot(where, times, style, color=colour, label=text)
        panel.set(xscale="log", yscale="log", title=name, xlabel="workers, or threads")
        panel.set_xticks(numbers, [str(n) for n in numbers])
        panel.minorticks_off()
    panels[0][0].set_ylabel("seconds")
    panels[0][0].legend(fontsize=8)
    path = folder / "scaling-curves.png"
    figure.savefig(path, dpi=110)
    return path


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--most", type=int, default=usable_cores(), help="the most workers")
    options.add_argument("--least", type=int, default=1, help="the fewest workers")
    given = options.parse_args()
    code = run(claim(given.least, given.most), given)
    if code == 0:
        is_short = given.quick or given.only
        folder = given.output or (QUICK_RESULTS if is_short else RESULTS)
        print("drawn", draw(Result.load(folder / "scaling.json"), folder))
    return code


if __name__ == "__main__":
    sys.exit(main())
