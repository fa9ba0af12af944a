"""Losses: the loss of each element, sample or place on its own part, and their sum or mean.

What a loss says of a sum or a mean is one number, which all workers share: each of them may derive
it, and gets the gradients of one process.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn import _reduction

from tessel.layout import Layout
from tessel.tensor.rules.batched import (
    applied,
    batched,
    holds_anywhere,
    part_of,
    plan_of,
    whole_of,
)
from tessel.tensor.rules.pointwise import pointwise
from tessel.tensor.rules.reductions import filled, without
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    held_layouts,
    is_split,
    is_whole,
    made,
    opened,
    outlines,
    rule,
    spread_among,
    unsupported,
)
from tessel.tensor.tensor import Tensor, move
from tessel.tensor.use import used

_signatures: dict[str, Signature] = {}


def arguments_of(name: str, func: Any, args: Arguments, kwargs: Settings) -> Settings:
    """All arguments of a function of `torch.nn.functional` by their names."""
    if func is not getattr(F, name):
        raise unsupported(
            name,
            f"only torch.nn.functional.{name} is known, and the arguments of this function are "
            f"others",
            *held_layouts(args, kwargs),
        )
    if name not in _signatures:
        _signatures[name] = signature(func)
    bound = _signatures[name].bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _reduction_of(given: Settings) -> str:
    """How losses are put together, in torch's words; the deprecated flags are taken out."""
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction: str = given.pop("reduction")
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction != "batchmean":
        _reduction.get_enum(reduction)  # torch's own error
    return reduction


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


# -- of each element ------------------------------------------------------------------------------

_OPERANDS = ("input", "input1", "input2", "target", "weight", "pos_weight")


@rule(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss"),
    *("soft_margin_loss", "margin_ranking_loss"),
    plain=True,
)
def of_elements(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Losses that compare tensors element by element."""
    if name == "l1_loss" and "weight" not in kwargs:
        kwargs = {**kwargs, "weight": _weight_of_l1()}
    given = arguments_of(name, func, args, kwargs)
    outlines(func, tuple(given.values()), {})  # torch's own errors and warnings
    reduction = _reduction_of(given)
    weight = given.pop("weight", None) if name in ("mse_loss", "l1_loss", "huber_loss") else None
    operands = {key: value for key, value in given.items() if key in _OPERANDS}
    settings = {key: value for key, value in given.items() if key not in _OPERANDS}
    if name == "binary_cross_entropy":
        _check_probabilities(operands["input"])
    each = partial(_of_parts, func, tuple(operands), settings)
    loss = pointwise(name, each, tuple(operands.values()), {})
    if weight is not None:
        loss = loss * weight
        if reduction == "mean" and name != "huber_loss":
            return loss.sum() / weight.sum()
    if reduction == "batchmean":
        total = loss.sum()
        return total / given["input"].shape[0] if given["input"].dim() else total
    return _reduced(loss, reduction)


def _of_parts(func: Any, names: tuple[str, ...], settings: Settings, *parts: Any) -> torch.Tensor:
    """The losses of the elements of parts; torch warned of different sizes before."""
    there = [part for part in parts if part is not None]
    wide = iter(torch.broadcast_tensors(*there))
    operands = {
        name: None if part is None else next(wide) for name, part in zip(names, parts, strict=True)
    }
    found: torch.Tensor = func(**operands, **settings, reduction="none")
    return found


def _weight_of_l1() -> Any:
    """The weights that a caller gave to `l1_loss`.

    Torch does not hand them on to tensors of other kinds; without a look at its frame they would be
    left out in silence.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight")
    return None


def _check_probabilities(x: torch.Tensor) -> None:
    """Torch's own error, which a worker with good values would not raise."""
    if holds_anywhere(~((x >= 0) & (x <= 1))):
        raise RuntimeError("all elements of input should be between 0 and 1")


@rule("gaussian_nll_loss", plain=True)
def gaussian_nll_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """½ (log v + (x - y)² / v), with a variance v for each element or for each row."""
    given = arguments_of(name, func, args, kwargs)
    reduction = _reduction_of(given)
    x, target, var, eps = (given[key] for key in ("input", "target", "var", "eps"))
    if not isinstance(var, torch.Tensor):
        var = torch.full((), var, dtype=x.dtype, device=x.device).expand(x.shape)
    if holds_anywhere(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.shape != x.shape:
        differ = [n for m, n in zip(x.shape, var.shape, strict=False) if m != n]
        if x.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif x.dim() != var.dim() or sum(differ) != 1:
            raise ValueError("var is of incorrect size")
    # torch puts the least variance in place of smaller ones behind autograd's back
    var = torch.where(var < eps, var - var.detach() + eps, var)
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    if given["full"]:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


@rule("linear_cross_entropy", plain=True)
def linear_cross_entropy(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`cross_entropy` of what a linear map gives."""
    given = arguments_of(name, func, args, kwargs)
    x, weight, bias = given["input"], given["linear_weight"], given["linear_bias"]
    if given["options"] is not None:
        raise unsupported(name, "options are not known", *held_layouts(args, kwargs))
    outlines(func, args, kwargs)  # torch's own error
    classes, *features = weight.shape[:-1]
    logits = F.linear(
        x, weight.reshape(-1, weight.shape[-1]), None if bias is None else bias.reshape(-1)
    )
    settings = {key: given[key] for key in ("weight", "reduction", "label_smoothing")}
    if given["ignore_index"] is not None:
        settings["ignore_index"] = given["ignore_index"]
    logits = logits.reshape(*x.shape[:-1], classes, *features)
    return F.cross_entropy(logits, given["target"], **settings)


@rule("ctc_loss", plain=True)
def ctc_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All times and classes of a sample on one worker; samples may be split."""
    given = arguments_of(name, func, args, kwargs)
    x, targets = given["log_probs"], given["targets"]
    reduction = _reduction_of(given)
    lengths = [_whole_numbers(given[f"{key}_lengths"]) for key in ("input", "target")]
    if x.dim() == 2:  # one sample
        x = x.unsqueeze(1)
        lengths = [each.reshape(1) for each in lengths]
        targets = targets.reshape(1, -1)
    elif targets.dim() == 1:  # those of all samples, one after the other
        targets = _in_rows(whole_of(targets), lengths[1])
    _check_times(given["blank"], x, targets, *lengths)
    settings = {key: given[key] for key in ("blank", "zero_infinity")} | {"reduction": "none"}
    operands = x, targets, *lengths
    plan = plan_of(name, (("tnc", "ns", "n", "n"), "n"), "tcs", operands)
    part = applied(lambda *parts: F.ctc_loss(*parts, **settings), operands, plan, x.dtype)
    losses: torch.Tensor = made(part, plan.result)
    if reduction == "mean":
        losses = losses / lengths[1].clamp_min(1)
    return _reduced(losses[0] if given["log_probs"].dim() == 2 else losses, reduction)


def _check_times(
    blank: int, x: torch.Tensor, targets: torch.Tensor, times: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Raise on all workers what torch would raise on the one that has the sample."""
    steps, samples, classes = x.shape
    for what, each, most in (
        ("input_lengths", times, steps),
        ("target_lengths", lengths, targets.shape[-1]),
    ):
        if tuple(each.shape) != (samples,) or (
            samples and not 0 <= each.min() <= each.max() <= most
        ):
            raise RuntimeError(
                f"ctc_loss: {what} of {samples} samples are needed, from 0 to {most}, got {each}"
            )
    if targets.dim() != 2 or targets.shape[0] != samples:
        raise RuntimeError(
            f"ctc_loss: targets of {samples} samples are needed, got shape {tuple(targets.shape)}"
        )
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    is_used = torch.arange(targets.shape[1]) < lengths[:, None]
    if holds_anywhere(((targets < 0) | (targets >= classes)) & is_used.to(targets.device)):
        raise RuntimeError(f"ctc_loss: a target is none of the {classes} classes")


def _whole_numbers(value: Any) -> torch.Tensor:
    """Numbers that a caller gave as a tensor or as a list, on all workers."""
    return torch.as_tensor(whole_of(value), device="cpu")


def _in_rows(targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Targets of samples, one after the other, as rows that end with zeros."""
    if int(lengths.sum()) != len(targets):
        raise RuntimeError(
            f"Expected targets of {int(lengths.sum())} values, the sum of target_lengths, got "
            f"{len(targets)}"
        )
    return torch.nn.utils.rnn.pad_sequence(list(targets.split(lengths.tolist())), True)


# -- of classes -----------------------------------------------------------------------------------


@rule("nll_loss", "cross_entropy", plain=True)
def of_classes(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The log-probability of each target; classes may be split, and are for `cross_entropy` logits.

    Forward:  ℓ_n = -w[y_n] x[n, y_n], where x are log-probabilities.
    """
    given = arguments_of(name, func, args, kwargs)
    outlines(func, tuple(given.values()), {})
    reduction = _reduction_of(given)
    x, target, weight = given["input"], given["target"], whole_of(given["weight"])
    dim = 0 if x.dim() == 1 else 1
    x = _beside(x, target, dim)
    smoothing = given.get("label_smoothing", 0.0)
    if name == "cross_entropy":
        if x.shape == target.shape:
            return _of_probabilities(x, target, weight, dim, smoothing, reduction)
        x = x.log_softmax(dim)
    ignored = target == given["ignore_index"]
    num_classes = x.shape[dim]
    if holds_anywhere(((target < 0) | (target >= num_classes)) & ~ignored):
        raise IndexError(
            f"a target is out of bounds: it is none of the {num_classes} classes and not "
            f"ignore_index, {given['ignore_index']}"
        )
    factors = ~ignored if weight is None else torch.where(ignored, 0, _looked_up(weight, target))
    losses = torch.where(ignored, 0, -_picked(x, target, dim))
    losses = losses if weight is None else losses * factors
    if not smoothing:
        return losses.sum() / factors.sum() if reduction == "mean" else _reduced(losses, reduction)
    smooth = -(x if weight is None else x * _along(weight, x, dim)).sum(dim)
    smooth = torch.where(ignored, 0, smooth)
    loss = losses * (1 - smoothing) + smooth * (smoothing / num_classes)
    return loss.sum() / factors.sum() if reduction == "mean" else _reduced(loss, reduction)


def _beside(x: torch.Tensor, target: torch.Tensor, dim: int) -> Tensor:
    """The input as a spread tensor; one that all workers have whole lies as the target does."""
    x = as_spread(x, next(spread_among(x, target))._layout.partition)
    if not isinstance(target, Tensor) or not is_whole(x._layout) or is_whole(target._layout):
        return x
    if target.dim() == x.dim():
        return x.move_to(target._layout)
    return x.move_to(_with_classes(target._layout, x._layout, dim))


def _with_classes(layout: Layout, whole: Layout, dim: int) -> Layout:
    """The layout of targets, with a whole dimension of classes."""
    shape = (*layout.shape[:dim], whole.shape[dim], *layout.shape[dim:])
    cuts = (*layout.cuts[:dim], whole.cuts[dim], *layout.cuts[dim:])
    return Layout(layout.partition, shape, cuts, layout.shared)


def _along(weight: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """A weight for each class, to be multiplied with the input."""
    return weight.reshape(-1, *[1] * (x.dim() - dim - 1))


def _of_probabilities(
    x: Tensor, target: torch.Tensor, weight: Any, dim: int, smoothing: float, reduction: str
) -> torch.Tensor:
    """The cross entropy of logits and probabilities of all classes."""
    num_classes = x.shape[dim]
    if smoothing:
        target = target * (1 - smoothing) + smoothing / num_classes
    terms = x.log_softmax(dim) * target
    terms = terms if weight is None else terms * _along(weight, x, dim)
    if reduction == "mean":
        count = x.numel() // num_classes
        return -terms.sum() / count if count else -terms.sum() * math.nan
    return -terms.sum(dim) if reduction == "none" else -terms.sum()


def _picked(x: Tensor, target: torch.Tensor, dim: int) -> Tensor:
    """x[n, target[n]]: each worker picks from its own classes, and the sum has them all."""
    part, layout = opened(x)
    separate, shared = without(layout, (dim,), False)
    chosen = part_of(target, shared)
    box = layout.box()
    assert box is not None
    start, stop = box[dim]
    rows = filled(part, (dim,))
    place = (chosen - start).clamp(0, rows.shape[dim] - 1).unsqueeze(dim)
    found = rows.gather(dim, place).squeeze(dim)
    if not is_split(layout, dim):
        return made(found, shared)
    found = torch.where((chosen >= start) & (chosen < stop), found, 0)
    return made(move(separate, shared).apply(found), shared)


def _looked_up(weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The weight of the class of each target; of any for targets that are ignored."""
    if not isinstance(target, Tensor):
        return weight[target.clamp(0, len(weight) - 1)]
    part, layout = opened(target)
    mine = used(weight, layout)
    assert mine is not None
    return made(mine[part.clamp(0, len(weight) - 1)], layout)


# -- of rows --------------------------------------------------------------------------------------


@rule("multi_margin_loss", "multilabel_margin_loss", plain=True)
def of_rows(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Losses that compare all classes of a sample with each other."""
    given = arguments_of(name, func, args, kwargs)
    outlines(func, tuple(given.values()), {})
    reduction = _reduction_of(given)
    x, target, weight = given.pop("input"), given.pop("target"), given.pop("weight", None)
    least = -1 if name == "multilabel_margin_loss" else 0
    if holds_anywhere((target < least) | (target >= x.shape[-1])):
        raise RuntimeError(f"{name}: target out of range, of {x.shape[-1]} classes")
    operands = [x, target] if weight is None else [x, target, whole_of(weight)]
    row = "n" * (x.dim() - 1)
    labels = row + "c" if least else "n" * target.dim()
    letters = (row + "c", labels, "c")[: len(operands)]

    def compute(x: torch.Tensor, y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        weights = {"weight": rest[0]} if rest else {}
        found: torch.Tensor = func(x, y, **given, **weights, reduction="none")
        return found.reshape(x.shape[:-1])  # of one sample, torch gives a row or a number

    return _reduced(batched(name, (letters, row), "c", operands, compute), reduction)


@rule("multilabel_soft_margin_loss", plain=True)
def multilabel_soft_margin_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    given = arguments_of(name, func, args, kwargs)
    outlines(func, tuple(given.values()), {})
    reduction = _reduction_of(given)
    x, target = given["input"], given["target"]
    loss = -(target * F.logsigmoid(x) + (1 - target) * F.logsigmoid(-x))
    loss = loss if given["weight"] is None else loss * given["weight"]
    return _reduced(loss.sum(-1) / x.shape[-1], reduction)


_LEAST = 1e-12  # what torch adds to the squares of a cosine embedding's lengths


@rule("cosine_embedding_loss", plain=True)
def cosine_embedding_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """1 - cos for targets of 1, the cosine beyond a margin for targets of -1."""
    given = arguments_of(name, func, args, kwargs)
    outlines(func, tuple(given.values()), {})
    reduction = _reduction_of(given)
    x, y, target = given["input1"], given["input2"], given["target"]
    lengths = [(each * each).sum(-1) + _LEAST for each in (x, y)]
    cosine = (x * y).sum(-1) / (lengths[0] * lengths[1]).sqrt()
    far = (cosine - given["margin"]).clamp_min(0)
    loss = torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, far, 0)
    return _reduced(loss, reduction)


@rule("triplet_margin_loss", "triplet_margin_with_distance_loss", plain=True)
def triplet_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """How much farther the negative is from the anchor than the positive, up to a margin."""
    given = arguments_of(name, func, args, kwargs)
    distance: Any = given.get("distance_function")
    if distance is None:
        outlines(func, (), given)
        settings = {key: given[key] for key in ("p", "eps") if key in given}
        distance = partial(F.pairwise_distance, **settings)
    elif given["margin"] <= 0:
        raise ValueError(f"margin must be greater than 0, got {given['margin']}")
    reduction = _reduction_of(given)
    anchor, positive, negative = (given[key] for key in ("anchor", "positive", "negative"))
    far = distance(anchor, negative)
    if given["swap"]:
        far = torch.minimum(far, distance(positive, negative))
    loss = (given["margin"] + distance(anchor, positive) - far).clamp_min(0)
    return _reduced(loss, reduction)
