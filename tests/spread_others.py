"""Functions for `test_spread.py` that users meet less often, some of which gather."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values
from spread_cases import Case, Shape


def matrices(shape: Shape, number: int) -> Tensor:
    """Square ones that can be inverted."""
    return values(shape, 3 + number) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def gathers(does: object, *shapes: Shape, **settings: object) -> Case:
    return Case(does, shapes or ((4, 5, 6),), order=1, may_gather=True, **settings)  # type: ignore


M = (3, 4, 4)
LOOSE = {"make": matrices, "tolerance": 1e-9}  # of iterations

STATISTICS = {
    "quantile": gathers(lambda x: (x.quantile(0.3, 1), torch.quantile(x, 0.5, dim=0))),
    "nanquantile": gathers(lambda x: x.nanquantile(0.3, 1)),
    "cov": gathers(lambda x: (torch.cov(x), torch.corrcoef(x)), (4, 6)),
    "histc": gathers(lambda x: x.detach().histc(5, -2, 2), derives=False),
    "bincount": gathers(
        lambda x: torch.bincount((x.detach() * 100).long().abs() % 5), (9,), derives=False
    ),
    "unique": gathers(lambda x: torch.unique(x.detach().round()), derives=False),
    "renorm": gathers(lambda x: x.renorm(2, 0, 1.0)),
    "trapezoid": gathers(lambda x: (torch.trapezoid(x, dim=1), torch.cumulative_trapezoid(x))),
    "gradient": gathers(lambda x: torch.gradient(x)),
    "logdet": gathers(lambda x: (torch.logdet(x), torch.det(x)), M, make=matrices),
}

MATRICES = {
    "inv": gathers(lambda x: torch.linalg.inv(x), M, make=matrices),
    "solve": gathers(lambda x, y: torch.linalg.solve(x, y), M, M, make=matrices),
    "svdvals": gathers(lambda x: torch.linalg.svdvals(x), M, **LOOSE),
    "eigvalsh": gathers(lambda x: torch.linalg.eigvalsh(x + x.mT), M, **LOOSE),
    "cholesky": gathers(lambda x: torch.linalg.cholesky(x @ x.mT), M, **LOOSE),
    "qr": gathers(lambda x: torch.linalg.qr(x), M, **LOOSE),
    "matrix_norm": gathers(
        lambda x: (torch.linalg.matrix_norm(x), torch.linalg.norm(x)), M, make=matrices
    ),
    "matrix_power": gathers(lambda x: torch.linalg.matrix_power(x, 3), M, make=matrices),
    "matrix_exp": gathers(lambda x: torch.matrix_exp(x / 9), M, make=matrices),
    "multi_dot": gathers(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (4, 5), (5, 6), (6, 3)),
    "kron": gathers(lambda a, b: torch.kron(a, b), (4, 3), (2, 5)),
    "cross": gathers(lambda a, b: torch.linalg.cross(a, b), (4, 5, 3), (4, 5, 3)),
    "cartesian_prod": gathers(lambda a, b: torch.cartesian_prod(a, b), (4,), (5,)),
    "pdist": gathers(lambda x: F.pdist(x), (6, 4)),
    "vander": gathers(lambda x: torch.vander(x.detach(), 3), (5,), derives=False),
}

SIGNALS = {
    "stft": gathers(
        lambda x: torch.stft(x, 6, window=torch.ones(6).double(), return_complex=True), (3, 30)
    ),
}

FAMILIES: dict[str, dict[str, Case]] = {
    "statistics": STATISTICS,
    "matrices": MATRICES,
    "signals": SIGNALS,
}
