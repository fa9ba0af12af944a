"""Functions of each element for `test_spread.py`, in groups by the values that they take.

Tests `tensor/rules/pointwise.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import values
from spread_cases import Case, Shape, positive, truths


def between(shape: Shape, number: int) -> Tensor:
    """From 0.1 to 0.9."""
    return values(shape, 3 + number).sigmoid() * 0.8 + 0.1


def numbers(shape: Shape, number: int) -> Tensor:
    """Whole numbers from 1 to 9."""
    return (values(shape, 3 + number) * 100).long().abs() % 9 + 1


def function(name: str) -> Callable[..., Any]:
    """A function of torch, of `torch.nn.functional` or of `torch.special` by its name."""
    place, _, last = name.rpartition(".")
    return getattr({"F": F, "special": torch.special, "": torch}[place], last)


def each_of(names: str) -> Callable[..., Any]:
    functions = [function(name) for name in names.split()]
    return lambda *operands: tuple(each(*operands) for each in functions)


def in_place(names: str) -> Callable[..., Any]:
    def change(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        copies = [x * 1 for _ in names.split()]
        return tuple(
            getattr(y, name)(*others) for y, name in zip(copies, names.split(), strict=True)
        )

    return change


ANY = "abs absolute neg negative positive exp exp2 expm1 sin cos tan asinh atan sinh cosh tanh"
ANY += " sigmoid erf erfc square sinc i0 deg2rad rad2deg nan_to_num"
STEPS = "sgn sign ceil floor round trunc frac signbit logical_not isfinite isinf isneginf isposinf"
STEPS += " isnan isreal"
ABOVE = "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma"
UNIT = "acos asin atanh erfinv logit"
ACTIVATIONS = "relu F.relu6 selu celu F.elu F.silu F.mish F.gelu F.softplus F.softsign F.tanhshrink"
ACTIVATIONS += " F.hardtanh F.hardswish F.hardshrink F.softshrink F.leaky_relu"
ACTIVATIONS += " F.logsigmoid"
TWO = "add sub subtract mul multiply div divide true_divide atan2 hypot maximum minimum fmax fmin"
TWO += " max min logaddexp logaddexp2 rsub"
QUOTIENTS = "floor_divide remainder fmod copysign nextafter heaviside"
POWERS = "pow float_power xlogy"
COMPARISONS = "eq ne lt le gt ge less less_equal greater greater_equal not_equal isclose"
LOGIC = "logical_and logical_or logical_xor"
BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm"
SPECIAL = "entr erfcx i0e i1 i1e log_ndtr ndtr expit expm1 psi gammaln round sinc exp2 erf"
ONE_IN_PLACE = "abs_ neg_ exp_ sin_ cos_ tanh_ sigmoid_ square_ relu_ zero_ clamp_ sgn_ erf_ atan_"
TWO_IN_PLACE = "add_ sub_ mul_ div_ atan2_ hypot_ copysign_ eq_ lt_ ge_ ne_"
X = (4, 5, 6)


def shifted(x: Tensor) -> tuple[Any, ...]:
    """What `new_zeros(x.shape)` gives lies as x does, and parts of x can be put into it."""
    y = x.new_zeros(x.shape)
    y[..., 1:] = x[..., :-1]
    y[..., 0] = 3.0
    more = x.new_ones(*x.shape) * x, x.new_full(size=x.shape, fill_value=2.0) * x
    return y, *more, x.new_empty(list(x.shape), dtype=torch.float32).fill_(1.0)


ELEMENTS: dict[str, Case] = {
    "of any number": Case(each_of(ANY)),
    "jumps": Case(each_of(STEPS)),
    "of positive numbers": Case(each_of(ABOVE), make=positive),
    "of numbers up to one": Case(each_of(UNIT), make=between),
    "gammas": Case(
        lambda x: (torch.polygamma(1, x), torch.mvlgamma(x + 2, 2), torch.acosh(x + 1)),
        make=positive,
    ),
    "incomplete gammas": Case(
        lambda x, y: (torch.igamma(x, y), torch.igammac(x, y)), (X, X), make=positive, derives=False
    ),
    "activations": Case(each_of(ACTIVATIONS)),
    "activations with arguments": Case(
        lambda x: (
            F.threshold(x, 0.2, 0.5),
            F.leaky_relu(x, 0.3),
            F.elu(x, 0.7),
            F.celu(x, 0.6),
            F.hardtanh(x, -0.5, 0.5),
            F.gelu(x, approximate="tanh"),
            F.relu(x * 1, inplace=True),
            F.silu(x * 1, inplace=True),
            F.hardsigmoid(x),
        ),
        order=1,
    ),
    "prelu": Case(lambda x, w: (F.prelu(x, w), F.prelu(x, w[:1])), (X, (5,)), plain_others=True),
    "prelu with a spread weight": Case(lambda x, w: F.prelu(x, w), (X, (5,))),
    "of two": Case(each_of(TWO), (X, X)),
    "of two that are broadcast": Case(each_of(TWO), (X, (5, 1))),
    "of a tensor and a row": Case(each_of(TWO), ((1, 6), (4, 5, 1))),
    "operators": Case(
        lambda x, y: (x + y, x - y, x * y, x / y, 2 - x, 2 / y, -x, abs(x), +x, x**2, 2**x, x % y),
        (X, X),
    ),
    "quotients": Case(each_of(QUOTIENTS), (X, X), derives=False),
    "powers": Case(each_of(POWERS), (X, (6,)), make=positive),
    "comparisons": Case(each_of(COMPARISONS), (X, (5, 6))),
    "comparison operators": Case(
        lambda x, y: (x == y, x != y, x < y, x <= y, x > 0, x >= 0, (x > 0) & (y > 0), ~(x > y)),
        (X, (5, 6)),
    ),
    "logic": Case(
        lambda x, y: (*each_of(LOGIC)(x, y), x & y, x | y, x ^ y, ~x), (X, (6,)), make=truths
    ),
    "bits": Case(
        lambda x, y: (*each_of(BITS)(x, y), torch.bitwise_not(x), x << 2, x >> 1, x // y, x % y),
        (X, (5, 6)),
        make=numbers,
    ),
    "of three": Case(
        lambda x, y, z: (
            torch.addcmul(x, y, z, value=0.3),
            torch.addcdiv(x, y, z.square() + 1),
            torch.lerp(x, y, z),
            torch.lerp(x, y, 0.3),
            torch.where(x > 0, y, z),
            torch.clamp(x, y - 1, y + 1),
        ),
        (X, X, (5, 6)),
    ),
    "clamp": Case(
        lambda x: (x.clamp(-0.5, 0.5), x.clip(min=0), x.clamp_min(0.1), torch.clamp_max(x, 0.2))
    ),
    "masked_fill": Case(lambda x, y: (x.masked_fill(y > 0, 0.5), x.where(y > 0, y)), (X, (5, 6))),
    "masked_fill by a tensor": Case(lambda x, y: x.masked_fill(x > 0, y), (X, ())),
    "in place": Case(in_place(ONE_IN_PLACE.replace("clamp_ ", ""))),
    "in place of two": Case(in_place(TWO_IN_PLACE), (X, (5, 6))),
    "in place of numbers": Case(
        lambda x: (
            (x * 1).fill_(2.0),
            (x * 1).clamp_(-1, 1),
            (x * 1).pow_(2),
            (x * 1).masked_fill_(x > 0, 1.0),
            (x * 1).addcmul_(x, x),
            (x * 1).lerp_(x * 2, 0.5),
        ),
    ),
    "complex numbers": Case(
        lambda x, y: (
            torch.complex(x, y).real,
            torch.complex(x, y).conj().imag,
            torch.complex(x, y).abs(),
            torch.complex(x, y).angle(),
            torch.polar(x.abs() + 1, y),
            torch.real(torch.complex(x, y).resolve_conj()),
            torch.imag(torch.conj_physical(torch.complex(x, y))),
        ),
        (X, X),
    ),
    "types": Case(
        lambda x, y: (
            x.float(),
            x.double(),
            x.half(),
            x.bfloat16(),
            x.int(),
            x.long(),
            x.short(),
            x.char(),
            x.abs().byte(),
            x.bool(),
            x.to(torch.float32),
            x.to("cpu"),
            x.type_as(y),
            x.type(torch.float32),
            x.contiguous(),
            x.cfloat().real,
            x.cdouble().real,
            x.chalf().real,
            x.resolve_neg(),
            +x,
            x.cpu(),
            x.detach(),
            x.data,
        ),
        (X, X),
        tolerance=1e-2,  # 16 bits
    ),
    "special": Case(
        lambda x: tuple(function(f"special.{each}")(x) for each in SPECIAL.split()),
        make=positive,
    ),
    "special of two": Case(
        lambda x, y: (torch.special.xlog1py(x, y), torch.special.zeta(x + 2, y)),
        (X, X),
        make=positive,
        derives=False,
    ),
    "frexp": Case(lambda x: tuple(torch.frexp(x.detach())), derives=False),
    "isin": Case(lambda x: torch.isin(x.round(), torch.tensor([0.0, 1.0]).to(x))),
    "new ones": Case(
        lambda x: (
            x.new_zeros(3) + x[0, 0, 0],
            x.new_ones(4, 5, 6) * x,
            x.new_full((6,), 5.0) * x,
            x.new_tensor([1.0, 2.0]) * x[0, 0, 0],
            x.new_empty(5, 6).fill_(1.0) + x,
        )
    ),
    "new ones of the shape": Case(shifted),
    "like": Case(
        lambda x: (
            torch.zeros_like(x) + x,
            torch.ones_like(x) * x,
            torch.full_like(x, 2.5) * x,
            torch.empty_like(x).fill_(3.0) * x,
        )
    ),
    "written into a plain tensor": Case(
        lambda x: (
            torch.zeros(4, 5, 6).double().copy_(x),
            torch.ones(4, 5, 6).double().add_(x, alpha=2) * x,
        ),
        may_gather=True,
    ),
    "contractions by opt_einsum's names": Case(
        lambda x, y: (
            tessel.einsum("abc,bd->acd", x, y),
            tessel.tensordot(x, y, axes=([1], [0])),
            tessel.transpose(x, (2, 0, 1)),
        ),
        ((4, 5, 6), (5, 3)),
    ),
    "made in a model": Case(
        lambda x: (
            x + torch.zeros(x.shape, dtype=x.dtype),
            x * torch.arange(x.shape[-1], device=x.device),
            x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None],
            x @ torch.eye(x.shape[-1], dtype=x.dtype),
            x * torch.as_tensor(2.0),
            x + torch.stack(torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")).sum(0),
        )
    ),
}

FAMILIES: dict[str, dict[str, Case]] = {"elements": ELEMENTS}
