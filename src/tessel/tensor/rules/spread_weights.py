"""Spread weights: convolutions with a weight in blocks, computed where these lie.

A convolution is a product of inputs and weights, summed over the channels of the input, whose
indices of space are read through windows. So it is planned as products are: each index is split as
in the largest operand that has it, and what is summed over a split index is added by one movement.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

import torch

from tessel.core.layout import Layout, Shape
from tessel.tensor.rules.products import Contraction, planned, summed
from tessel.tensor.table import is_whole, made, opened, whole_part
from tessel.tensor.tensor import Tensor
from tessel.transport import kept_in_job


@kept_in_job
def _in_blocks(
    x: Layout, weight: Layout, shape: Shape, groups: int, outputs_first: bool
) -> Contraction | None:
    """How a convolution is computed in blocks; None where each worker takes all of the weight.

    Args:
        x: how the input lies.
        weight: how the weight lies.
        shape: of the whole output.
        groups: of channels.
        outputs_first: whether the weight is (outputs, inputs, *kernel), or the inputs come first.
    """
    if x.partition != weight.partition:
        return None
    num_dims = len(weight.shape) - 2
    channel = len(shape) - num_dims - 1
    inputs = "Z"
    weight = weight.gathered(range(2, len(weight.shape)))  # windows need all of a kernel
    if groups > 1:
        size = weight.shape[0] // groups
        ends = [end for interval in weight.cuts[0].intervals for end in interval]
        if not outputs_first or any(end % size for end in ends):  # a block has parts of groups
            return None
        # Outputs read the inputs of their groups: those are no index of the weight.
        x, weight, inputs = x.gathered([channel]), weight.gathered([1]), "G"
    lengths = (*x.shape[: channel + 1], *shape[channel + 1 :])
    cuts = (*x.cuts[: channel + 1], *x.resized(lengths).cuts[channel + 1 :])
    lead, space = ascii_lowercase[:channel], ascii_lowercase[channel : channel + num_dims]
    kernel = ascii_lowercase[-num_dims:]
    plan = planned(
        x.partition,
        (lead + inputs + space, ("YZ" if outputs_first else "ZY") + kernel),
        lead + "Y" + space,
        (lengths, weight.shape),
        (Layout(x.partition, lengths, cuts, x.shared), weight),
    )
    splits = any(map(plan.inputs[1].is_split, range(2)))
    return plan if splits else None  # none of its axes is free: x keeps them for space and batch


def convolve_with(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: Tensor,
    shape: Shape,
    convolve_parts: Callable[..., tuple[torch.Tensor, Layout]],
    settings: Any,
    outputs_first: bool = True,
) -> Tensor:
    """What the rule of a convolution gives: with a weight in blocks where they lie, else with all.

    Args:
        weight: spread or plain.
        bias: the same.
        x: the input.
        shape: of the whole output.
        convolve_parts: computes this worker's part, or with a plan its term of a sum.
        settings: of the convolution.
        outputs_first: whether the weight is (outputs, inputs, *kernel), or the inputs come first.
    """
    part, layout = opened(x)
    plan = None
    if isinstance(weight, Tensor) and not is_whole(weight._layout):
        plan = _in_blocks(layout, weight._layout, shape, settings.groups, outputs_first)
    outputs = settings.channels.outputs
    if bias is not None and tuple(bias.shape) != (outputs,):  # of which a worker may see a part
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with "
            f"{outputs} elements, but got bias of size {list(bias.shape)} instead"
        )
    if plan is None:
        parameters = whole_part(weight, layout), whole_part(bias, layout)
        return made(*convolve_parts(part, layout, *parameters, settings))
    if bias is None or plan.terms is plan.result:
        return summed(convolve_parts(part, layout, weight, bias, settings, plan)[0], plan)
    # Added to all of a sum, the bias has a gradient that those who summed need not sum again.
    y = summed(convolve_parts(part, layout, weight, None, settings, plan)[0], plan)
    found = y + bias.reshape(-1, *[1] * settings.num_dims).to(y.dtype)
    assert isinstance(found, Tensor)
    return found
