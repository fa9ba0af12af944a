"""Machines of several hosts: the network in the planner, published times, files, measurements.

Tests `operators/rates.py`, `operators/cost.py`, `cli/plan_model.py`, `cli/measure.py`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tessel
from scripts import python
from tessel.cli import main, measure
from tessel.cli.plan_model import LayerCall, best_grids, layers_of, load_model
from tessel.core.boxes import common_volume
from tessel.operators.choose import plan_on
from tessel.operators.explanation import explain_plan
from tessel.operators.layouts import box_of, share_inside
from tessel.operators.rates import Machine, Network, Rates, built_in, known_machine

sys.path.append(
    str(Path(__file__).resolve().parents[2] / "benchmarks")
)  # behind tests/common, which has modules of the same names
import jean_zay

C64 = torch.complex64


def free(**changes: float) -> Rates:
    """A worker to which everything costs nothing but what is given."""
    rates = {each.name: 1e30 for each in dataclasses.fields(Rates)}
    rates |= {"call": 0.0, "step": 0.0, "latency": 0.0, **changes}
    return Rates(**(rates | {"workers": 2}))  # type: ignore[arg-type]


# --- published times


def test_published_times_are_predicted_within_a_factor() -> None:
    """The model knows two of the six times."""
    model = known_machine("jean-zay")
    found = jean_zay.factors(model)
    for P in jean_zay.FITTED:
        assert found[P] == pytest.approx(1, abs=0.01)
    assert len(jean_zay.FITTED) == 2
    for P, factor in found.items():
        assert 1 / 1.5 < factor < 1.5, P
    times = [jean_zay.predicted(P, model) for P in sorted(jean_zay.PUBLISHED)]
    assert all(before > after for before, after in pairwise(times))
    # without a network it would be a third to two thirds of the least that was measured
    alone = dataclasses.replace(model, network=None)
    assert all(jean_zay.predicted(P, alone) < 0.7 * jean_zay.PUBLISHED[P] for P in found)


def test_the_file_is_what_the_fit_gives() -> None:
    model, again = known_machine("jean-zay.json"), jean_zay.fit(jean_zay.FITTED)
    assert again.network is not None and model.network is not None
    assert again.rates[0].fft == pytest.approx(model.rates[0].fft, rel=1e-3)
    assert again.network.bisection == pytest.approx(model.network.bisection, rel=1e-3)
    notes = json.loads((jean_zay.MACHINES / "jean-zay.json").read_text())["notes"]
    assert all(str(P) in notes["fitted"] for P in jean_zay.FITTED)


def test_the_best_partition_is_faster_with_more_workers() -> None:
    model, operator = known_machine("jean-zay"), jean_zay.TRANSFORM
    times = [
        tessel.best_partition(operator, P, partition_out="anywhere", machine=model).time
        for P in (256, 512, 1024, 2048)
    ]
    assert all(before > after for before, after in pairwise(times))


# --- the model


@pytest.mark.parametrize("per_host", [1, 2, 3, 8])
@pytest.mark.parametrize("grid", [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_what_stays_inside_of_a_host(per_host: int, grid: tuple[int, ...]) -> None:
    operator = tessel.kron(*(tessel.ParDFT(C64, 8) for _ in range(3)))
    for step in plan_on(operator, grid).steps:
        before, after = step.before, step.after
        if before.cuts == after.cuts:
            continue
        shares = []
        last = 7 // per_host
        for host in {0, last // 2, last}:
            here = [w for w in range(8) if w // per_host == host]
            sent = {
                (a, b): common_volume(box_of(before, a), box_of(after, b))
                for a in here
                for b in range(8)
                if a != b
            }
            inside = sum(n for (_, b), n in sent.items() if b // per_host == host)
            shares.append(inside / sum(sent.values()) if sum(sent.values()) else 1.0)
        assert share_inside(before, after, per_host) == pytest.approx(min(shares))


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        (Network(2, 3.0, 1e30), lambda messages, sent: 3.0 * messages),
        (Network(2, 1e-30, 0.5), lambda messages, sent: 2 * sent / 0.5),
        (Network(2, 1e-30, 1e30, 0.25), lambda messages, sent: 4 * sent / 0.25),
    ],
)
def test_times_follow_from_the_network(
    network: Network, seconds: Callable[[float, float], float]
) -> None:
    """Four workers on two hosts: of three messages two leave the host."""
    operator = tessel.kron(*(tessel.ParDFT(C64, 8) for _ in range(2)))
    plan = plan_on(operator, (4, 1), "anywhere")
    found = explain_plan(plan, C64, {}, 1, Machine(2, (free(),), "test", network))
    (transfer,) = [k for k, line in enumerate(found.lines) if line.is_transfer]
    cost = found.costs[transfer][0]
    assert cost.num_messages == 3
    assert cost.time == pytest.approx(seconds(2 / 3 * 3, 2 / 3 * cost.bytes_sent))
    one_host = dataclasses.replace(network, workers_per_host=4)
    inside = explain_plan(plan, C64, {}, 1, Machine(2, (free(),), "test", one_host))
    assert inside.time < 1e-20


def test_one_partition_can_be_asked_for() -> None:
    operator = tessel.kron(*(tessel.ParDFT(C64, 16) for _ in range(3)))
    found = tessel.best_partition(operator, 8, partition=(2, 4, 1))
    assert found.partition == [2, 4, 1] and len(found.candidates) == 1
    for wrong in ((2, 4), (2, 2, 1), (8, 0, 1)):
        with pytest.raises(ValueError, match="3 dimensions, 8 in all"):
            tessel.best_partition(operator, 8, partition=wrong)


# --- files


def written(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    found = json.loads((jean_zay.MACHINES / "jean-zay.json").read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.pop("cores"), "cores is missing"),
        (lambda m: m.update(cores=2.5), "cores must be a whole number"),
        (lambda m: m.update(nodes=2), "unknown key nodes"),
        (lambda m: m.update(rates={}), "rates must be a list"),
        (lambda m: m["rates"][0].pop("fft"), r"rates\[0\]\.fft is missing"),
        (lambda m: m["rates"][0].update(memory=-1), r"rates\[0\]\.memory must be a positive"),
        (lambda m: m["rates"][0].update(memory=True), r"rates\[0\]\.memory must be a positive"),
        (lambda m: m["rates"][0].update(workers=0), r"rates\[0\]\.workers must be a whole"),
        (lambda m: m["network"].pop("latency"), r"network\.latency is missing"),
        (lambda m: m["network"].update(latency="1 µs"), r"network\.latency must be a positive"),
        (lambda m: m["network"].update(bandwith=1), r"unknown key network\.bandwith"),
        (lambda m: m["network"].update(bisection=-1.0), r"network\.bisection must be"),
        (lambda m: m.update(network=7), "network must be an object"),
    ],
)
def test_a_wrong_key_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str, capsys: Any
) -> None:
    path = written(tmp_path / "machine.json", change)
    with pytest.raises(ValueError, match=text):
        known_machine(path)
    words = ("plan", "--shape", "8,8", "--workers", "2", "--machine", str(path))
    assert main([*words]) == 2
    assert capsys.readouterr().err.startswith("tessel plan: ")


def test_files_and_names(tmp_path: Path, capsys: Any) -> None:
    model = known_machine("jean-zay")
    assert model.save(tmp_path / "copy.json") == tmp_path / "copy.json"
    assert known_machine(tmp_path / "copy.json") == model
    with pytest.raises(ValueError, match=r"no machine model .*none\.json.*jean-zay"):
        known_machine(tmp_path / "none.json")
    words = ("plan", "--shape", "64,64,64", "--operator", "rfft", "--workers", "80", "--json")
    assert main([*words, "--machine", "jean-zay", "--partition", "8,10,1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == model.origin
    assert [each["partition"] for each in found["candidates"]] == [[8, 10, 1]]


# --- measured


def measured(hosts: list[str]) -> Machine:
    """In short: the doctor, below, takes as long as users wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_TURNS", 2)
        return measure.measure_job(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "b", "b"], ["a", "a", "b"]])
def test_a_job_is_measured(run: Callable[..., list[Any]], hosts: list[str], tmp_path: Path) -> None:
    first, *others = run(measured, hosts, nprocs=len(hosts), timeout=240)
    assert all(each == first for each in others)
    per_host = min(hosts.count(each) for each in hosts)
    assert first.rates[0].workers == per_host
    assert (first.network is None) == (len(set(hosts)) == 1)
    if first.network is not None:
        assert first.network.workers_per_host == per_host
        assert 1e-7 < first.network.latency < 1 and 1e5 < first.network.bandwidth < 1e13
    assert known_machine(first.save(tmp_path / "machine.json")) == first


@pytest.mark.slow
@pytest.mark.alone
def test_the_doctor_measures_under_a_launcher(tmp_path: Path) -> None:
    words = ("run", "-n", "2", "-m", "tessel", "doctor", "--measure", "--output", "cluster.json")
    ended = python("-m", "tessel", *words, cwd=tmp_path, timeout=240)
    assert ended.returncode == 0, ended.stderr
    model = known_machine(tmp_path / "cluster.json")
    assert model.rates[0].workers == 2 and model.network is None
    assert ended.stdout.count("measured on 1 host of 2 workers") == 1  # by the first worker alone


def test_an_output_without_a_measurement_is_refused(capsys: Any) -> None:
    assert main(["doctor", "--output", "machine.json"]) == 2
    assert "--output requires --measure" in capsys.readouterr().err


# --- models


@pytest.mark.parametrize(
    ("model", "shape", "grids"),
    [
        # seconds of a step on 16 cores, docs/performance.md: 0.61 and 0.75, 0.67 and 0.80
        ("UNet(3, 16)", (1, 1, 128, 96, 96), [(1, 1, 16, 1, 1), (1, 1, 4, 2, 2)]),
        # 0.76, 0.81 and 0.82; another day the last two were 0.92 and 0.94
        ("ResNet18(64)", (8, 3, 512, 512), [(8, 1, 2, 1), (1, 1, 16, 1), (1, 1, 4, 4)]),
    ],
)
def test_grids_are_in_the_order_that_was_measured(
    model: str, shape: tuple[int, ...], grids: list[tuple[int, ...]]
) -> None:
    calls, held = layers_of(load_model(f"models:{model}"), shape, torch.float32)
    found = best_grids(calls, held, shape, 16, built_in())
    by_grid = {each.partition: each for each in found}
    assert [each for each in by_grid if each in grids] == grids
    assert found[0].partition == grids[0] and len(by_grid) == len(found) >= 14
    # Slabs compute a sixteenth, however thin (the input of the last layer is uneven in some
    # grids), where blocks copy their input, too.
    (least, slabs, blocks) = (min(c.computing for c in found), *(by_grid[g] for g in grids[-2:]))
    assert slabs.computing == pytest.approx(least, rel=1e-3) and blocks.computing > 1.02 * least


def test_grids_that_are_predicted_alike_split_leading_dimensions() -> None:
    calls, held = layers_of(lambda: torch.nn.Conv2d(1, 1, 3), (4, 1, 16, 16), torch.float32)
    places = [each.partition for each in best_grids(calls, held, (4, 1, 16, 16), 4, built_in())]
    assert places.index((1, 1, 4, 1)) < places.index((1, 1, 1, 4))
    assert places.index((2, 1, 2, 1)) < places.index((2, 1, 1, 2))


@pytest.mark.parametrize(
    ("network", "halo", "total", "norm"),
    [
        # the inner workers of 4 have 2 neighbours, one of them on the other host
        (Network(2, 3.0, 1e30), 0.5 * 2 * 3.0, 2 * 3.0, 2 * 3.0),
        (Network(2, 1e-30, 0.5), 0.5 * 2 * 64 / 0.5, 1000 / 0.5, 0.0),
        (Network(2, 1e-30, 1e30, 0.25), 0.5 * 4 * 64 / 0.25, 2 * 1000 / 0.25, 0.0),
        (Network(4, 3.0, 0.5, 0.25), 0.0, 0.0, 0.0),  # all on one host
    ],
)
def test_times_of_models_follow_from_the_network(
    network: Network, halo: float, total: float, norm: float
) -> None:
    """Four workers: a halo of 2 rows of 8 numbers, there and back; the sum of 1000 bytes."""
    window = LayerCall("conv", (1, 1, 16, 8), (1, 1, 16, 8), 0.0, (3, 3), (1, 1))
    sums = LayerCall("norm", (1, 1, 16, 8), (1, 1, 16, 8), 0.0, sums=True)
    machine = Machine(4, (free(),), "test", network)

    def seconds(calls: list[LayerCall], parameters: int) -> float:
        found = best_grids(calls, parameters, (1, 1, 16, 8), 4, machine)
        return next(each.time for each in found if each.partition == (1, 1, 4, 1))

    assert seconds([window], 0) - seconds([], 0) == pytest.approx(2 * halo, abs=1e-12)
    assert seconds([], 1000) == pytest.approx(total, abs=1e-12)
    assert seconds([sums], 0) - seconds([], 0) == pytest.approx(norm, abs=1e-12)


def test_halos_of_a_model_are_those_that_travel(run: Callable[..., list[Any]]) -> None:
    from plan_cases import halo_bytes

    shape = (1, 2, 16, 12)
    calls, held = layers_of(load_model("plan_cases:convolutions"), shape, torch.float32)
    for grid in ((1, 1, 3, 1), (1, 1, 1, 3)):
        (found,) = (
            each for each in best_grids(calls, held, shape, 3, built_in()) if each.partition == grid
        )
        counted = max(run(halo_bytes, grid, shape, nprocs=3))  # that of the worker in the middle
        assert found.bytes == 2 * counted


def test_plan_for_a_model(capsys: Any) -> None:
    words = ("plan", "--workers", "4", "--shape", "2,3,32,32", "--model")
    assert main([*words, "models:ResNet18"]) == 0
    text = capsys.readouterr().out
    assert "predicted step" in text and "create_cartesian_topology_partition" in text
    assert main([*words, "models:ResNet18(8, classes=5)", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["candidates"]) > 1
    for model, error in (
        ("models:Nothing", "PACKAGE:FUNCTION"),
        ("nowhere", "PACKAGE:FUNCTION"),
        ("models:UNet", "write arguments"),
        ("models:UNet(3)", "does not accept an input"),
        ("math:sqrt(2)", "must make a torch.nn.Module"),
    ):
        assert main([*words, model]) == 2
        assert error in capsys.readouterr().err
    assert main([*words, "models:ResNet18", "--modes", "3"]) == 2
    assert "--modes applies to operators" in capsys.readouterr().err
