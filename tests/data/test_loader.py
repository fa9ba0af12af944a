"""Loaders: batches are those of one process, in any layout, and all workers raise or none.

Tests `data/loader.py`, `data/dataset.py`, `data/sampler.py`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, pad

import tessel
from tessel.core.layout import Cut, Layout
from tessel.data import FromArray, FromArrays, FromFunction, PartDataset, PartLoader, PartSampler
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
# a grid for batch, channels, height and width; images of 3 channels have parts that are empty
GRIDS = {
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 1, 2, 1)],
    3: [(3, 1, 1, 1), (1, 1, 1, 3)],
    4: [(2, 1, 2, 1), (1, 4, 1, 1), (1, 2, 1, 2), (4, 1, 1, 1)],
}
everywhere = pytest.mark.parametrize("nprocs", GRIDS)


def raised(make: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def images(count: int = 5, size: tuple[int, int] = (6, 5)) -> Any:
    shape = (count, 3, *size)
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


def sources() -> dict[str, Any]:
    """Images, a class for each pixel, and one number for each image."""
    x = images()
    return {
        "image": FromArray(x),
        "pixels": FromArray((x[:, 0] % 7).astype(np.int64)),
        "label": FromArray(np.arange(5)),
    }


def grid_of(*shape: int) -> tessel.Partition:
    return tessel.world().create_cartesian_topology_partition(shape)


def whole(batch: dict[str, Any], indices: list[int]) -> None:
    """Raise unless a batch is what one process has."""
    x = images()[indices]
    expected = {"image": x, "pixels": (x[:, 0] % 7).astype(np.int64), "label": np.array(indices)}
    assert batch.keys() == expected.keys()
    for name, each in batch.items():
        assert torch.equal(each.full(), torch.from_numpy(expected[name])), name


def load_on_grids(nprocs: int, **options: Any) -> None:
    for shape in GRIDS[nprocs]:
        dataset = PartDataset(sources(), grid_of(*shape))
        loader = PartLoader(dataset, 2, **options)
        assert len(loader) == 3
        for _ in range(2):
            batches = [[0, 1], [2, 3], [4]]
            with count_traffic() as traffic:
                found = list(loader)
            assert traffic.bytes_sent == 0  # everybody reads what it needs
            for batch, indices in zip(found, batches, strict=True):
                whole(batch, indices)
                image = batch["image"]
                assert image.layout == Layout.balanced(dataset.partition, image.shape)
        assert loader.epoch == 2


@everywhere
def test_batches_are_those_of_one_process(run: Run, nprocs: int) -> None:
    run(load_on_grids, nprocs, nprocs=nprocs)


@pytest.mark.parametrize("options", [{"prefetch_factor": 0}, {"prefetch_factor": 5}])
def test_batches_that_are_read_ahead(run: Run, options: dict[str, Any]) -> None:
    run(load_with, options, nprocs=2)


def load_with(options: dict[str, Any]) -> None:
    load_on_grids(tessel.world().size, **options)


@pytest.mark.slow
def test_processes_read(run: Run) -> None:
    """Those of torch's DataLoader, forked from a worker."""
    run(load_with, {"num_workers": 2}, nprocs=2)
    run(fail_in_processes, nprocs=2)


def fail_in_processes() -> None:
    grid = grid_of(1, 2)
    source = FromFunction(fail_at_second(2), (4,), torch.float64, 3)
    loader = PartLoader(PartDataset(source, grid), num_workers=1)
    text = raised(lambda: list(loader), FileNotFoundError)
    assert "samples [2] of epoch 0: on worker 1" in text and "no such box" in text


def random_layouts(seed: int, count: int) -> None:
    """Cuts of any length along any axes, empty and uneven, against numpy's slices."""
    random = np.random.default_rng(seed)
    grid, x = grid_of(2, 2), images(4, (7, 4))
    for _ in range(count):
        axes: list[int | None] = random.permutation([0, 1, None]).tolist()
        shape = x.shape[1:]
        cuts = []
        for n, axis in zip(shape, axes, strict=True):
            border = int(random.integers(0, n + 1))
            cuts.append(Cut.whole(n) if axis is None else Cut((axis,), ((0, border), (border, n))))
        layout = Layout(grid, shape, tuple(cuts))
        size = int(random.integers(1, 6))
        dataset = PartDataset((FromArray(x, dtype=torch.float32),), (layout,))
        assert dataset.batch_axis is None
        assert np.array_equal(dataset[3][0], x[3][layout.local_slice()].astype(np.float32))
        for (batch,), start in zip(PartLoader(dataset, size), range(0, 4, size), strict=True):
            assert torch.equal(batch.full(), torch.from_numpy(x[start : start + size]).float())


def test_random_layouts(run: Run) -> None:
    run(random_layouts, 0, 12, nprocs=4)


def orders(seeds: Any, nprocs: int) -> list[list[list[int]]]:
    torch.manual_seed(tessel.world().rank or 0)  # another on each worker
    dataset = PartDataset(FromArray(np.arange(11)), grid_of(nprocs, 1))
    found = []
    for drop in (False, True):
        loader = PartLoader(dataset, 4, shuffle=True, seed=seeds, drop_last=drop)
        found += [[each.full().tolist() for each in loader] for _ in range(2)]
        loader.set_epoch(0)
        found.append([each.full().tolist() for each in loader])
    return found


def test_all_workers_shuffle_alike(run: Run) -> None:
    for seed in (None, 3):
        told = run(orders, seed, 3, nprocs=3)
        assert told[0] == told[1] == told[2]
        first, second, again, *dropped = told[0]
        assert sorted(chain(*first)) == list(range(11)) and [*map(len, first)] == [4, 4, 3]
        assert first != second and first == again
        assert [[*map(len, each)] for each in dropped] == [[4, 4]] * 3
    assert told[0] == run(orders, 3, 1, nprocs=1)[0]  # and on any number of workers


def begin(steps: int, options: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
    loader = numbers_loader(options)
    iterator, found = iter(loader), []
    for _ in range(steps):
        found.append(next(iterator).full().tolist())
    return found, loader.state_dict()


def go_on(state: dict[str, Any], options: dict[str, Any]) -> list[list[int]]:
    loader = numbers_loader(options)
    loader.load_state_dict(state)
    epochs = [[each.full().tolist() for each in loader] for _ in range(2)]
    return list(chain(*epochs))


def numbers_loader(options: dict[str, Any]) -> PartLoader:
    P = tessel.world()
    sampler = torch.utils.data.RandomSampler(range(9)) if options.get("sampler") else None
    options = {**options, "sampler": sampler}
    return PartLoader(PartDataset(FromArray(np.arange(9)), grid_of(P.size, 1)), 2, **options)


@pytest.mark.parametrize("steps", [0, 3, 5])
def test_an_epoch_goes_on_elsewhere(run: Run, steps: int) -> None:
    options = {"shuffle": True, "seed": 1, "prefetch_factor": 2}
    head, state = run(begin, steps, options, nprocs=3)[1]
    rest = run(go_on, state, options, nprocs=2)[0]
    expected = run(go_on, run(begin, 0, options, nprocs=1)[0][1], options, nprocs=1)[0]
    # of the first epoch what was left, and all of the second
    assert head + rest == (expected if steps < 5 else expected[:5] + rest)
    assert len(head + rest) == 10 and sorted(chain(*(head + rest)[:5])) == list(range(9))


def test_an_order_of_ones_own_goes_on(run: Run) -> None:
    """The sampler of the first worker counts, and its order is in the state."""
    found = run(begin, 2, {"sampler": True}, nprocs=2)
    assert found[0] == found[1]
    head, state = found[0]
    rest = run(go_on, state, {"sampler": True}, nprocs=3)
    assert rest[0] == rest[2] and sorted(chain(*head, *rest[0][:3])) == list(range(9))


def broken_off() -> None:
    loader = numbers_loader({"shuffle": True, "seed": 0})
    first = [next(iter(loader)).full().tolist() for _ in range(3)]
    assert loader.epoch == 2 and len({*map(tuple, first)}) > 1  # each is the next epoch
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 4 and loader.epoch == 3
    other = numbers_loader({})
    with pytest.raises(ValueError, match="shuffle True"):
        other.load_state_dict(loader.state_dict())
    ordered = numbers_loader({"sampler": True})
    ordered.load_state_dict(other.state_dict())  # of an epoch that has not begun
    for begun, resumed, words in ((ordered, other, "with"), (other, ordered, "without")):
        next(iter(begun))
        with pytest.raises(ValueError, match=f"saved in an epoch {words} sampler="):
            resumed.load_state_dict(begun.state_dict())


def test_a_loop_may_be_left(run: Run) -> None:
    run(broken_off, nprocs=2)


def numbers_of_numpy() -> None:
    own = np.int64 if tessel.world().rank else int
    sampler = PartSampler(9, tessel.world(), 2, shuffle=True, seed=own(5))
    sampler.set_epoch(own(2))
    expected = PartSampler(9, tessel.world(), 2, shuffle=True, seed=5)
    expected.set_epoch(2)
    assert list(sampler.batches()) == list(expected.batches())


def test_numbers_of_numpy_are_the_same_numbers(run: Run) -> None:
    run(numbers_of_numpy, nprocs=2)


def batch_sampler() -> list[Any]:
    sampler = PartSampler(5, grid_of(2, 1), 3)
    dataset = PartDataset(FromArray(np.arange(20).reshape(5, 4)), grid_of(2, 1))
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    return [list(sampler), [each[:, 0].tolist() for each in loader], sampler.epoch]


def test_samplers_are_for_loaders_of_torch(run: Run) -> None:
    told = run(batch_sampler, nprocs=2)
    assert told == [
        [[[0, 1], [3]], [[0, 4], [12]], 2],
        [[[2], [4]], [[8], [16]], 2],
    ]


def fail_at_second(index: int, kind: type[Exception] = FileNotFoundError) -> Any:
    rank = tessel.world().rank

    def read(number: int, box: Any) -> Any:
        if number == index and rank == 1:
            raise kind("no such box")
        return np.full([stop - start for start, stop in box], float(number))

    return read


def fail_and_go_on() -> None:
    source = FromFunction(fail_at_second(1), (4,), torch.float64, 3)
    for ahead in (0, 2):
        loader = PartLoader(PartDataset(source, grid_of(1, 2)), prefetch_factor=ahead)
        text = raised(lambda: list(loader), FileNotFoundError)  # noqa: B023
        assert text == "tessel.data: samples [1] of epoch 0: on worker 1, no such box"
        assert float(next(iter(loader)).sum()) == 0  # it is whole after all
        assert float(tessel.ones(4, where=tessel.world()).sum()) == 4
    # Python takes this error for the end of a generator, and of a block in one
    source = FromFunction(fail_at_second(1, StopIteration), (4,), torch.float64, 3)
    text = raised(lambda: list(PartLoader(PartDataset(source, grid_of(1, 2)))), RuntimeError)
    assert text == "tessel.data: samples [1] of epoch 0: on worker 1, StopIteration: no such box"


class TextlessError(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        return self.missing  # type: ignore[attr-defined,no-any-return]


def errors_without_text() -> None:
    source = FromFunction(fail_at_second(1, TextlessError), (4,), torch.float64, 3)
    text = raised(lambda: list(PartLoader(PartDataset(source, grid_of(1, 2)))), RuntimeError)
    assert "on worker 1, TextlessError: " in text
    assert float(tessel.ones(4, where=tessel.world()).sum()) == 4


def test_an_error_whose_text_raises(run: Run) -> None:
    run(errors_without_text, nprocs=2)


def bad_states() -> None:
    loader = numbers_loader({"shuffle": True, "seed": 0})
    state, is_first = loader.state_dict(), tessel.world().rank == 0
    for wrong in ({}, {**state, "length": 5}, {**state, "order": [1]}):
        text = raised(lambda: loader.load_state_dict(state if is_first else wrong), ValueError)  # noqa: B023
        assert text.startswith("PartSampler.load_state_dict: on worker 1, PartSampler: ")
    assert len(list(loader)) == len(loader)  # and it goes on
    # a part of a number is not dropped
    loader = PartLoader(loader.dataset, sampler=[0, 1.5])  # type: ignore[list-item]
    raised(lambda: list(loader), TypeError)


def test_states_and_orders_that_one_worker_refuses(run: Run) -> None:
    run(bad_states, nprocs=2)


def test_what_one_worker_cannot_read_raises_on_all(run: Run) -> None:
    run(fail_and_go_on, nprocs=2)


def no_room(folder: str) -> None:
    """The device of one worker has no room for what it has read."""
    right, rank = torch.Tensor.to, tessel.world().rank

    def to(x: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        if rank == 1 and x.dtype == torch.float64:
            raise torch.OutOfMemoryError("no room")
        return right(x, *args, **settings)

    path = f"{folder}/x"
    tessel.save(torch.ones(4, dtype=torch.float64), path)
    loader = PartLoader(PartDataset(FromArray(np.ones((2, 4))), grid_of(1, 2)), device="cpu")
    try:
        torch.Tensor.to = to  # type: ignore[assignment, method-assign]
        for act in (lambda: list(loader), lambda: tessel.load(path, grid_of(2), device="cpu")):
            assert raised(act, RuntimeError).endswith("on worker 1, OutOfMemoryError: no room")
    finally:
        torch.Tensor.to = right  # type: ignore[method-assign]
    assert len(list(loader)) == 2


def test_no_room_on_the_device_of_one_worker(run: Run, tmp_path: Path) -> None:
    run(no_room, str(tmp_path), nprocs=2)


def different() -> None:
    P, x = tessel.world(), images()
    rank, grid = P.rank or 0, grid_of(1, 1, 2, 1)

    def make(source: Any, **options: Any) -> PartLoader:
        return PartLoader(PartDataset(source, grid), **options)

    kinds = [np.float64, np.float32]
    for source in (FromArray(x[: 4 + rank]), FromArray(x.astype(kinds[rank]))):
        assert "the data differs between workers" in raised(lambda: make(source), ValueError)  # noqa: B023
    assert "the data differs" in raised(lambda: make(FromArray(x), seed=rank), ValueError)
    ragged = FromArrays([images(1)[0], images(1, (6 + rank, 5))[0]])
    loader = make(ragged)
    assert "samples [1] of epoch 0: the data differs" in raised(lambda: list(loader), ValueError)
    missing = FromArrays(["nothing.npy"] if rank else [x[0]])
    text = raised(lambda: make(missing), FileNotFoundError)
    assert text.startswith("PartLoader: on worker 1, ") and "nothing.npy" in text


def test_data_that_differ_between_workers(run: Run) -> None:
    run(different, nprocs=2)


def ragged() -> None:
    arrays = [np.full((2 + k, 5), float(k)) for k in range(4)]
    dataset = PartDataset(FromArrays(arrays), grid_of(1, 2, 1))
    for x, array in zip(PartLoader(dataset), arrays, strict=True):
        assert torch.equal(x.full(), torch.from_numpy(array)[None])
    loader = PartLoader(dataset, 2)
    text = raised(lambda: list(loader), ValueError)
    assert "samples of a batch must have the same shape, got (2, 5) for sample 0 and (3, 5)" in text


def test_sizes_that_differ(run: Run) -> None:
    run(ragged, nprocs=2)


def blurred(x: torch.Tensor) -> torch.Tensor:
    """The mean of 3 × 5 pixels, reflected at the border of the image."""
    padded = pad(x[None], (2, 2, 1, 1), "reflect")
    return avg_pool2d(padded, (3, 5), 1)[0]


def transforms() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 12, 13))

    def transform(sample: Any, place: Any) -> Any:
        image, label = sample
        (_, rows, _), _ = place.boxes
        assert image.shape[1] == rows[1] - rows[0] and label == place.index
        scale = torch.rand((), generator=place.generator, dtype=torch.float64)
        return scale * blurred(image), label

    found = []
    for shape in ((1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 1, 1)):
        P = tessel.world().create_partition_inclusive(range(int(np.prod(shape))))
        grid = P.create_cartesian_topology_partition(shape)
        dataset = PartDataset(
            (FromArray(x), FromArray(np.arange(3))),
            grid,
            transform=transform,
            halo=([(0, 0), (1, 1), (2, 2)], None),
        )
        loader = PartLoader(dataset, 3, seed=5)
        batches = [image.move_to(grid_of(1, 1, 1, 4)).full() for image, _ in (*loader, *loader)]
        plain = torch.stack([blurred(torch.from_numpy(each)) for each in x])
        scales = [batch / plain for batch in batches]
        # one number for each sample and epoch, wherever its parts are
        assert all(torch.allclose(each, each[:, :1, :1, :1], atol=1e-10) for each in scales)
        found.append(torch.stack([each[:, 0, 0, 0] for each in scales]))
    assert torch.allclose(found[0], found[2], atol=1e-10)
    assert torch.allclose(found[1], found[2], atol=1e-10)
    assert len({round(float(each), 6) for each in found[2].flatten()}) == 6


def test_transforms_with_halos(run: Run) -> None:
    run(transforms, nprocs=4)


def wrong_transform() -> None:
    source = FromArray(images())
    for new in (lambda x, place: x.float(), lambda x, place: x[:, 1:], lambda x, place: 3):
        dataset = PartDataset(source, grid_of(1, 1, 2, 1), transform=new)
        text = raised(lambda: list(PartLoader(dataset)), ValueError)  # noqa: B023
        assert "a transform must keep shapes and dtypes" in text


def test_a_transform_that_changes_shapes(run: Run) -> None:
    run(wrong_transform, nprocs=2)


def outside() -> None:
    """Workers that are not in the grid go through the same batches, and read nothing."""
    P = tessel.world().create_partition_inclusive([1, 2])
    grid = P.create_cartesian_topology_partition([1, 1, 2, 1])
    rank = tessel.world().rank

    def read(index: int, box: Any) -> Any:
        assert rank in (1, 2)
        return images()[index][tuple(slice(*each) for each in box)]

    dataset = PartDataset(FromFunction(read, (3, 6, 5), torch.float64, 5), grid)
    for number, batch in enumerate(PartLoader(dataset, 2)):
        moved = batch.move_to(grid_of(1, 1, 1, 3)).full()
        assert torch.equal(moved, torch.from_numpy(images()[2 * number : 2 * number + 2]))
    assert dataset[0].shape == ((3, 3, 5) if grid.active else (0,))


def test_workers_outside(run: Run) -> None:
    run(outside, nprocs=3)


def test_a_dataset_goes_to_processes_that_are_not_forked() -> None:
    """They are no workers: which box is meant goes with it, and groups do not."""
    layout = Layout(grid_of(1), (3, 6, 5), (Cut.whole(3), Cut.whole(6), Cut((0,), ((0, 5),))))
    for where in (grid_of(1, 1, 1, 1), layout):
        dataset = PartDataset(FromArray(images()), where, halo=[(0, 0), (1, 1), (0, 0)])
        again = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(again[3], torch.from_numpy(images()[3]))


def test_reads_go_no_further_ahead_than_is_said() -> None:
    begun: list[int] = []

    def read(index: int, box: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        begun.append(index)
        return np.zeros(4)

    dataset = PartDataset(FromFunction(read, (4,), torch.float64, 9), grid_of(1, 1))
    for number, _ in enumerate(PartLoader(dataset, prefetch_factor=2)):
        deadline = time.monotonic() + 20
        while len(begun) < min(9, number + 3) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert begun == list(range(min(9, number + 3)))


def test_bad_arguments(tmp_path: Path) -> None:
    source, grid = FromArray(images()), grid_of(1, 1, 1, 1)
    dataset = PartDataset(source, grid)
    for options in (
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"num_workers": -1},
        {"num_workers": 1, "prefetch_factor": 0},
        {"multiprocessing_context": "spawn"},
        {"shuffle": True, "sampler": [1]},
    ):
        with pytest.raises(ValueError):
            PartLoader(dataset, **options)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="pin_memory=True requires a GPU"):
            PartLoader(dataset, pin_memory=True)
    # all workers would go through the share of the first one
    sampler = torch.utils.data.DistributedSampler(range(5), num_replicas=2, rank=0)  # type: ignore[var-annotated,arg-type]
    with pytest.raises(ValueError, match="processes its share of the samples, but here all"):
        PartLoader(dataset, sampler=sampler)
    sampler = torch.utils.data.DistributedSampler(range(5), 1, 0, shuffle=False)  # type: ignore[arg-type]
    assert len(list(PartLoader(dataset, sampler=sampler))) == 5
    loader = PartLoader(dataset)
    with pytest.raises(ValueError, match=r"expected what state_dict\(\) returns, .* no 'length'"):
        loader.load_state_dict({"seed": 0, "epoch": 0, "taken": 0, "shuffle": False, "order": None})
    with pytest.raises(IndexError, match="there are 5 samples, got 7"):
        list(PartLoader(dataset, sampler=[1, 7]))
    with pytest.raises(IndexError):
        dataset[5]
    with pytest.raises(TypeError, match=r"FromArray\(array\)"):
        PartDataset(images(), grid)
    with pytest.raises(TypeError, match="a Partition or a Layout"):
        PartDataset((source,), (3,))
    with pytest.raises(ValueError, match="in the same structure"):
        PartDataset((source, source), (grid,))
    with pytest.raises(ValueError, match="on one grid"):
        PartDataset((source, source), (grid, grid_of(1)))
    with pytest.raises(ValueError, match="sources of one length"):
        len(PartDataset((source, FromArray(np.arange(4))), grid))
    with pytest.raises(ValueError, match=r"pass a tessel\.Layout"):
        PartLoader(PartDataset(source, grid_of(1, 1)))
    with pytest.raises(ValueError, match="its layout is"):
        PartLoader(PartDataset(source, Layout.split(grid, (3, 6, 4), (1, 2, 3))))
    assert list(PartLoader(PartDataset(FromArray(images()[:0]), grid))) == []


def test_the_order_does_not_depend_on_the_default_device() -> None:
    orders = []
    for device in ("cpu", "meta"):  # a tensor of ours on "meta" would have no values
        with torch.device(device):
            orders.append(list(PartSampler(5, tessel.world(), 2, shuffle=True, seed=1)))
    assert orders[0] == orders[1]
