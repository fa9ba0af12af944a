"""Functions for `test_spread.py` that users meet less often, some of which gather.

Tests `tensor/rules/compositions.py`, `tensor/rules/matrices.py`, `tensor/rules/diagonals.py`,
`tensor/rules/reductions.py`, `tensor/rules/differences.py`, `tensor/rules/scans.py`,
`tensor/rules/short_time.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values
from spread_cases import Case, Shape, quiet


def matrices(shape: Shape, number: int) -> Tensor:
    """Square ones that can be inverted."""
    return values(shape, 3 + number) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def once(does: Any, *shapes: Shape, **settings: Any) -> Case:
    """With first derivatives."""
    return Case(does, shapes or ((4, 5, 6),), **settings)


def gathers(does: Any, *shapes: Shape, **settings: Any) -> Case:
    return once(does, *shapes, may_gather=True, **settings)


M = (3, 4, 4)
LOOSE = {"make": matrices, "tolerance": 1e-9}  # of iterations

STATISTICS = {
    "quantile": once(
        lambda x: (
            x.quantile(0.3, 1),
            torch.quantile(x, torch.tensor([0.5, 0.1]).double(), dim=0, keepdim=True),
            x.quantile(0.2),
            x.quantile(0.2, 2, interpolation="lower"),
        )
    ),
    "quantile at levels with gradients": once(
        lambda x, q: (
            torch.quantile(x, q.sigmoid(), dim=1),
            torch.quantile(x, q.sigmoid(), dim=0, keepdim=True),
            x.quantile(q[0].sigmoid()),
        ),
        (4, 5, 6),
        (3,),
    ),
    "nanquantile": once(lambda x: x.nanquantile(0.3, 1)),
    "cov": once(lambda x: (torch.cov(x), torch.corrcoef(x)), (4, 6)),
    "histc": once(lambda x: x.detach().histc(5, -2, 2), derives=False),
    "bincount": once(
        lambda x: torch.bincount((x.detach() * 100).long().abs() % 5), (9,), derives=False
    ),
    # of a part without numbers torch forgets the type of the weights
    "bincount with weights": once(
        lambda x, w: (
            torch.bincount((x.detach() * 100).long().abs() % 5, w.detach()),
            torch.bincount((x.detach() * 100).long().abs() % 5, w.detach().float(), 9),
        ),
        (9,),
        (9,),
        derives=False,
    ),
    "unique": gathers(lambda x: torch.unique(x.detach().round()), derives=False),
    "renorm": once(lambda x: x.renorm(2, 0, 1.0)),
    "logdet": once(
        lambda x: (torch.logdet(x), torch.det(x), torch.slogdet(x)[1]), M, make=matrices
    ),
}

MATRICES = {
    "inv": once(lambda x: torch.linalg.inv(x), M, make=matrices),
    "solve": once(lambda x, y: torch.linalg.solve(x, y), M, M, make=matrices),
    "svdvals": once(lambda x: torch.linalg.svdvals(x), M, **LOOSE),
    "eigvalsh": once(lambda x: torch.linalg.eigvalsh(x + x.mT), M, **LOOSE),
    "cholesky": once(lambda x: torch.linalg.cholesky(x @ x.mT), M, **LOOSE),
    "qr": once(lambda x: torch.linalg.qr(x), M, **LOOSE),
    "eigh": once(lambda x: torch.linalg.eigh(x + x.mT), M, **LOOSE),
    "svd": once(lambda x: (torch.linalg.svd(x)[1], torch.linalg.pinv(x)), M, **LOOSE),
    "eig": once(
        lambda x: (torch.linalg.eigvals(x.detach()), torch.linalg.eig(x.detach())[0]),
        M,
        derives=False,
        **LOOSE,
    ),
    "matrix_norm": once(
        lambda x: (
            torch.linalg.matrix_norm(x),
            torch.linalg.norm(x),
            torch.linalg.norm(x, 1, (0, 1)),
            torch.linalg.matrix_norm(x, -float("inf"), keepdim=True),
            torch.linalg.norm(x, 3, 1),
        ),
        M,
        make=matrices,
    ),
    "matrix_power": once(
        lambda x: (torch.linalg.matrix_power(x, 5), x.matrix_power(0), x.matrix_power(-2)),
        M,
        make=matrices,
    ),
    "matrix_exp": once(
        lambda x: (torch.matrix_exp(x / 9), torch.linalg.matrix_exp(x / 5)), M, make=matrices
    ),
    "multi_dot": once(
        lambda a, b, c: (torch.linalg.multi_dot([a, b, c]), quiet(torch.chain_matmul)(a, b, c)),
        (4, 5),
        (5, 6),
        (6, 3),
    ),
    "kron": once(lambda a, b: torch.kron(a, b), (4, 3), (2, 5)),
    "cross": once(lambda a, b: torch.linalg.cross(a, b), (4, 5, 3), (4, 5, 3)),
    "cross with broadcasting": once(lambda a, b: torch.cross(a, b, dim=0), (3, 4, 5), (3, 1, 5)),
    "vecdot": once(lambda a, b: torch.linalg.vecdot(a, b, dim=1), (4, 5, 3), (5, 3)),
    "diagflat": once(lambda a: torch.diagflat(a, 1), (3, 2)),
    "other names": once(
        lambda a, b: (
            torch.linalg.matmul(a, b),
            torch.special.softmax(a, 0),
            torch.special.log_softmax(a, 1),
            torch.special.logsumexp(a, 0),
            torch.linalg.diagonal(a),
            torch.arctan(a),
            torch.fix(a),
            a.sum_to_size(1, 5),
        ),
        (4, 5),
        (5, 6),
    ),
    "inverse": once(lambda a: (torch.inverse(a), a.det(), a.slogdet()[1]), M, **LOOSE),
    "cartesian_prod": once(lambda a, b: torch.cartesian_prod(a, b), (4,), (5,)),
    "pdist": once(lambda x: (F.pdist(x), F.pdist(x, 1), F.pdist(x[:1].detach())), (6, 4), order=1),
    "pdist of rows that are close together": once(
        lambda x: F.pdist(1e3 + 1e-4 * x), (30, 4), order=1, tolerance=1e-9
    ),
    "vander": once(
        lambda x: (
            torch.vander(x.detach()),
            torch.vander(x.detach(), 3, increasing=True),
            torch.vander(x.detach().long(), 2),
            torch.vander(x.detach(), 0),
        ),
        (5,),
        derives=False,  # torch itself changes what it needs for a derivative
    ),
}

COORDINATES = torch.tensor([0.0, 0.1, 0.4, 0.9, 1.6], dtype=torch.float64)
DIFFERENCES = {
    "trapezoid": once(
        lambda x: (
            torch.trapezoid(x),
            torch.trapezoid(x, dx=0.5, dim=0),
            torch.trapezoid(y=x, x=COORDINATES, dim=1),
            torch.trapz(x[:, :, :1]),
            torch.trapezoid(x[:, :0], dim=1),
            torch.trapezoid(x[:, :0].detach().int(), dim=1),
        )
    ),
    "trapezoid with spread coordinates": once(
        lambda x, y: (
            torch.trapezoid(x, y, dim=1),
            torch.trapezoid(x.detach(), y),
            torch.cumulative_trapezoid(x, y),
        ),
        (4, 5, 6),
        (5, 6),
    ),
    "cumulative_trapezoid": once(
        lambda x: (
            torch.cumulative_trapezoid(x),
            torch.cumulative_trapezoid(x, COORDINATES, dim=1),
            torch.cumulative_trapezoid(x[:1], dx=2.0, dim=0),
        )
    ),
    "gradient": once(
        lambda x: (
            *torch.gradient(x),
            *torch.gradient(x, spacing=0.5, dim=1, edge_order=2),
            *torch.gradient(x, spacing=[0.5, 2.0], dim=(0, -1)),
            *torch.gradient(x, spacing=(COORDINATES[:4], COORDINATES), dim=(0, 1)),
            *torch.gradient(x, spacing=(COORDINATES,), dim=1, edge_order=2),
            *torch.gradient(x[:, :2], dim=1),
        )
    ),
    "gradient with a tensor as spacing": gathers(
        lambda x: torch.gradient(x, spacing=torch.tensor(2.0), dim=1)
    ),
}

WINDOW = torch.tensor([0.1, 0.4, 0.9, 0.9, 0.4, 0.1], dtype=torch.float64)


def stft(x: Tensor, *sizes: int, **settings: Any) -> Tensor:
    found: Tensor = torch.stft(x, *sizes, return_complex=True, **settings)
    return found


def istft(x: Tensor, *sizes: int, **settings: Any) -> Tensor:
    """Of any real numbers, two for a complex one."""
    found: Tensor = quiet(torch.istft)(torch.complex(x[0], x[1]), *sizes, **settings)
    return found


SIGNALS = {
    "stft": once(
        lambda x: (
            stft(x, 6, window=WINDOW),
            stft(x, 8, 3, 6, window=WINDOW, center=False, normalized=True),
            stft(x[0], 6, window=WINDOW, onesided=False, pad_mode="constant"),
            quiet(stft)(x, 5),
            quiet(torch.stft)(x, 6, window=WINDOW, return_complex=False),
        ),
        (3, 30),
    ),
    "stft of complex values": once(
        lambda x: (
            quiet(torch.stft)(torch.complex(x[0], x[1]), 6, window=WINDOW).abs(),
            quiet(torch.stft)(x[0], 6, window=WINDOW + 1j).abs(),
            quiet(torch.stft)(torch.complex(x[0], x[1]), 6, return_complex=False),
        ),
        (2, 3, 30),
    ),
    "stft by operators": once(
        lambda x: (
            torch.ops.aten.stft.default(x, 6, 2, 6, WINDOW, True, None, True),
            torch.ops.aten.stft.center(x, 6, 2, 6, WINDOW, False, "constant", return_complex=True),
        ),
        (3, 30),
    ),
    "istft": once(
        lambda x: (
            istft(x, 6, window=WINDOW),
            istft(x, 6, 2, window=WINDOW, length=9, normalized=True),
            istft(x, 6, 4, window=WINDOW, length=40, center=False),
            istft(x[:, 0], 6),
        ),
        (2, 3, 4, 9),
    ),
    "istft of both sides": once(
        lambda x: (
            istft(x, 8, 3, 6, window=WINDOW, onesided=False),
            torch.view_as_real(
                istft(x, 8, window=torch.ones(8).cdouble(), onesided=False, return_complex=True)
            ),
        ),
        (2, 3, 8, 9),
    ),
}


@lru_cache
def recurrent(kind: str) -> torch.nn.Module:
    torch.default_generator.manual_seed(1)
    name, _, nonlinearity = kind.partition(" ")
    settings = {"nonlinearity": nonlinearity} if nonlinearity else {}
    layer: torch.nn.Module = getattr(torch.nn, name)(6, 3, batch_first=True, **settings).double()
    return layer


RECURRENT = {
    f"recurrent {kind}": gathers(lambda x, kind=kind: recurrent(kind)(x)[0])
    for kind in ("LSTM", "GRU", "RNN tanh", "RNN relu")
}


def changed_view(x: Tensor) -> Tensor:
    y = x * 1
    y[1:].zero_()
    return y


def refused(does: Any, *shapes: Shape, **settings: Any) -> Case:
    return once(does, *shapes, may_raise=True, **settings)


REFUSED = {
    "view of a split dimension, changed": refused(changed_view),
    "put in place": refused(lambda x, y: (x * 1).put_(torch.tensor([3, 7]), y), (5, 4), (2,)),
    "fill with a generator": refused(
        lambda x: torch.ones_like(x).normal_(0.0, 0.0, generator=torch.Generator())
    ),
    "embedding with a largest norm": refused(
        lambda x, w: F.embedding((x * 100).long().abs() % 7, w.detach() * 1, max_norm=1.0),
        (4, 5),
        (7, 3),
        derives=False,
    ),
}

FAMILIES: dict[str, dict[str, Case]] = {
    "statistics": STATISTICS,
    "differences": DIFFERENCES,
    "matrices": MATRICES,
    "signals": SIGNALS,
    "recurrent": RECURRENT,
    "refused": REFUSED,
}
