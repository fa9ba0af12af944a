"""Periodic padding: the laws of its operator, torch's values, and one exchange.

Tests `tensor/padding.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from tessel import Layout
from tessel.tensor.padding import PeriodicHalo
from tessel.testing import check_adjoint, check_gradient, count_traffic

Run = Callable[..., list[Any]]
WIDTHS = ((2, 3), (0, 1), (4, 0), (9, 9))


def check_padding(dim: int) -> None:
    """Rows of uneven lengths, one of them none, and columns that are whole on every worker."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    lengths = {1: [9], 2: [3, 6], 3: [4, 0, 5], 4: [1, 3, 3, 2]}[P.size]
    layout = Layout.from_lengths(P, [lengths, [9]])
    x = torch.arange(81.0, dtype=torch.float64).view(9, 9)
    for before, after in WIDTHS:
        halo = PeriodicHalo(layout, dim, before, after)
        halo.prepare()
        check_adjoint(halo)
        check_adjoint(halo, torch.complex128)
        check_gradient(halo)
        places = torch.arange(-before, 9 + after).remainder(9)
        mine = layout.local_part(x).clone()
        with count_traffic() as sent:
            y = halo.apply(mine)
        assert torch.equal(y, halo.codomain.local_part(x.index_select(dim, places)))
        # The first and the last worker read what they have not; nobody sends to one of them twice.
        assert sent.messages <= 2
        if dim == 1:
            assert sent.messages == sent.bytes_received == 0


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_the_laws_hold(run: Run, nprocs: int, dim: int) -> None:
    run(check_padding, dim, nprocs=nprocs)
