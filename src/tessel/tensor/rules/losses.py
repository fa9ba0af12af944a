"""Losses: the loss of each element, sample or position of the part, and their sum or mean.

The result of a sum or mean is one number, which all workers share: each of them may call
`backward`, and gets the gradients of one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import _reduction

from tessel.core.layout import Layout, Shape
from tessel.core.shared import total, used
from tessel.tensor.rules.batched import (
    applied,
    batched,
    holds_anywhere,
    part_of,
    plan_of,
    whole_of,
)
from tessel.tensor.rules.pointwise import common_layout, fitted
from tessel.tensor.rules.reductions import filled, without
from tessel.tensor.rules.split_classes import CrossEntropy
from tessel.tensor.table import (
    Arguments,
    Settings,
    arguments_of,
    as_spread,
    check_fits,
    held_layouts,
    made,
    moved,
    opened,
    outlines,
    outlining,
    rule,
    shared_whole,
    spread_among,
    unsupported,
    widened,
)
from tessel.tensor.tensor import Tensor, move
from tessel.tensor.windowed import outline


def _reduction_of(given: Settings) -> str:
    """The reduction, in torch's words; removes it and the deprecated flags from the arguments."""
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


_OPERANDS = ("input", "input1", "input2", "target", "weight", "pos_weight", "var")
_MEAN_OF_WEIGHTS = ("mse_loss", "l1_loss")  # their means are divided by the sum of weights


@rule(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss"),
    *("soft_margin_loss", "margin_ranking_loss", "gaussian_nll_loss"),
    plain=True,
)
def of_elements(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Elementwise losses: torch's own of the parts, and their sum."""
    if name == "l1_loss" and "weight" not in kwargs:
        kwargs = {**kwargs, "weight": _weight_of_l1()}
    given = arguments_of(name, func, args, kwargs)
    # torch raises its own errors, once for each kind of call
    kinds = kinds_of(given)
    sizes = {each.shape for key, each in kinds if isinstance(each, Kind) and key not in _WEIGHTS}
    if len(sizes) > 1 and name != "gaussian_nll_loss":  # which reads values
        func(**{key: _outlined(each) for key, each in kinds})  # it warns of sizes at every call
    if name != "gaussian_nll_loss" or not outlining.get():  # it reads values, and there are none
        _check_least(name, func, kinds)
    reduction = _reduction_of(given)
    if name == "binary_cross_entropy" and not checked.get():
        x = given["input"]
        if holds_anywhere(~((x >= 0) & (x <= 1))):  # workers with valid values would not raise
            raise RuntimeError("all elements of input should be between 0 and 1")
    if name == "gaussian_nll_loss":
        given["var"] = _variance(given["var"], given["input"])
    operands = {
        key: given.pop(key) for key in _OPERANDS if isinstance(given.get(key), torch.Tensor)
    }
    layout = common_layout(name, tuple(operands.values()))
    wide = torch.broadcast_tensors(*(fitted(each, layout) for each in operands.values()))
    parts = dict(zip(operands, wide, strict=True))

    def measure(reduction: str) -> torch.Tensor:
        """Torch's own loss of the parts, which it reduces without storing each element's loss."""
        if name == "gaussian_nll_loss" and outlining.get():  # torch's own reads values
            variance = parts.get("var", given.get("var"))
            return F.mse_loss(parts["input"] / variance, parts["target"], reduction=reduction)
        loss: torch.Tensor = func(**parts, **given, reduction=reduction)
        return loss

    if reduction == "none":
        return made(measure("none"), layout)
    if reduction == "mean" and name in _MEAN_OF_WEIGHTS and "weight" in parts:
        both = _total(torch.stack([measure("sum"), parts["weight"].sum()]), layout)
        return _one_number(both[0] / both[1], layout)
    count, own = prod(layout.shape), prod(layout.local_shape)
    if reduction == "mean" and own:  # in half precision sums may overflow where means do not
        mean = measure("mean")
        share = widened(mean) * (own / count)
        return _one_number(_total(share, layout).to(mean.dtype), layout)
    loss = measure("sum")
    share = widened(loss)
    if reduction == "mean":
        share = share / count
    elif reduction == "batchmean" and layout.shape:
        share = share / operands["input"].shape[0]
    return _one_number(_total(share, layout).to(loss.dtype), layout)


def _total(share: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The sum of the shares of all workers for their parts of a tensor in this layout."""
    return total(share, layout.partition, layout.shared)


def _one_number(value: torch.Tensor, layout: Layout) -> Tensor:
    """A loss as one number that all workers of a layout share."""
    return made(value, shared_whole(layout.partition, ()))


def _weight_of_l1() -> Any:
    """The weights that a caller passed to `l1_loss`.

    Torch does not pass them on for tensors of other kinds; without reading them from its frame they
    would be ignored silently.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is F.l1_loss.__code__:
            return frame.f_locals.get("weight")
    return None


def _variance(var: Any, x: torch.Tensor) -> Any:
    """A variance for each element or for each row, in a shape to be broadcast; a number stays."""
    if not isinstance(var, torch.Tensor):
        return var
    if not checked.get() and holds_anywhere(var < 0):
        raise ValueError("var has negative entry/entries")
    if var.shape != x.shape:
        differ = [n for m, n in zip(x.shape, var.shape, strict=False) if m != n]
        if x.shape[:-1] == var.shape:
            return var.unsqueeze(-1)
        if x.dim() != var.dim() or sum(differ) != 1:
            raise ValueError("var is of incorrect size")
    return var


# set when values were already checked, as workers agreed on their parts
checked: ContextVar[bool] = ContextVar("checked", default=False)
_WEIGHTS = ("weight", "pos_weight")


class Kind(NamedTuple):
    """The properties of a tensor on which torch's errors depend, except its values."""

    shape: Shape
    dtype: torch.dtype
    device: str
    needs_grad: bool

    def zeros(self, shape: Shape) -> torch.Tensor:
        found = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return found.requires_grad_() if self.needs_grad else found

    def outline(self) -> torch.Tensor:
        return outline(self.shape, self.dtype)


Kinds = tuple[tuple[str, Any], ...]


@contextmanager
def _asked() -> Iterator[None]:
    """Let torch check arguments without warnings, and outside of transforms of `torch.func`."""
    with warnings.catch_warnings(), temporarily_clear_interpreter_stack():
        warnings.simplefilter("ignore")
        yield


def kinds_of(given: Settings) -> Kinds:
    """The arguments of a loss with tensors replaced by their kinds."""
    found: list[tuple[str, Any]] = []
    for key, x in given.items():
        if isinstance(x, torch.Tensor):
            part = x._part if isinstance(x, Tensor) else x
            shape = x._layout.shape if isinstance(x, Tensor) else tuple(x.shape)
            x = Kind(shape, part.dtype, part.device.type, part.requires_grad)
        found.append((key, x))
    return tuple(found)


@lru_cache(maxsize=1024)
@_asked()
def _check_least(name: str, func: Any, kinds: Kinds) -> None:
    """Let torch check the smallest tensors of these kinds; whole ones without computing."""
    is_weighted = name in ("mse_loss", "l1_loss", "huber_loss")  # by weights of the input's shape
    ones = {
        key: () if key in _WEIGHTS and not is_weighted else (1,) * len(each.shape)
        for key, each in kinds
        if isinstance(each, Kind)
    }
    func(**{key: each.zeros(ones[key]) if key in ones else each for key, each in kinds})
    if is_weighted:
        func(**{key: _outlined(each) for key, each in kinds})
    for key, each in kinds:
        if key in _WEIGHTS and each is not None and not is_weighted:
            # a weight must not have more elements than the input
            check_fits(dict(kinds)["input"].shape, each.shape)


def _outlined(value: Any) -> Any:
    return value.outline() if isinstance(value, Kind) else value


@lru_cache(maxsize=1024)
@_asked()
def loss_dtype(func: Any, kinds: Kinds, autocast: bool) -> torch.dtype:
    """The dtype of a loss of classes, after torch has checked the arguments.

    Torch checks one sample with all classes, and then, without values, all shapes.

    Args:
        func: torch's function.
        kinds: its arguments.
        autocast: whether autocast is on, with which torch computes in another dtype.
    """
    given = dict(kinds)
    x, target, weight = given["input"], given["target"], given["weight"]
    dim = min(1, len(x.shape) - 1)
    row = tuple(length if d == dim else 1 for d, length in enumerate(x.shape))
    # a target of one class may have a dimension, if the input has classes alone
    is_row = len(target.shape) == len(x.shape) and (target.shape != (1,) or x.shape == (1,))
    goal = target.zeros(row if is_row else (1,) * len(target.shape))
    if x.shape and not x.shape[dim] and goal.dtype == torch.int64:  # there is no class at all
        goal.fill_(given["ignore_index"])
    least = {
        "input": x.zeros(row),
        "target": goal,
        "weight": weight.zeros(weight.shape) if isinstance(weight, Kind) else weight,
    }
    found: torch.Tensor = func(**given | least)
    # without values torch accepts neither classes of uint8 nor the dimension of a single class
    kind = torch.int64 if target.dtype == torch.uint8 else target.dtype
    shape = target.shape if is_row or len(x.shape) != len(target.shape) else ()
    given["target"] = target._replace(dtype=kind, shape=shape)
    # the valid shapes depend neither on the reduction nor on label smoothing
    values_only = ("reduction", "label_smoothing")
    _check_shapes(func, tuple(each for each in given.items() if each[0] not in values_only))
    return found.dtype


@lru_cache(maxsize=1024)
@_asked()
def _check_shapes(func: Any, kinds: Kinds) -> None:
    """Raise torch's own error for wrong shapes; without values it takes 20 ms, in Python."""
    func(**{key: _outlined(each) for key, each in kinds})


@rule("linear_cross_entropy", plain=True)
def linear_cross_entropy(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`cross_entropy` of the result of a linear map."""
    given = arguments_of(name, func, args, kwargs)
    x, weight, bias = given["input"], given["linear_weight"], given["linear_bias"]
    if given["options"] is not None:
        raise unsupported(name, "options are not supported", *held_layouts(args, kwargs))
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
    """CTC with all times and classes of a sample on one worker; samples may be split."""
    given = arguments_of(name, func, args, kwargs)
    x, targets = given["log_probs"], given["targets"]
    reduction = _reduction_of(given)
    lengths = [
        torch.as_tensor(whole_of(given[f"{key}_lengths"]), device="cpu")
        for key in ("input", "target")
    ]
    if x.dim() == 2:  # one sample
        x = x.unsqueeze(1)
        lengths = [each.reshape(1) for each in lengths]
        targets = targets.reshape(1, -1)
    elif targets.dim() == 1:  # the targets of all samples, one after the other
        targets, count = whole_of(targets), int(lengths[1].sum())
        if count != len(targets):
            raise RuntimeError(
                f"Expected targets of {count} values, the sum of target_lengths, got {len(targets)}"
            )
        # as rows padded with zeros, so that samples can be split
        rows = targets.split(lengths[1].tolist())
        targets = torch.nn.utils.rnn.pad_sequence(list(rows), True)
    if not held_layouts(x, targets):  # only lengths were, which all workers have now
        x = as_spread(x, next(spread_among(args, kwargs))._layout.partition)
    _check_times(given["blank"], x, targets, *lengths)
    settings = {key: given[key] for key in ("blank", "zero_infinity")} | {"reduction": "none"}
    operands = x, targets, *lengths
    plan = plan_of(name, (("tnc", "ns", "n", "n"), "n"), "tcs", operands)
    part = applied(lambda *parts: F.ctc_loss(*parts, **settings), operands, plan, x.dtype)
    losses: torch.Tensor = made(part, plan.result)
    if reduction == "mean":
        losses = losses / lengths[1].clamp_min(1).to(losses.device)
    return _reduced(losses[0] if given["log_probs"].dim() == 2 else losses, reduction)


def _check_times(
    blank: int, x: torch.Tensor, targets: torch.Tensor, times: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Raise on all workers the errors that torch would raise where the sample is."""
    steps, samples, classes = x.shape
    for what, each, most in (
        ("input_lengths", times, steps),
        ("target_lengths", lengths, targets.shape[-1]),
    ):
        if tuple(each.shape) != (samples,) or (
            samples and not 0 <= each.min() <= each.max() <= most
        ):
            raise RuntimeError(
                f"ctc_loss: expected {what} of {samples} samples, from 0 to {most}, got {each}"
            )
    if targets.dim() != 2 or targets.shape[0] != samples:
        raise RuntimeError(
            f"ctc_loss: expected targets of {samples} samples, got shape {tuple(targets.shape)}"
        )
    if not 0 <= blank < classes:
        raise RuntimeError("blank must be in label range")
    is_used = torch.arange(targets.shape[1]) < lengths[:, None]
    if holds_anywhere(((targets < 0) | (targets >= classes)) & is_used.to(targets.device)):
        raise RuntimeError(f"ctc_loss: a target is none of the {classes} classes")


GATHERED = 1 << 16  # bytes of scores of classes that go to all workers: one message is faster
NUM_FACTS = 3  # numbers that a worker sends for each sample if its scores stay split


@rule("nll_loss", "cross_entropy", plain=True)
def of_classes(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The negative log-probability of each target; `cross_entropy` takes scores.

    Forward:  ℓ_n = -w[y_n] x[n, y_n], where x are log-probabilities.

    Each worker computes, by torch's own function, the losses of samples for which it has all
    classes. Classes that are split are gathered if they are few; else they stay split.
    """
    given = arguments_of(name, func, args, kwargs)
    first = next(spread_among(*(given[key] for key in ("input", "target", "weight"))))
    given["weight"] = weight = whole_of(given["weight"])
    dim = 0 if given["input"].dim() == 1 else 1
    dtype = loss_dtype(func, kinds_of(given), torch.is_autocast_enabled(given["input"].device.type))
    reduction = _reduction_of(given)
    target = given.pop("target")
    x = as_spread(given.pop("input"), first._layout.partition)
    if isinstance(target, Tensor) and x._layout.is_whole and not target._layout.is_whole:
        # an input that all workers have whole gets the layout of the target
        is_alike = target.dim() == x.dim()
        there = target._layout
        x = x.move_to(there if is_alike else there.with_whole(dim, x._layout.shape[dim]))
    layout = x._layout
    is_probable = name == "cross_entropy" and x.shape == target.shape
    if not is_probable:
        if x.dim() == target.dim():  # the target of one sample may have a dimension
            target = target.reshape(())
        num_classes, ignored = layout.shape[dim], given["ignore_index"]
        part = target._part if isinstance(target, Tensor) else target
        if not checked.get():
            wrong = ((part < 0) | (part >= num_classes)) & (part != ignored)
            if holds_anywhere(made(wrong, target._layout) if isinstance(target, Tensor) else wrong):
                raise IndexError(
                    f"a target is out of bounds: it is none of the {num_classes} classes and not "
                    f"ignore_index, {ignored}"
                )
    if layout.is_split(dim):
        few = max(stop - start for start, stop in layout.cuts[dim].intervals) <= NUM_FACTS
        if prod(layout.shape) * x.element_size() > GATHERED or not (few or name == "nll_loss"):
            if name == "nll_loss":
                return _of_split_scores(x, target, dim, given, reduction)
            measure = CrossEntropy(given["ignore_index"], given["label_smoothing"], reduction)
            goal = as_spread(target, layout.partition)
            lies = layout if is_probable else without(layout, (dim,), False)[1]
            return made(*measure(moved(x, layout), layout, moved(goal, lies), weight, dtype))
        layout = layout.gathered((dim,))
    _, samples = without(layout, (dim,), False)
    part, chosen = moved(x, layout), part_of(target, layout if is_probable else samples)
    if weight is not None and weight.requires_grad:
        given["weight"] = used(weight, samples)
    each = func(part, chosen, **given, reduction="none")
    if reduction == "none":
        return made(each, samples)
    share = widened(each).sum()
    if reduction == "mean" and is_probable:
        share = share / prod(samples.shape)
    elif reduction == "mean":
        # divided by the weights of all samples that count
        counted = chosen != given["ignore_index"]
        if weight is not None:
            weights = weight.detach()[torch.where(counted, chosen, 0).long()]
            counted = widened(torch.where(counted, weights, 0))
        both = _total(torch.stack([share, counted.sum().to(share)]), samples)
        return _one_number((both[0] / both[1]).to(each.dtype), samples)
    return _one_number(_total(share, samples).to(each.dtype), samples)


def _of_split_scores(
    x: Tensor, target: torch.Tensor, dim: int, given: Settings, reduction: str
) -> Any:
    """`nll_loss` if no worker has all classes: the score of each target is sent.

    Each worker selects x[n, target[n]] in its own classes, and the sum has them all.
    """
    part, layout = opened(x)
    separate, shared = without(layout, (dim,), False)
    chosen = part_of(target, shared).long()
    box = layout.box()
    assert box is not None
    start, stop = box[dim]
    rows = filled(part, (dim,))
    place = (chosen - start).clamp(0, rows.shape[dim] - 1).unsqueeze(dim)
    own = torch.where((chosen >= start) & (chosen < stop), rows.gather(dim, place).squeeze(dim), 0)
    scores = made(move(separate, shared).apply(own), shared)
    ignored = made(chosen == given["ignore_index"], shared)
    losses, factors, weight = torch.where(ignored, 0, -scores), ~ignored, given["weight"]
    if weight is not None:
        # the weight of the class of each target; of any class for targets that are ignored
        each = used(weight, shared)[chosen.clamp(0, len(weight) - 1)]
        factors = torch.where(ignored, 0, made(each, shared))
        losses = losses * factors
    return losses.sum() / factors.sum() if reduction == "mean" else _reduced(losses, reduction)


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
    if not held_layouts(x, target):  # only a weight is spread
        x = as_spread(x, weight._layout.partition)
    # the target of one sample is 0-d, or 1-d of length one
    target = target if least else target.reshape(x.shape[:-1])
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("the derivative for 'weight' is not implemented")  # as torch does
    operands = [x, target] if weight is None else [x, target, whole_of(weight)]
    row = "n" * (x.dim() - 1)
    letters = (row + "c", row + "c" if least else row, "c")[: len(operands)]

    def compute(x: torch.Tensor, y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        weights = {"weight": rest[0]} if rest else {}
        found: torch.Tensor = func(x, y, **given, **weights, reduction="none")
        return found.reshape(x.shape[:-1])  # for one sample, torch returns a 1-d or 0-d tensor

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


_LEAST = 1e-12  # torch adds it to the squared norms of a cosine embedding


@rule("cosine_embedding_loss", plain=True)
def cosine_embedding_loss(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """1 - cos for targets of 1, and the cosine above a margin for targets of -1."""
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
    """By how much the negative is not farther from the anchor than the positive plus a margin."""
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
