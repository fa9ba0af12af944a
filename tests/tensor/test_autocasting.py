"""Under autocast functions give the dtypes of one process, on workers with any number of values.

Tests `tensor/autocasting.py`, `tensor/rules/products.py`, `tensor/rules/fourier.py`,
`tensor/overlapped_convolution.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from parity import values
from spread_cases import Case
from tessel import Layout
from tessel.tensor import autocasting
from test_spread import CASES, flat

Run = Callable[..., list[Any]]
Compute = Callable[[Any], Any]


def shaped(shape: tuple[int, ...], seed: int = 1) -> Any:
    return values(shape, seed).float()


FUNCTIONS: dict[str, tuple[Compute, tuple[int, ...]]] = {
    # of one index torch multiplies elements, which autocast does not cast
    "einsum": (lambda x: torch.einsum("bij,bjk->bik", x, shaped((x.shape[0], 5, 2))), (3, 4, 5)),
    "einsum of one index": (lambda x: torch.einsum("bij,j->bi", x, shaped((1,))), (3, 4, 1)),
    "linear": (lambda x: F.linear(x, shaped((3, 6)), shaped((3,))), (1, 4, 6)),
    "addmm": (lambda x: torch.addmm(shaped((4, 3)), x, shaped((5, 3))), (4, 5)),
    "baddbmm": (lambda x: torch.baddbmm(shaped((2, 4, 3)), x, shaped((2, 5, 3))), (2, 4, 5)),
    "rfft": (lambda x: torch.fft.rfft(x, dim=-1).abs(), (3, 4, 6)),
    "fftn": (lambda x: torch.fft.fftn(x, dim=(0, 1)).abs(), (3, 4, 6)),
    # by strips, of which some workers have none
    "convolution": (lambda x: F.conv1d(x, shaped((3, 2, 2)), stride=2), (1, 2, 64)),
    "wide convolution": (
        lambda x: F.conv2d(x, shaped((4, 4, 3, 3)), padding=1),
        (1, 4, 64, 64),
    ),
}


def check(name: str) -> None:
    compute, shape = FUNCTIONS[name]
    world = tessel.world()
    for dtype in (torch.float32, torch.bfloat16):
        plain = shaped(shape).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected = compute(plain)
        expected.float().square().sum().backward()
        for dim in range(len(shape)):
            grid = world.create_cartesian_topology_partition([world.size])
            cuts = [0 if k == dim else None for k in range(len(shape))]
            x = tessel.spread(plain.detach(), Layout.split(grid, shape, cuts)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                found = compute(x)
            assert found.dtype == found.local.dtype == expected.dtype, (dim, dtype, found.dtype)
            found.float().square().sum().backward()
            for mine, theirs in ((found, expected), (x.grad, plain.grad)):
                error = (mine.full().detach() - theirs.detach()).abs().max()
                assert error <= 0.05 * theirs.detach().abs().max(), (dim, dtype, float(error))


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_are_those_of_one_process(run: Run, name: str, nprocs: int) -> None:
    run(check, name, nprocs=nprocs)


# functions that write into `out`, whose operands torch does not cast
WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "mm": lambda x, out: torch.mm(x, shaped((6, 4)), out=out),
    "matmul": lambda x, out: torch.matmul(x, shaped((6, 4)), out=out),
    "addmm": lambda x, out: torch.addmm(shaped((4,)), x, shaped((6, 4)), out=out),
    "linear": lambda x, out: torch._C._nn.linear(x, shaped((4, 6)), out=out),
    "vecdot": lambda x, out: torch.linalg.vecdot(x, shaped((8, 6)), out=out[:, 0] * 1),
}


def check_written(name: str) -> None:
    """All digits of float32, and an error where dtypes differ."""
    plain, write = shaped((8, 6), 7), WRITTEN[name]
    expected = write(plain, torch.empty(8, 4))
    for dim in range(2):
        x = tessel.spread(plain, Layout.split(tessel.world(), (8, 6), [(0, None), (None, 0)][dim]))
        out = torch.empty_like(x[:, :4])
        with torch.autocast("cpu", torch.bfloat16):
            found = write(x, out)
            with pytest.raises((RuntimeError, ValueError)):
                write(x.bfloat16(), out)
        assert torch.allclose(found.full(), expected, 1e-5, 1e-5), (dim, found.full() - expected)


@pytest.mark.parametrize("name", WRITTEN)
def test_operands_are_not_cast_for_an_output(run: Run, name: str) -> None:
    run(check_written, name, nprocs=2)


SHARES = 4  # tests of all cases, each with some of them
SHORT = (torch.float16, torch.bfloat16)
EXCEPT = (
    "operator: adaptive pool",  # autocast is above it, and knows another operator
    *(name for name, case in CASES.items() if case.may_raise or case.may_gather),
    *(name for name in CASES if "random" in name or "dropout" in name),
)


def check_cases(device: str, share: int) -> int:
    """All functions of `test_spread.py`; what one process refuses is left out."""
    count, wrong = 0, []
    for name in [each for each in CASES if each not in EXCEPT][share::SHARES]:
        for dtype in (torch.float32, torch.bfloat16):
            found = _wrong_dtypes(name, CASES[name], dtype, device)
            count += found is not None
            wrong.extend(found or [])
    assert not wrong, "\n".join(wrong)
    return count


def _wrong_dtypes(name: str, case: Case, dtype: torch.dtype, device: str) -> list[str] | None:
    """A line for each output of another dtype than in one process; None if that refuses."""
    short = {torch.float64: dtype, torch.complex128: torch.complex64}
    operands = [case.operand(k) for k in range(len(case.shapes))]
    operands = [each.to(device, short.get(each.dtype, each.dtype)) for each in operands]
    try:
        with torch.autocast(device, torch.bfloat16):
            expected = flat(case.does(*operands))
    except RuntimeError:  # of short numbers
        return None
    wrong = []
    shape, world = operands[0].shape, tessel.world()
    for dim in {0, len(shape) - 1}:
        layout = Layout.split(world, shape, [0 if k == dim else None for k in range(len(shape))])
        spread = [tessel.spread(operands[0], layout), *operands[1:]]
        try:
            with torch.autocast(device, torch.bfloat16):
                got = flat(case.does(*spread))
        except Exception as error:
            wrong.append(f"{name} of {dtype}, split along {dim}: {error!r}")
            continue
        for k, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            what = f"{name} of {dtype}, split along {dim}: output {k}"
            if isinstance(theirs, torch.Tensor):
                part = mine.local if isinstance(mine, tessel.Tensor) else mine
                found = {mine.dtype, part.dtype}
                if found != {theirs.dtype}:
                    wrong.append(f"{what}: {found}, expected {theirs.dtype}")
    return wrong


def listed(macro: str) -> set[str]:
    """The operators of one of torch's lists of what autocast does on GPUs."""
    folder = Path(torch.__file__).parent / "include" / "ATen"
    lines = (folder / "autocast_mode.h").read_text().splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith(f"#define {macro}(_)"))
    found = set()
    for line in lines[begin + 1 :]:
        if not (operator := re.match(r" *_\((\w+)", line)):
            break
        found.add(operator[1])
    return found


def test_operators_are_cast_as_in_lists_of_torch() -> None:
    """On GPUs, which a machine without one cannot try."""
    in_widest = autocasting._WIDEST["cuda"]
    for macro, others in (
        ("AT_FORALL_LOWER_PRECISION_FP", autocasting._SHORTER),
        ("AT_FORALL_PROMOTE", in_widest),
    ):
        assert len(listed(macro)) > 5
        assert listed(macro) <= others, listed(macro) - others
    for macro in ("AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"):
        assert len(listed(macro)) > 5
        assert not listed(macro) & (autocasting._SHORTER | in_widest)


def test_methods_of_all_objects_are_no_operators() -> None:
    for name in ("__reduce_ex__", "__format__", "__eq__", "__iter__"):
        assert not autocasting.may_matter(name)


@pytest.mark.parametrize("share", range(SHARES))
def test_all_functions_have_the_dtypes_of_one_process(run: Run, share: int) -> None:
    counts = run(check_cases, "cpu", share, nprocs=3)
    assert min(counts) > len(CASES) / SHARES
