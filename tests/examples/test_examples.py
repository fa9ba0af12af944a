"""The functions of the examples: shortened, against plain torch, on one and several workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tessel.core import boxes
from tessel.examples import classes, darcy, deblur, gpt
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]

DOUBLE = torch.float64
SHORT = gpt.Settings(dim=32, length=16, batch=8, steps=40, rate=1e-2, dtype=DOUBLE)
TEXT = gpt.make_text(100, seed=1)
FEW = classes.Settings(features=6, samples=24, batch=8, steps=8, dtype=DOUBLE)  # 100,000 classes
# on two workers, the scripts of the examples are tested
several = pytest.mark.parametrize("nprocs", [1, 4])


def learn(settings: gpt.Settings) -> gpt.Curve:
    """Train the GPT with one thread: for tensors as small as these, more take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return gpt.train(settings, TEXT)
    finally:
        torch.set_num_threads(threads)


# --- the GPT


@pytest.fixture(scope="module")
def plain_curve() -> gpt.Curve:
    """The losses of torch's own layers in one process."""
    layers = {
        "ParallelLinear": nn.Linear,
        "ParallelEmbedding": nn.Embedding,
        "ParallelCrossEntropyLoss": nn.CrossEntropyLoss,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, layer in layers.items():
            monkeypatch.setattr(
                gpt, name, lambda *args, dim=None, layer=layer, **kw: layer(*args, **kw)
            )
        monkeypatch.setattr(gpt, "write", lambda *args: [])
        return learn(SHORT)


@pytest.fixture(scope="module")
def written(pool: Any) -> str:
    """What the GPT writes that one worker has trained."""
    return pool.run(learn, SHORT, nprocs=1)[0].written


@pytest.mark.slow
@several
def test_gpt_learns_alike_on_any_number_of_workers(
    run: Run, plain_curve: gpt.Curve, written: str, nprocs: int
) -> None:
    assert plain_curve.losses[-1] < 0.8 * plain_curve.losses[0]
    assert len(written) == 160 and set(written) <= set(TEXT)
    for curve in run(learn, SHORT, nprocs=nprocs):
        assert curve.workers == nprocs
        assert curve.losses == pytest.approx(plain_curve.losses, rel=1e-10, abs=0)
        assert curve.written == written
        whole, mine = curve.num_parameters
        assert whole == plain_curve.num_parameters[0]
        assert (mine == whole) if nprocs == 1 else (mine < 1.3 * whole / nprocs + 200)


def test_gpt_of_another_seed_learns_otherwise(run: Run, plain_curve: gpt.Curve) -> None:
    """So that equal curves say something."""
    (other,) = run(learn, replace(SHORT, seed=2), nprocs=1)
    assert other.losses[0] != pytest.approx(plain_curve.losses[0], rel=1e-6)


def send_in_a_block() -> tuple[int, int]:
    """The bytes that this worker sends forward and backward in a block of the GPT."""
    block = gpt.Block(16, 4)
    x = torch.ones(2, 5, 16, requires_grad=True)
    block(x).sum().backward()
    with count_traffic() as forward:
        y = block(x)
    with count_traffic() as backward:
        y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent


@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_block_costs_two_all_reduces_each_way(run: Run, nprocs: int) -> None:
    """Of P workers and n bytes an all-reduce sends 2 (P - 1) n."""
    one = 2 * (nprocs - 1) * 4 * 2 * 5 * 16
    ways = zip(*run(send_in_a_block, nprocs=nprocs), strict=True)
    assert [sum(each) for each in ways] == [2 * one, 2 * one]


@pytest.mark.parametrize(("nprocs", "changes"), [(3, {}), (1, {"dim": 34})])
def test_heads_that_do_not_fit_are_refused(run: Run, nprocs: int, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"and 4 heads on {nprocs} worker"):
        run(learn, replace(SHORT, **changes), nprocs=nprocs)


def test_the_text_is_that_of_its_grammar() -> None:
    """One thing calls, and several call."""
    noun = r"(?:cat|dog|bird|horse|farmer)"
    kind = r"(?:(?:old|small|red|quiet|hungry) )?"
    one, many = rf"(?:the|a) {kind}{noun}", rf"(?:the|two|three|many) {kind}{noun}s"
    verb = r"(?:see|follow|like|hear|call)"
    sentence = rf"(?:{one} {verb}s|{many} {verb}) (?:{one}|{many})\."
    lines = gpt.make_text(200, seed=3).splitlines()
    assert len(lines) == 200 and len(set(lines)) > 150
    assert [line for line in lines if not re.fullmatch(sentence, line)] == []


# --- the classifier


@pytest.fixture(scope="module")
def plain_losses() -> dict[int, list[float]]:
    """The losses of torch's own layers in one process, by the number of classes."""
    plain = replace(FEW, is_split=False)
    return {n: classes.train(replace(plain, classes=n)).losses for n in (100_000, 1003, 3)}


@several
@pytest.mark.parametrize("num_classes", [100_000, 1003, 3])
def test_the_head_falls_as_one_over_the_workers(
    run: Run, plain_losses: dict[int, list[float]], num_classes: int, nprocs: int
) -> None:
    """In bytes, exactly; 1003 classes are uneven over 2 and 4 workers, and 3 leave one without."""
    settings = replace(FEW, classes=num_classes)
    row = 8 * (1 + settings.features)
    parts = [stop - start for start, stop in boxes.balanced(num_classes, nprocs)]
    expected = [
        classes.Holding(row * part, row * part, row * part, 8 * settings.batch * part)
        for part in parts
    ]
    if num_classes == 100_000:
        assert len(set(parts)) == 1
    for report in run(classes.train, settings, nprocs=nprocs):
        assert report.holdings == expected
        assert report.whole == row * num_classes == sum(each.parameters for each in expected)
        assert report.losses == pytest.approx(plain_losses[num_classes], rel=1e-10, abs=0)


def test_the_classifier_learns(plain_losses: dict[int, list[float]]) -> None:
    losses = plain_losses[100_000]
    assert losses[0] > 10 and losses[-1] < 0.9 * losses[0]


# --- Darcy flow

FLOW = darcy.Settings(
    points=12, num_train=32, num_test=8, width=8, modes=4, blocks=2, epochs=8, batch=4
)


def dense(a: torch.Tensor) -> torch.Tensor:
    """The matrix of the flow, column by column."""
    n = a.shape[0] * a.shape[1]
    units = torch.eye(n, dtype=a.dtype).reshape(n, *a.shape)
    return darcy.outflow(a.expand_as(units), units).reshape(n, n).mT


def test_pressure_solves_the_equation() -> None:
    """As a direct solver does; the matrix is symmetric and positive, so it has one solution."""
    a = darcy.permeability(2, 7, torch.Generator().manual_seed(1))
    for each, u in zip(a, darcy.pressure(a), strict=True):
        matrix = dense(each)
        torch.testing.assert_close(matrix, matrix.mT)
        expected = torch.linalg.solve(matrix, torch.ones(49, dtype=a.dtype))
        torch.testing.assert_close(u.flatten(), expected, rtol=1e-6, atol=1e-9)  # CG stops at 1e-8


def test_pressure_of_an_even_medium() -> None:
    """The known solution of Poisson's equation on a square has 0.07367 in its middle."""
    u = darcy.pressure(torch.ones(1, 33, 33, dtype=torch.float64))
    assert abs(u[0, 16, 16].item() - 0.07367) < 2e-4  # of a grid of 33 points


@pytest.fixture(scope="module")
def darcy_alone(pool: Any) -> darcy.Curves:
    return pool.run(darcy.train, FLOW, nprocs=1)[0]


@pytest.mark.parametrize("nprocs", [3, 4])
def test_darcy_learns_alike_on_any_number_of_workers(
    run: Run, darcy_alone: darcy.Curves, nprocs: int
) -> None:
    assert darcy_alone.losses[-1] < 0.7 * darcy_alone.losses[0]
    for curves in run(darcy.train, FLOW, nprocs=nprocs):
        assert curves.workers == nprocs
        assert curves.losses == pytest.approx(darcy_alone.losses, rel=1e-8)
        assert curves.errors == pytest.approx(darcy_alone.errors, rel=1e-8)
        for got, expected in zip(curves.example, darcy_alone.example, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_another_seed_gives_another_curve(run: Run, darcy_alone: darcy.Curves) -> None:
    """So that equal curves say something."""
    (other,) = run(darcy.train, replace(FLOW, seed=2, epochs=1), nprocs=1)
    assert other.losses != pytest.approx(darcy_alone.losses[:1], rel=1e-6)


# --- deblurring

BLURRED = deblur.Settings(size=60, patch=24, dtype=DOUBLE)
WAYS = {"own": BLURRED, "deepinv": replace(BLURRED, deepinv=True)}


@pytest.fixture(scope="module")
def reconstructed() -> dict[str, torch.Tensor]:
    """What plain torch makes of it in one process."""
    return {name: deblur.in_plain_torch(settings) for name, settings in WAYS.items()}


def test_deblurring_gets_better(run: Run) -> None:
    assert BLURRED.iterations == 10 and BLURRED.lr == 1.0
    (result,) = run(deblur.run, BLURRED, nprocs=1)
    first, *curve = result.psnr
    assert len(curve) == 10
    assert all(b > a for a, b in pairwise(curve))
    assert curve[-1] > max(first, curve[0] + 1)


@pytest.mark.parametrize("number", range(3))
def test_deepinv_measures_the_same(number: int) -> None:
    ours, theirs = (deblur.measurement(each, number) for each in WAYS.values())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("nprocs", "parts"), [(1, None), (2, None), (4, None), (2, (1, 2)), (4, (2, 2)), (4, (4, 1))]
)
def test_deblurring_is_that_of_one_process(
    run: Run,
    reconstructed: dict[str, torch.Tensor],
    way: str,
    nprocs: int,
    parts: tuple[int, int] | None,
) -> None:
    for result in run(deblur.run, replace(WAYS[way], parts=parts), nprocs=nprocs):
        torch.testing.assert_close(result.reconstruction, reconstructed[way], rtol=0, atol=1e-12)
