"""Draw the pictures of the documentation anew, by running the examples on four workers.

`make pictures` runs it, which takes some minutes. It writes into docs/pictures, whose files are
small, so that the repository stays so: a picture of more than 150 kB is an error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import tessel
from tessel import Layout, viz

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000

RUN = (sys.executable, "-m", "tessel", "run", "-n", "4")
EXAMPLES = {
    "check": "--size 64 --steps 60",
    "classes": "",
    "deblur": "--parts 2 2",
    "gpt": "",
    "llama": "--length 2048 --steps 16",
    "segment": "--size 64 64 64 --steps 30",
    "vae": "--size 48",
}
NEEDS = {"llama": "transformers", "segment": "monai", "vae": "diffusers"}


def layouts() -> tuple[Layout, Layout, Layout]:
    """A tensor in rows, in tiles, and in tiles with halos, on four workers."""
    P = tessel.world()
    rows, tiles = (
        Layout.balanced(P.create_cartesian_topology_partition(shape), (64, 64))
        for shape in ((4, 1), (2, 2))
    )
    return rows, tiles, tiles.grow([(6, 6)] * 2)


def draw_movements() -> None:
    """What the first page shows: a repartition and a halo exchange, each before and after."""
    rows, tiles, grown = tessel.launch(layouts, 4)[0]
    for name, source, target, titles in (
        ("repartition", rows, tiles, ("each worker has rows …", "… and then a tile")),
        ("halo", tiles, grown, ("each worker has a tile …", "… and then what lies around it")),
    ):
        figure = viz.new_figure(10.5, 5.2)
        before, after = figure.subplots(1, 2, gridspec_kw={"wspace": 0.28})
        viz.draw_exchange(before, after, source, target, titles=titles)
        figure.savefig(PICTURES / f"{name}.png", dpi=80, bbox_inches="tight", pad_inches=0.1)


def run_examples() -> None:
    """The examples as users start them."""
    for name, options in EXAMPLES.items():
        if name in NEEDS and find_spec(NEEDS[name]) is None:
            print(f"{name}.png stays as it is: {NEEDS[name]} is not installed")
            continue
        output = ["--output", str(PICTURES / f"{name}.png")]
        subprocess.run([*RUN, f"examples/{name}.py", *options.split(), *output], check=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/darcy.py", "--workers", "1", "4", "--out", folder]
        subprocess.run(command, check=True)
        for name in ("loss", "prediction"):
            (PICTURES / f"darcy-{name}.png").write_bytes(Path(folder, f"{name}.png").read_bytes())


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    draw_movements()
    run_examples()
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.stat().st_size:8d} {path.relative_to(ROOT)}")
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path.name} is larger than {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
