"""The Fourier neural operator against the same network, written by hand, in one process.

Tests `models/fno.py`, `models/spectral.py`, `models/weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

import tessel
from parity import close, values, vjps
from tessel import Layout, Partition
from tessel.models import FNO
from tessel.nn import DistributedMSELoss
from tessel.operators.local_transform import chosen_library
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
State = dict[str, Tensor]

TOLERANCE = 1e-10  # of sums over all points
COMPLEX = 16  # bytes of a complex128


@dataclass(frozen=True)
class Case:
    """A grid of workers, the points of space, the modes, and the batch."""

    grid: tuple[int, ...]
    space: tuple[int, ...]
    modes: tuple[int, ...]
    batch: int = 3
    width: int = 4
    transfers: int | None = None  # of a block
    lengths: tuple[tuple[int, ...], ...] | None = None

    @property
    def workers(self) -> int:
        return prod(self.grid)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, 2, *self.space)

    def partition(self) -> Partition:
        return tessel.world().create_cartesian_topology_partition(self.grid)

    def layout(self) -> Layout:
        if self.lengths is not None:
            return Layout.from_lengths(self.partition(), self.lengths)
        return Layout.balanced(self.partition(), self.shape)

    def model(self, blocks: int = 2) -> FNO:
        torch.manual_seed(1000 + tessel.transport.this_worker())  # another on each worker
        return FNO(self.partition(), 2, 3, self.width, self.modes, blocks, dtype=torch.float64)


CASES = [
    Case((1, 1, 1), (11,), (4,), transfers=0),
    Case((1, 1, 1, 1), (10, 9), (3, 2), transfers=0),
    Case((1, 1, 1, 1, 1), (6, 5, 8), (2, 2, 3), transfers=0),
    Case((1, 1, 1, 1, 1, 1), (4, 4, 5, 6), (1, 2, 2, 2), transfers=0),
    Case((1, 1, 2), (16,), (5,), transfers=4),
    Case((2, 1, 1), (16,), (5,), transfers=0),
    Case((1, 1, 2, 1), (10, 9), (3, 3), transfers=2),
    Case((1, 1, 1, 2), (10, 9), (3, 3), transfers=2),
    Case((1, 1, 1, 2), (8, 8), (4, 4), transfers=2),  # all modes that can be kept
    Case((1, 1, 1, 2, 1), (6, 7, 8), (2, 2, 3), transfers=2),
    Case((1, 1, 1, 1, 2, 1), (4, 4, 5, 6), (1, 2, 2, 2), transfers=2),
    Case((3, 1, 1), (12,), (3,), transfers=0),
    Case((1, 1, 3), (13,), (3,), transfers=4),
    Case((1, 1, 3, 1), (11, 10), (3, 4), transfers=2),
    Case((1, 1, 1, 3), (11, 10), (3, 4), transfers=2),
    Case((1, 1, 1, 1, 3), (6, 4, 7), (2, 2, 3), transfers=2),
    Case((1, 1, 4), (16,), (5,), transfers=4),
    Case((2, 1, 2), (16,), (5,), transfers=4),
    Case((4, 1, 1, 1), (8, 8), (3, 3), batch=5, transfers=0),
    Case((4, 1, 1, 1), (8, 8), (3, 3), batch=2, transfers=0),  # two workers have nothing
    Case((1, 1, 4, 1), (10, 9), (3, 4), transfers=2),
    Case((1, 1, 1, 4), (10, 9), (3, 4), transfers=2),
    Case((1, 1, 2, 2), (10, 9), (3, 4)),
    Case((2, 1, 2, 1), (10, 9), (3, 4), transfers=2),
    Case((2, 1, 1, 2), (10, 9), (3, 4), transfers=2),
    Case((1, 1, 4, 1), (10, 9), (2, 2), batch=1),  # fewer modes than workers
    Case((1, 1, 4, 1), (2, 2), (1, 1), width=2),  # and fewer points and channels
    Case((1, 1, 2, 2, 1), (6, 7, 8), (2, 2, 4), transfers=2),
    Case((1, 1, 1, 2, 2), (6, 7, 8), (2, 2, 4), transfers=2),
    Case((2, 1, 1, 2, 1), (6, 7, 8), (2, 2, 4), transfers=2),
    Case((1, 1, 4, 1, 1), (6, 7, 8), (2, 2, 4), transfers=2),
    Case((1, 1, 4, 1, 1, 1), (4, 4, 5, 6), (1, 2, 2, 2), transfers=2),
    Case((1, 1, 1, 2, 1, 2), (4, 4, 5, 6), (1, 2, 2, 2), transfers=2),
    Case((1, 1, 2, 1, 2, 1), (4, 4, 5, 6), (2, 2, 2, 3), transfers=2),
    Case((2, 1, 2, 1), (7, 6), (2, 2), lengths=((1, 2), (2,), (2, 5), (6,))),
]


def plain(state: State, x: Tensor, modes: tuple[int, ...]) -> Tensor:
    """The network with functions of torch alone."""
    dims = tuple(range(2, x.dim()))
    space = x.shape[2:]
    kept = [torch.tensor([*range(k), *range(n - k, n)]) for k, n in zip(modes, space, strict=True)]
    kept[-1] = torch.arange(modes[-1])
    where = (slice(None), slice(None), *torch.meshgrid(*kept, indexing="ij"))

    def mix(name: str, v: Tensor) -> Tensor:
        mixed = torch.einsum("oi,bi...->bo...", state[f"{name}.weight"], v)
        return mixed + state[f"{name}.bias"].reshape(-1, *[1] * len(space))

    v = mix("lift", x)
    blocks = sum(name.endswith("spectral.weight") for name in state)
    for number in range(blocks):
        weights = torch.view_as_complex(state[f"blocks.{number}.spectral.weight"])
        spectrum = torch.fft.rfftn(v, dim=dims)
        low = torch.einsum("oi...,bi...->bo...", weights, spectrum[where])
        padded = torch.zeros_like(spectrum)
        padded[where] = low
        v = torch.fft.irfftn(padded, s=space, dim=dims) + mix(f"blocks.{number}.mix", v)
        v = gelu(v) if number < blocks - 1 else v
    return mix("projection.outer", gelu(mix("projection.inner", v)))


def leaves(state: State) -> State:
    return {name: value.clone().requires_grad_() for name, value in state.items()}


def part_of(model: FNO, name: str, whole: Tensor) -> Tensor:
    """What this worker has of a parameter, or of its gradient."""
    module = model.get_submodule(name.rpartition(".")[0])
    return module.layout.local_part(whole) if "spectral" in name else whole


def check(case: Case, second: bool) -> None:
    """Output and gradients, if asked for also of second order, against one process."""
    model, layout = case.model(), case.layout()
    state = leaves(model.state_dict())
    if case.transfers is not None:
        assert model.spectral_operator(case.space).plan.num_transfers == case.transfers
    x = values(case.shape, 1)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    expected, got = plain(state, whole, case.modes), model(part)
    lengths = [
        [b - a for a, b in cut.intervals] for cut in replace(case, lengths=None).layout().cuts
    ]
    lengths[:2] = [b - a for a, b in layout.cuts[0].intervals], [3]  # the batch stays as it is
    out = Layout.from_lengths(layout.partition, lengths)
    close("output", got, out.local_part(expected), TOLERANCE)
    weights = values(expected.shape, 2)
    names = [name for name, _ in model.named_parameters()]
    assert names == list(state)
    for order in (1, 2) if second else (1,):
        expected_slopes = vjps(expected, weights, [whole, *state.values()], order)
        got_slopes = vjps(got, out.local_part(weights), [part, *model.parameters()], order)
        close(
            "gradient of the input", got_slopes[0], layout.local_part(expected_slopes[0]), TOLERANCE
        )
        for name, a, b in zip(names, got_slopes[1:], expected_slopes[1:], strict=True):
            close(f"gradient of {name}, order {order}", a, part_of(model, name, b), TOLERANCE)
        expected, got, weights, out = expected_slopes[0], got_slopes[0], x, layout


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(run: Run, case: Case) -> None:
    run(check, case, False, nprocs=case.workers)


@pytest.mark.parametrize("case", [CASES[2], CASES[7], CASES[22], CASES[24], CASES[27]], ids=str)
def test_second_order(run: Run, case: Case) -> None:
    run(check, case, True, nprocs=case.workers)


def check_steps(case: Case, name: str) -> None:
    model, layout = case.model(), case.layout()
    state = leaves(model.state_dict())
    loss = DistributedMSELoss(case.partition())
    make = getattr(torch.optim, name)
    optimizers = [make(each, lr=1e-2) for each in (model.parameters(), state.values())]
    out = layout.resized((case.batch, 3, *case.space))
    losses = []
    for step in range(5):
        x, y = values(case.shape, step), values(out.shape, 10 + step)
        for each in optimizers:
            each.zero_grad()
        spread = loss(model(layout.local_part(x)), out.local_part(y))
        alone = (plain(state, x, case.modes) - y).square().mean()
        losses.append(alone.item())
        close("loss", spread, alone, TOLERANCE)
        for each in (spread, alone):
            each.backward()
        for each in optimizers:
            each.step()
    assert losses[-1] != losses[0]
    for name, value in model.state_dict().items():
        close(name, value, state[name], 1e-9)  # Adam divides by what may be as small as rounding


@pytest.mark.parametrize("case", [CASES[1], CASES[13], CASES[20], CASES[21], CASES[24]], ids=str)
def test_five_steps(run: Run, case: Case) -> None:
    run(check_steps, case, "Adam", nprocs=case.workers)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_other_optimizers(run: Run, name: str) -> None:
    run(check_steps, CASES[20], name, nprocs=4)


def check_clipping(case: Case) -> None:
    model, layout = case.model(), case.layout()
    state = leaves(model.state_dict())
    x = values(case.shape, 1)
    for most in (1e9, 0.5):
        model.zero_grad()
        model(layout.local_part(x)).square().sum().backward()
        for each in state.values():
            each.grad = None
        plain(state, x, case.modes).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(state.values(), most)
        assert expected > 0.5
        close("norm", model.clip_grad_norm_(most), expected, TOLERANCE)
        for name, each in model.named_parameters():
            close(name, each.grad, part_of(model, name, state[name].grad), TOLERANCE)


@pytest.mark.parametrize("case", [CASES[1], CASES[13], CASES[20], CASES[23], CASES[18]], ids=str)
def test_gradients_are_clipped_by_the_norm_of_all(run: Run, case: Case) -> None:
    run(check_clipping, case, nprocs=case.workers)


def outcome(case: Case, state: State | None) -> tuple[State, Tensor]:
    """The state of a model and its whole result; all workers must have the same."""
    model = case.model()
    if state is not None:
        assert any(not torch.equal(state[k], v) for k, v in model.state_dict().items())
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    layout = case.layout()
    with torch.no_grad():
        y = model(layout.local_part(values(case.shape, 1)))
    out = layout.resized((case.batch, 3, *case.space))
    whole = tessel.Move(out, Layout.whole(layout.partition, out.shape)).apply(y)
    return {name: value.clone() for name, value in model.state_dict().items()}, whole


GRIDS = [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 4), (1, 1, 4, 1), (2, 1, 1, 2), (1, 1, 3, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_states_move_between_numbers_of_workers(run: Run, grid: tuple[int, ...]) -> None:
    """From these workers to all the others, and the same comes out."""
    cases = [Case(each, (10, 9), (3, 4)) for each in (grid, *GRIDS)]
    first, others = cases[0], cases[1:]
    results = run(outcome, replace(first, batch=2), None, nprocs=first.workers)
    state = {name: value + 0.1 for name, value in results[0][0].items()}
    (_, expected), *_ = run(outcome, first, state, nprocs=first.workers)
    for case in others:
        for loaded, result in run(outcome, case, state, nprocs=case.workers):
            assert list(loaded) == list(state)
            assert all(torch.equal(loaded[name], state[name]) for name in state)
            close("result", result, expected, TOLERANCE)


def same_seed(grid: tuple[int, ...]) -> State:
    torch.manual_seed(3)
    P_x = tessel.world().create_cartesian_topology_partition(grid)
    return {k: v.clone() for k, v in FNO(P_x, 1, 1, 5, 3, 2).state_dict().items()}


def test_one_seed_gives_one_model(run: Run) -> None:
    """Whatever the number of workers."""
    expected, *_ = run(same_seed, (1, 1, 1, 1), nprocs=1)
    for grid in GRIDS[1:]:
        for state in run(same_seed, grid, nprocs=prod(grid)):
            assert all(torch.equal(state[name], value) for name, value in expected.items())


def num_spectral(grid: tuple[int, ...], modes: tuple[int, ...]) -> tuple[int, int]:
    """The spectral weights that this worker stores, and all others."""
    P_x = tessel.world().create_cartesian_topology_partition(grid)
    model = FNO(P_x, 1, 1, 6, modes, 3)
    counts = {name: value.numel() for name, value in model.named_parameters()}
    spectral = sum(n for name, n in counts.items() if "spectral" in name)
    return spectral, sum(counts.values()) - spectral


@pytest.mark.parametrize(
    "grid",
    [(1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 4, 1), (1, 1, 1, 4), (1, 1, 2, 2), (1, 1, 4), (2, 1, 2, 1)],
    ids=str,
)
def test_weights_are_split(run: Run, grid: tuple[int, ...]) -> None:
    modes = (12,) * (len(grid) - 2)
    (whole, others), *_ = run(num_spectral, (1,) * len(grid), modes, nprocs=1)
    assert whole == 3 * 6 * 6 * (24 * 12 if len(modes) == 2 else 12) * 2
    workers, copies = prod(grid), grid[0]
    for spectral, rest in run(num_spectral, grid, modes, nprocs=workers):
        assert (spectral, rest) == (whole * copies // workers, others)


def traffic(case: Case, blocks: int) -> tuple[int, int, int]:
    """Bytes and messages that this worker sends in a forward pass, and how often it asks."""
    model, layout = case.model(blocks), case.layout()
    x = layout.local_part(values(case.shape, 1))
    with torch.no_grad():
        model(x)
        with count_traffic() as traffic:
            model(x)
    return traffic.bytes_sent, traffic.messages, traffic.agreements


@pytest.mark.parametrize("blocks", [1, 3])
def test_only_kept_modes_travel_from_slabs(run: Run, blocks: int) -> None:
    """Split along x: of each row, the modes along y; each worker keeps a fourth of them."""
    case = Case((1, 1, 4, 1), (12, 20), (3, 8), batch=2)
    kept = (
        case.width * case.batch * (12 // 4) * 8
    )  # numbers that a worker has after the restriction
    expected = blocks * 2 * (kept - kept // 4) * COMPLEX
    for result in run(traffic, case, blocks, nprocs=4):
        assert result == (expected, blocks * 2 * 3, 1)


def test_only_kept_modes_travel_from_a_split_last_dimension(run: Run) -> None:
    """Split along y: of each column, the modes along x, of both signs."""
    case = Case((1, 1, 1, 4), (20, 12), (4, 3), batch=2)
    kept = case.width * case.batch * (2 * 4) * (12 // 4)
    for result in run(traffic, case, 1, nprocs=4):
        assert result == (2 * (kept - kept // 4) * COMPLEX, 2 * 3, 1)


def test_only_kept_modes_travel_from_pencils(run: Run) -> None:
    """Split along x and y: the modes along z."""
    case = Case((1, 1, 2, 2, 1), (6, 8, 16), (2, 3, 4), batch=2)
    kept = case.width * case.batch * (6 // 2) * (8 // 2) * 4
    for result in run(traffic, case, 1, nprocs=4):
        assert result == (2 * (kept - kept // 4) * COMPLEX, 2 * 3, 1)


def test_nothing_travels_if_the_batch_is_split(run: Run) -> None:
    case = Case((4, 1, 1, 1), (8, 8), (3, 3), batch=4)
    for result in run(traffic, case, 3, nprocs=4):
        assert result == (0, 0, 1)


def gradients_on_another_grid_of_points() -> None:
    """One model on tensors of several sizes: its weights stay where they are."""
    case = Case((1, 1, 4, 1), (9, 12), (2, 4))
    model = case.model()
    state = leaves(model.state_dict())
    for space in ((9, 12), (5, 8), (16, 9)):
        x = values((2, 2, *space), 1)
        layout = Layout.balanced(case.partition(), x.shape)
        y, expected = model(layout.local_part(x)), plain(state, x, case.modes)
        out = layout.resized(expected.shape)
        close("output", y, out.local_part(expected), TOLERANCE)
        y.square().sum().backward()
        expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        close(name, parameter.grad, part_of(model, name, state[name].grad), TOLERANCE)


def test_any_number_of_points(run: Run) -> None:
    run(gradients_on_another_grid_of_points, nprocs=4)


def on_some_workers() -> tuple[int, ...]:
    """A model on two of three workers, the first of which is not among them."""
    row = tessel.world().create_partition_inclusive([2, 1])
    P_x = row.create_cartesian_topology_partition((1, 1, 2, 1))
    model = FNO(P_x, 2, 3, 4, 2, 2, dtype=torch.float64)
    layout = Layout.balanced(P_x, (2, 2, 6, 5))
    x = values(layout.shape, 1)
    y = model(
        layout.local_part(x) if P_x.active else tessel.zero_volume_tensor(dtype=torch.float64)
    )
    state = model.state_dict()
    if P_x.active:
        expected = plain(state, x, (2, 2))
        close("output", y, layout.resized(expected.shape).local_part(expected), TOLERANCE)
    model.load_state_dict(state)
    return tuple(model.blocks[0].spectral.weight.shape)


def test_on_some_workers(run: Run) -> None:
    outside, *inside = run(on_some_workers, nprocs=3)
    assert outside == (0,)
    assert inside == [(4, 4, 4, 1, 2)] * 2


def in_single_precision() -> None:
    case = Case((1, 1, 2, 1), (8, 8), (3, 3))
    model, layout = case.model(), case.layout()
    x = layout.local_part(values(case.shape, 1))
    y = model(x)
    single = model.float()(x.float())
    assert single.dtype == torch.float32
    close("output", single.double(), y, 1e-5)  # of single precision
    close("output", model.double()(x), y, 1e-5)


def test_casts(run: Run) -> None:
    run(in_single_precision, nprocs=2)


def attempt(call: str) -> str:
    """The text of a ValueError; the workers can go on afterwards."""
    me, P = tessel.transport.this_worker(), tessel.world().create_cartesian_topology_partition
    case = Case((1, 1, 2, 1), (8, 8), (3, 3))
    good = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    model = case.model()
    calls: dict[str, Callable[[], object]] = {
        "axes": lambda: FNO(P((2,)), 1, 1, 4, 2),
        "too many axes": lambda: FNO(P((1, 1, 2, 1, 1, 1, 1)), 1, 1, 4, 2),
        "channels split": lambda: FNO(P((1, 2, 1)), 1, 1, 4, 2),
        "modes": lambda: FNO(P((1, 1, 2)), 1, 1, 4, (2, 2)),
        "no modes": lambda: FNO(P((1, 1, 2)), 1, 1, 4, 0),
        "half modes": lambda: FNO(P((1, 1, 2)), 1, 1, 4, 1.5),  # type: ignore[arg-type]
        "width": lambda: FNO(P((1, 1, 2)), 1, 1, 0, 2),
        "blocks": lambda: FNO(P((1, 1, 2)), 1, 1, 4, 2, 0),
        "hidden": lambda: FNO(P((1, 1, 2)), 1, 1, 4, 2, hidden=0),
        "complex": lambda: FNO(P((1, 1, 2)), 1, 1, 4, 2, dtype=torch.complex64),
        "channels": lambda: model(torch.ones(1, 3, 4, 8, dtype=torch.float64)),
        "channels of one": lambda: model(good[:, : 1 + me]),
        "dims": lambda: model(good[..., 0]),
        "dims of one": lambda: model(good if me else good[..., 0]),
        "points": lambda: model(good[:, :, :2]),
        "parts": lambda: model(good[..., : 7 + me]),
        "dtype": lambda: model(good.float()),
        "no tensor": lambda: model(None if me else good),
        "grad": lambda: model(good.clone().requires_grad_()) if me else no_grad(model, good),
        "parameters": lambda: frozen(model, me)(good),
    }
    text = ""
    try:
        calls[call]()
    except ValueError as error:
        text = str(error)
    model = case.model()
    assert model(good).shape == (1, 3, 4, 8)
    return text


def said_of_a_library() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSEL_FFT", "fftpack" if tessel.world().rank == 1 else "torch")
        chosen_library.cache_clear()
        with pytest.raises(ValueError) as raised:
            FNO(tessel.world().create_cartesian_topology_partition([1, 1, 2]), 1, 1, 2, 2)
    chosen_library.cache_clear()
    return str(raised.value)


def test_all_workers_raise_where_one_cannot_use_its_library(run: Run) -> None:
    first, second = run(said_of_a_library, nprocs=2)
    assert first == second and "TESSEL_FFT must be one of" in first


def no_grad(model: FNO, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def frozen(model: FNO, me: int) -> FNO:
    model.lift.weight.requires_grad_(me == 0)
    return model


WORDS = {
    "axes": "1 to 4 dimensions of space",
    "too many axes": "1 to 4 dimensions of space",
    "channels split": "channels cannot be split",
    "modes": "one for each of 1 dimensions",
    "no modes": "modes must be an integer of at least 1, got 0",
    "half modes": "modes must be an integer of at least 1, got 1.5",
    "width": "width must be",
    "blocks": "blocks must be",
    "hidden": "hidden must be",
    "complex": "torch.float32 or torch.float64",
    "channels": "expected 2 channels, got 3",
    "channels of one": "worker 1 has",
    "dims": "as many axes as the tensor has dimensions",
    "dims of one": "number of dimensions differs",
    "points": "3 modes need a length of at least 6, but dimension 0 of space has 4",
    "parts": "do not fit together",
    "dtype": "torch.float32",
    "no tensor": "worker 1 passed no tensor",
    "grad": "no_grad",
    "parameters": "FNO",
}


@pytest.mark.parametrize("call", WORDS)
def test_bad_input(run: Run, call: str) -> None:
    """A ValueError on all workers, with the same text."""
    texts = run(attempt, call, nprocs=2)
    assert WORDS[call] in texts[0]
    assert len(set(texts)) == 1


def check_inside_of_a_model(grid: tuple[int, ...]) -> Tensor:
    """Converting what is around an FNO leaves its parameters where they lie."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    torch.manual_seed(3)
    fno = FNO(P, 2, 2, width=4, modes=3, blocks=2, dtype=torch.float64)
    around = torch.nn.Conv2d(1, 2, 3, padding=1).double()
    model = tessel.nn.distribute_module(torch.nn.Sequential(around, fno, torch.nn.ReLU()), P)
    x = values((2, 1, 12, 10), 5)
    layout = Layout.balanced(P, x.shape)
    y = model(layout.local_part(x))
    out = Layout.balanced(P, (2, 2, 12, 10))
    whole = tessel.Move(out, Layout.whole(P, out.shape)).apply(y.detach())
    return whole.detach()


def test_inside_of_a_converted_model(run: Run) -> None:
    (alone,) = run(check_inside_of_a_model, (1, 1, 1, 1), nprocs=1)
    for spread in run(check_inside_of_a_model, (1, 1, 3, 1), nprocs=3):
        close("output", spread, alone, 1e-12)


def test_parameters_do_not_depend_on_the_default_device() -> None:
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    models = []
    for device in ("cpu", "meta"):  # a tensor of ours on "meta" would have no values
        torch.manual_seed(3)
        with torch.device(device):
            models.append(FNO(P_x, 1, 1, width=2, modes=2, blocks=1))
    pairs = zip(*(each.state_dict().values() for each in models), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
