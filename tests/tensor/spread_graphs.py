"""Functions of nodes and edges for `test_spread.py`: rows at an index, read and written to.

Tests `tensor/rules/rows.py`, `tensor/rules/sparse.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values
from spread_cases import Case, Shape, quiet

NODES, EDGES, FEATURES = 7, 9, 3
HEADS = torch.tensor([5, 0, 2, 6, 6, 1, 0, 0, 3])  # a node that nobody names, and several edges
TAILS = torch.tensor([1, 4, 6, 0, 2, 2, 2, 5, 6])
SHAPES = ((NODES, FEATURES), (EDGES, FEATURES), (EDGES,))


def graph(shape: Shape, number: int) -> Tensor:
    """Nodes, values of edges, and an index of nodes."""
    if len(shape) == 1:
        return (values(shape, 3 + number) * 100).long().abs() % NODES
    return values(shape, 3 + number)


def ties(shape: Shape, number: int) -> Tensor:
    """The same with many equal values."""
    made = graph(shape, number)
    return (made * 2).round() if made.is_floating_point() else made


def expanded(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, 1).expand_as(like)


def convolution(x: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
    """Sums of messages, scaled by degrees, as graph convolutions have them."""
    ones = x.new_ones((len(heads), 1))
    degree = x.new_zeros((len(x), 1)).scatter_add_(0, heads.view(-1, 1), ones)
    scale = (degree + 1).rsqrt()
    messages = (x * scale).index_select(0, tails).sin()
    sums = x.new_zeros((len(x), x.shape[1]))
    return sums.scatter_add_(0, expanded(heads, messages), messages) * scale


def attention(x: Tensor, heads: Tensor, tails: Tensor) -> Tensor:
    """Messages weighed by a softmax over the edges of a node."""
    scores = (x[heads] * x[tails]).sum(1)
    most = scores.new_zeros(len(x)).scatter_reduce_(
        0, heads, scores.detach(), "amax", include_self=False
    )
    weights = (scores - most.index_select(0, heads)).exp()
    sums = weights.new_zeros(len(x)).scatter_add_(0, heads, weights)
    weights = weights / (sums.index_select(0, heads) + 1e-16)
    return torch.zeros_like(x).index_add(0, heads, x[tails] * weights[:, None])


def neighbours(reduce: str, **settings: Any) -> Any:
    return lambda x, y, i: x.scatter_reduce(0, expanded(i, y), y, reduce, **settings)


GRAPHS = {
    "graph convolution": Case(lambda x: convolution(x, HEADS, TAILS), ((NODES, FEATURES),)),
    "graph convolution of spread edges": Case(
        lambda x, i: convolution(x, i, i.flip(0)),
        ((NODES, FEATURES), (EDGES,)),
        make=graph,
    ),
    "graph attention": Case(lambda x: attention(x, HEADS, TAILS), ((NODES, FEATURES),)),
    "graph attention of spread edges": Case(
        lambda x, i: attention(x, i, i.flip(0)), ((NODES, FEATURES), (EDGES,)), make=graph
    ),
    "rows at an index": Case(
        lambda x, y, i: (
            *(x[i], x.index_select(0, i), x.gather(0, expanded(i, y)), x[-1 - i], x[i[:0]]),
            *(x[i.view(3, 3)], x[HEADS.view(3, 3)], x[HEADS[:1]], x.T[:, i], x[HEADS[:, None]]),
            *(x[i, 1], x[HEADS, HEADS % 3], x[:, None, :, None][i, 0, i % 3]),
        ),
        SHAPES,
        make=graph,
    ),
    "rows that are added": Case(
        lambda x, y, i: (
            *(x.index_add(0, i, y), x.index_add(0, HEADS, y, alpha=2)),
            x.scatter_add(0, expanded(i, y), y),
            x.scatter_reduce(0, expanded(HEADS, y), y, "sum", include_self=False),
        ),
        SHAPES,
        make=graph,
    ),
    "an index that is split beside its rows": Case(
        lambda x, i: x.gather(0, i[:, :, None].expand(4, 4, 2).reshape(4, 8)),
        ((7, 8), (4, 4)),
        make=lambda shape, number: graph(shape, number).long().abs() if number else graph(shape, 0),
    ),
    "rows that are added to a plain tensor": Case(
        lambda y, i: (
            torch.zeros(NODES, FEATURES).double().index_add(0, i, y),
            torch.zeros(NODES, FEATURES).double().scatter_add_(0, expanded(HEADS, y), y),
        ),
        ((EDGES, FEATURES), (EDGES,)),
        make=graph,
    ),
    **{
        f"scatter_reduce of rows by {reduce}": Case(neighbours(reduce), SHAPES, make=graph)
        for reduce in ("mean", "prod", "amax", "amin")
    },
    **{
        f"scatter_reduce of rows by {reduce} without the first": Case(
            neighbours(reduce, include_self=False), SHAPES, make=ties
        )
        for reduce in ("mean", "amax")
    },
    "rows that are replaced": Case(
        lambda x, y: (
            *(x.index_copy(0, HEADS[:5] % 5, y[:5]), x.index_fill(0, HEADS[:4] - 7, 2.5)),
            *(x.scatter(0, expanded(HEADS, y), 1.5), x.index_fill(0, HEADS[:2], y[0, 0].detach())),
        ),
        ((NODES, FEATURES), (EDGES, FEATURES)),
    ),
    "rows that are replaced at a spread index": Case(
        lambda x, y, i: (
            x.index_copy(0, torch.cat([i, i])[:EDGES], y),
            x.index_fill(0, i, 2.5),
            quiet(x.detach().index_reduce)(0, i, y.detach(), "mean"),
        ),
        SHAPES,
        make=graph,
    ),
    "rows in place": Case(
        lambda x, y, i: [
            (z := x * 2).index_add_(0, i, y).scatter_reduce_(0, expanded(HEADS, y), y, "amax"),
            z,
        ],
        SHAPES,
        make=graph,
    ),
    "sums over graphs": Case(
        lambda x: x.new_zeros((2, FEATURES)).scatter_add_(
            0, expanded(torch.arange(NODES) // 4, x), x
        ),
        ((NODES, FEATURES),),
    ),
    "new tensors": Case(
        lambda x: (
            *(x.new_zeros(x.shape) + x, x.new_ones(9, 2), x.new_full((9, 4), 2.5), x.new_ones(3)),
            *(x.new_zeros(size=(2, 2)), x.new_empty((1, 1)).fill_(3), x.new_tensor([1.0])),
        ),
        ((NODES, FEATURES),),
    ),
}


def adjacency(rows: int, columns: int, kind: str = "to_sparse") -> Tensor:
    """A sparse matrix with an empty row and an empty column, the same on all workers."""
    dense = values((rows, columns), 5) * (values((rows, columns), 6) > 0.3)
    dense[2], dense[:, 1] = 0, 0
    found: Tensor = getattr(dense, kind)()
    return found


def products(x: Tensor, kind: str) -> tuple[Tensor, ...]:
    square, wide = adjacency(NODES, NODES, kind), adjacency(4, NODES, kind)
    added = torch.sparse.addmm(x, square, x, beta=0.5, alpha=2.0)
    return square @ x, torch.sparse.mm(wide, x), torch.spmm(square, x), added, x.mT @ square


def autocast_product(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return adjacency(4, NODES).float() @ x.float()


SPARSE = {
    f"sparse products {kind}": Case(lambda x, kind=kind: products(x, kind), ((NODES, FEATURES),))
    for kind in ("to_sparse", "to_sparse_csr")
} | {
    "sparse products of vectors": Case(
        lambda x: (
            adjacency(4, NODES) @ x,
            adjacency(NODES, NODES).mv(x),
            x @ adjacency(NODES, 5, "to_sparse_csc"),
            torch.mv(torch.zeros(3, NODES).double().to_sparse(), x),
        ),
        ((NODES,),),
    ),
    "sparse weights": Case(
        lambda x: F.linear(x, adjacency(4, FEATURES)),
        ((NODES, FEATURES),),
    ),
    "sparse products in half precision": Case(
        autocast_product, ((NODES, FEATURES),), derives=False
    ),
    "other reductions by sparse matrices": Case(
        lambda x: tuple(
            torch.sparse.mm(adjacency(4, NODES, "to_sparse_csr"), x.detach(), reduction)
            for reduction in ("sum", "mean", "amax")
        ),
        ((NODES, FEATURES),),
        derives=False,
        may_gather=True,
    ),
    "gradients of sparse matrices": Case(
        lambda x, w: torch.sparse.mm((w * (w > 0)).to_sparse(), x),
        ((NODES, FEATURES), (4, NODES)),
        plain_others=True,
        may_gather=True,
    ),
}

FAMILIES = {"graphs": GRAPHS, "sparse": SPARSE}
