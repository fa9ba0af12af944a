"""The walks of docs/architecture.md: how many functions of Tessel a call enters, in how many files.

`python tests/test_walks.py` prints them; with a name, the functions of that walk, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from tessel import nn
from tessel.examples import deblur
from tessel.imaging import DistributedContext, solvers

ROOT = Path(__file__).parents[1]
SOURCE = str(Path(tessel.__file__).parent) + "/"
# what is no function of its own from Python 3.12 on
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
CALLS = 20
Walk = set[tuple[str, str]]  # files and functions


class Profile:
    """Notes the functions of Tessel that are entered between `begin` and `end`."""

    def __init__(self) -> None:
        self.walk: Walk = set()

    def begin(self) -> None:
        self.walk = set()
        sys.setprofile(self._note)

    def end(self) -> Walk:
        sys.setprofile(None)
        return self.walk

    def _note(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(SOURCE)
        if is_ours and not code.co_qualname.endswith(COMPREHENSIONS):
            file = code.co_filename.removeprefix(SOURCE)
            # the examples are a user's own code
            if not file.startswith("examples/"):
                self.walk.add((file, code.co_qualname))


def walked(call: Callable[[], object]) -> Walk:
    """The shortest of some calls: in others a message has not come yet, which is waited for."""
    profile, found = Profile(), []
    for _ in range(3):
        call()  # the first ones make plans and agree
    for _ in range(CALLS):
        profile.begin()
        call()
        found.append(profile.end())
    return min(found, key=len)


def calls() -> Iterator[tuple[str, Walk]]:
    """The walks of this worker, by name."""
    torch.set_num_threads(1)
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 1))
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    x = tessel.spread(torch.randn(1, 3, 16, 16), P)
    yield "convolution", walked(lambda: F.conv2d(x, weight, padding=1))
    large = tessel.spread(torch.randn(1, 3, 512, 512), P)
    yield "overlapped", walked(lambda: F.conv2d(large, weight, padding=1))
    layer, part = nn.DistributedConv2d(P, 3, 4, 3, padding=1), torch.randn(1, 3, 8, 16)
    yield "layer", walked(lambda: layer(part))
    factors = (tessel.ParDFT(torch.complex64, n) for n in (8, 6))
    operator = tessel.distribute(tessel.kron(*factors), [2, 1], "anywhere")
    rows = torch.randn(4, 6, dtype=torch.complex64)
    yield "transform", walked(lambda: operator * rows)
    head, loss = nn.ParallelLinear(8, 6, dim=-1), nn.ParallelCrossEntropyLoss()
    features, labels = torch.ones(4, 8), torch.tensor([0, 1, 2, 3])
    logits = head(features)
    yield "head", walked(lambda: head(features))
    yield "loss", walked(lambda: loss(logits, labels))
    yield "both", walked(lambda: loss(head(features), labels))
    whole = deblur.Settings(size=32, iterations=CALLS, patch=16)
    for name, settings in (("step", whole), ("parts", replace(whole, parts=(2, 1)))):
        yield name, of_iterations(settings)


def of_iterations(settings: deblur.Settings) -> Walk:
    """The shortest of the iterations of a solver behind the third."""
    profile, found = Profile(), []

    def each(iteration: int, x: torch.Tensor) -> None:
        found.append(profile.end())
        profile.begin()

    with DistributedContext(seed=settings.seed, device_mode="cpu") as ctx:
        bundle = deblur.make_bundle(ctx, settings)
        method = solvers.PGD(bundle.data_fidelity, bundle.prior, step=settings.lr)
        profile.begin()
        solvers.solve(method, bundle.signal, max_iterations=settings.iterations, each=each)
        profile.end()
    return min(found[3:], key=len)


def walks() -> dict[str, Walk]:
    return dict(calls())


def told() -> dict[str, tuple[int, int]]:
    """What the page says of each walk."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    page = " ".join(page[page.index("## Four walks") : page.index("## Glossary")].split())
    numbers = re.findall(r"(\d+)(?: functions)? in (\d+)(?: files)?", page)
    names = ("convolution", "overlapped", "layer", "transform", "head", "loss", "both", "step")
    return {
        name: (int(functions), int(files))
        for name, (functions, files) in zip((*names, "parts"), numbers, strict=True)
    }


@pytest.mark.slow
def test_the_page_says_how_far_calls_go(run: Any) -> None:
    if not tessel.transport.has_engine():
        pytest.skip("without the compiled engine other functions run")
    said = told()
    found: dict[str, Walk] = {}
    for _ in range(3):  # on a busy machine a message may be late in all calls of a walk
        for name, walk in run(walks, nprocs=2, timeout=120)[0].items():
            found[name] = min(found.get(name, walk), walk, key=len)
        if all(len(walk) <= said[name][0] for name, walk in found.items()):
            break
    for name, walk in found.items():
        functions, files = said[name]
        # torch's versions differ in what they call back
        assert abs(len(walk) - functions) <= 2, (name, len(walk))
        assert abs(len({file for file, _ in walk}) - files) <= 1, name


if __name__ == "__main__":
    for name, walk in tessel.launch(walks, 2)[0].items():
        print(f"{name}: {len(walk)} functions in {len({file for file, _ in walk})} files")
        if name in sys.argv[1:]:
            print(*(f"  {file} {function}" for file, function in sorted(walk)), sep="\n")
