"""Losses for `test_spread.py`, with targets that lie in other ways than the inputs.

Tests `tensor/rules/losses.py`, `tensor/rules/distances.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values
from spread_cases import Case, positive, quiet

Shape = tuple[int, ...]
Maker = Callable[[Shape, int], Tensor]

CLASSES = 5


def then(*makers: Maker) -> Maker:
    """Each operand with a maker of its own."""
    return lambda shape, number: makers[min(number, len(makers) - 1)](shape, number)


def real(shape: Shape, number: int) -> Tensor:
    return values(shape, 3 + number)


def chances(shape: Shape, number: int) -> Tensor:
    return values(shape, 3 + number).sigmoid()


def log_chances(shape: Shape, number: int) -> Tensor:
    return values(shape, 3 + number).log_softmax(-1)


def classes(shape: Shape, number: int) -> Tensor:
    return (values(shape, 3 + number) * 100).long() % CLASSES


def with_ignored(shape: Shape, number: int) -> Tensor:
    found = classes(shape, number)
    return torch.where(found == 2, -100, found)


def all_ignored(shape: Shape, number: int) -> Tensor:
    return torch.full(shape, -100)


def signs(shape: Shape, number: int) -> Tensor:
    return torch.where(values(shape, 3 + number) > 0, 1, -1)


def labels_of_times(shape: Shape, number: int) -> Tensor:
    return classes(shape, number) % (CLASSES - 1) + 1


def labels(shape: Shape, number: int) -> Tensor:
    """Lists of classes, which end with -1."""
    found = classes(shape, number)
    found[..., 2:] = -1
    return found


ELEMENTS: dict[str, Case] = {}
for _reduction in ("none", "mean", "sum"):
    for _name, _settings in (
        ("mse_loss", {}),
        ("l1_loss", {}),
        ("smooth_l1_loss", {"beta": 0.7}),
        ("smooth_l1_loss", {"beta": 0.0}),
        ("huber_loss", {"delta": 0.6}),
        ("kl_div", {"log_target": True}),
        ("poisson_nll_loss", {}),
    ):
        _key = f"{_name} {_settings} {_reduction}"
        ELEMENTS[_key] = Case(
            quiet(
                lambda x, y, name=_name, settings=_settings, reduction=_reduction: getattr(F, name)(
                    x, y, **settings, reduction=reduction
                )
            ),
            ((4, 5, 3), (4, 5, 3)),
        )
    ELEMENTS[f"bce {_reduction}"] = Case(
        lambda x, y, w, reduction=_reduction: F.binary_cross_entropy(
            x, y, w.detach(), reduction=reduction
        ),
        ((4, 5, 3), (4, 5, 3), (5, 1)),
        make=then(chances, chances, positive),
    )
    ELEMENTS[f"bce with logits {_reduction}"] = Case(
        lambda x, y, w, p, reduction=_reduction: F.binary_cross_entropy_with_logits(
            x, y, w.detach(), reduction=reduction, pos_weight=p.detach()
        ),
        ((4, 5, 3), (4, 5, 3), (3,), (5, 3)),
        make=then(real, chances, positive, positive),
    )
    ELEMENTS[f"soft_margin {_reduction}"] = Case(
        lambda x, y, reduction=_reduction: F.soft_margin_loss(x, y.detach(), reduction=reduction),
        ((4, 6), (4, 6)),
    )
    ELEMENTS[f"hinge_embedding {_reduction}"] = Case(
        lambda x, y, reduction=_reduction: F.hinge_embedding_loss(x, y, 0.8, reduction=reduction),
        ((4, 6), (4, 6)),
        make=then(real, signs),
    )
    ELEMENTS[f"margin_ranking {_reduction}"] = Case(
        lambda a, b, y, reduction=_reduction: F.margin_ranking_loss(
            a, b, y, 0.3, reduction=reduction
        ),
        ((4, 6), (4, 6), (4, 6)),
        make=then(real, real, signs),
    )
    for _shape in ((4, 5, 3), (4, 5), (4, 1, 3)):
        ELEMENTS[f"gaussian_nll {_shape} {_reduction}"] = Case(
            lambda x, y, v, reduction=_reduction: F.gaussian_nll_loss(
                x, y, v, full=True, eps=0.9, reduction=reduction
            ),
            ((4, 5, 3), (4, 5, 3), _shape),
            make=then(real, real, positive),
        )
ELEMENTS |= {
    "kl_div batchmean": Case(
        lambda x, y: F.kl_div(x, y, reduction="batchmean"),
        ((4, 6), (4, 6)),
        make=then(log_chances, chances),
    ),
    "poisson without log": Case(
        lambda x, y: F.poisson_nll_loss(x, y, log_input=False, full=True),
        ((4, 6), (4, 6)),
        make=positive,
    ),
    "mse with broadcast": Case(
        quiet(lambda x, y: F.mse_loss(x, y)), ((4, 5, 3), (5, 1)), plain_others=True
    ),
    "mse with broadcast of the input": Case(
        quiet(lambda x, y: F.mse_loss(x, y)), ((5, 1), (4, 5, 3))
    ),
    **{
        f"weighted {name} {reduction}": Case(
            lambda x, y, w, name=name, reduction=reduction: getattr(F, name)(
                x, y, reduction=reduction, weight=w
            ),
            ((4, 6), (4, 6), (4, 6)),
            make=then(real, real, positive),
        )
        for name in ("mse_loss", "l1_loss", "huber_loss")
        for reduction in ("none", "mean", "sum")
    },
    "deprecated flags": Case(
        quiet(
            lambda x, y: (
                F.mse_loss(x, y, size_average=False),
                F.l1_loss(x, y, reduce=False),
                F.kl_div(x, y, size_average=True),
            )
        ),
        ((4, 6), (4, 6)),
    ),
    "gaussian_nll with a number": Case(
        lambda x, y: F.gaussian_nll_loss(x, y, 0.5), ((4, 6), (4, 6))
    ),
    "modules": Case(
        lambda x, y: torch.nn.MSELoss()(x, y) * torch.nn.SmoothL1Loss(reduction="sum")(x, y),
        ((4, 6), (4, 6)),
    ),
    "a plain input": Case(lambda y, x: F.mse_loss(x, y) + F.l1_loss(x, y), ((4, 6), (4, 6))),
}

CLASS_SHAPES: tuple[tuple[Shape, Shape], ...] = (
    ((CLASSES,), ()),
    ((4, CLASSES), (4,)),
    ((3, CLASSES, 4), (3, 4)),
    ((3, CLASSES, 2, 4), (3, 2, 4)),
    ((2, CLASSES, 2, 3, 2), (2, 2, 3, 2)),
)
CLASS_LOSSES: dict[str, Case] = {}
for _x, _y in CLASS_SHAPES:
    for _reduction in ("none", "mean", "sum"):
        CLASS_LOSSES[f"nll {_x} {_reduction}"] = Case(
            lambda x, y, w, reduction=_reduction: (
                F.nll_loss(x, y, reduction=reduction),
                F.nll_loss(x, y.clamp(min=0), w.detach(), ignore_index=3, reduction=reduction),
            ),
            (_x, _y, (CLASSES,)),
            make=then(real, with_ignored if _y else classes, positive),
        )
        CLASS_LOSSES[f"cross_entropy {_x} {_reduction}"] = Case(
            lambda x, y, w, reduction=_reduction: (
                F.cross_entropy(x, y, reduction=reduction),
                F.cross_entropy(x, y, w.detach(), reduction=reduction, label_smoothing=0.2),
            ),
            (_x, _y, (CLASSES,)),
            make=then(real, with_ignored if len(_y) > 1 else classes, positive),
        )
        CLASS_LOSSES[f"cross_entropy of chances {_x} {_reduction}"] = Case(
            lambda x, y, w, reduction=_reduction: (
                F.cross_entropy(x, y, reduction=reduction),
                F.cross_entropy(x, y, w, reduction=reduction, label_smoothing=0.2),
            ),
            (_x, _x, (CLASSES,)),
            make=then(real, chances, positive),
        )
CLASS_LOSSES |= {
    "cross_entropy ignores": Case(
        lambda x, y, w: (
            F.cross_entropy(x, y, w.detach(), ignore_index=1),
            F.cross_entropy(x, y, ignore_index=1, label_smoothing=0.1),
            F.cross_entropy(x, y, w.detach(), ignore_index=1, label_smoothing=0.1, reduction="sum"),
        ),
        ((4, CLASSES, 3), (4, 3), (CLASSES,)),
        make=then(real, classes, positive),
    ),
    "cross_entropy of all ignored": Case(
        lambda x, y: (F.cross_entropy(x, y), F.nll_loss(x, y, reduction="sum")),
        ((4, CLASSES), (4,)),
        make=then(real, all_ignored),
        derives=False,
    ),
    "cross_entropy of a plain input": Case(
        lambda y, x: F.cross_entropy(x, y), ((4, 3), (4, CLASSES, 3)), make=then(classes, real)
    ),
    "nll of one sample": Case(
        lambda x, y: F.nll_loss(x, y) + F.nll_loss(x, y, reduction="sum"),
        ((CLASSES,), ()),
        make=then(real, classes),
    ),
}

if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    CLASS_LOSSES |= {
        "linear_cross_entropy": Case(
            lambda x, w, y, b: F.linear_cross_entropy(
                x, w, y, linear_bias=b, label_smoothing=0.1, ignore_index=1
            ),
            ((4, 6), (CLASSES, 6), (4,), (CLASSES,)),
            make=then(real, real, classes, real),
        ),
        "linear_cross_entropy of more": Case(
            lambda x, w, y: F.linear_cross_entropy(x, w, y, reduction="sum"),
            ((4, 6), (CLASSES, 3, 6), (4, 3)),
            make=then(real, real, classes),
        ),
    }

ROWS: dict[str, Case] = {}
for _reduction in ("none", "mean", "sum"):
    for _n in ((4,), ()):
        ROWS[f"multi_margin {_n} {_reduction}"] = Case(
            lambda x, y, w, reduction=_reduction: (
                F.multi_margin_loss(x, y, reduction=reduction),
                F.multi_margin_loss(x, y, 2, 0.6, w.detach(), reduction=reduction),
            ),
            ((*_n, CLASSES), _n, (CLASSES,)),
            make=then(real, classes, positive),
            order=1,
        )
        ROWS[f"multilabel_margin {_n} {_reduction}"] = Case(
            lambda x, y, reduction=_reduction: F.multilabel_margin_loss(x, y, reduction=reduction),
            ((*_n, CLASSES), (*_n, CLASSES)),
            make=then(real, labels),
            order=1,
        )
    ROWS[f"multilabel_soft_margin {_reduction}"] = Case(
        lambda x, y, w, reduction=_reduction: F.multilabel_soft_margin_loss(
            x, y, w, reduction=reduction
        ),
        ((4, 6), (4, 6), (6,)),
        make=then(real, chances, positive),
    )
    ROWS[f"cosine_embedding {_reduction}"] = Case(
        lambda x, y, t, reduction=_reduction: F.cosine_embedding_loss(
            x, y, t, -0.2, reduction=reduction
        ),
        ((4, 6), (4, 6), (4,)),
        make=then(real, real, signs),
    )
    ROWS[f"triplet {_reduction}"] = Case(
        lambda a, p, n, reduction=_reduction: F.triplet_margin_loss(
            a, p, n, 2.0, p=3, swap=True, reduction=reduction
        ),
        ((4, 6), (4, 6), (4, 6)),
    )
ROWS |= {
    "triplet with a distance": Case(
        lambda a, p, n: F.triplet_margin_with_distance_loss(
            a, p, n, distance_function=lambda x, y: (x - y).abs().sum(-1), swap=True, margin=3.0
        ),
        ((4, 6), (4, 6), (4, 6)),
    ),
    "triplet with the usual distance": Case(
        lambda a, p, n: F.triplet_margin_with_distance_loss(a, p, n, reduction="none"),
        ((4, 6), (4, 6), (4, 6)),
    ),
    "cosine_similarity": Case(
        lambda x, y: (F.cosine_similarity(x, y), F.cosine_similarity(x, y, -1, 3.0)),
        ((4, 5, 6), (4, 5, 6)),
    ),
    "cosine_similarity of unequal": Case(
        lambda x, y: F.cosine_similarity(x, y, dim=2), ((4, 5, 6), (5, 6))
    ),
    "pairwise_distance": Case(
        lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1.0, keepdim=True)),
        ((4, 5, 6), (4, 5, 6)),
    ),
    **{
        f"cdist {p} of {a} and {b}": Case(
            lambda x, y, p=p: torch.cdist(x, y, p=p), (a, b), tolerance=1e-9, order=1
        )
        for p in (1.0, 2.0, 3.0)
        for a, b in (((4, 6), (5, 6)), ((3, 4, 6), (3, 5, 6)), ((3, 4, 6), (5, 6)))
    },
    **{
        f"ctc {reduction}": Case(
            lambda x, y, reduction=reduction: F.ctc_loss(
                x,
                y,
                torch.tensor([6, 6, 5]),
                torch.tensor([2, 2, 1]),
                reduction=reduction,
                zero_infinity=True,
            ),
            ((6, 3, CLASSES), (3, 2)),
            make=then(log_chances, labels_of_times),
            order=1,
        )
        for reduction in ("none", "mean", "sum")
    },
    "ctc of one sample": Case(
        lambda x, y: F.ctc_loss(x, y, torch.tensor(6), torch.tensor(2)),
        ((6, CLASSES), (2,)),
        make=then(log_chances, labels_of_times),
        order=1,
    ),
    "ctc of targets in a row": Case(
        lambda x, y: F.ctc_loss(x, y, (6, 6, 5), (2, 2, 1)),
        ((6, 3, CLASSES), (5,)),
        make=then(log_chances, labels_of_times),
        order=1,
    ),
}


FAMILIES: dict[str, dict[str, Case]] = {
    "losses of elements": ELEMENTS,
    "losses of classes": {
        name: case for name, case in CLASS_LOSSES.items() if "chances" not in name
    },
    "losses of probabilities": {
        name: case for name, case in CLASS_LOSSES.items() if "chances" in name
    },
    "losses of rows": ROWS,
}
