"""Random functions: the same numbers for every layout and every number of workers.

A random function draws one number, the same on all workers; each random value is a function of it
and of its index in the whole tensor. So copies of one value get the same number, and parts get
those of the whole. While a converted model runs, the number comes from a stream that all workers
have; elsewhere it is drawn by the first worker, from the caller's generator if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.counter_random import is_at_least, normal, uniform, whole_numbers
from tessel.tensor.gathering import gathered, may_gather, say
from tessel.tensor.rules.batched import holds_anywhere
from tessel.tensor.rules.pointwise import changed, check_change, is_in_place, pointwise
from tessel.tensor.rules.reductions import argument
from tessel.tensor.shared_random import common_number, seeded
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    held_layouts,
    made,
    moved,
    opened,
    outlines,
    rule,
    spread_among,
    unsupported,
)
from tessel.tensor.tensor import Tensor
from tessel.transport import kept_in_job


def _even(layout: Layout, device: Any, generator: torch.Generator | None = None) -> torch.Tensor:
    """Numbers uniformly distributed in [0, 1), for this worker's part."""
    return uniform(
        common_number(layout.partition, generator, device), layout, torch.float64, device
    )


def _without_generator(
    args: Arguments, kwargs: Settings
) -> tuple[torch.Generator | None, Arguments, Settings]:
    """The generator, or None for torch's own, and the other arguments.

    Some functions take it as a positional argument, too.
    """
    placed = [each for each in args if isinstance(each, torch.Generator)]
    others = tuple(each for each in args if not isinstance(each, torch.Generator))
    settings = {key: value for key, value in kwargs.items() if key != "generator"}
    return (placed[0] if placed else kwargs.get("generator")), others, settings


_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@rule("rand_like", "randn_like")
def noise_like(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Uniformly or normally distributed numbers."""
    x, layout = opened(args[0])
    dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
    if dtype not in _FLOATING and not dtype.is_complex:
        func(torch.empty(1, dtype=dtype))  # torch's own error
    draw = uniform if name == "rand_like" else normal
    part = draw(
        common_number(layout.partition, kwargs.get("generator"), device), layout, dtype, device
    )
    return made(part.requires_grad_(bool(kwargs.get("requires_grad"))), layout)


@rule("randint_like")
def whole_numbers_like(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Integers in [low, high), with low 0 by default."""
    x, layout = opened(args[0])
    limits = [*args[1:], *(kwargs[key] for key in ("low", "high") if key in kwargs)]
    low, high = (0, *limits) if len(limits) == 1 else limits
    dtype = kwargs.get("dtype") or x.dtype
    func(torch.empty(0, dtype=dtype), low, high)  # torch's own errors
    device = kwargs.get("device") or x.device
    seed = common_number(layout.partition, kwargs.get("generator"), device)
    part = whole_numbers(seed, layout, low, high, dtype, device)
    return made(part.requires_grad_(bool(kwargs.get("requires_grad"))), layout)


@rule("normal", plain=True)
def normal_by_tensors(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Normally distributed numbers, each with its own mean and standard deviation."""
    mean, std = argument(args, kwargs, 0, "mean"), argument(args, kwargs, 1, "std", 1.0)
    if holds_anywhere(std < 0) if isinstance(std, torch.Tensor) else std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    both = pointwise("add", torch.add, (mean, std), {})  # in the layout of the result
    noise = torch.empty_like(both.detach()).normal_(generator=kwargs.get("generator"))
    return _constant(mean) + _constant(std) * noise


def _constant(value: Any) -> Any:
    """A tensor that a random function reads: its derivative is zero, as in torch."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, Tensor):
        return value.detach() + anchored_zeros(tuple(value.shape), value)
    part, layout = opened(value)
    return made(part.detach() + anchored_zeros(tuple(part.shape), part), layout)


DrawNoise = Callable[..., torch.Tensor]


def _random(u: Any, layout: Layout, like: torch.Tensor, *limits: int) -> torch.Tensor:
    """Integers: all of the dtype's, or up to a limit, or between two."""
    dtype = like.dtype
    if dtype.is_floating_point:
        most = 2 ** {torch.float64: 53, torch.float32: 24, torch.float16: 11}.get(dtype, 8) + 1
    else:
        most = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    given = [each for each in limits if each is not None]
    low, high = (0, most) if not given else (0, given[0]) if len(given) == 1 else given
    return whole_numbers(u, layout, low, high, dtype, like.device)


# arguments with their defaults, and functions that draw the numbers of a part from a seed
_FILLS: dict[str, tuple[dict[str, Any], DrawNoise]] = {
    "normal_": (
        {"mean": 0.0, "std": 1.0},
        lambda s, at, like, mean, std: mean + std * normal(s, at, _kind(like), like.device),
    ),
    "uniform_": (
        {"from": 0.0, "to": 1.0},
        lambda s, at, like, a, b: a + (b - a) * uniform(s, at, _kind(like), like.device),
    ),
    "exponential_": (
        {"lambd": 1.0},
        lambda s, at, like, rate: -torch.log1p(-_unit(s, at, like)) / rate,
    ),
    "log_normal_": (
        {"mean": 1.0, "std": 2.0},
        lambda s, at, like, mean, std: (
            mean + std * normal(s, at, torch.float64, like.device)
        ).exp(),
    ),
    "cauchy_": (
        {"median": 0.0, "sigma": 1.0},
        lambda s, at, like, median, sigma: (
            median + sigma * torch.tan(math.pi * (_unit(s, at, like) - 0.5))
        ),
    ),
    "geometric_": (
        {"p": None},
        lambda s, at, like, p: (
            (torch.log1p(-_unit(s, at, like)) / math.log1p(-p)).ceil().clamp_min(1)
        ),
    ),
    "random_": ({"from": None, "to": None}, _random),
}


def _kind(like: torch.Tensor) -> torch.dtype:
    return like.dtype if like.dtype in _FLOATING or like.is_complex() else torch.float64


def _unit(seed: int, layout: Layout, like: torch.Tensor) -> torch.Tensor:
    return uniform(seed, layout, torch.float64, like.device)


@rule(*_FILLS)
def fill(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Fill with random numbers of a distribution."""
    target, layout = args[0], args[0]._layout
    check_change(name, target, [layout])
    like = target._part
    generator, args, kwargs = _without_generator(args, kwargs)
    func(torch.empty(0, dtype=like.dtype), *args[1:], **kwargs)  # torch's own errors
    names, draw = _FILLS[name]
    settings = names | dict(zip(names, args[1:], strict=False)) | kwargs
    part = draw(
        common_number(layout.partition, generator, like.device), layout, like, *settings.values()
    )
    like.copy_(part)
    return changed(target)


@rule("bernoulli", "bernoulli_")
def bernoulli(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Ones with a given probability, or with that of each element."""
    target, layout = args[0], args[0]._layout
    usual = 0.5 if name == "bernoulli_" else None
    p = argument(args, kwargs, 1, "p", usual)
    chances = target if p is None else p
    if isinstance(chances, torch.Tensor):
        if holds_anywhere(~((chances >= 0) & (chances <= 1))):
            raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    elif not 0 <= chances <= 1:
        raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={chances}")
    if name == "bernoulli_":
        check_change(name, target, [layout])
    numbers: Any = made(_even(layout, target.device, kwargs.get("generator")), layout)
    if isinstance(chances, torch.Tensor):
        chances = chances.detach()
    # probabilities may have another layout: the result gets that of the target
    ones = (numbers < chances).to(target.dtype).move_to(layout)
    if name == "bernoulli_":
        target._part.copy_(ones._part)
        return changed(target)
    return ones if p is not None else ones + _constant(target) * 0


@kept_in_job
def _features(layout: Layout, channel: int) -> Layout:
    """The layout of one value for each channel of each sample, on all workers with a part of it."""
    shape, cuts = list(layout.shape), list(layout.cuts)
    for dim in range(channel + 1, len(shape)):
        shape[dim] = 1
        cuts[dim] = Cut(cuts[dim].axes, ((0, 1),) * len(cuts[dim].intervals))
    return replace(layout, shape=tuple(shape), cuts=tuple(cuts))


@rule(
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "native_dropout"),
    *("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"),
    *("feature_dropout_", "feature_alpha_dropout_"),
)
def dropout(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Drop values, or channels of samples, with a probability.

    Forward:  y = a (m x + (1 - m) v) + b with a mask m, where v, a, b keep the mean and, for alpha
    dropout, variance.
    """
    target = args[0]
    p = argument(args, kwargs, 1, "p", 0.5)
    called = "train" if "train" in kwargs else "training"
    training = argument(args, kwargs, 2, called, "alpha" not in name)
    training = training is None or bool(training)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if "feature" in name or name[-1] == "d":
        in_copies = {"inplace": False} if "inplace" in kwargs else {}
        outlines(func, args, {**kwargs, **in_copies})  # torch's own errors and warnings
    x, layout = opened(target)
    in_place = is_in_place(name) or bool(kwargs.get("inplace", args[3:4] == (True,)))
    if in_place:
        check_change(name, target, [layout])
    is_single = (name, x.dim()) in (("dropout1d", 2), ("dropout3d", 4))  # channels are first
    if not training or not p:
        everything = made(torch.ones_like(x, dtype=torch.bool), layout)
        if is_single and not in_place:  # torch adds a dimension and removes it, which gives a view
            return target.unsqueeze(0).squeeze(0)
        return (target, everything) if name == "native_dropout" else target
    of_channels = name.startswith("feature") or name[-1] == "d"
    at = _features(layout, 0 if is_single else 1) if of_channels else layout
    seed, box = common_number(at.partition, None, x.device), at.box()
    kept = torch.empty(0, dtype=torch.bool, device=x.device)
    if box is not None:
        kept = is_at_least(p, seed, at.shape, box, torch.bool, x.device)
    scale, is_alpha = 1 / (1 - p) if p < 1 else 0.0, "alpha" in name
    if is_alpha and p < 1:
        scale = 1 / math.sqrt((_SATURATION**2 * p + 1) * (1 - p))
    factors = kept.to(x.dtype).mul_(scale)
    terms = None
    if is_alpha:
        # the terms for values that stay, and for those that are dropped; as tensors, since for two
        # numbers torch.where returns float32
        stays, falls = (factors.new_tensor(_SATURATION * scale * q) for q in (p, p - 1))
        terms = torch.where(kept, stays, falls)
    if in_place:
        target._part.mul_(factors)
        if terms is not None:
            target._part.add_(terms)
        return changed(target)
    y = x * factors if terms is None else x * factors + terms
    return (made(y, layout), made(kept, layout)) if name == "native_dropout" else made(y, layout)


_SATURATION = 1.7580993408473766  # that of SELU, with the opposite sign


@rule("rrelu", "rrelu_")
def rrelu(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Multiply negative values by a slope, in training a random one for each."""
    generator, args, kwargs = _without_generator(args, kwargs)
    target = args[0]
    x, layout = opened(target)
    lower = argument(args, kwargs, 1, "lower", 1 / 8)
    upper = argument(args, kwargs, 2, "upper", 1 / 3)
    in_place = is_in_place(name) or bool(kwargs.get("inplace", args[4:5] == (True,)))
    if in_place:
        check_change(name, target, [layout])
    func(torch.empty(0, dtype=x.dtype), lower, upper)  # torch's own errors
    slope = x.new_tensor((lower + upper) / 2)
    if argument(args, kwargs, 3, "training", False):
        slope = (lower + (upper - lower) * _even(layout, x.device, generator)).to(x.dtype)
    factors = torch.where(x.detach() <= 0, slope, 1)
    if in_place:
        target._part.mul_(factors)
        return changed(target)
    return made(x * factors, layout)


@rule("gumbel_softmax")
def gumbel_softmax(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The softmax of logits with noise; if hard, one-hot with the gradient of the soft one."""
    x = args[0]
    dim = argument(args, kwargs, 4, "dim", -1)
    outlines(func, args, kwargs)
    noise = -torch.empty_like(x.detach()).exponential_().log()
    soft = ((x + noise) / argument(args, kwargs, 1, "tau", 1)).softmax(dim)
    if not argument(args, kwargs, 2, "hard", False):
        return soft
    dim %= max(1, x.dim())
    numbers = torch.arange(x.shape[dim] if x.dim() else 1, device=x.device)
    numbers = numbers.reshape(-1, *[1] * (x.dim() - dim - 1)) if x.dim() else numbers[0]
    hard = (soft.detach().argmax(dim, True) == numbers).to(x.dtype)
    return hard - soft.detach() + soft


@rule("multinomial")
def multinomial(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Random indices of rows of weights, with probabilities by weight."""
    x, generator = args[0].detach(), kwargs.get("generator")
    count = argument(args, kwargs, 1, "num_samples")
    replacement = argument(args, kwargs, 2, "replacement", False)
    outlines(func, (args[0], count, replacement), {})  # torch's own errors
    if holds_anywhere(~((x >= 0) & (x < math.inf))):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    least = 1 if replacement else count
    if holds_anywhere((x > 0).sum(-1) < least):
        raise RuntimeError(
            f"invalid multinomial distribution: {least} categories of positive probability are "
            f"needed in each row"
        )
    if not replacement:  # exponential clocks with the weights as rates: the first to ring
        clocks = torch.empty_like(x, dtype=torch.float64).exponential_(generator=generator) / x
        return clocks.topk(count, -1, largest=False).indices
    last = x.dim() - 1
    there = x._layout.hosted((last,))
    sums = moved(x, there).double().cumsum(-1)
    target = there.reshaped_along((*x.shape[:-1], count), (last,))
    levels = _even(target, x.device, generator) * sums[..., -1:]
    # right: a level of zero, or at a bound, belongs to an index of positive weight
    places = torch.searchsorted(sums, levels, right=True)
    return made(places.clamp_max(x.shape[-1] - 1), target)


@rule(
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
    *(f"fractional_max_pool{n}d{ending}" for n in (2, 3) for ending in ("", "_with_indices")),
    plain=True,
)
def together(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Functions without counter-based numbers: all workers draw the whole tensor from one seed."""
    spread = list(spread_among(args, kwargs))
    layout, device = spread[0]._layout, spread[0].device
    if not may_gather() and not all(each._layout.is_whole for each in spread):
        raise unsupported(name, "it draws for whole tensors only", layout)
    say(name, spread)
    generator, args, kwargs = _without_generator(args, kwargs)
    seed = common_number(layout.partition, generator, device)
    whole, settings = gathered(args), gathered(kwargs)
    with seeded(seed, device):
        result = func(*whole, **settings)
    return _like_operand(result, layout)


def _like_operand(result: Any, layout: Layout) -> Any:
    """A result of all workers, in the layout of the operand if it has its shape."""
    if isinstance(result, tuple):
        return tuple(_like_operand(each, layout) for each in result)
    found = as_spread(result, layout.partition)
    return found.move_to(layout) if found.shape == layout.shape else found


def initialize(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Functions that `torch.nn.init` passes on for other kinds of tensors, by torch's own steps."""
    given = dict(kwargs)
    x, generator = given.pop("tensor"), given.pop("generator", None)
    with torch.no_grad():
        if name == "init constant_":
            return x.fill_(given["val"])
        if name == "init normal_":
            return x.normal_(given["mean"], given["std"], generator=generator)
        if name == "init uniform_":
            return x.uniform_(given["a"], given["b"], generator=generator)
        if name == "init kaiming_uniform_":
            if 0 in x.shape:  # torch draws nothing
                return x
            fan = nn.init._calculate_correct_fan(x, given["mode"])
            gain = nn.init.calculate_gain(given["nonlinearity"], given["a"])
            bound = math.sqrt(3 / fan) * gain
            return x.uniform_(-bound, bound, generator=generator)
    raise unsupported(name, "it has no rule", *held_layouts(kwargs))
