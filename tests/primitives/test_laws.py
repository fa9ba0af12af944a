"""Every law for every movement on every number of workers.

Tests `primitives/all_gather.py`, `primitives/all_sum_reduce.py`, `primitives/broadcast.py`,
`primitives/halo_exchange.py`, `primitives/repartition.py`, `core/linop.py`, `core/move.py`,
`core/halo.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import tessel
from registry import MAKERS, WORLDS, Case, Values, derivatives, random
from tessel.testing import check_adjoint, check_gradient

TOLERANCE = 1e-12

Record = dict[str, Any]  # what one worker got in one case, by law


# On the workers: apply everything, compare nothing that others have to know of.


def record_laws(make: Callable[..., Iterable[Case]], argument: Any, dtype: Any) -> list[Record]:
    """What this worker gets in each case that `make(argument)` yields."""
    records = []
    for case in make(argument):
        try:
            records.append(record_case(case, dtype))
        except BaseException as error:
            error.add_note(f"in the case: {case.name}, {dtype}")
            raise
    return records


def record_case(case: Case, dtype: torch.dtype) -> Record:
    me, layer = tessel.world().rank, case.build()
    x = case.input_of(me, dtype, seed=1)
    y = layer(x)
    record: Record = {"value": y, "broken": broken_promises(case, x, y, me)}
    if y.requires_grad:
        record["broken"].append("a gradient is recorded that nobody asked for")
    taken = case.input_of(me, dtype, seed=2)
    with forward_ad.dual_level():
        record["primal"], record["tangent"] = forward_ad.unpack_dual(
            layer(forward_ad.make_dual(x, taken))
        )
    x.requires_grad_()
    y = layer(x)
    if me in case.members:
        weight = weight_like(case, y.detach(), me)
        record |= gradients(y, x, weight)
        record |= higher_gradients(layer(x), x, weight)
        operator = case.operator(layer)
        record["broken"] += broken_operator(operator)
        record["adjoint"] = operator.H(weight)
    return {law: _plain(value) for law, value in record.items()}


def broken_promises(case: Case, x: Tensor, y: Tensor, me: int) -> list[str]:
    broken = []
    if me in case.shapes and not torch.equal(x, case.input_of(me, x.dtype, seed=1)):
        broken.append("the input was changed")
    if y is x or (y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()):
        broken.append("the output is the input's memory")
    return broken


def gradients(y: Tensor, x: Tensor, weight: Tensor) -> Record:
    """By `backward`, by `autograd.grad`, and that of a plain sum, which has stride 0."""
    (grad,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    (ones,) = torch.autograd.grad(y.real.sum(), x, retain_graph=True)
    y.backward(weight)
    return {"autograd.grad": grad, "backward": x.grad, "gradient of a sum": ones}


def higher_gradients(y: Tensor, x: Tensor, weight: Tensor) -> Record:
    (first,) = torch.autograd.grad(loss(y, weight), x, create_graph=True)
    (second,) = torch.autograd.grad(loss(first, x.detach()), x)
    return {"first-order gradient": first, "second-order gradient": second}


def broken_operator(A: tessel.LinearOperator) -> list[str]:
    laws = {
        "A.H.H is not A": A.H.H == A and hash(A.H.H) == hash(A),
        "A.H does not go the other way": (A.H.domain, A.H.codomain) == (A.codomain, A.domain),
    }
    return [law for law, holds in laws.items() if not holds]


def weight_like(case: Case, y: Tensor, worker: int) -> Tensor:
    """What a worker's loss multiplies its output with, the same where a value is shared."""
    return random(y.shape, y.dtype, 77 + case.one_out.get(worker, worker))


def loss(y: Tensor, weight: Tensor) -> Tensor:
    """A loss whose second derivative is not constant."""
    square = (y * y.conj()).real
    return (square * square).sum() / 8 + (y * weight.conj()).real.sum()


def _plain(value: Any) -> Any:
    return value.detach().resolve_conj().numpy() if isinstance(value, Tensor) else value


# In one process: what they should have got.


def expected_laws(case: Case, dtype: torch.dtype) -> dict[str, Values]:
    inputs = case.inputs(dtype, seed=1)
    outputs = case.outputs(inputs)
    weights = {w: weight_like(case, y, w) for w, y in outputs.items()}
    leaves = {w: x.clone().requires_grad_() for w, x in inputs.items()}
    first = case.gradients(leaves, lambda w, y: loss(y, weights[w]))
    counted = {w: x for w, x in leaves.items() if case.counts_in(w)}
    total = sum(loss(first[w], inputs[w]) for w in counted)
    adjoint = case.gradients(leaves, lambda w, y: (y.conj() * weights[w]).real.sum())
    return {
        "value": outputs,
        "primal": outputs,
        "tangent": case.outputs(case.inputs(dtype, seed=2)),
        "autograd.grad": adjoint,
        "backward": adjoint,
        "adjoint": adjoint,
        "gradient of a sum": case.gradients(leaves, lambda w, y: y.real.sum()),
        "first-order gradient": first,
        "second-order gradient": case.to_all(derivatives(total, counted)),
    }


def broken_laws(case: Case, dtype: torch.dtype, records: list[Record]) -> list[str]:
    """All that is wrong in one case, on any worker."""
    label = f"{case.name} [{dtype}]"
    expected = expected_laws(case, dtype)
    broken = [
        f"{label} on worker {w}: {what}" for w, r in enumerate(records) for what in r["broken"]
    ]
    for law, values in expected.items():
        for worker, record in enumerate(records):
            member = worker in case.members
            fault = difference(record.get(law), values.get(worker), member, law, dtype)
            if fault:
                broken.append(f"{label} on worker {worker}: {law}: {fault}")
    return broken + failed_dot_test(case, label, dtype, records)


def difference(
    got: Any, expected: Tensor | None, member: bool, law: str, dtype: torch.dtype
) -> str | None:
    """How a worker's tensor differs from the reference, or None."""
    if not member and got is None:  # who takes no part has no gradient
        return None
    if got is None:
        return "missing"
    got = torch.from_numpy(got)
    if expected is None:  # an empty tensor, of the right dtype where data came from elsewhere
        strict = member and law in ("value", "primal", "tangent", "adjoint")
        fits = got.shape == (0,) and (got.dtype == dtype or not strict)
        return None if fits else f"{got.dtype}{tuple(got.shape)} where nothing was expected"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        kinds = [f"{t.dtype}{tuple(t.shape)}" for t in (got, expected)]
        return f"{kinds[0]} instead of {kinds[1]}"
    gap = (got - expected).abs().max().item() if got.numel() else 0.0
    scale = max(1.0, expected.abs().max().item() if got.numel() else 0.0)
    return f"off by {gap:.3g}" if not gap <= TOLERANCE * scale else None


def failed_dot_test(case: Case, label: str, dtype: torch.dtype, records: list[Record]) -> list[str]:
    """⟨A x, y⟩ = ⟨x, A.H y⟩ over all workers, with what they got; what is shared counts once."""
    left = right = 0j
    norms = [0.0, 0.0]
    for worker, record in enumerate(records):
        if "adjoint" not in record:
            continue
        y, back = torch.from_numpy(record["value"]), torch.from_numpy(record["adjoint"])
        weight = weight_like(case, y, worker)
        if case.counts_out(worker):
            left += _dot(y, weight)
            norms = [norms[0] + _dot(y, y).real, norms[1] + _dot(weight, weight).real]
        if case.counts_in(worker):
            right += _dot(case.input_of(worker, dtype, seed=1), back)
    if abs(left - right) <= TOLERANCE * (norms[0] * norms[1]) ** 0.5:
        return []
    return [f"{label}: ⟨A x, y⟩ = {left} but ⟨x, A.H y⟩ = {right}"]


def _dot(a: Tensor, b: Tensor) -> complex:
    return complex(torch.vdot(a.reshape(-1), b.reshape(-1)).item())


def assert_laws(run: Any, make: Any, argument: Any, dtype: torch.dtype, nprocs: int) -> None:
    """Every law for every case that `make(argument)` yields, over all workers."""
    everyones = run(record_laws, make, argument, dtype, nprocs=nprocs)
    cases = list(make(argument))
    assert cases and all(len(records) == len(cases) for records in everyones)
    broken = []
    for case, *records in zip(cases, *everyones, strict=True):
        broken += broken_laws(case, dtype, records)
    assert not broken, f"{len(broken)} laws broken:\n" + "\n".join(broken[:40])


DTYPES = {"real": torch.float64, "complex": torch.complex128}
# Complex numbers travel as pairs of real ones, whoever the workers are: both kinds are on one and
# on three. Not on eight: twelve have grids of two and of three axes, too.
ONE_KIND = {2: "real", 4: "real", 6: "complex", 12: "real"}
WAYS = [(n, kind) for n in WORLDS for kind in DTYPES if ONE_KIND.get(n, kind) == kind and n != 8]
# of three axes, on twelve, those that decide by axes; others are made of these, or of one axis
OF_AXES = ("broadcast", "sum_reduce", "all_sum_reduce", "repartition", "halo_exchange", "move")


@pytest.mark.parametrize(
    ("nprocs", "name", "dtype"),
    [
        pytest.param(n, name, DTYPES[kind], id=f"{n}-{kind}-{name}")
        for n, kind in WAYS
        for name in MAKERS
        if n < 12 or name in OF_AXES
    ],
)
def test_laws(run: Any, nprocs: int, name: str, dtype: torch.dtype) -> None:
    assert_laws(run, MAKERS[name], nprocs, dtype, nprocs)


def run_public_checks(names: list[str]) -> int:
    """The checks that users have, on operators that are known to be right."""
    world, count = tessel.world(), 0
    for case in (case for name in names for case in MAKERS[name](world.size)):
        operator = case.operator(case.build()) if world.rank in case.members else None
        if operator is not None:
            check_adjoint(operator)
            check_adjoint(operator, torch.complex128)
            check_gradient(operator)
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_public_checks(run: Any, nprocs: int) -> None:
    names = ["broadcast", "sum_reduce", "all_sum_reduce", "repartition", "halo_exchange"]
    assert min(run(run_public_checks, names, nprocs=nprocs)) > 20
