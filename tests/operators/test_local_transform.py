"""Transforms of a part by each library: equal to torch's, and chosen as documented.

Tests `operators/local_transform.py`, `operators/memory.py`.
"""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from tessel.operators import local_transform
from tessel.operators.local_transform import LocalTransform
from tessel.operators.space import complex_of

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
KINDS = ("fftn", "ifftn", "rfftn", "irfftn")


def choose(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let TESSEL_FFT be this, as a job that begins would read it."""
    patch.setenv("TESSEL_FFT", name)
    local_transform.chosen_library.cache_clear()


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    yield
    local_transform.chosen_library.cache_clear()


@pytest.fixture(params=["scipy", "fftw"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    pytest.importorskip({"scipy": "scipy.fft", "fftw": "pyfftw"}[name])
    choose(name, monkeypatch)
    return name


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def forms(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of one shape that lie differently in memory."""
    n = len(shape)
    wide = numbers((*shape[:-1], 2 * shape[-1] + 1), dtype)
    return {
        "contiguous": numbers(shape, dtype),
        "the other way round": numbers(shape[::-1], dtype).permute(*range(n)[::-1]),
        "every second, unaligned": wide[..., 1::2],
        "expanded": numbers((1, *shape[1:]), dtype).expand(shape),
    } | ({"conjugate": numbers(shape, dtype).conj()} if dtype.is_complex else {})


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_libraries_give_what_torch_gives(kind: str, real: torch.dtype, library: str) -> None:
    dtype = real if kind == "rfftn" else complex_of(real)
    cases = product([(4, 3, 6), (5, 1, 1), (1, 7, 2)], [(0,), (1,), (2,), (0, 2), (2, 0, 1)])
    for (shape, dims), norm, last in product(cases, ("backward", "forward"), (0, 1)):
        if kind == "irfftn":  # of n points, odd or even, there are n // 2 + 1 coefficients
            points = max(1, 2 * (shape[dims[-1]] - 1) + last)
            lengths = (*(shape[dim] for dim in dims[:-1]), points)
            if shape[dims[-1]] != points // 2 + 1:
                continue
        elif last:
            continue
        else:
            lengths = tuple(shape[dim] for dim in dims)
        transform = LocalTransform(kind, dims, lengths, norm)
        for form, x in forms(shape, dtype).items():
            before = x.clone()
            # coefficients that are those of no real numbers are read alike, too
            with torch.device("meta"):  # a default for new tensors changes nothing
                found = transform(x.resolve_conj(), library)
            expected = transform(x)
            assert torch.equal(x, before)
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert torch.allclose(found, expected, rtol=0, atol=10 * TOLERANCES[real]), (form, dims)


def test_operators_by_a_library_have_right_gradients(library: str) -> None:
    F = tessel.kron(tessel.ParDFT(torch.complex128, 4), tessel.ParDFT(torch.float64, 5))
    for A in (F, F.H, F.inv, F.inv.H, tessel.ParDFT(torch.float64, 4, padding=1.5)):
        x = numbers(A.domain.shape, A.domain.dtype).requires_grad_()
        y = A * x
        assert y.grad_fn is not None and "Fft" not in y.grad_fn.name()
        assert torch.autograd.gradcheck(A.__mul__, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(A.__mul__, x)
        other = numbers(A.codomain.shape, A.codomain.dtype)
        pairs = (y.detach(), other), (x.detach(), A.H * other)
        here, there = ((a.conj() * b).real.sum() for a, b in pairs)
        assert torch.allclose(here, there, rtol=1e-12, atol=1e-12)


def test_transforms_of_functions_take_torch_s(library: str) -> None:
    F = tessel.ParDFT(torch.complex128, 4)
    x = numbers((3, 4), torch.complex128)
    assert torch.allclose(torch.func.vmap(F.__mul__)(x), torch.fft.fft(x))
    # fullgraph: a call of another library would break the graph
    compiled = torch.compile(F.__mul__, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x[0]), torch.fft.fft(x[0]))
    with torch.device("meta"):
        assert (F * torch.empty(4, dtype=torch.complex128)).is_meta


def test_the_setting_names_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, x = LocalTransform("fftn", (0,), (4,), "backward"), torch.ones(4) + 0j
    choose("fftpack", monkeypatch)
    with pytest.raises(ValueError, match="TESSEL_FFT must be one of auto, torch, scipy, fftw"):
        transform.library(x)
    choose("fftw", monkeypatch)
    monkeypatch.setitem(sys.modules, "pyfftw", None)  # as if it were not installed
    local_transform._imported.cache_clear()
    with pytest.raises(ValueError, match=r"TESSEL_FFT=fftw needs the package pyfftw.*set TESS"):
        transform.library(x)
    local_transform._imported.cache_clear()
    assert transform.library(x[:0]) == "torch"  # nothing to transform: torch raises its own error


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A library that is faster than torch, and what was asked of it; none was measured yet."""
    asked: list[str] = []

    def by_fftw(self: LocalTransform, x: Tensor) -> Tensor:
        asked.append(self.kind)
        return x.new_full(x.shape, 7)

    choose("auto", monkeypatch)
    monkeypatch.setattr(local_transform, "_others", lambda: ("fftw",))
    monkeypatch.setattr(local_transform, "_imported", lambda name: True)
    monkeypatch.setattr(local_transform, "_measured", {})
    monkeypatch.setattr(LocalTransform, "_by_fftw", by_fftw)
    return asked


def test_what_comes_again_is_timed_in_some_calls(fast: list[str]) -> None:
    F, x = tessel.ParDFT(torch.complex64, 64), torch.ones(64, 2000) + 0j
    for _ in range(7):
        assert not (F * x == 7).any()
    assert not fast
    timed = [bool((F * x == 7).all()) for _ in range(24)]
    assert timed == ([False] * 4 + [True] * 4) * 3  # in turns
    assert all((F * x == 7).all() for _ in range(5))  # chosen
    assert not (F * x[:, :1000] == 7).any()  # another form: from the beginning
    with torch.no_grad():
        assert (F * x == 7).all()


def times_of(*given: tuple[str, list[float]]) -> str:
    """The library that is chosen when calls by each of them take so long."""
    trial = local_transform._Trial(
        LocalTransform("fftn", (0,), (4,), "backward"), tuple(name for name, _ in given[1:])
    )
    left = {name: iter(seconds) for name, seconds in given}
    while library := trial.next():
        if trial.is_over:
            return library
        trial.add(library, next(left[library]))
    raise AssertionError


def test_a_trial_is_not_decided_by_noise(fast: list[str]) -> None:
    usual = [9.0, 1.0, 1.1, 1.0] * 3
    assert times_of(("torch", usual), ("fftw", [30.0, 0.7, 5.0, 0.7] * 3)) == "fftw"
    # some calls in a row that something else slowed down
    late = [9.0, 5.0, 5.0, 5.0, 5.0, *[1.0] * 7]
    assert times_of(("torch", late), ("fftw", [1.0] * 12)) == "torch"
    assert times_of(("torch", usual), ("fftw", [9.0, *[0.95] * 11])) == "torch"  # no tenth
    assert times_of(("torch", usual), ("fftw", [0.1, 1.0, 1.0, 1.0] * 3)) == "torch"  # untimed
    # what takes twice as long is called in one block
    slow = [9.0, 2.0, 2.0, 2.0]
    assert times_of(("torch", usual), ("scipy", slow), ("fftw", [0.5] * 12)) == "fftw"


def test_calls_that_raise_end_a_trial(fast: list[str]) -> None:
    trial = local_transform._Trial(LocalTransform("fftn", (0,), (4,), "backward"), ("fftw",))
    asked = [trial.next() for _ in range(200) if not trial.is_over]
    assert trial.is_over and asked[-1] == "torch"


def test_what_is_not_measured(fast: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    F = tessel.ParDFT(torch.complex64, 64)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(30):
            F * (torch.ones(64) + 0j)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(local_transform, "_MOST", 100)
    for _ in range(30):
        F * (torch.ones(64, 2) + 0j)
    choose("torch", monkeypatch)
    for _ in range(30):
        F * (torch.ones(64) + 0j)
    assert not fast


def test_a_library_that_cannot_be_imported_is_left_out(
    fast: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(name: str) -> Any:
        raise ValueError("its libraries are missing")

    monkeypatch.setattr(local_transform, "_imported", imported)
    F, x = tessel.ParDFT(torch.complex64, 64), torch.ones(64) + 0j
    assert all((F * x)[0] == 64 for _ in range(30)) and not fast


def transform_by(library: str) -> None:
    F = tessel.kron(*[tessel.ParDFT(torch.complex128, 6)] * 2, tessel.ParDFT(torch.float64, 5))
    spread = tessel.distribute(F, [2, 1, 1])
    x = numbers((6, 6, 5), torch.float64)
    here = tuple(slice(*interval) for interval in spread.layout_in.box())
    there = tuple(slice(*interval) for interval in spread.layout_out.box())
    with pytest.MonkeyPatch.context() as patch:
        choose(library if tessel.world().rank == 0 else "torch", patch)
        part = x[here].requires_grad_()
        y = spread * part
        assert torch.allclose(y, torch.fft.rfftn(x)[there], rtol=0, atol=1e-12)
        y.abs().square().sum().backward()
    whole = x.clone().requires_grad_()
    torch.fft.rfftn(whole).abs().square().sum().backward()
    assert part.grad is not None and whole.grad is not None
    assert torch.allclose(part.grad, whole.grad[here], rtol=0, atol=1e-9)


def test_workers_may_use_different_libraries(run: Any, library: str) -> None:
    run(transform_by, library, nprocs=2)


def said_of(name: str) -> list[str]:
    """What is raised where the last worker cannot use its library, and where none can."""
    F = tessel.kron(tessel.ParDFT(torch.complex64, 2), tessel.ParDFT(torch.complex64, 4))
    spread = tessel.distribute(F, [tessel.world().size, 1])  # the last part is empty
    part, said = torch.ones(spread.layout_in.local_shape) + 0j, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyfftw", None)  # as if it were not installed
        local_transform._imported.cache_clear()
        for wrong in ({2}, {0, 1, 2}):
            choose(name if tessel.world().rank in wrong else "torch", patch)
            with pytest.raises(ValueError) as raised:
                spread * part
            said.append(str(raised.value))
        choose("torch", patch)
        assert torch.allclose(spread.H * (spread * part), 8 * part)
        choose(name, patch)  # other operators do not ask for it
        tessel.distribute(tessel.ParDCT(torch.float32, 6), [3]) * torch.ones(2)
    local_transform._imported.cache_clear()
    local_transform.chosen_library.cache_clear()
    return said


@pytest.mark.parametrize("name", ["fftpack", "fftw"])
def test_all_workers_raise_where_one_cannot_use_its_library(run: Any, name: str) -> None:
    first, *others = run(said_of, name, nprocs=3)
    assert others == [first] * 2
    reason = "TESSEL_FFT must be one of" if name == "fftpack" else "TESSEL_FFT=fftw needs the"
    assert "worker 2 calls" in first[0] and f"a wrong library: {reason}" in first[0]
    assert first[1].startswith(reason)


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, tessel, torch; tessel.ParDFT(torch.complex64, 4) * (torch.ones(4) + 0j); "
        "print([name for name in ('scipy', 'pyfftw') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
