"""Plans explained: predicted bytes are the counted ones; the best partition; machine models.

Tests `operators/planning.py`, `operators/choose.py`, `operators/cost.py`,
`operators/explanation.py`, `operators/picture.py`, `operators/units.py`, `cli/plan.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import tessel
from tessel import (
    ParDCT,
    ParDFT,
    ParDiagonal,
    ParDST,
    ParIdentity,
    ParMatrix,
    ParMultilinear,
    ParRestriction,
    distribute,
    init,
    kron,
)
from tessel.cli import doctor, main, measure
from tessel.cli.plan import build
from tessel.operators.algebra import ParOperator
from tessel.operators.choose import best_partition, plan_on
from tessel.operators.distributed import Distributed
from tessel.operators.explanation import Explanation, explain, explain_plan
from tessel.operators.rates import Machine, Rates, built_in, known_machine, model_path
from tessel.operators.storage import storage_of

C64, C128, F32, F64 = torch.complex64, torch.complex128, torch.float32, torch.float64

Make = Callable[[], ParOperator]


def transform(*lengths: int, T: torch.dtype = C64) -> ParOperator:
    return kron(*(ParDFT(T, n) for n in lengths))


def low(T: torch.dtype, n: int, kept: int) -> ParOperator:
    return ParRestriction(T, n, [(0, kept), (n - kept, n)]) @ ParDFT(T, n)


def used_twice() -> ParOperator:
    """A diagonal whose parameters are needed where the tensor lies in two ways."""
    D = ParDiagonal(C64, 7)
    return kron(D @ ParDFT(C64, 7) @ D, ParDFT(C64, 5))


def used_along_both() -> ParOperator:
    D, F = ParDiagonal(C64, 6), ParDFT(C64, 6)
    return kron(ParIdentity(C64, 6), F @ D) @ kron(D @ F, ParIdentity(C64, 6))


OPERATORS: dict[str, Make] = {
    "fft": lambda: transform(6, 5, 7),
    "rfft": lambda: kron(ParDFT(C64, 6), ParDFT(C64, 5), ParDFT(F32, 8)),
    "double": lambda: kron(ParDFT(F64, 9), ParDFT(C128, 5), ParDFT(C128, 4)),
    "inverse": lambda: kron(ParDFT(C64, 6), ParDFT(C64, 5), ParDFT(F32, 7)).inv,
    "adjoint": lambda: kron(ParDFT(F64, 6), ParDFT(C128, 5)).H,
    "there and back": lambda: transform(4, 6).inv
    @ kron(*(ParDiagonal(C64, n) for n in (4, 6)))
    @ transform(4, 6),
    "low frequencies": lambda: kron(low(C64, 9, 2), low(C64, 8, 3), ParDFT(F32, 6)),
    "and back": lambda: kron(low(C64, 9, 2), low(C64, 8, 3)).H
    @ kron(low(C64, 9, 2), low(C64, 8, 3)),
    "channels": lambda: kron(ParIdentity(F32, 6), ParIdentity(F32, 5), ParMatrix(F32, 3, 4)),
    "matrices": lambda: kron(ParMatrix(F64, 3, 5), ParMatrix(F64, 7, 6)),
    "sum": lambda: transform(5, 6) + 2j * kron(ParMatrix(C64, 5, 5), ParIdentity(C64, 6)),
    "sum inside": lambda: kron(ParDFT(C64, 5) + ParMatrix(C64, 5, 5), ParDFT(C64, 6)),
    "one dimension": lambda: ParDFT(F32, 11),
    "one dimension there and back": lambda: ParDFT(C64, 10).inv
    @ ParDiagonal(C64, 10)
    @ ParDFT(C64, 10),
    "cosines": lambda: kron(ParDCT(F32, 6), ParDST(F32, 5, 1), ParDCT(F32, 7, 4)),
    "cosines and waves": lambda: kron(ParDCT(F64, 6, 3), ParDFT(F64, 8), ParDFT(C128, 5)),
    "padded": lambda: kron(*(ParDFT(C64, n, 1.5) for n in (4, 5)), ParDFT(F32, 6, 1.5)),
    "padded back": lambda: kron(*(ParDFT(C64, n, 1.5) for n in (4, 5)), ParDFT(F32, 6, 1.5)).inv,
    "short": lambda: transform(2, 3, 2),
    "spectral layer": lambda: build("fno", (8, 10), F32, 3, (3,)),
    "convolution": lambda: build("convolution", (6, 7), F64, 2),
    "parameters move": used_twice,
    "parameters move along both": used_along_both,
}


def grids(workers: int, ndim: int) -> list[tuple[int, ...]]:
    """All grids of so many workers."""
    if ndim == 0:
        return [()] if workers == 1 else []
    return [
        (n, *rest)
        for n in range(1, workers + 1)
        if workers % n == 0
        for rest in grids(workers // n, ndim - 1)
    ]


def counted_and_predicted(name: str, grid: tuple[int, ...], out: Any) -> list[Any]:
    """Of an operator, its adjoint and their product: what this worker sends, and what is told."""
    S = distribute(OPERATORS[name](), grid, out)
    assert isinstance(S, Distributed)
    assert S.storage == storage_of(S.plan)
    theta = init(S, requires_grad=False)
    columns = 3 if len(grid) > len(S.domain.shape) else 1
    return [compared(each, theta, columns) for each in (S, S.H, S.H @ S)]


def compared(S: Any, theta: Any, columns: int) -> Any:
    shape = S.layout_in.local_shape
    x = torch.ones((*shape, columns) if columns > 1 else shape, dtype=S.domain.dtype)
    with tessel.testing.count_traffic() as traffic:
        y = S.apply(x, theta)
    explanation = explain(S, columns=columns)
    mine = explanation.workers.index(tessel.world().rank)
    total = explanation.totals[mine]
    if explanation.lines:
        last = explanation.lines[-1]
        assert last.dtype_after == y.dtype
        assert last.after.shape_on(explanation.workers[mine]) == y.shape[: len(shape)]
    return (total.bytes_sent, total.num_messages), (traffic.bytes_sent, traffic.messages)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_predicted_bytes_are_the_counted_ones(
    nprocs: int, name: str, run: Callable[..., list[Any]]
) -> None:
    ndim = len(OPERATORS[name]().domain.shape)
    places = grids(nprocs, ndim)
    if nprocs == 4:  # of four in a row, one: three are in all rows
        places = [grid for grid in places if 4 not in grid] or places[:1]
    cases = [(grid, out) for grid in places for out in (None, "anywhere")]
    if nprocs == 4:
        cases.append(((2, *[1] * (ndim - 1), 2), None))  # and two for the batch
    for grid, out in cases:
        for results in run(counted_and_predicted, name, grid, out, nprocs=nprocs):
            for predicted, counted in results:
                assert predicted == counted, (grid, out)


def test_the_cases_move_what_they_shall() -> None:
    """That parameters move in some cases, and nothing in others, is no accident."""
    explanation = explained("parameters move", (4, 1))
    moved = [
        cost.bytes_sent
        for line, costs in zip(explanation.lines, explanation.costs, strict=True)
        for cost in costs
        if not line.is_transfer
    ]
    assert sum(moved) > 0
    assert explained("channels", (2, 2, 1)).bytes_sent == 0
    assert explained("fft", (4, 1, 1)).lines[0].title == "ParDFT along 1, ParDFT along 2"


def explained(name: str, grid: tuple[int, ...], machine: Machine | None = None) -> Explanation:
    operator = OPERATORS[name]()
    plan = plan_on(operator, grid)
    dtype = operator.domain.dtype
    return explain_plan(plan, dtype, storage_of(plan), 1, machine or built_in())


# --- memory, operations, times


def test_memory_is_input_output_and_what_travels() -> None:
    explanation = explained("fft", (1, 1, 2))  # 6 × 5 × 7 complex64: parts of 4 and 3
    first, transfer, *_ = explanation.costs
    assert [cost.memory for cost in first] == [2 * 30 * 4 * 8, 2 * 30 * 3 * 8]
    line = explanation.lines[1]
    for at, cost in zip(explanation.workers, transfer, strict=True):
        before, after = prod(line.before.shape_on(at)), prod(line.after.shape_on(at))
        kept = before - cost.bytes_sent // 8
        given = before  # the user's input, which is still there
        assert cost.memory == 8 * (given + before + after + (before - kept) + (after - kept))


def test_memory_counts_parameters_and_terms_of_sums() -> None:
    channels = explained("channels", (1, 1, 1))
    assert channels.memory == 4 * (6 * 5 * 4 + 6 * 5 * 3 + 3 * 4)
    whole, part, matrix = 8 * 5 * 6, 8 * 5 * 3, 8 * 5 * 5
    alone = explained("sum", (1, 1))
    assert [line.title for line in alone.lines] == ["sum along 0,1"]
    assert alone.memory == 4 * whole + matrix  # input, two results and their sum
    terms = explained("sum", (1, 2))
    assert terms.lines[-1].title == "sum of 2"
    assert terms.costs[-1][0].memory == 4 * part + matrix  # and the input
    # the first step of the second term: input, output, and the first result waits
    titles = [line.title for line in terms.lines]
    assert terms.costs[titles.index("ParMatrix along 0")][0].memory == 3 * part + matrix
    # steps of the first term also keep the input of the sum
    second = terms.costs[titles.index("ParDFT along 1")][0]
    assert second.memory == 2 * 8 * 3 * 6 + part + matrix


def peak(name: str) -> tuple[int, int]:
    S = distribute(OPERATORS[name](), [1, 1])
    theta = init(S, requires_grad=False)
    x = torch.ones(S.domain.shape, dtype=S.domain.dtype)
    with tessel.testing.count_memory() as memory:
        S.apply(x, theta)
    assert isinstance(S, Distributed)
    given = x.nbytes + sum(value.nbytes for value in theta.values())
    return memory.peak + given, explain(S).memory


@pytest.mark.parametrize("name", ["matrices", "sum"])
def test_memory_is_predicted(name: str) -> None:
    """Counted are also small tensors that torch makes inside of a step."""
    counted, predicted = peak(name)
    assert 0.8 * counted <= predicted <= counted


def test_operations_are_those_of_the_operators() -> None:
    explanation = explained("matrices", (1, 1))
    assert explanation.totals[0].flops in (
        2.0 * 3 * 5 * 6 + 2.0 * 7 * 6 * 3,
        2.0 * 7 * 6 * 5 + 2.0 * 3 * 5 * 7,
    )
    assert sum(total.flops for total in explained("channels", (2, 2, 1)).totals) == 2 * 3 * 4 * 30


def rates(workers: int = 1, **changes: float) -> Rates:
    """A worker to which everything costs nothing but what is given."""
    free = {each.name: 1e30 for each in dataclasses.fields(Rates)}
    free |= {"workers": workers, "call": 0.0, "step": 0.0, "latency": 0.0}
    return Rates(**(free | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"call": 5.0}, lambda e: 5.0),
        ({"latency": 2.0}, lambda e: 2.0 * e.totals[0].num_messages),
        ({"bandwidth": 0.5}, lambda e: e.totals[0].bytes_sent / 0.5),
        ({"fft": 10.0, "fft_across": 10.0}, lambda e: e.totals[0].flops / 10.0),
        ({"step": 3.0}, lambda e: 3.0 * sum(not line.is_transfer for line in e.lines)),
    ],
)
def test_times_follow_from_the_rates(
    changes: dict[str, float], seconds: Callable[[Explanation], float]
) -> None:
    machine = Machine(4, (rates(4, **changes),), "test")
    operator = transform(8, 8, 8)
    plan = plan_on(operator, (4, 1, 1))
    explanation = explain_plan(plan, C64, {}, 1, machine)
    assert explanation.time == pytest.approx(seconds(explanation))


def test_a_batch_multiplies() -> None:
    plan = plan_on(transform(4, 6), (2, 1))
    one, many = (explain_plan(plan, C64, {}, n, built_in()) for n in (1, 5))
    assert many.bytes_sent == 5 * one.bytes_sent
    assert many.memory == 5 * one.memory
    assert many.totals[0].flops == pytest.approx(5 * one.totals[0].flops)
    with pytest.raises(ValueError, match="at least one column"):
        explain_plan(plan, C64, {}, 0)


# --- tables and pictures


def test_the_table_has_steps_workers_and_totals() -> None:
    text = str(explained("fft", (1, 1, 3)))
    for word in ("ParDFT along 0, ParDFT along 1", "transfer", "[6 × 5 × 7/3]", "6×5×3", "total"):
        assert word in text
    assert "predicted:" in text and "built in" in text
    assert " 1–2 " in text  # two workers have the same numbers


def test_of_many_workers_the_table_has_the_largest_and_the_smallest() -> None:
    operator = transform(64, 64, 64)
    plan = plan_on(operator, (10, 5, 20))
    explanation = explain_plan(plan, C64, {}, 1, built_in())
    assert not explanation.is_complete
    text = str(explanation)
    assert "largest: 0" in text and "smallest:" in text
    assert "only some of 1000 workers were examined" in text


def test_an_operator_that_does_nothing_has_no_steps() -> None:
    explanation = explained_identity()
    assert explanation.lines == () and explanation.bytes_sent == explanation.memory == 0
    assert "total" in str(explanation)


def explained_identity() -> Explanation:
    plan = plan_on(kron(ParIdentity(F32, 4), ParIdentity(F32, 3)), (2, 1))
    return explain_plan(plan, F32, {}, 1, built_in())


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    explained("spectral layer", (1, 2, 2)).save(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    from tessel.viz import draw_plan

    figure = draw_plan(explained("fft", (1, 1, 3)))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[1:] == ["operations", "bytes sent", "peak memory", "predicted time"]
    draw_plan(explained_identity(), tmp_path / "nothing.png")


# --- the best partition


def test_the_best_partition_is_the_fastest_of_all() -> None:
    operator = transform(16, 16, 16)
    choice = best_partition(operator, 4, machine=built_in())
    assert sorted(each.partition for each in choice.candidates) == sorted(grids(4, 3))
    times = []
    for grid in grids(4, 3):
        plan = plan_on(operator, grid)
        times.append(explain_plan(plan, C64, {}, 1, built_in()).time)
    assert choice.time == pytest.approx(min(times), rel=0.05)
    assert choice.time == min(each.time for each in choice.candidates)
    assert choice.time == pytest.approx(choice.explanation.time, rel=0.05)
    assert (choice.memory, choice.bytes) == (choice.best.memory, choice.best.bytes)


def test_channels_are_best_left_alone() -> None:
    choice = best_partition(OPERATORS["channels"](), 6, machine=built_in())
    assert choice.partition[2] == 1 and choice.bytes == 0


def applied_to_the_best() -> list[int]:
    choice = best_partition(transform(6, 5, 7), tessel.world().size)
    S = distribute(choice.operator, choice.partition)
    assert isinstance(S, Distributed)
    with tessel.testing.count_traffic() as traffic:
        S * torch.ones(S.layout_in.local_shape, dtype=C64)
    return [traffic.bytes_sent, choice.bytes]


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_the_best_partition_can_be_distributed(nprocs: int, run: Callable[..., list[Any]]) -> None:
    results = run(applied_to_the_best, nprocs=nprocs)
    assert max(sent for sent, _ in results) == results[0][1]
    assert (max(sent for sent, _ in results) > 0) == (nprocs > 1)


def test_leaving_the_result_anywhere_is_never_slower() -> None:
    operator = transform(16, 16, 16)
    back = best_partition(operator, 8, machine=built_in())
    stays = best_partition(operator, 8, machine=built_in(), partition_out="anywhere")
    assert stays.time < back.time
    assert stays.best.plan.num_transfers == 1


# all numbers for one operator, and a small one and one of most grids for the others
MANY = [("fft", workers) for workers in (1, 2, 7, 64, 1000, 98_280, 99_991, 100_000)]
MANY += [(name, workers) for name in ("rfft", "convolution", "fno") for workers in (7, 98_280)]


@pytest.mark.parametrize(("name", "workers"), MANY)
def test_many_workers(name: str, workers: int) -> None:
    choice = best_partition(build(name, (256, 256, 256), F32), workers, machine=built_in())
    assert prod(choice.partition) == workers
    assert choice.time > 0 and choice.memory > 0
    assert (choice.bytes > 0) == (workers > 1)


def plans_of(name: str, grid: tuple[int, ...], out: str | None) -> tuple[Any, Any]:
    operator = OPERATORS[name]()
    spread = distribute(operator, list(grid), out)
    assert isinstance(spread, Distributed)
    chosen = plan_on(operator, grid, out)
    return [(s.before.cuts, s.after.cuts) for s in chosen.every_step()], [
        (s.before.cuts, s.after.cuts) for s in spread.plan.every_step()
    ]


def all_plans_of(workers: int) -> int:
    count = 0
    for name, make in OPERATORS.items():
        for grid in grids(workers, len(make().domain.shape)):
            for out in (None, "anywhere"):
                chosen, carried_out = plans_of(name, grid, out)
                assert chosen == carried_out, (name, grid, out)
                count += 1
    return count


@pytest.mark.parametrize("nprocs", [2, 4])
def test_what_is_compared_is_what_is_carried_out(
    nprocs: int, run: Callable[..., list[Any]]
) -> None:
    assert min(run(all_plans_of, nprocs, nprocs=nprocs, timeout=60)) > 20


@pytest.mark.parametrize("real", [0, 1, 2])
@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_a_real_transform_of_a_pencil_travels_twice(real: int, grid: tuple[int, ...]) -> None:
    """There and back, wherever the real dimension is; three times if it is split on both."""
    factors = [ParDFT(F32 if dim == real else C64, 64) for dim in range(3)]
    assert plan_on(kron(*factors), grid).num_transfers == 2


def test_more_workers_than_numbers() -> None:
    assert prod(best_partition(ParDFT(C64, 5), 12).partition) == 12


@pytest.mark.parametrize("workers", [0, -3, 2.5, "4", True, None])
def test_nonsense_numbers_of_workers_are_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers must be an integer"):
        best_partition(ParDFT(C64, 5), workers)


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="partition_out"):
        best_partition(ParDFT(C64, 5), 2, partition_out="somewhere")
    with pytest.raises(ValueError, match="not distributed"):
        best_partition(distribute(ParDFT(C64, 5), [1]), 2)
    with pytest.raises(ValueError, match="expected an operator"):
        best_partition(torch.ones(3), 2)  # type: ignore[arg-type]


def test_bound_parameters_do_not_matter() -> None:
    A = ParMatrix(F32, 4, 4)
    bound = kron(A, ParIdentity(F32, 6))(init(A))
    assert best_partition(bound, 2).partition == [1, 2]


# --- machine models


def test_a_model_is_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSEL_MACHINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_machine() == built_in()
    machine = Machine(3, (rates(1, call=1.0, step=1.0, latency=1.0),), "test")
    assert machine.save() == tmp_path / "tessel" / "machine.json" == model_path()
    assert known_machine() == machine
    monkeypatch.setenv("TESSEL_MACHINE", str(tmp_path / "other.json"))
    assert known_machine() == built_in()
    built_in().save()
    assert json.loads((tmp_path / "other.json").read_text())["cores"] == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cores": 2, "rates": [], "origin": ""}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"machine\.json is not a machine model.*--measure"):
        known_machine(path)


def test_rates_for_a_number_of_workers() -> None:
    machine = built_in()
    assert [machine.rates_for(n).workers for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert machine.rates_for(5).workers == machine.rates_for(10**5).workers == 2


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_every_rate_can_be_measured(nprocs: int, run: Callable[..., list[Any]]) -> None:
    for found in run(measure._worker_rates, nprocs=nprocs):
        assert found.workers == nprocs
        assert all(value > 0 for value in dataclasses.asdict(found).values())


def test_of_several_rounds_the_best_rates_count() -> None:
    slow = Machine(2, (rates(1, latency=3.0, fft=5.0), rates(2, latency=1.0)), "slow")
    fast = Machine(2, (rates(1, latency=2.0, fft=4.0), rates(2, latency=4.0)), "fast")
    best = measure.best_of([slow, fast])
    assert [each.latency for each in best.rates] == [2.0, 1.0]
    assert best.rates[0].fft == 5.0 and [each.workers for each in best.rates] == [1, 2]


def test_the_doctor_measures_and_keeps_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    monkeypatch.setenv("TESSEL_MACHINE", str(path))
    measured = dataclasses.replace(built_in(), origin="measured in a test")
    monkeypatch.setattr(doctor, "measure_machine", lambda: measured)
    assert main(["doctor", "--no-measure"]) == 0
    assert "built in" in capsys.readouterr().out and not path.exists()
    assert main(["doctor", "--no-measure", "--measure"]) == 0
    assert "measured in a test" in capsys.readouterr().out
    assert known_machine() == measured
    assert main(["doctor", "--no-measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["origin"] == "measured in a test"
    path.write_text("{}")
    assert main(["doctor", "--no-measure"]) == 0
    assert "cannot be read" in capsys.readouterr().out


# --- the command


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["fft", "rfft", "convolution", "fno"])
def test_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--shape", "64,64", "--operator", name, "--workers", "8")
    expected = ("predicted time", "the steps of the best partition", "transfer", "machine:")
    for word in ("8 workers", *expected):
        assert word in text


def test_plan_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    words = ("--shape", "16,16", "--workers", "4", "--json", "--picture", str(picture))
    found = json.loads(told(capsys, *words, "--anywhere", "--batch", "2", "--dtype", "float64"))
    assert sorted(found["candidates"][0]["partition"]) in ([1, 4], [2, 2])
    assert set(found["steps"][0]["workers"]) == {"0", "1", "2", "3"}
    assert picture.exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--shape", "16", "--workers", "0"), "integer of at least 1"),
        (("--shape", "16", "--workers", "2", "--modes", "3"), "--modes"),
        (("--shape", "16,8", "--workers", "2", "--operator", "fno", "--modes", "3,3,3"), "2 dim"),
        (("--shape", "16", "--workers", "2", "--channels", "0"), "integer of at least 1"),
        (("--shape", "16", "--workers", "2", "--batch", "0"), "integer of at least 1"),
    ],
)
def test_plan_refuses_nonsense(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert error in capsys.readouterr().err


def test_the_operators_of_the_command() -> None:
    assert build("fft", (8, 6), F32).domain.shape == (8, 6)
    assert str(build("rfft", (8, 6), F64, 3).codomain) == "complex128 3×8×4"
    kept = build("fno", (16, 6), F32, 2, (3, 9))
    assert [leaf.parameter_shape for leaf in kept.leaves] == [(2, 2, 6, 4)]
    x = torch.randn(2, 16, 6)
    theta = init(kept)
    assert (kept(theta) * x).shape == x.shape
    plain = build("convolution", (5, 4), F64)
    (leaf,) = plain.leaves
    assert isinstance(leaf, ParMultilinear)
    ones = tessel.operators.Parameters({leaf: torch.ones(leaf.parameter_shape, dtype=C128)})
    y = torch.randn(1, 5, 4, dtype=F64)
    torch.testing.assert_close(plain(ones) * y, y)
