"""Recurrent layers and cells: samples are independent, so the batch may be split.

If the sequence is split, states are passed on from part to part (`tensor/recurrence.py`). Features
are whole on each worker: axes that split them split another dimension that is long enough. Dropout
between layers calls torch's function of it, and so draws the same numbers for every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.layout import Cut, Layout, Shape
from tessel.core.shared import anchored_zeros, used
from tessel.tensor.gathering import may_gather, of_whole
from tessel.tensor.recurrence import Wave, pipeline, run_together
from tessel.tensor.rules.batched import part_of, plan_of
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    check_whole,
    held_layouts,
    made,
    moved,
    parts,
    rule,
    unsupported,
)
from tessel.tensor.tensor import Tensor

_SEQUENCE = (
    *("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional"),
    "batch_first",
)
_PACKED = ("data", "batch_sizes", *_SEQUENCE[1:-1])


@dataclass(frozen=True)
class _Batch:
    """The layouts of samples: of the operands, and of results."""

    inputs: tuple[Layout, ...]
    samples: Layout  # of one number for each sample

    def layout(self, shape: Shape, dim: int) -> Layout:
        """The layout of a result with samples along one of its dimensions."""
        cuts = [Cut.whole(length) for length in shape]
        cuts[dim] = self.samples.cuts[0]
        return Layout(self.samples.partition, shape, tuple(cuts), self.samples.shared)


def _planned(name: str, letters: tuple[str, ...], operands: Sequence[torch.Tensor]) -> _Batch:
    whole = "".join({*"".join(letters)} - {"n"})
    plan = plan_of(name, (letters, "n"), whole, operands)
    return _Batch(plan.inputs, plan.result)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _hidden(name: str, states: Sequence[torch.Tensor]) -> Any:
    """States as torch's function takes them; cuDNN rejects parts that are views of the whole."""
    held = tuple(each.contiguous() for each in states)
    return held if name.startswith("lstm") else held[0]


def _computed(
    name: str,
    func: Any,
    batch: _Batch,
    operands: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    lies: Sequence[Layout],
) -> list[Tensor]:
    """Apply a function of the input, the states and the parameters to this worker's samples.

    A worker without samples returns zeros that depend on all operands, so that it takes part in the
    sums of gradients in the backward pass.
    """
    check_whole(name, params)
    part, *states = (part_of(*each) for each in zip(operands, batch.inputs, strict=True))
    weights = [used(parts(each), batch.samples) for each in params]
    if batch.samples.local_shape == (0,):
        if 0 not in operands[0].shape:  # of one step of one sample, what torch raises of dtypes
            first, *others = ([*each.shape[:-2], 1, each.shape[-1]] for each in (part, *states))
            first[0] = 1
            with torch.no_grad():
                ones = [each.new_ones(shape) for each, shape in zip(states, others, strict=True)]
                func(part.new_ones(first), _hidden(name, ones), weights)
        found = [anchored_zeros(each.local_shape, part, *states, *weights) for each in lies]
    else:
        found = _as_list(func(part, _hidden(name, states), weights))
    return [made(*each) for each in zip(found, lies, strict=True)]


def _check(
    name: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    expected: Sequence[Shape],
) -> None:
    """Raise for operands that do not fit together, before their parts are computed."""
    kinds = {each.dtype for each in (x, *states, *params)}
    if len(kinds) > 1 and not torch.is_autocast_enabled(x.device.type):
        # torch would, on workers with something to compute
        names = ", ".join(sorted(map(str, kinds)))
        raise RuntimeError(f"{name}: input, states and weights must have one dtype, got {names}")
    if params[0].shape[-1] != x.shape[-1]:
        raise RuntimeError(
            f"{name}: expected an input with {params[0].shape[-1]} features, got {x.shape[-1]}"
        )
    for state, shape in zip(states, expected, strict=False):
        if tuple(state.shape) != shape:
            raise RuntimeError(
                f"{name}: expected a hidden state of shape {shape}, got {tuple(state.shape)}"
            )


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", plain=True)
def sequences(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The functions of `torch.nn.LSTM`, `GRU` and `RNN`: the output, and the last states."""
    given, is_packed = _named(args, kwargs)
    if drops(args, kwargs):
        return _layer_by_layer(func, given, is_packed)
    if is_packed:
        # Sequences of different lengths, by time step: all workers compute all of them. Not by
        # `without_rule`: torch counts this as a random function, even without dropout.
        layouts = held_layouts(args, kwargs)
        if not may_gather() and not all(each.is_whole for each in layouts):
            raise unsupported(name, "sequences of different lengths must be whole", *layouts)
        return of_whole(name, func, args, kwargs)
    x, params, states = given["input"], given["params"], _as_list(given["hx"])
    if x.dim() != 3:
        raise unsupported(
            name, "expected an input of three dimensions", *held_layouts(args, kwargs)
        )
    letters = "nti" if given["batch_first"] else "tni"
    lengths = dict(zip(letters, x.shape, strict=True))
    if not lengths["t"]:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    ways = 2 if given["bidirectional"] else 1
    width = params[1].shape[-1]  # of the recurrent state: of the projection, if there is one
    cells = len(params[1]) // {"lstm": 4, "gru": 3}.get(name, 1)
    ends = [(given["num_layers"] * ways, lengths["n"], n) for n in (width, cells)]
    _check(name, x, states, params, ends)
    operands = [x, *states]
    # autocast may return states of another dtype, of which only some workers would know
    if isinstance(x, Tensor) and not torch.is_autocast_enabled(x.device.type):
        # a sequence stays split if each time step is in one part
        time_steps = x._layout.hosted((2,)).cuts[letters.index("t")].intervals
        if len(time_steps) > 1 and x._layout.owns_once and lengths["n"]:
            return _passed(name, func, given, x, states, width)
    batch = _planned(name, (letters, "lnh", "lnc")[: len(operands)], operands)
    shape = tuple((lengths | {"i": width * ways})[letter] for letter in letters)
    lies = [batch.layout(shape, letters.index("n"))]
    lies += [batch.layout(tuple(each.shape), 1) for each in states]
    settings = [given[key] for key in _SEQUENCE[3:]]
    y, *last = _computed(name, lambda *held: func(*held, *settings), batch, operands, params, lies)
    if isinstance(x, Tensor):  # the result gets the layout of the input
        y = y.move_to(x._layout.split_like(shape))
    return (y, *last)


def _passed(
    name: str, func: Any, given: Settings, x: Tensor, states: Sequence[torch.Tensor], width: int
) -> Any:
    """The same with a split sequence: states are passed on from part to part.

    One pipeline computes all layers at once; with two directions each layer needs both directions
    of the previous one, which run at the same time.
    """
    check_whole(name, given["params"])
    there = x._layout.hosted((2,))
    batch_first, ways = given["batch_first"], 2 if given["bidirectional"] else 1
    time, batch = (1, 0) if batch_first else (0, 1)
    params = [used(parts(each), there) for each in given["params"]]
    depth = given["num_layers"] if ways == 1 else 1  # layers that are computed at once
    count = len(params) * depth // len(states[0])  # parameters of one way through them
    y = moved(x, there)
    partition = there.partition
    held: list[Any] = [as_spread(each, partition) for each in states]
    firsts: list[list[torch.Tensor]] = []
    ends: list[torch.Tensor] = []
    routes = [pipeline(there, time, batch, backward) for backward in (False, True)[:ways]]
    # moved before anything is computed, so that movements have the same order on all workers
    for number in range(len(states[0]) // depth):
        route = routes[number % ways]
        rows = slice(number * depth, (number + 1) * depth)
        firsts.append([moved(each[rows], route.held_at(0, depth, each.shape[-1])) for each in held])
    anchors = [y, *params, *(each for first in firsts for each in first)]

    def direction(number: int, x: torch.Tensor) -> Wave:
        route = routes[number % ways]
        weights = params[number * count : (number + 1) * count]

        def compute(x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
            x = x.flip(time) if route.backward else x
            settings = (given["has_biases"], depth, 0.0, given["train"], False, batch_first)
            found = _as_list(func(x, _hidden(name, states), weights, *settings))
            return [found[0].flip(time) if route.backward else found[0], *found[1:]]

        return Wave(route, x, firsts[number], anchors, width, compute)

    for layer in range(len(firsts) // ways):
        waves = [direction(layer * ways + way, y) for way in range(ways)]
        run_together(*waves)
        found = [each.result() for each in waves]
        y = torch.cat([each for each, _ in found], -1) if ways > 1 else found[0][0]
        for wave, (_, last) in zip(waves, found, strict=True):
            # each worker gets the last states of its samples, in one message
            packed = torch.cat(last, -1)
            at = wave.way.held_at(len(wave.way.order) - 1, depth, packed.shape[-1])
            ends.append(made(packed, at).move_to(wave.way.by_samples(at.shape)))
    shape = (*there.shape[:2], width * ways)
    result = made(y, there.reshaped_along(shape, (2,))).move_to(x._layout.split_like(shape))
    final = torch.cat(ends) if len(ends) > 1 else ends[0]
    return (result, *final.split([each.shape[-1] for each in states], -1))


def drops(args: Arguments, kwargs: Settings) -> bool:
    """Whether a call of a recurrent function draws random numbers, for dropout between layers."""
    given, _ = _named(args, kwargs)
    return bool(given["dropout"] > 0 and given["train"] and given["num_layers"] > 1)


def _named(args: Arguments, kwargs: Settings) -> tuple[Settings, bool]:
    """The arguments by name, and whether sequences are packed."""
    is_packed = len(args) > 3 and isinstance(args[3], list | tuple)
    return dict(zip(_PACKED if is_packed else _SEQUENCE, args, strict=False)) | kwargs, is_packed


def _layer_by_layer(func: Any, given: Settings, is_packed: bool) -> Any:
    """Compute layers one by one with dropout between them, with equal numbers for all layouts."""
    names = _PACKED if is_packed else _SEQUENCE
    layers, ways = given["num_layers"], 2 if given["bidirectional"] else 1
    params, states = list(given["params"]), _as_list(given["hx"])
    count = len(params) // layers
    y = given[names[0]]
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(layers):
        own = [each[layer * ways : (layer + 1) * ways] for each in states]
        settings = {
            **given,
            names[0]: y,
            "hx": own if isinstance(given["hx"], list | tuple) else own[0],
            "params": params[layer * count : (layer + 1) * count],
            "num_layers": 1,
            "dropout": 0.0,
        }
        y, *ends = func(*(settings[key] for key in names))
        for kept, end in zip(last, ends, strict=True):
            kept.append(end)
        if layer < layers - 1:
            y = F.dropout(y, given["dropout"])
    return (y, *(torch.cat(each) for each in last))


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", plain=True)
def cells(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """One step: the next state of each sample, in the layout in which it is computed."""
    names = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, states = given["input"], _as_list(given["hx"])
    params = [given[key] for key in names[2:] if given.get(key) is not None]
    if x.dim() != 2:
        raise unsupported(name, "expected an input of two dimensions", *held_layouts(args, kwargs))
    shape = (x.shape[0], params[1].shape[-1])
    _check(name, x, states, params, [shape] * len(states))
    operands = [x, *states]
    batch = _planned(name, ("ni", "nh", "nc")[: len(operands)], operands)
    lies = [batch.layout(shape, 0)] * len(states)
    found = _computed(name, lambda a, h, w: func(a, h, *w), batch, operands, params, lies)
    return tuple(found) if name == "lstm_cell" else found[0]
