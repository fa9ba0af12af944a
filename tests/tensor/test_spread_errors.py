"""Bad values of losses, tables and attention: the same error on every worker, and no hang.

Tests `tensor/rules/losses.py`, `tensor/rules/embedding.py`, `tensor/rules/attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.nn.attention.flex_attention import flex_attention

import tessel
from parity import values
from tessel import Layout
from tessel.tensor import gathering
from tessel.tensor.gathering import GatherWarning

Run = Callable[..., list[Any]]


def split(x: Tensor, dim: int = 0) -> Any:
    axes = [0 if d == dim else None for d in range(x.dim())]
    return tessel.spread(x, Layout.split(tessel.world(), x.shape, axes))


def last_is(value: int) -> Any:
    """Classes, of which the last worker has one that is bad."""
    return split(torch.tensor([0, 1, 2, 0, 1, value]))


def reals(*shape: int) -> Any:
    return split(values(shape, 1))


def last_chance(value: float) -> Any:
    return split(torch.tensor([0.5] * 5 + [value], dtype=torch.float64))


def stepped(**kwargs: bool) -> None:
    x = reals(6).requires_grad_()
    x.square().sum().backward()
    torch.optim.AdamW([x], **kwargs).step()


def relu_in_place(x: Any) -> Any:
    return F.relu(x[1:], inplace=True)


def cumsum_in_place(x: Any) -> Any:
    return x[1:].cumsum_(1)


def double_weights() -> Any:
    """Torch casts the sequences alone; the last worker has none of the samples."""
    with torch.autocast("cpu", torch.bfloat16):
        return nn.GRU(2, 3).double()(split(values((4, 2, 2), 1).float(), 1))


def ctc(target: int = 1, times: int = 4, length: int = 1) -> Any:
    """Six samples, of which the last worker has one that is bad."""
    return F.ctc_loss(
        split(values((4, 6, 3), 1).log_softmax(2), 1),
        split(torch.tensor([[1]] * 5 + [[target]])),
        torch.tensor([4] * 5 + [times]),
        torch.tensor([1] * 5 + [length]),
    )


def last_is_nothing() -> Any:
    """Matrices of which the last one, on the last worker, is zero."""
    x = torch.eye(3, dtype=torch.float64).repeat(6, 1, 1)
    x[5] = 0
    return split(x)


def nested(layout: torch.layout) -> Any:
    """A plain nested tensor of two matrices."""
    return torch.nested.nested_tensor([values((2, 3), 1), values((5, 3), 2)], layout=layout)


BAD: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "ctc of classes": (lambda: ctc(target=3), RuntimeError, "3 classes"),
    "einsum of lengths": (
        lambda: torch.einsum("bc,c->b", reals(5, 14).mT.mT, values((7,), 1)),
        RuntimeError,
        "do not fit",
    ),
    "einsum of part": (
        lambda: torch.einsum("bc,c->b", split(values((5, 14), 1), 1), values((7,), 1)),
        RuntimeError,
        "do not fit",
    ),
    "einsum of letters": (
        lambda: torch.einsum("bc->bz", reals(6, 4)),
        RuntimeError,
        "no operand has the index z",
    ),
    "tensordot of part": (
        lambda: torch.tensordot(split(values((5, 14), 1), 1), values((7, 2), 1), 1),
        RuntimeError,
        "do not fit",
    ),
    "linear of part": (
        lambda: F.linear(split(values((5, 14), 1), 1), reals(4, 7)),
        RuntimeError,
        "do not fit",
    ),
    "autocast of double weights": (double_weights, RuntimeError, "same dtype"),
    # all of the samples are on the first worker
    "transposed convolution without outputs": (
        lambda: F.conv_transpose1d(split(values((1, 1, 1), 1)), values((1, 1, 2), 1), padding=1),
        RuntimeError,
        "Output size is too small",
    ),
    # refused by torch where there are values, which the last worker has not
    "product of truth values": (
        lambda: split(torch.ones(2, 4) > 0) @ (torch.ones(4, 3) > 0),
        NotImplementedError,
        "not implemented for 'Bool'",
    ),
    "linear of truth values": (
        lambda: F.linear(split(torch.ones(2, 4) > 0), torch.ones(3, 4) > 0),
        NotImplementedError,
        "not implemented for 'Bool'",
    ),
    "linear of split truth values": (
        lambda: F.linear(split(torch.ones(3, 4) > 0, 1), split(torch.ones(2, 4) > 0)),
        NotImplementedError,
        "not implemented for 'Bool'",
    ),
    "forward mode around reverse mode": (
        lambda: torch.func.jvp(
            torch.func.grad(lambda x: x.tanh().sum()), (reals(6, 4),), (reals(6, 4),)
        ),
        NotImplementedError,
        "put the jvp inside",
    ),
    "ctc of times": (lambda: ctc(times=5), RuntimeError, "input_lengths"),
    "ctc of lengths": (lambda: ctc(length=2), RuntimeError, "target_lengths"),
    "embedding_bag": (
        lambda: F.embedding_bag(split(torch.tensor([[0], [1], [7]])), values((5, 2), 1)),
        IndexError,
        "5 rows",
    ),
    "max_unpool": (
        lambda: F.max_unpool1d(reals(6, 1, 2), split(torch.tensor([[[0, 9]]] * 6)), 2),
        ValueError,
        "out of bounds",
    ),
    "bincount": (lambda: torch.bincount(last_is(-1)), RuntimeError, "non-negative"),
    # was: a gathered copy of them was changed, and the change was lost
    "statistics that are split": (
        lambda: F.batch_norm(
            reals(6, 3), split(torch.zeros(3)), split(torch.ones(3)), training=True
        ),
        NotImplementedError,
        "running statistics",
    ),
    "cross_entropy": (lambda: F.cross_entropy(reals(6, 3), last_is(3)), IndexError, "3 classes"),
    "cross_entropy of classes": (
        lambda: F.cross_entropy(split(values((6, 3), 1), 1), last_is(-1)),
        IndexError,
        "bounds",
    ),
    "nll": (lambda: F.nll_loss(reals(6, 3), last_is(7)), IndexError, "bounds"),
    "cross_entropy of other sizes": (
        lambda: F.cross_entropy(reals(6, 3), split(torch.zeros(5).long())),
        ValueError,
        "batch",
    ),
    "cross_entropy of a kind": (
        lambda: F.cross_entropy(reals(6, 3), last_is(2), reduction="median"),
        ValueError,
        "median",
    ),
    "mse of other sizes": (lambda: F.mse_loss(reals(6, 3), reals(6, 4)), RuntimeError, "size"),
    "bce": (
        lambda: F.binary_cross_entropy(last_chance(1.5), last_chance(1.0)),
        RuntimeError,
        "between 0 and 1",
    ),
    "bce of nan": (
        lambda: F.binary_cross_entropy(last_chance(float("nan")), last_chance(1.0)),
        RuntimeError,
        "between 0 and 1",
    ),
    "gaussian_nll": (
        lambda: F.gaussian_nll_loss(reals(6), reals(6), last_chance(-1.0)),
        ValueError,
        "negative",
    ),
    "multi_margin": (lambda: F.multi_margin_loss(reals(6, 3), last_is(5)), RuntimeError, "range"),
    "embedding": (lambda: F.embedding(last_is(9), torch.ones(4, 2)), IndexError, "4 rows"),
    "embedding with a norm": (
        lambda: F.embedding(last_is(1), torch.ones(4, 2), max_norm=1.0),
        NotImplementedError,
        "max_norm",
    ),
    "embedding by frequency": (
        lambda: F.embedding(last_is(1), torch.ones(4, 2), scale_grad_by_freq=True),
        NotImplementedError,
        "scale_grad_by_freq",
    ),
    "sparse embedding": (
        lambda: F.embedding(last_is(1), torch.ones(4, 2), sparse=True),
        NotImplementedError,
        "sparse",
    ),
    "an outer product with a sparse matrix": (
        lambda: torch.outer(reals(6), torch.eye(6).double().to_sparse()),
        RuntimeError,
        "Expected 1-D",
    ),
    "sparse matrix of booleans, of which some workers have none": (
        lambda: torch.eye(6)[:, :1].bool().to_sparse() @ split(torch.ones(1, 2).bool()),
        NotImplementedError,
        "Bool",
    ),
    "one_hot": (lambda: F.one_hot(last_is(5), 4), RuntimeError, "smaller"),
    "one_hot of negative": (lambda: F.one_hot(last_is(-1)), RuntimeError, "non-negative"),
    "a mask of another length beside indices": (
        lambda: reals(6, 4).__setitem__((torch.ones(5).bool(), torch.arange(5) % 4), 1.0),
        IndexError,
        "shape of the mask",
    ),
    "attention of other sizes": (
        lambda: F.scaled_dot_product_attention(
            reals(6, 2, 3, 4), reals(6, 2, 3, 5), reals(6, 2, 3, 5)
        ),
        RuntimeError,
        "",
    ),
    "attention with two masks": (
        lambda: F.scaled_dot_product_attention(
            reals(6, 2, 4), reals(6, 2, 4), reals(6, 2, 4), torch.ones(2, 2).bool(), 0.0, True
        ),
        RuntimeError,
        "is_causal",
    ),
    "heads of another width": (
        lambda: nn.MultiheadAttention(8, 2).double()(*[reals(6, 2, 4)] * 3),
        AssertionError,
        "8",
    ),
    # torch looks at the type of values alone, and the last two workers have none
    "softmax of whole numbers": (
        lambda: split(torch.ones(1, 4).long()).softmax(1),
        NotImplementedError,
        "Long",
    ),
    "softmax of whole numbers that are split": (
        lambda: split(torch.ones(6, 4).long()).softmax(0),
        NotImplementedError,
        "Long",
    ),
    "cumsum of truths": (
        lambda: split(torch.ones(1, 4)).cumsum(1, dtype=torch.bool),
        NotImplementedError,
        "Bool",
    ),
    "argmin of truths": (lambda: split(torch.ones(6, 4) > 0).argmin(0), RuntimeError, "bool"),
    "nanmean of whole numbers": (
        lambda: split(torch.ones(6, 4).long()).nanmean(0),
        RuntimeError,
        "floating point",
    ),
    # was: a gathered copy was changed, and what torch has a view of was not
    "relu in place of a copy": (
        lambda: relu_in_place(reals(6, 3)),
        NotImplementedError,
        "copy",
    ),
    "cumsum in place of a copy": (
        lambda: cumsum_in_place(reals(6, 3)),
        NotImplementedError,
        "copy",
    ),
    "cumsum in place of another type": (
        lambda: reals(6, 3).cumsum_(1, dtype=torch.float32),
        RuntimeError,
        "float32",
    ),
    # was: the compiler that it calls said that it cannot trace us
    "flex_attention": (
        lambda: flex_attention(torch.ones(6, 2, 4, 8), *[split(torch.ones(6, 2, 4, 8))] * 2),
        NotImplementedError,
        r"flex_attention .* use torch\.nn\.functional\.scaled_dot_product_attention",
    ),
    # was: on CPUs torch missed a GPU, and on GPUs counted the whole once for each worker
    "SyncBatchNorm outside of models": (
        lambda: torch.nn.SyncBatchNorm(4).double()(reals(6, 4, 3)),
        NotImplementedError,
        "distribute_module",
    ),
    # was: an internal error of torch, which said nothing of nested tensors
    "nested tensor of spread ones": (
        lambda: torch.nested.nested_tensor([reals(6, 3), reals(4, 3)]),
        NotImplementedError,
        "nested",
    ),
    "jagged tensor of spread ones": (
        lambda: torch.nested.as_nested_tensor([reals(6, 3), reals(4, 3)], layout=torch.jagged),
        NotImplementedError,
        "nested",
    ),
    "jagged tensor of spread values": (
        lambda: torch.nested.nested_tensor_from_jagged(reals(6, 3), torch.tensor([0, 2, 6])),
        NotImplementedError,
        "nested",
    ),
    "product with a nested tensor": (
        lambda: reals(2, 1, 3) * nested(torch.strided),
        NotImplementedError,
        "nested",
    ),
    "product of a nested tensor": (
        lambda: nested(torch.strided) @ reals(2, 3, 4),
        NotImplementedError,
        "nested",
    ),
    "product with a jagged tensor": (
        lambda: reals(2, 1, 3) * nested(torch.jagged),
        NotImplementedError,
        "nested",
    ),
    "product of a jagged tensor": (
        lambda: nested(torch.jagged) * reals(2, 1, 3),
        NotImplementedError,
        "nested",
    ),
    "gradient by way of a jagged tensor": (
        lambda: F.linear(nested(torch.jagged), reals(6, 3).requires_grad_())
        .values()
        .sum()
        .backward(),
        NotImplementedError,
        "nested",
    ),
    "a nested tensor that is to be spread": (
        lambda: tessel.spread(nested(torch.strided), tessel.world()),
        ValueError,
        "only dense tensors",
    ),
    "nested parts": (
        lambda: tessel.from_local(nested(torch.strided), tessel.world()),
        ValueError,
        "only dense tensors",
    ),
    "a nested input of a converted model": (
        lambda: tessel.nn.distribute_module(torch.nn.Linear(3, 3).double(), tessel.world())(
            nested(torch.strided)
        ),
        ValueError,
        "only dense tensors",
    ),
    # was: only the worker that has the matrix raised, and others waited for it
    "inverse of a singular matrix": (
        lambda: torch.linalg.inv(last_is_nothing()),
        RuntimeError,
        "Batch element 5",
    ),
    "cholesky of what is not definite": (
        lambda: torch.linalg.cholesky(-last_is_nothing()),
        RuntimeError,
        "Batch element 0",
    ),
    "solution with a singular matrix": (
        lambda: torch.linalg.solve(last_is_nothing(), reals(6, 3, 2)),
        RuntimeError,
        "Batch element 5",
    ),
    "singular values of what is not finite": (
        lambda: torch.linalg.svdvals(last_is_nothing() * float("nan")),
        RuntimeError,
        "non-finite",
    ),
    "lists of parts in collectives": (
        lambda: torch.distributed.reduce_scatter(torch.ones(6), [reals(6)] * 3),
        ValueError,
        "collective",
    ),
    "functional collectives": (
        lambda: torch.ops._c10d_functional.all_reduce(reals(6), "sum", "0"),
        ValueError,
        "all_reduce",
    ),
    "another shape of a leaf": (
        lambda: tessel.spread(values((6,), 1), tessel.world()).requires_grad_().unsqueeze_(0),
        RuntimeError,
        "leaf",
    ),
    "a fused optimizer": (lambda: stepped(fused=True), NotImplementedError, "fused=False"),
    "fft of no length": (lambda: torch.fft.fft(reals(6), n=0), RuntimeError, "Invalid"),
    "fft beyond": (lambda: torch.fft.fft(reals(6), dim=3), IndexError, "range"),
}


def check_bad(name: str) -> str:
    """What a worker is told; after that, all go on."""
    does, kind, part = BAD[name]
    with pytest.raises(kind, match=part) as caught:
        does()
    assert float(tessel.ones(6, where=tessel.world()).sum()) == 6
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_values_raise_on_every_worker(run: Run, name: str) -> None:
    said = run(check_bad, name, nprocs=3, timeout=30)
    assert len(set(said)) == 1


@pytest.mark.slow
def test_flex_attention_of_compilers() -> None:
    x = split(torch.ones(1, 2, 4, 8))
    with pytest.raises(Unsupported, match="instead of flex_attention use torch"):
        torch.compile(flex_attention, backend="eager")(x, x, x)


def check_weights_of_l1() -> None:
    """Torch does not hand the weights on; they count."""
    x, y, w = (values((6, 4), k) for k in (1, 2, 3))
    got = F.l1_loss(split(x), split(y, 1), weight=w)
    assert torch.allclose(got.full(), F.l1_loss(x, y, weight=w))
    got = F.l1_loss(split(x), y, None, None, "sum", w)
    assert torch.allclose(got.full(), F.l1_loss(x, y, None, None, "sum", w))
    assert torch.allclose(F.l1_loss(split(x), y).full(), F.l1_loss(x, y))


def check_backward_on_every_worker() -> None:
    """A loss is one number, which every worker derives: gradients of one process, once."""
    x, target = values((6, 4), 1), torch.tensor([0, 1, 2, 3, 0, 1])
    alone = x.clone().requires_grad_()
    F.cross_entropy(alone, target, label_smoothing=0.1).backward()
    root = x.clone().requires_grad_()
    loss = F.cross_entropy(split(root, 1), split(target), label_smoothing=0.1)
    loss.backward()
    assert torch.allclose(root.grad, alone.grad, 1e-12, 1e-12)
    assert isinstance(loss.item(), float)


def check_nothing_gathers() -> None:
    """Losses and transforms of tensors that are split move parts only."""
    with tessel.fallback("raise"):
        F.cross_entropy(split(values((6, 4), 1), 1), last_is(3))
        torch.fft.fftn(reals(6, 4, 5))
        F.scaled_dot_product_attention(*[split(values((2, 1, 9, 4), 1), 2)] * 3, is_causal=True)
    gathering._said.clear()  # each place warns once
    with pytest.warns(GatherWarning):
        torch.kl_div(reals(6, 4), reals(6, 4), 1)


def check_comparisons_with_what_is_no_number() -> None:
    """`x == "text"` and `x is not in [...]`, as models ask of what may be a tensor: no gather."""
    x, y = split(values((6, 4), 1)), values((6, 4), 1)
    with tessel.fallback("raise"):
        for other in ("text", None, object(), [1, 2]):
            assert (x == other) is (y == other) is False
            assert (x != other) is (y != other) is True
        for compare in (lambda z: z < "text", lambda z: z + "text", lambda z: torch.eq(z, "text")):
            for each in (x, y):
                with pytest.raises(TypeError):
                    compare(each)


@pytest.mark.parametrize(
    "check",
    [
        *(check_weights_of_l1, check_backward_on_every_worker, check_nothing_gathers),
        check_comparisons_with_what_is_no_number,
    ],
)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_losses(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=30)
