"""Products: sums over some indices of products of tensors, as in `torch.einsum`.

Each index of a product is split by the axes that split it in the largest operand that has it. An
operand without the index is copied along these axes; if an index is summed over, workers have terms
of the sum, which one movement adds. Matrix products, batched or not, inner and outer products and
linear maps all have this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros, used
from tessel.tensor.autocasting import is_shortened
from tessel.tensor.overlapped_linear import can_overlap, multiply_part, takes_steps
from tessel.tensor.rules.reductions import argument, without
from tessel.tensor.rules.sparse import is_sparse, sparse_product
from tessel.tensor.table import (
    ApartError,
    Arguments,
    Settings,
    as_autocast,
    check_dtypes,
    held_layouts,
    made,
    moved,
    outlines,
    parts,
    rule,
    unsupported,
)
from tessel.tensor.tensor import Tensor, move, open_part
from tessel.tensor.windowed import reading, shape_of
from tessel.transport import kept_in_job

Equation = tuple[tuple[str, ...], str]  # the letters of the operands, and those of the result


@dataclass(frozen=True)
class Contraction:
    """The layouts in which a product is computed.

    Attributes:
        inputs: the layout of each operand, copied along axes that split an index it lacks.
        terms: the layout of terms of the result, separate along axes that split a summed index.
        result: the layout of the result.
    """

    inputs: tuple[Layout, ...]
    terms: Layout
    result: Layout


@kept_in_job
def planned(
    partition: Partition,
    indices: tuple[str, ...],
    output: str,
    shapes: tuple[Shape, ...],
    layouts: tuple[Layout | None, ...],
) -> Contraction:
    """Plan a product.

    Args:
        partition: the workers.
        indices: a letter for each dimension of each operand.
        output: the letters of the result.
        shapes: the shapes of the operands; dimensions of length one are broadcast.
        layouts: the layouts of the operands, None for plain ones.
    """
    lengths: dict[str, int] = {}
    for letters, shape in zip(indices, shapes, strict=True):
        for letter, length in zip(letters, shape, strict=True):
            known = lengths.setdefault(letter, length)
            if known == 1:
                lengths[letter] = length
            elif length not in (1, known) and not partition.is_supposed:
                # for placeholder workers a plain operand may be a part
                raise RuntimeError(
                    f"operands of shapes {shapes} do not fit: an index is {known} long in one and "
                    f"{length} in another, as {','.join(indices)}->{output} names them"
                )
    for letter in output:
        if letter not in lengths:
            raise RuntimeError(f"{','.join(indices)}->{output}: no operand has the index {letter}")
    cuts = _cuts(indices, lengths, shapes, layouts)
    taken = {axis for cut in cuts.values() for axis in cut.axes}
    shared = tuple(axis for axis in range(partition.dim) if axis not in taken)

    def lies(letters: str, shape: Shape) -> Layout:
        found = tuple(
            cuts[letter]
            if letter in cuts and length == lengths[letter]
            else Cut((), ((0, length),))
            for letter, length in zip(letters, shape, strict=True)
        )
        return Layout(partition, shape, found, shared)

    inputs = tuple(lies(*each) for each in zip(indices, shapes, strict=True))
    terms = lies(output, tuple(lengths[letter] for letter in output))
    return Contraction(inputs, terms, terms.summed)


def _cuts(
    indices: tuple[str, ...],
    lengths: dict[str, int],
    shapes: tuple[Shape, ...],
    layouts: tuple[Layout | None, ...],
) -> dict[str, Cut]:
    """The cut of each index: as in the largest operand that splits it; an axis splits only one."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda k: -sizes[k])
    found: dict[str, Cut] = {}
    taken: set[int] = set()
    for k in order:
        layout = layouts[k]
        if layout is None:
            continue
        for letter, length, cut in zip(indices[k], shapes[k], layout.cuts, strict=True):
            if length != lengths[letter]:  # a single value, which is broadcast
                continue
            if len(cut.intervals) > 1 and letter not in found and not taken & {*cut.axes}:
                found[letter] = cut
                taken |= {*cut.axes}
    return found


def multiply(
    name: str,
    equation: Equation,
    operands: Sequence[torch.Tensor],
    compute: Any,
) -> Tensor:
    """A product of tensors, some of them spread, and plain ones whole on all workers.

    Args:
        name: the name of the function.
        equation: the letters of the operands, and those of the result.
        operands: the tensors.
        compute: returns the part of the result, given parts of the operands.
    """
    plan = contraction_of(name, equation, operands)
    held = [operand(*each) for each in zip(operands, plan.inputs, strict=True)]
    if any(0 in each.shape for each in held):
        _try_dtypes(compute, operands, held)
    return summed(compute(*held), plan)


def _try_dtypes(
    compute: Any, operands: Sequence[torch.Tensor], held: Sequence[torch.Tensor]
) -> None:
    """Raise what torch raises of dtypes where there are values, as only other workers may have.

    Args:
        compute: of parts.
        operands: the whole ones.
        held: their parts, of which some are empty.
    """
    shapes = [_shape(each) for each in operands]
    if any(0 in shape for shape in shapes):
        return
    # the least that is a product for torch: of single values it multiplies elements
    least = [[min(n, 2) for n in shape] for shape in shapes]
    with torch.no_grad():
        compute(*(part.new_ones(shape) for part, shape in zip(held, least, strict=True)))


def contraction_of(name: str, equation: Equation, operands: Sequence[torch.Tensor]) -> Contraction:
    """The plan of a product of these tensors; ValueError if they are on different workers."""
    layouts = tuple([each._layout if isinstance(each, Tensor) else None for each in operands])
    return _planned_together(name, equation, tuple(map(_shape, operands)), layouts)


@kept_in_job
def _planned_together(
    name: str,
    equation: Equation,
    shapes: tuple[Shape, ...],
    layouts: tuple[Layout | None, ...],
) -> Contraction:
    """A plan for operands, after checking that they are on the same workers; cached as one step."""
    partition = next(layout for layout in layouts if layout is not None).partition
    if any(layout is not None and layout.partition != partition for layout in layouts):
        raise ApartError(name, layouts)
    return planned(partition, *equation, shapes, layouts)


def _shape(x: torch.Tensor) -> Shape:
    """The shape of the whole, without reading it from a spread tensor, which takes microseconds."""
    return x._layout.shape if isinstance(x, Tensor) else tuple(x.shape)


def _is_split(x: torch.Tensor | None) -> bool:
    """Whether this is a spread tensor with different parts on workers."""
    return isinstance(x, Tensor) and not x._layout.is_whole


def summed(part: torch.Tensor, plan: Contraction) -> Tensor:
    """The result, given this worker's part of it, or its term of the sum."""
    if plan.terms is not plan.result:
        part = move(plan.terms, plan.result).apply(part)
    return made(part, plan.result)


def operand(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This worker's part of an operand; a plain one is whole on all workers."""
    if isinstance(value, Tensor):
        return reading(value._layout, layout).fetch(open_part(value))
    part = used(value, layout)
    box = layout.box()
    for dim, cut in enumerate(layout.cuts):
        if box is not None and len(cut.intervals) > 1:
            start, stop = box[dim]
            part = part.narrow(dim, start, stop - start)
    return part


@rule("einsum", plain=True)
def einsum(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The product given by the equation."""
    text, *operands = args
    if isinstance(text, torch.Tensor) or not isinstance(text, str):
        raise unsupported(name, "the equation must be a string", *held_layouts(args))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    given, output = _parsed(text, tuple(each.dim() for each in operands))
    indices = list(given)
    for k, letters in enumerate(indices):
        # A repeated index of an operand denotes a diagonal; plans have each index once.
        for letter in dict.fromkeys(letters):
            while letters.count(letter) > 1:
                first = letters.index(letter)
                second = letters.index(letter, first + 1)
                operands[k] = operands[k].diagonal(0, first, second)
                rest = letters[:first] + letters[first + 1 : second] + letters[second + 1 :]
                letters = rest + letter  # torch puts the diagonal last
        indices[k] = letters
    plain = f"{','.join(indices)}->{output}"
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return multiply(name, (tuple(indices), output), operands, partial(func, plain))
    dtype = _einsum_dtype(
        plain,
        tuple(map(_shape, operands)),
        tuple(each.dtype for each in operands),
        device,
        torch.get_autocast_dtype(device),
    )
    return multiply(
        name, (tuple(indices), output), operands, lambda *parts: func(plain, *parts).to(dtype)
    )


@kept_in_job
def _einsum_dtype(
    plain: str,
    shapes: tuple[Shape, ...],
    dtypes: tuple[torch.dtype, ...],
    device: str,
    autocast: torch.dtype,
) -> torch.dtype:
    """The dtype in which autocast computes the whole; for parts with one index it may differ.

    For dimensions of length one torch multiplies elementwise, which autocast does not cast.
    """
    with torch.no_grad(), torch.autocast(device, autocast):
        least = [tuple(min(n, 2) for n in shape) for shape in shapes]
        operands = [
            torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype in zip(least, dtypes, strict=True)
        ]
        return torch.einsum(plain, *operands).dtype


def _parsed(text: str, ndims: tuple[int, ...]) -> Equation:
    """The letters of the operands and of the result, with letters instead of dots."""
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [letter for letter in ascii_letters if letter not in text]
    most = max(
        (ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)),
        default=0,
    )
    dots = "".join(free[: max(0, most)])

    def without_dots(term: str, ndim: int) -> str:
        count = ndim - len(term.replace("...", ""))
        return term.replace("...", dots[len(dots) - count :] if count else "")

    indices = tuple(without_dots(term, n) for term, n in zip(terms, ndims, strict=True))
    if arrow:
        return indices, right.replace("...", dots)
    letters = "".join(term.replace("...", "") for term in terms)
    once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
    return indices, (dots if "..." in left else "") + "".join(once)


@rule(
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "outer", "ger"),
    "vdot",
    plain=True,
)
def matmul(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Matrix products of all kinds."""
    a, b = args[0], argument(args, kwargs, 1, "other")
    for key in ("mat2", "vec", "vec2", "tensor"):
        b = kwargs.get(key, b) if b is None else b
    if name == "__rmatmul__":
        a, b, func, name = b, a, torch.matmul, "matmul"
    if not isinstance(b, torch.Tensor):
        raise unsupported(name, "two tensors are needed", *held_layouts(args))
    if is_sparse(a) or is_sparse(b):
        return sparse_product(name, a, b)
    m, n = a.dim(), b.dim()
    if name in ("outer", "ger"):
        equation: Equation = ("i", "j"), "ij"
    elif not m or not n:
        raise unsupported(
            name, f"tensors of {m} and {n} dimensions are not supported", *held_layouts(a, b)
        )
    elif name == "inner":
        left, right = ascii_letters[: m - 1], ascii_letters[m - 1 : m + n - 2]
        equation = (left + "Z", right + "Z"), left + right
    else:
        # Dimensions before the last two are a batch, and are broadcast.
        batch = ascii_letters[: max(0, m - 2, n - 2)]
        left = "Z" if m == 1 else batch[len(batch) - (m - 2) :] + "XZ"
        right = "Z" if n == 1 else batch[len(batch) - (n - 2) :] + "ZY"
        equation = (left, right), batch + ("" if m == 1 else "X") + ("" if n == 1 else "Y")
    shape_of(getattr(torch, name.strip("_")), _shape(a), _shape(b))  # torch's own error
    return multiply(name, equation, (a, b), func)


@rule("tensordot", plain=True)
def tensordot(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    a, b, dims = args[0], args[1], argument(args, kwargs, 2, "dims", 2)
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    over = [[dim % each.dim() for dim in given] for each, given in zip((a, b), dims, strict=True)]
    left = list(ascii_letters[: a.dim()])
    right = list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(*over, strict=True):
        right[j] = left[i]
    output = [c for c in left if c not in right] + [c for c in right if c not in left]
    equation = ("".join(left), "".join(right)), "".join(output)
    return multiply(name, equation, (a, b), lambda x, y: torch.tensordot(x, y, dims=over))


@rule("addmm", "addmv", "baddbmm", "addbmm", "addr", plain=True)
def add_product(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """β · input + α · a @ b."""
    x, a, b = args[:3]
    product: dict[str, Any] = {
        "addmm": torch.mm,
        "addmv": torch.mv,
        "baddbmm": torch.bmm,
        "addr": torch.outer,
    }
    found = product[name](a, b) if name in product else torch.einsum("bij,bjk->ik", a, b)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if name == "addr":  # torch supports booleans here, and factors of them
        outlines(func, args, kwargs)
    if found.dtype == x.dtype == torch.bool:
        return (found & bool(alpha)) | (x & bool(beta))
    if not (found.is_floating_point() or found.is_complex()):
        outlines(func, args, kwargs)  # torch's own error, in some of these functions
        beta, alpha = int(beta), int(alpha)  # as in functions that do not raise
    found = found if alpha == 1 else alpha * found
    found = found if beta == 0 else found + (x if beta == 1 else beta * x)
    return as_autocast(found) if is_shortened(name, found.device.type) else found


def bias_of(bias: torch.Tensor, terms: Layout, dim: int) -> torch.Tensor:
    """The bias that a worker adds to its term of a sum, a value for each index of a dimension.

    It is only added on the first of the workers whose terms are summed.
    """
    own = operand(bias, terms.of_dim(dim))  # split like the dimension, used along all axes
    if _is_first_term(terms):
        return own
    return anchored_zeros(tuple(own.shape), own)  # not own * 0, which is NaN for inf


@kept_in_job
def _is_first_term(terms: Layout) -> bool:
    """Whether this worker is the first of those whose terms are summed."""
    index = terms.partition.index
    return index is None or not any(index[axis] for axis in terms.separate)


def linear_terms(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Contraction
) -> torch.Tensor:
    """This worker's part of y[…, o] = Σ w[o, i] x[…, i] + b[o], or its term of that sum.

    Args:
        x: the input, spread in any layout, or plain.
        weight: the weight, spread or plain.
        bias: the bias, likewise.
        plan: the layouts for the product.
    """
    own = operand(weight, plan.inputs[1])
    added = None if bias is None else bias_of(bias, plan.terms, -1)
    if isinstance(x, Tensor) and plan.terms is plan.result:
        use, part = reading(x._layout, plan.inputs[0]).use, open_part(x)
        if use is not None and can_overlap(part, own):
            return multiply_part(use, part, own, added)
    part = operand(x, plan.inputs[0])
    if plan.terms.is_outside:
        return anchored_zeros((0,), part, own, added)
    if 0 in part.shape or 0 in own.shape:  # torch's derivatives may be constants
        _try_dtypes(F.linear, (x, weight), (part, own))
        y = as_autocast(anchored_zeros(plan.terms.local_shape, part, own))
        return y if added is None else as_autocast(y + added)
    if own.dim() == 2 and takes_steps(part, own):
        return multiply_part(None, part, own, added)
    return F.linear(part, own, added)


@rule("bilinear", plain=True)
def bilinear(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """y[…, o] = Σ a[…, i] w[o, i, j] b[…, j] + bias[o]."""
    a, b = args[0], argument(args, kwargs, 1, "input2")
    weight, bias = argument(args, kwargs, 2, "weight"), argument(args, kwargs, 3, "bias")
    y = torch.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias


@rule("linear")
def linear(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """y[…, o] = Σ w[o, i] x[…, i] + b[o], with whole features on each worker if w is whole.

    Parts of the rows of a weight give parts of the outputs; parts of its columns are multiplied
    with those of the inputs, and the products are terms of a sum.
    """
    given = dict(zip(("weight", "bias"), args[1:], strict=False)) | kwargs
    x, weight, bias = args[0], given["weight"], given.get("bias")
    layout = x._layout
    if is_sparse(weight):
        y = sparse_product("mm", x, weight.mT)
        return y if bias is None else y + bias
    last = len(layout.shape) - 1
    if _is_split(weight) or _is_split(bias):
        of_weight = _shape(weight)
        if layout.shape[-1:] != of_weight[-1:]:  # a product would broadcast a length of one
            raise RuntimeError(
                f"`linear`: an input of shape {layout.shape} and a weight of shape {of_weight} do "
                f"not fit"
            )
        check_dtypes(x, weight, bias)
        batch, output = ascii_letters[:last], "Y" * (len(of_weight) - 1)
        plan = contraction_of(name, ((f"{batch}Z", f"{output}Z"), batch + output), (x, weight))
        if bias is None or (plan.terms is plan.result and _shape(bias) == of_weight[:1]):
            return summed(linear_terms(x, weight, bias, plan), plan)
        # If the bias is added to the final sum, its gradient is not summed over the terms.
        part = linear_terms(x, weight, None, plan)
        with torch._C.DisableTorchFunctionSubclass():
            is_alike = bias.dtype == part.dtype
        return summed(part, plan) + (bias if is_alike else bias.to(part.dtype))
    part = open_part(x)
    if layout.is_split(last):
        layout = layout.gathered((last,))
        part = moved(x, layout)
    weight, bias = used(parts(weight), layout), used(parts(bias), layout)
    if 0 in part.shape:
        _try_dtypes(F.linear, (x, weight), (part, weight))
    y = F.linear(part, weight, bias)
    if weight.dim() == 1:  # one output for each row, without a dimension of its own
        return made(y, without(layout, (last,), False)[1])
    return made(y, layout.reshaped_along((*layout.shape[:-1], len(weight)), (last,)))
