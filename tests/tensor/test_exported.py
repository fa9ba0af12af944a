"""Graphs of `torch.export` call operators, some with other arguments than functions have.

Tests `tensor/aten.py`, `tensor/call.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tessel
from parity import close, values
from tessel.tensor.gathering import noted_gathers

Run = Callable[..., list[Any]]
SHAPE = (2, 3, 5, 4)
LABELS = torch.tensor([[1, 0], [2, 2], [0, 1], [1, 1], [2, 0]])


def losses(x: Tensor, y: Tensor) -> list[Tensor]:
    """By number, and by the default, which torch's own bindings of the operators do not have."""
    found = []
    for settings in ({}, {"reduction": "sum"}, {"reduction": "none"}):
        found += [
            F.l1_loss(x, y, **settings),
            F.mse_loss(x, y, **settings),
            F.smooth_l1_loss(x, y, beta=0.5, **settings),
            F.huber_loss(x, y, delta=0.5, **settings),
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **settings),
            F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].abs(), **settings),
            F.poisson_nll_loss(x, y.abs(), **settings),
            F.soft_margin_loss(x, y.sign(), **settings),
            F.hinge_embedding_loss(x, y.sign(), margin=0.5, **settings),
            F.margin_ranking_loss(x, y, x.sign(), margin=0.2, **settings),
            F.kl_div(x, y.softmax(1), **settings),
            F.cross_entropy(x.movedim(1, 2)[0], LABELS.T[0:1].expand(5, -1)[:, :4] % 3, **settings),
            F.cross_entropy(x, y.softmax(1), label_smoothing=0.1, **settings),
            F.nll_loss(x[0].T.log_softmax(1), (LABELS.repeat(1, 2) % 5).T[:, :3], **settings),
            F.triplet_margin_loss(x[0, 0], y[0, 0], x[0, 1], swap=True, **settings),
            F.cosine_embedding_loss(x[0, 0], y[0, 0], torch.ones(5), **settings),
        ]
    return found


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "attributes": lambda x, y: (x.mT, x.mH, x[0, 0].T, x[0, 1].H, (x + 1j * y).real),
    "products": lambda x, y: (
        torch.einsum("bchw,bdhw->bcd", x, y),
        torch.tensordot(x, y, ([1, 2], [1, 2])),
        torch.block_diag(x[0, 0], y[0, 0]),
        torch.linalg.multi_dot([x[0, 0], y[0, 0].T, x[0, 1]]),
        torch.cartesian_prod(x[0, 0, 0], y[0, 0, 0]),
    ),
    "transforms": lambda x, y: (
        torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho"), s=x.shape[-2:]),
        torch.fft.fftshift(torch.fft.fftn(x, dim=(1, 2)), 2).abs(),
    ),
    "linear algebra": lambda x, y: (
        torch.linalg.inv(x[:, :, :4]),
        torch.linalg.solve(x[:, :, :4], y[:, :, :4]),
        torch.linalg.norm(x, dim=(2, 3)),
        torch.linalg.vector_norm(x, 3, 1),
    ),
    "special": lambda x, y: (torch.special.expit(x), torch.special.xlog1py(x, y.abs())),
    "logic": lambda x, y: (((x > 0) & (y > 0)) | (x < y), (x > 0) ^ (y > 0)),
    "largest": lambda x, y: (
        F.adaptive_max_pool2d(x, 2),
        *F.adaptive_max_pool1d(x[0], 3, return_indices=True),
        *F.adaptive_max_pool3d(x, 2, return_indices=True),
    ),
    "losses": losses,
    "sampled": lambda x, y: (
        F.grid_sample(x, y[..., :2], align_corners=False),
        F.affine_grid(x[:, 0, :2, :3], [2, 1, 3, 3], align_corners=True),
        F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    ),
    "rows": lambda x, y: F.embedding(LABELS, x[0, 0], padding_idx=1),
    "short-time transforms": lambda x, y: (
        torch.view_as_real(torch.stft(x[0, 0], 4, 1, normalized=True, return_complex=True)),
        torch.istft(torch.complex(x, y)[0, :, :3], 4, 1),
    ),
    "one-hot": lambda x, y: F.one_hot((x > 0).long(), 2),
}


class Calls(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return tuple(tree_leaves(FUNCTIONS[self.name](x, y)))


def gradient(results: Sequence[Tensor], x: Tensor) -> Any:
    """Of the sum of all squares; None if nothing depends on x."""
    squares = [each.square().sum() for each in results if each.requires_grad]
    return torch.autograd.grad(sum(squares), x)[0] if squares else None


def check_graph(name: str) -> list[str]:
    """What a graph gathers where the function itself does not.

    Values and gradients are those of one process.
    """
    x, y = values(SHAPE, 1), values(SHAPE, 2)
    graph: Any = torch.export.export(Calls(name), (x, y)).module()
    leaf = x.clone().requires_grad_()
    expected = Calls(name)(leaf, y)
    derived = gradient(expected, leaf)
    found = []
    for dim in (0, 2):
        sizes = [1] * 4
        sizes[dim] = tessel.world().size
        P = tessel.world().create_cartesian_topology_partition(sizes)
        spread = [tessel.spread(each, P) for each in (x, y)]
        with noted_gathers() as known:
            Calls(name)(*spread)
        with noted_gathers() as gathers:
            got = graph(*spread)
        assert len(got) == len(expected)
        for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours.dtype == torch.bool:
                ours, theirs = ours.long(), theirs.long()
            close(f"{name} {number}", ours.full(), theirs, 1e-11)
        root = tessel.spread(x, P).requires_grad_()
        ours = gradient(graph(root, spread[1]), root)
        assert (ours is None) == (derived is None)
        if ours is not None and derived is not None:
            close(f"{name}: gradient", ours.full(), derived, 1e-10)
        if len(gathers) > len(known):
            found += [each.name for each in gathers]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_graphs_are_their_functions(run: Run, name: str) -> None:
    assert run(check_graph, name, nprocs=2, timeout=60) == [[], []]
