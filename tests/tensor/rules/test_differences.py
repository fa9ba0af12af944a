"""What differences, integrals and scans along a split dimension send, and what they raise.

Their values are those of `spread_others.py` and `spread_cases.py`. Tests
`tensor/rules/differences.py`, `tensor/rules/scans.py`, `tensor/rules/short_time.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tessel
from parity import values
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Function = Callable[[torch.Tensor], Any]

ROW = 6 * 8  # bytes of a row of the tensor below
WINDOW = torch.ones(4, dtype=torch.float64)
# the bytes that three workers receive together
RECEIVED: dict[str, tuple[Function, int]] = {
    "cumsum": (lambda x: x.cumsum(0), 3 * 2 * ROW),  # each the totals of both others
    "cumprod": (lambda x: x.cumprod(0), 3 * 2 * ROW),
    "diff": (lambda x: x.diff(dim=0), 2 * ROW),
    "gradient": (lambda x: torch.gradient(x, dim=0), 2 * 3 * ROW),
    "stft": (
        lambda x: torch.stft(x.mT, 4, 2, window=WINDOW, center=False, return_complex=True),
        2 * 2 * ROW,
    ),
}


def received() -> list[int]:
    P = tessel.world().create_cartesian_topology_partition([3, 1])
    x = tessel.spread(values((12, 6), 1), P)
    found = []
    for does, _ in RECEIVED.values():
        with count_traffic() as traffic:
            does(x)
        found.append(traffic.bytes_received)
    return found


def test_parts_send_what_is_next_to_others(run: Run) -> None:
    found = run(received, nprocs=3)
    totals = dict(zip(RECEIVED, map(sum, zip(*found, strict=True)), strict=True))
    assert totals == {name: expected for name, (_, expected) in RECEIVED.items()}


REFUSED: tuple[Function, ...] = (
    lambda x: torch.gradient(x[:, :2], dim=1, edge_order=2),
    lambda x: torch.gradient(x, dim=2),
    lambda x: torch.gradient(x, spacing=[1.0, 2.0, 3.0]),
    lambda x: torch.trapezoid(x, torch.arange(4.0)),
    lambda x: torch.trapezoid(x > 0),
    lambda x: torch.cumulative_trapezoid(x, dim=2),
    lambda x: x.cumsum(2),
    lambda x: torch.vander(x),
    lambda x: torch.vander(x[0], -1),
    lambda x: torch.nn.functional.pdist(x[0]),
    lambda x: torch.stft(x, 40, window=torch.ones(40).double(), return_complex=True),
    lambda x: torch.stft(x, 4, 0, window=WINDOW, return_complex=True),
    lambda x: torch.istft(x, 6, window=WINDOW),  # no complex numbers
    lambda x: torch.istft(torch.complex(x, x), 6, window=WINDOW),
    lambda x: torch.istft(torch.complex(x, x), 6, hop_length=9, window=torch.ones(6)),
    lambda x: torch.istft(torch.complex(x, x), 9, window=torch.ones(9)),  # frequencies are missing
    lambda x: torch.istft(torch.complex(x, x), 6, center=False, window=torch.zeros(6)),
    lambda x: torch.istft(torch.complex(x, x), 6, length=0, window=torch.ones(6)),
)


def refused() -> list[tuple[str, str]]:
    """What plain and spread tensors raise."""
    P = tessel.world()
    plain = values((4, 9), 1)
    x = tessel.spread(plain, P.create_cartesian_topology_partition([1, P.size]))
    found = []
    for does in REFUSED:
        kinds = []
        for each in (plain, x):
            try:
                does(each)
                kinds.append("nothing")
            except (RuntimeError, IndexError, ValueError) as error:
                kinds.append(type(error).__name__)
        found.append((kinds[0], kinds[1]))
    return found


def test_what_torch_refuses_raises_on_all_workers(run: Run) -> None:
    for found in run(refused, nprocs=3):
        for number, (theirs, ours) in enumerate(found):
            assert theirs != "nothing" and ours == theirs, (number, theirs, ours)


def numbers_without_dimensions() -> None:
    P = tessel.world()
    plain, half = values((4, 9), 1), torch.tensor(0.5)
    x = tessel.spread(plain, P.create_cartesian_topology_partition([1, P.size]))
    for does in (
        lambda x: torch.gradient(x, spacing=half, dim=1)[0],
        lambda x: torch.trapezoid(x, dx=half),
    ):
        assert torch.allclose(does(x).full(), does(plain), 1e-13, 1e-13)


def test_numbers_may_be_tensors_without_dimensions(run: Run) -> None:
    run(numbers_without_dimensions, nprocs=3)
