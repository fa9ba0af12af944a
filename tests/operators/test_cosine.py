"""Cosine and sine transforms, and padded Fourier transforms: values, adjoints, uses.

Tests `operators/cosine.py`, `operators/dct.py`, `operators/dft.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from math import pi
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tessel
from operator_cases import (
    DTYPES,
    H,
    Spec,
    Spread,
    add,
    check_local,
    check_spreads,
    complex_of,
    compose,
    dct,
    dft,
    diagonal,
    dst,
    grids,
    identity,
    inv,
    kron,
    matrix,
    num_transfers,
    scale,
    trigonometric_matrix,
    values,
)
from parity import close
from tessel import Layout, ParDCT, ParDFT, ParDST, distribute
from tessel.operators import ParOperator
from tessel.operators.cosine import TrigonometricKernel
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
F32, F64, C64, C128 = DTYPES
LENGTHS = (1, 2, 3, 4, 5, 8)
TYPES = (1, 2, 3, 4)
NORMS = (None, "backward", "ortho", "forward")
WORKERS = pytest.mark.parametrize("nprocs", [1, 3, 4])


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small tensors: threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- cosines and sines ----------------------------------------------------------------------------


def all_kinds(n: int, T: torch.dtype) -> list[Spec]:
    found: list[Spec] = []
    for type, norm in product(TYPES, (None, "ortho", "forward")):
        found.append(dst(n, T, type, norm))
        if type > 1 or n > 1:
            found.append(dct(n, T, type, norm))
    return found


# even and odd ones in types in which the same code computes
@pytest.mark.parametrize(
    ("n", "T"),
    [
        pytest.param(n, T, id=f"{n}-{T}")
        for T in DTYPES
        for n in (LENGTHS if T == F64 else (1, 4, 5) if T == C128 else (4, 5))
    ],
)
def test_every_kind_is_its_matrix(n: int, T: torch.dtype) -> None:
    """Results, adjoint, inverse and both, with gradients of first and second order."""
    for spec in all_kinds(n, T):
        for each in (spec, H(spec), inv(spec), H(inv(spec))):
            check_local(each)


@pytest.mark.parametrize("n", [16, 17, 31, 32, 63, 64, 97, 100, 101])
@pytest.mark.parametrize("make", [ParDCT, ParDST])
@pytest.mark.parametrize("type", TYPES)
def test_longer_ones(make: Any, type: int, n: int) -> None:
    A = make(F64, n, type)
    M = trigonometric_matrix(make is ParDST, n, type, None)
    close("matrix", A.to_dense(), M)
    close("adjoint", A.H.to_dense(), M.T)
    close("inverse", (A.inv @ A).to_dense(), torch.eye(n, dtype=F64))


@pytest.mark.parametrize("T", [F64, C128], ids=str)
def test_they_are_those_of_scipy(T: torch.dtype) -> None:
    fft = pytest.importorskip("scipy.fft")
    for n, type, norm in product(LENGTHS, TYPES, NORMS):
        x = values((n, 3), T, 1)
        pairs = [(ParDST, fft.dst, fft.idst)]
        if type > 1 or n > 1:
            pairs.append((ParDCT, fft.dct, fft.idct))
        for make, there, back in pairs:
            A = make(T, n, type, norm)
            for mine, theirs in ((A, there), (A.inv, back)):
                expected = torch.from_numpy(theirs(x.numpy(), type, axis=0, norm=norm))
                close(f"{mine}", mine * x, expected)


def test_an_example_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    close("DCT-1", ParDCT(F64, 4, 1) * x, torch.tensor([15.0, -4.0, 0.0, -1.0], dtype=F64))
    close("sum", (ParDCT(F64, 4) * x)[0], torch.tensor(20.0, dtype=F64))
    close("ortho keeps lengths", (ParDST(F64, 4, 4, "ortho") * x).norm(), x.norm())


def test_with_ortho_adjoint_and_inverse_are_one() -> None:
    for type, n, make in product(TYPES, (2, 5, 6), (ParDCT, ParDST)):
        A = make(F64, n, type, "ortho")
        close(f"{A}", A.H.to_dense(), A.inv.to_dense())
        B = make(F64, n, type)
        assert not torch.allclose(B.H.to_dense(), B.inv.to_dense())


def test_the_four_of_a_kernel() -> None:
    """Adjoint and inverse of what is weighted at its ends, by any weights."""
    for is_sine, type in product((False, True), TYPES):
        A = TrigonometricKernel(is_sine, type, 6, 0.3, 1.7, 0.6)
        assert A.H.H == A and A.H.inv == A.inv.H
        unit = torch.eye(6, dtype=F64)
        M = A._apply(unit).T
        close("adjoint", A.H._apply(unit).T, M.T)
        close("inverse", A.inv._apply(unit).T, torch.linalg.inv(M))


@pytest.mark.parametrize("T", DTYPES, ids=str)
def test_in_combinations(T: torch.dtype) -> None:
    C = complex_of(T)
    cases: list[Spec] = [
        kron(dct(3, T), dst(4, T, 1)),
        kron(dct(5, T, 3), dft(4, T), dst(3, C, 2)),
        H(kron(dft(4, C), dct(5, T, 1), dft(3, T))),
        inv(kron(dft(4, C), dct(5, T, 4, "ortho"), dft(3, T))),
        compose(inv(dct(6, T)), diagonal(6, T), dct(6, T)),
        add(dct(4, T), scale(0.5, dst(4, T, 3))),
        kron(add(dct(4, T), identity(4, T)), matrix(2, 3, T)),
        compose(dst(5, T, 2), inv(dst(5, T, 2))),
    ]
    for spec in cases:
        check_local(spec)


def test_batches_vectors_and_strides() -> None:
    A = tessel.kron(ParDCT(C128, 3), ParDST(C128, 4, 1))
    M = A.to_dense()
    X = values((4, 3, 2), C128, 1).permute(1, 0, 2)
    close("batch", (A * X).reshape(12, 2), M @ X.reshape(12, 2))
    x = values((3, 4), C128, 2)
    close("vec", A * x.reshape(12), M @ x.reshape(12))
    close("conjugate view", A * x.conj(), (M @ x.conj().reshape(12)).reshape(3, 4))
    close(
        "expanded", A * x[:, :1].expand(3, 4), (M @ x[:, :1].repeat(1, 4).reshape(12)).reshape(3, 4)
    )
    strided = values((6, 8), C128, 3)[::2, ::2]
    before = strided.clone()
    close("strided", A * strided, (M @ strided.reshape(12)).reshape(3, 4))
    assert torch.equal(strided, before), "the input was changed"
    empty = A * torch.empty(3, 4, 0, dtype=C128, requires_grad=True)
    assert empty.shape == (3, 4, 0) and empty.dtype == C128
    empty.sum().abs().backward()


@pytest.mark.slow
def test_autograd_knows_that_they_are_linear() -> None:
    x = values((5, 3), F64, 1).requires_grad_()
    z = values((4, 3), C128, 2).requires_grad_()
    for type in TYPES:
        for A, at in ((ParDCT(F64, 5, type), x), (ParDST(C128, 4, type, "forward"), z)):
            assert torch.autograd.gradcheck(A, at, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(A, at, fast_mode=True)
    with torch.no_grad():
        assert not (ParDCT(F64, 5) * x).requires_grad


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("n", [4, 5])
def test_torch_transforms_them(type: int, n: int) -> None:
    """Jacobians, vmap and forward mode."""
    for A in (ParDCT(F64, n, type), ParDST(F64, n, type)):
        M, x = A.to_dense(), values((n,), F64, 1)
        close("jacrev", torch.func.jacrev(A)(x), M)
        close("jacfwd", torch.func.jacfwd(A)(x), M)
        X = values((3, n), F64, 2)
        close("vmap", torch.func.vmap(A)(X), X @ M.T)
        _, tangent = torch.func.jvp(A, (x,), (X[0],))
        close("jvp", tangent, M @ X[0])


@pytest.mark.parametrize("type", TYPES)
def test_compilers_look_into_them(type: int) -> None:
    for A in (ParDCT(F64, 6, type, "ortho"), ParDST(F64, 7, type)):
        compiled = torch.compile(A.act, fullgraph=True, backend="aot_eager")
        x = values(A.domain.shape, F64, 1).requires_grad_()
        y = compiled(x, 0, None)
        close("compiled", y, A * x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        close("gradient", grad, 2 * (A.H * (A * x)))


def test_a_first_call_in_inference_mode_leaves_nothing_behind() -> None:
    """What is kept between calls can be used where gradients are recorded."""
    A, x = ParDCT(F64, 23), values((23,), F64, 1)
    with torch.inference_mode():
        A * x
    assert not any(table.is_inference() for table in A.kernel._tables(x))
    close("gradient", torch.func.jacrev(A)(x), A.to_dense())


def test_a_first_call_of_a_tracer_leaves_nothing_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    A = ParDCT(F64, 29)
    with FakeTensorMode():
        assert (A * torch.empty(29, dtype=F64)).shape == (29,)
    close("matrix", A.to_dense(), trigonometric_matrix(False, 29, 2, None))


def test_copies_are_the_same() -> None:
    A = ParDCT(F64, 5, 3, "ortho")
    A.H * values((5,), F64, 1)
    for made in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        close("copy", made.H.to_dense(), A.H.to_dense())
        assert repr(made) == repr(A)
    assert A.H.H is A and A.inv.inv is A and A.H.inv is A.inv.H


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "one number for DCT-1": (lambda: ParDCT(F32, 1, 1), "type 1 needs a length n of at least 2"),
    "a fifth type": (lambda: ParDCT(F32, 4, 5), "type must be 1, 2, 3 or 4, got 5"),
    "no type": (lambda: ParDST(F32, 4, None), "type must be 1, 2, 3 or 4, got None"),  # type: ignore[arg-type]
    "a truth as type": (lambda: ParDST(F32, 4, True), "type must be 1, 2, 3 or 4"),
    "half a type": (lambda: ParDST(F32, 4, 2.5), "type must be 1, 2, 3 or 4"),  # type: ignore[arg-type]
    "another norm": (lambda: ParDCT(F32, 4, norm="unitary"), "norm must be one of backward, ortho"),
    "a number as norm": (lambda: ParDCT(F32, 4, norm=2), "norm must be one of"),  # type: ignore[arg-type]
    "no length": (lambda: ParDCT(F32, 0), "ParDCT: n must be an integer of at least 1"),
    "whole numbers": (lambda: ParDST(torch.int64, 4), "ParDST: T must be one of"),
    "half precision": (
        lambda: ParDST(torch.float16, 4) * torch.ones(4, dtype=torch.float16),
        "torch does not support float16 on cpu",
    ),
    "too few points": (lambda: ParDFT(F32, 4, 0.5), "padding must be a number of at least 1"),
    "mpi4py-fft's word for none": (lambda: ParDFT(F32, 4, False), "padding must be a number"),
    "a list": (lambda: ParDFT(F32, 4, [1.5]), "padding must be a number"),  # type: ignore[arg-type]
    "no number": (lambda: ParDFT(F32, 4, float("nan")), "padding must be a number"),
    "for ever": (lambda: ParDFT(F32, 4, float("inf")), "padding must be a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


def test_they_print_what_they_are() -> None:
    assert repr(ParDCT(F32, 4).H) == "ParDCT(float32 4, type=2, norm='backward').H"
    assert repr(ParDST(C64, 3, 1, "ortho")) == "ParDST(complex64 3, type=1, norm='ortho')"
    assert repr(ParDFT(F32, 4, 1.5)) == "ParDFT(4 modes, float32 6 → complex64 3)"
    assert repr(ParDFT(F32, 4, 1)) == "ParDFT(float32 4 → complex64 3)"


# -- padded Fourier transforms --------------------------------------------------------------------

PADDINGS = (1, 1.2, 4 / 3, 1.5, 2, 3.7)


@pytest.mark.parametrize("T", DTYPES, ids=str)
@pytest.mark.parametrize("padding", PADDINGS)
def test_padded_transforms_are_their_matrices(padding: float, T: torch.dtype) -> None:
    """The inverse is the pseudo-inverse of the matrix."""
    # even and odd ones in single precision, which the same transforms compute
    for n in (1, 2, 3, 4, 5, 6, 8, 9) if T in (F64, C128) else (2, 5, 9):
        spec = dft(n, T, padding)
        for each in (spec, H(spec), inv(spec), H(inv(spec))):
            check_local(each)


def test_the_number_of_points() -> None:
    points = [ParDFT(C64, n, 1.5).domain.numel for n in range(1, 9)]
    assert points == [1, 3, 4, 6, 7, 9, 10, 12]
    assert ParDFT(F32, 25, 1.16).domain.numel == 29, "25 · 1.16 is 28.999… in floating point"


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("padding", [1.5, 2])
def test_coefficients_are_those_of_n_points(n: int, padding: float) -> None:
    """A field of the lowest modes: what n points give is what more points give."""
    for T in (F64, C128):
        F, G, u = ParDFT(T, n, padding), ParDFT(T, n), values((n,), T, n)
        spectrum = G * u
        field = F.inv * spectrum
        assert field.dtype == T
        close("there and back", F * field, spectrum)
        k = torch.arange(n)
        at = k[(k * F.domain.numel) % n == 0]  # points that both have
        close("the same field", field[at * F.domain.numel // n], u[at])


def test_the_highest_of_an_even_number_of_modes_stands_for_two() -> None:
    n, m = 4, 6
    x = 2 * pi / m * torch.arange(m, dtype=F64)
    F, R = ParDFT(C128, n, 1.5), ParDFT(F64, n, 1.5)
    for a, b in ((1.0, 0.0), (0.0, 1.0), (2.0, -1.0), (0.5, 0.5)):
        field = a * torch.exp(2j * x) + b * torch.exp(-2j * x)
        expected = torch.tensor([0, 0, n * (a + b), 0], dtype=C128)
        close("as n points see it", F * field, expected)
    close("cosine", R * torch.cos(2 * x), torch.tensor([0, 0, n], dtype=C128))
    close("sine", R * torch.sin(2 * x), torch.zeros(3, dtype=C128))
    close("back", R.inv * torch.tensor([0, 0, n], dtype=C128), torch.cos(2 * x))
    close("back", (F.inv * torch.tensor([0, 0, n, 0], dtype=C128)).imag, torch.zeros(m, dtype=F64))


# What is below the highest frequency of an even n, which stands for two: |k| ≤ K = (n - 1) // 2.


def padded(n: Shape, T: torch.dtype) -> ParOperator:
    C = complex_of(T)
    return tessel.kron(*(ParDFT(C, length, 1.5) for length in n[:-1]), ParDFT(T, n[-1], 1.5))


def below_highest(n: Shape, T: torch.dtype) -> Tensor:
    """One at frequencies with |k| ≤ K, else zero, as coefficients lie."""
    mask = torch.ones(n if T.is_complex else (*n[:-1], n[-1] // 2 + 1), dtype=F64)
    for dim, length in enumerate(n):
        if length % 2 == 0:
            mask = mask.index_fill(dim, torch.tensor([length // 2]), 0)
    return mask


def convolved(u: Tensor, v: Tensor, n: Shape, T: torch.dtype) -> Tensor:
    """The coefficients Σ û[p] v̂[k - p] of a product, over all p, at frequencies with |k| ≤ K.

    Frequencies in order are a line, along which torch convolves; what is beyond K is cut off.
    """
    ends = [(length - 1) // 2 for length in n]
    in_order = []
    for each in (u, v):
        if not T.is_complex:
            each = torch.fft.fftn(torch.fft.irfftn(each, s=n).to(complex_of(T)))
        for dim, end in enumerate(ends):
            each = each.index_select(dim, torch.arange(-end, end + 1) % n[dim])
        in_order.append(each)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(n) - 1]
    kernel = in_order[1].flip(tuple(range(len(n))))
    result = convolve(in_order[0][None, None], kernel[None, None], padding=ends)[0, 0]
    for dim, length in enumerate(n):  # the frequency -n/2 comes first, if there is one
        before = [side for each in reversed(range(len(n))) for side in (int(each == dim), 0)]
        result = functional.pad(result, before) if length % 2 == 0 else result
        result = result.roll(-(length // 2), dim)
    result = result if T.is_complex else result[..., : n[-1] // 2 + 1]
    return result / torch.Size(n).numel()


def check_product(n: Shape, T: torch.dtype, grid: Shape) -> None:
    """The product of two fields is computed without aliasing, and so are its derivatives."""
    mask = below_highest(n, T)
    transform = torch.fft.fftn if T.is_complex else torch.fft.rfftn
    u, v = (transform(values(n, T, seed)) * mask for seed in (1, 2))
    weight = values(mask.shape, complex_of(T), 3) * mask

    wholes = [each.clone().requires_grad_() for each in (u, v)]
    expected = convolved(*wholes, n, T)
    vjps = torch.autograd.grad((weight.conj() * expected).real.sum(), wholes)

    F: Any = distribute(padded(n, T), grid, "anywhere")
    local = F.layout_out.local_part
    mine = [local(each).clone().requires_grad_() for each in (u, v)]
    y = F * ((F.inv * mine[0]) * (F.inv * mine[1]))
    close("product", y * local(mask), local(expected))
    grads = torch.autograd.grad((local(weight).conj() * y).real.sum(), mine)
    for grad, slope in zip(grads, vjps, strict=True):
        close("gradient", grad * local(mask), local(slope * mask))


PRODUCTS = [(5,), (8,), (9,), (4, 7), (6, 5), (3, 4, 6), (5, 3, 7)]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@pytest.mark.parametrize("T", [F64, C128], ids=str)
def test_products_have_no_aliasing(run: Run, nprocs: int, T: torch.dtype) -> None:
    for n in PRODUCTS:
        for grid in grids(nprocs, len(n)):
            run(check_product, n, T, grid, nprocs=nprocs)


def test_without_padding_they_have_aliasing() -> None:
    """So the test above can fail."""
    n = (8,)
    mask = below_highest(n, C128)
    u, v = (torch.fft.fft(values(n, C128, seed)) * mask for seed in (1, 2))
    F = ParDFT(C128, 8)
    y = F * ((F.inv * u) * (F.inv * v))
    assert not torch.allclose(y * mask, convolved(u, v, n, C128), rtol=1e-2)


def count_padded() -> dict[str, tuple[int, int]]:
    """Transfers and bytes that a worker sends of 12 × 12 points and 8 × 8 modes, in slabs."""
    F: Any = distribute(tessel.kron(*[ParDFT(C128, 8, 1.5)] * 2), [4, 1], "anywhere")
    found = {}
    points = torch.rand(F.layout_in.local_shape, dtype=C128)
    modes = torch.rand(F.layout_out.local_shape, dtype=C128)
    for name, A, x in (("there", F, points), ("back", F.inv, modes)):
        A * x
        with count_traffic() as traffic:
            A * x
        found[name] = num_transfers(A), traffic.bytes_sent
    return found


def test_only_modes_travel(run: Run) -> None:
    """Of 3 × 12 points, 3 × 8 are left when they travel; a quarter stays."""
    for found in run(count_padded, nprocs=4):
        assert found == {"there": (1, 3 * 8 * 16 * 3 // 4), "back": (1, 3 * 8 * 16 * 3 // 4)}


# -- on workers -----------------------------------------------------------------------------------


def spread_cases(nprocs: int) -> list[Spread]:
    """Uneven and empty parts, batches, results elsewhere."""
    found = []
    for type, make in product(TYPES, (dct, dst)):
        for n, norm in ((nprocs + 1, None), (7, "ortho"), (2, "forward")):
            found.append(Spread(make(n, F64, type, norm), (nprocs,)))
            found.append(Spread(H(make(n, C128, type, norm)), (nprocs,), "anywhere"))
            found.append(Spread(inv(make(n, F64, type, norm)), (nprocs, 1), batch=(2,)))
    pair = kron(dct(5, F64, 1), dst(6, F64, 2))
    for grid in grids(nprocs, 2):
        found.append(Spread(pair, grid))
        found.append(Spread(kron(dct(5, F64), dft(4, F64, 1.5)), grid, "anywhere"))
        found.append(Spread(inv(kron(dst(3, C128, 4), dft(5, F64, 1.5))), grid))
    batch = (0,) * (nprocs - 1) + (3,)
    found.append(Spread(pair, (1, 1, nprocs), batch=batch))
    found.append(Spread(dft(5, F64, 1.5), (1, nprocs), batch=batch))
    found.append(Spread(dct(5), (nprocs, 1), batch=(0,)))
    return found


@WORKERS
def test_on_workers_they_are_their_matrices(run: Run, nprocs: int) -> None:
    cases = spread_cases(nprocs)
    assert run(check_spreads, cases, nprocs=nprocs) == [len(cases)] * nprocs


def transfers() -> dict[str, int]:
    C = tessel.kron(*[ParDCT(F64, 8)] * 3)
    return {
        "a slab": num_transfers(distribute(C, [4, 1, 1], "anywhere")),
        "a pencil": num_transfers(distribute(C, [2, 2, 1], "anywhere")),
        "there and back": num_transfers(distribute(C.inv @ C, [4, 1, 1])),
    }


def test_one_rearrangement_is_enough(run: Run) -> None:
    for found in run(transfers, nprocs=4):
        assert found == {"a slab": 1, "a pencil": 1, "there and back": 2}


def different_on_worker_1() -> dict[str, str]:
    """Workers that make different transforms of tensors of the same size."""
    first = tessel.world().rank == 0
    pairs: dict[str, ParOperator] = {
        "type": ParDCT(F64, 8, 2 if first else 3),
        "norm": ParDCT(F64, 8, norm="ortho" if first else "forward"),
        "sine": ParDCT(F64, 8) if first else ParDST(F64, 8),
        "modes": ParDFT(F64, 4 if first else 5, 2 if first else 1.6),
    }
    found = {}
    for name, operator in pairs.items():
        A: Any = distribute(operator, [2], "anywhere")
        try:
            A * torch.ones(4, dtype=operator.domain.dtype)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_different_transforms_on_workers_raise_on_all(run: Run) -> None:
    one, other = run(different_on_worker_1, nprocs=2)
    assert set(one) == {"type", "norm", "sine", "modes"}, "each of them raises"
    assert one == other, "with the same text"


def explained() -> list[str]:
    A: Any = distribute(tessel.kron(ParDCT(F32, 8), ParDST(F32, 6)), [2, 1])
    explanation = A.explain()
    assert explanation.time > 0
    return [line.title for line in explanation.lines if not line.is_transfer]


def test_they_are_explained(run: Run) -> None:
    assert run(explained, nprocs=2)[0] == ["ParDST along 1", "ParDCT along 0"]


def test_work_is_that_of_a_real_transform() -> None:
    """Twice for complex numbers; of twice the length for type 1."""

    def work(A: Any) -> float:
        return float(A.flops((64,), (0,)))

    real, whole = work(ParDCT(F32, 64)), work(ParDFT(F32, 64))
    assert whole < real < 2 * whole
    assert work(ParDCT(C64, 64)) == 2 * real
    assert work(ParDCT(F32, 64, 1)) > 1.5 * real
    assert work(ParDFT(C64, 64, 1.5).H) == work(ParDFT(C64, 96).H)


# -- slices ---------------------------------------------------------------------------------------


def slices() -> list[tuple[slice, ...]]:
    P = tessel.world().create_partition_inclusive([0, 1, 2])
    grid = P.create_cartesian_topology_partition([3, 1])
    layout = Layout.balanced(grid, (5, 4))
    whole = torch.arange(20).reshape(5, 4)
    part = whole[layout.local_slice()]
    assert part.numel() == layout.local_part(whole).numel()
    if grid.active:
        assert torch.equal(part, layout.local_part(whole))
    assert [layout.local_slice(w) for w in range(3)] == [
        (slice(0, 2), slice(0, 4)),
        (slice(2, 4), slice(0, 4)),
        (slice(4, 5), slice(0, 4)),
    ]
    return [layout.local_slice()]


def test_slices_of_parts(run: Run) -> None:
    *_, ((rows, columns),) = run(slices, nprocs=4)
    assert (rows, columns) == (slice(0, 0), slice(0, 0)), "outside of the partition"
