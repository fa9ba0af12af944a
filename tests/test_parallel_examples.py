"""The examples of parallel layers: shortened, against plain torch, on one and several workers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessel import boxes
from tessel.cli import main
from tessel.cli.acts import classes as act
from tessel.cli.acts import picture
from tessel.cli.acts.act import Share
from tessel.testing import count_traffic

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import classes  # noqa: E402
import gpt  # noqa: E402

Run = Callable[..., list[Any]]

DOUBLE = torch.float64
SHORT = gpt.Settings(dim=32, length=16, batch=8, steps=40, rate=1e-2, dtype=DOUBLE)
TEXT = gpt.make_text(100, seed=1)
FEW = classes.Settings(features=6, samples=24, batch=8, steps=8, dtype=DOUBLE)  # 100,000 classes
several = pytest.mark.parametrize("nprocs", [1, 2, 4])


def learn(settings: gpt.Settings) -> gpt.Curve:
    """Train the GPT with one thread: for tensors as small as these, more take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return gpt.train(settings, TEXT)
    finally:
        torch.set_num_threads(threads)


def in_plain_torch(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an example be made of torch's own layers."""
    layers = {
        "ParallelLinear": nn.Linear,
        "ParallelEmbedding": nn.Embedding,
        "ParallelCrossEntropyLoss": nn.CrossEntropyLoss,
    }
    for name, layer in layers.items():
        if hasattr(example, name):
            monkeypatch.setattr(
                example, name, lambda *args, dim=None, layer=layer, **kw: layer(*args, **kw)
            )


# --- the GPT


@pytest.fixture(scope="module")
def plain_curve() -> gpt.Curve:
    """The losses of torch's own layers in one process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_plain_torch(gpt, monkeypatch)
        monkeypatch.setattr(gpt, "write", lambda *args: [])
        return learn(SHORT)


@pytest.fixture(scope="module")
def written(pool: Any) -> str:
    """What the GPT writes that one worker has trained."""
    return pool.run(learn, SHORT, nprocs=1)[0].written


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
    found = {}
    for num_classes in (100_000, 1003, 3):
        with pytest.MonkeyPatch.context() as monkeypatch:
            in_plain_torch(classes, monkeypatch)
            monkeypatch.setattr(classes, "holdings", lambda *args: [])
            found[num_classes] = classes.train(replace(FEW, classes=num_classes)).losses
    return found


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


# --- the act of the demo


@pytest.mark.parametrize(("nprocs", "size"), [(1, 8), (2, 8), (3, 8), (4, 8), (4, 64)])
def test_the_act_compares_with_one_process(run: Run, nprocs: int, size: int) -> None:
    report, *others = run(act.perform, size, nprocs=nprocs)
    assert others == [None] * (nprocs - 1)
    assert report.worst <= act.LIMIT and report.wrong == []
    parts = [stop - start for start, stop in boxes.balanced(100 * size + 1, nprocs)]
    row = 8 * (1 + act.FEATURES)
    assert [(each.classes, each.head) for each in report.holdings] == [
        (part, row * part) for part in parts
    ]
    assert (report.alone.classes, report.alone.head) == (100 * size + 1, row * (100 * size + 1))
    most = max(each.peak for each in report.holdings)
    assert most == report.alone.peak if nprocs == 1 else most < 1.5 * report.alone.peak / nprocs
    facts = 8 * act.SAMPLES * 3  # three numbers for each sample, to each of the others
    gradient = 8 * act.SAMPLES * act.FEATURES  # of the head's input, all-reduced
    expected = (nprocs - 1) * (nprocs * facts + 2 * gradient)
    assert sum(report.sent) == expected


def test_the_demo_fails_when_the_act_is_wrong(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (pictured,), (report,) = run(picture.perform, 8, nprocs=1), run(act.perform, 8, nprocs=1)
    monkeypatch.setattr("tessel.cli.demo._try_to_draw", lambda *args: "")
    right = Share(0.0, 0.0, 1.0, 1.0, bytes_sent=8, messages=1, seconds=1e-3)
    less = replace(report.alone, head=report.alone.head - 8)
    for changes, code in (
        ({}, 0),
        ({"loss_error": 1e-9}, 1),
        ({"gradient_error": float("nan")}, 1),
        ({"holdings": (less,)}, 1),
    ):
        results = [[(right,)] * 4], [], pictured, replace(report, **changes)
        monkeypatch.setattr("tessel.cli.demo._perform", lambda *args, r=results: r)
        assert main(["demo", "--output", str(tmp_path)]) == code
        printed = capsys.readouterr().out
        assert ("wrong: a step of a classifier" in printed) == bool(code)
        assert "a step of a classifier with 801 classes" in printed
