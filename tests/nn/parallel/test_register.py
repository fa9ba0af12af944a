"""The names of torchshard's documents, at their places, with their arguments in their order.

Tests `nn/parallel/register.py`, `nn/functional.py`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import close, values
from tessel import nn
from tessel.core import boxes
from tessel.distributed import gather, get_group, reduce
from tessel.nn import functional
from tessel.nn.parallel.drawing import layout_of
from windowed_cases import raised

Run = Callable[..., list[Any]]

TABLE = (
    *("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"),
    *("scale_grad_by_freq", "sparse", "_weight", "dim"),
)
LOSS = ("weight", "size_average", "ignore_index", "reduce", "reduction")
LOOKUP = (
    *("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    *("num_embeddings", "dim"),
)
# by position, as the documents have them
SIGNATURES: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (nn.ParallelLinear, ("in_features", "out_features", "bias", "dim")),
    (nn.ParallelLinear.convert_parallel_linear, ("module", "dim")),
    (nn.ParallelEmbedding, TABLE),
    (nn.Embedding, TABLE),
    (nn.ParallelEmbedding.convert_parallel_embedding, ("module", "dim")),
    (nn.ParallelCrossEntropyLoss, LOSS),
    (nn.RegisterParallelDim, ("dim",)),
    (functional.parallel_linear, ("input", "weight", "bias", "dim")),
    (functional.parallellinear, ("input", "weight", "bias", "dim")),
    (functional.parallel_cross_entropy, ("input", "target", *LOSS)),
    (functional.parallel_cross_entropy_loss, ("input", "target", *LOSS)),
    (functional.cross_entropy_loss, ("input", "target", *LOSS)),
    (functional.parallel_embedding, LOOKUP),
    (nn.init.shard_init_helper_, ("init_method", "tensor")),
    (nn.shard_init_helper_, ("init_method", "tensor")),
    (tessel.slice, ("tensor", "num_partitions", "dim", "contiguous")),
    (tessel.collect_state_dict, ("module", "state", "prefix")),
    (tessel.relocate_state_dict, ("module", "state", "prefix")),
    (tessel.register_ddp_parameters_to_ignore, ("module",)),
    (tessel.get_parallel_dim, ("x",)),
    (tessel.register_parallel_dim, ("x", "dim")),
    (tessel.register_parallel_attribute, ("x", "dim", "order_type")),
    (tessel.distributed.init_process_group, ("group_size",)),
    (tessel.distributed.scatter, ("x", "dim")),
    (tessel.distributed.gather, ("x", "dim")),
    (tessel.distributed.reduce, ("x",)),
    (tessel.distributed.copy, ("x",)),
]
DEFAULTS = {
    "bias": (True, None),
    "dim": (None,),
    "padding_idx": (None,),
    "max_norm": (None,),
    "norm_type": (2.0,),
    "scale_grad_by_freq": (False,),
    "sparse": (False,),
    "_weight": (None,),
    "weight": (None,),
    "size_average": (None,),
    "ignore_index": (-100,),
    "reduce": (None,),
    "reduction": ("mean",),
    "num_embeddings": (None,),
    "prefix": ("",),
    "contiguous": (False,),
    "order_type": (0,),
}


@pytest.mark.parametrize(
    ("function", "names"), SIGNATURES, ids=lambda each: getattr(each, "__qualname__", "")
)
def test_arguments_stand_where_the_documents_have_them(
    function: Callable[..., Any], names: tuple[str, ...]
) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    found = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert tuple(each.name for each in found[: len(names)]) == names
    for each in found[: len(names)]:
        if each.default is not each.empty:
            assert each.default in DEFAULTS.get(each.name, (None,)), each


def test_names_of_one_thing() -> None:
    assert nn.Embedding is nn.ParallelEmbedding
    assert nn.shard_init_helper_ is nn.init.shard_init_helper_
    assert functional.parallellinear is functional.parallel_linear
    assert functional.cross_entropy_loss is functional.parallel_cross_entropy
    assert functional.parallel_cross_entropy_loss is functional.parallel_cross_entropy
    for name in ("collect_state_dict", "relocate_state_dict", "register_ddp_parameters_to_ignore"):
        assert getattr(tessel, name) is getattr(nn, name)
    for name in ("get_parallel_dim", "register_parallel_dim", "register_parallel_attribute"):
        assert getattr(tessel, name) is getattr(tessel.distributed, name)


def test_the_ninth_argument_of_an_embedding_is_dim() -> None:
    layer = nn.ParallelEmbedding(64, 512, None, None, 2.0, False, False, None, 1)
    assert layer.dim == 1 and layer.weight.requires_grad
    with pytest.raises(ValueError, match="dim must be None, 0, 1 or -1, got True"):
        nn.ParallelEmbedding(64, 512, None, None, 2.0, False, False, None, True)  # torch's _freeze
    with pytest.raises(TypeError, match="positional"):
        nn.ParallelEmbedding(4, 5, None, None, 2.0, False, False, None, 1, True)  # type: ignore[misc]
    frozen = nn.ParallelEmbedding(4, 5, dim=0, _freeze=True, dtype=torch.float64)
    assert not frozen.weight.requires_grad and frozen.weight.dtype == torch.float64


def slices_of_workers() -> None:
    P, x = tessel.world(), values((7, 10), 0)
    assert P.rank is not None
    for dim in (0, 1, -1, None):
        own = tessel.slice(x, P.size, dim=dim)[P.rank]
        part = tessel.distributed.scatter(x, -1 if dim is None else dim)
        assert torch.equal(own, part)


def test_slices_are_the_shards_of_workers(run: Run) -> None:
    for nprocs in (1, 2, 3, 4):
        run(slices_of_workers, nprocs=nprocs)


def test_slices() -> None:
    x = values((3, 10), 0).requires_grad_()
    parts = tessel.slice(x, 2, dim=-1)
    assert isinstance(parts, tuple) and [tuple(each.shape) for each in parts] == [(3, 5)] * 2
    assert torch.equal(torch.cat(tessel.slice(x, 4), -1), x)
    assert [each.shape[1] for each in tessel.slice(x, 4)] == [
        stop - start for start, stop in boxes.balanced(10, 4)
    ]
    assert [each.shape[0] for each in tessel.slice(x, 5, 0)] == [1, 1, 1, 0, 0]
    assert not parts[0].is_contiguous() and parts[0].data_ptr() == x.data_ptr()
    assert all(each.is_contiguous() for each in tessel.slice(x, 2, -1, True))
    parts[1].sum().backward()
    assert x.grad is not None and x.grad.sum() == 15
    for wrong in (lambda: tessel.slice(x, 0), lambda: tessel.slice(x, 2, 2)):
        with pytest.raises(ValueError, match="slice: "):
            wrong()
    with pytest.raises(ValueError, match="at least one dimension"):
        tessel.slice(torch.tensor(1.0), 2)


def shardings_in_place() -> None:
    """As torchshard's programs call it: without taking the result."""
    x = values((4, 3), (tessel.world().rank or 0)).requires_grad_()
    assert tessel.get_parallel_dim(x) is None
    assert tessel.register_parallel_dim(x, -1) is x
    assert tessel.get_parallel_dim(x) == 1 and x.is_leaf
    assert tessel.get_parallel_dim(x * 2) == 1
    expected = torch.cat([values((4, 3), k) for k in range(tessel.world().size)], 1)
    close("whole", gather(x), expected)
    gather(x).square().sum().backward()
    assert x.grad is not None
    close("gradient", gather(x.grad), 2 * expected)

    h = x * 2
    assert tessel.register_parallel_dim(h, None) is h and type(h) is Tensor
    assert tessel.get_parallel_dim(h) is None and tessel.get_parallel_dim(x) == 1
    close("sum", reduce(h.sum()), 2 * expected.sum())  # a number of this worker alone

    y = torch.ones(3)
    assert tessel.get_parallel_dim(nn.RegisterParallelDim(0)(y)) == 0
    assert type(y) is Tensor  # a module leaves its input as it is

    logits = values((5, 2), (tessel.world().rank or 0))
    tessel.register_parallel_dim(logits, -1)
    target = torch.tensor([0, 1, 0, 1, 1])
    loss = functional.parallel_cross_entropy(logits, target)
    whole = torch.cat([values((5, 2), k) for k in range(tessel.world().size)], 1)
    close("loss", loss, torch.nn.functional.cross_entropy(whole, target))


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_tensor_is_registered_itself(run: Run, nprocs: int) -> None:
    run(shardings_in_place, nprocs=nprocs)


def dims_of_parameters(dim: int) -> None:
    linear, table = nn.ParallelLinear(7, 5, dim=dim), nn.ParallelEmbedding(7, 5, dim=dim)
    both = torch.nn.ModuleList([linear, table])
    bias = None if dim == 0 else dim  # that of a row layer is whole
    for each in (both, copy.deepcopy(both), pickle.loads(pickle.dumps(both)), both.double()):
        assert tessel.get_parallel_dim(each[0].weight) == dim
        assert tessel.get_parallel_dim(each[0].bias) == bias
        assert tessel.get_parallel_dim(each[1].weight) == dim
    for copied in (copy.deepcopy(linear.weight), pickle.loads(pickle.dumps(linear.weight))):
        assert tessel.get_parallel_dim(copied) == dim
    place = 1 if dim == 0 else 0
    assert tessel.get_parallel_dim(linear.weight * 2) == place
    assert tessel.get_parallel_dim(linear.weight.T) == 1 - place
    tessel.register_parallel_dim(linear.weight, place)
    assert tessel.get_parallel_dim(linear.weight) == place


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_parameter_answers_with_the_dim_of_its_layer(run: Run, dim: int) -> None:
    for nprocs in (1, 2):
        run(dims_of_parameters, dim, nprocs=nprocs)


class Own(torch.nn.Module):
    """A linear layer of a user's own, as torchshard's projects write them."""

    def __init__(self, weight: Tensor, bias: Tensor, dim: int) -> None:
        super().__init__()
        P, self.dim = get_group(), dim
        assert P.rank is not None
        own = tessel.slice(weight, P.size, 0 if dim else 1)[P.rank]
        self.weight = torch.nn.Parameter(own.clone())
        self.bias = torch.nn.Parameter(
            (tessel.slice(bias, P.size)[P.rank] if dim else bias).clone()
        )
        for each in (self.weight, self.bias):
            tessel.register_parallel_attribute(each, dim)

    def forward(self, x: Tensor) -> Tensor:
        return functional.parallellinear(x, self.weight, self.bias, self.dim)


def own_layer(dim: int) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(7, 5, dtype=torch.float64)
    model = torch.nn.Sequential(Own(alone.weight.detach(), alone.bias.detach(), dim))
    assert tessel.get_parallel_dim(model[0].weight) == dim
    assert tessel.get_parallel_dim(model[0].bias) == (dim or None)
    x = values((3, 7), 1)
    y = model(x)
    close("output", y if tessel.get_parallel_dim(y) is None else gather(y), alone(x))
    whole = tessel.collect_state_dict(model, model.state_dict(), "model.")
    for name, value in alone.named_parameters():
        close(name, whole[f"model.0.{name}"], value.detach())
    own = tessel.relocate_state_dict(model, whole, "model.")
    model.load_state_dict(own)
    for name, value in alone.named_parameters():
        got = model[0].get_parameter(name)
        layout = layout_of(got)
        close(name, got.detach(), (value if layout is None else layout.local_part(value)).detach())
    table = torch.nn.Parameter(torch.ones(4, 2))
    tessel.register_parallel_attribute(table, -1, 1)
    assert tessel.get_parallel_dim(table * 1) == 1 and tessel.get_parallel_dim(table) == -1


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parameters_of_a_layer_of_ones_own(run: Run, dim: int) -> None:
    for nprocs in (1, 2, 3):
        run(own_layer, dim, nprocs=nprocs)


def test_wrong_attributes() -> None:
    x = torch.ones(3, 2)
    for wrong in (
        lambda: tessel.register_parallel_attribute(x, 2),
        lambda: tessel.register_parallel_attribute(x, True),
        lambda: tessel.register_parallel_attribute(x, 0, 2),
        lambda: tessel.register_parallel_attribute(torch.ones(1, 2, 3), 0),
    ):
        found = raised(wrong)
        assert found is not None and found[0] is ValueError
        assert "register_parallel_attribute(" in found[1]
    assert type(x) is Tensor


def test_names_that_others_have_too_say_what_they_are() -> None:
    with pytest.raises(TypeError, match="but dim is a partition"):
        gather(torch.ones(2), tessel.world())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="backends are chosen by torch"):
        tessel.distributed.init_process_group("gloo")  # type: ignore[arg-type]
    assert not tessel.distributed.is_initialized()


def test_attributes_of_shards_that_are_no_tensors() -> None:
    layer = nn.ParallelLinear(3, 2, dim=-1)
    for shard in (layer.weight, layer(torch.ones(1, 3))):
        assert shard.name is torch.ones(1).name is None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            shard.nothing  # noqa: B018


def test_two_functions_named_gather_tell_each_other_apart() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"tessel\.distributed\.gather\(x, dim\)"):
        tessel.gather(x, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tessel\.all_gather\(x, P\)"):
        tessel.distributed.gather(x, tessel.world())  # type: ignore[arg-type]


def test_a_shard_has_the_attributes_of_a_tensor() -> None:
    """Also `name`, which torch's packets of operators have for themselves."""
    plain, shard = torch.ones(2, 3), tessel.register_parallel_dim(torch.ones(2, 3), 1)
    for name in dir(plain):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                getattr(plain, name)
            except Exception:  # which torch has no more, or not for such a tensor
                continue
            getattr(shard, name)


def test_no_function_hides_a_module_of_its_name() -> None:
    """`tessel.nn.parallel.data_parallel` is a function, wherever it is written."""
    for package in ("tessel.distributed", "tessel.nn", "tessel.nn.parallel"):
        here = importlib.import_module(package)
        for found in pkgutil.iter_modules(here.__path__):
            module = importlib.import_module(f"{package}.{found.name}")
            assert getattr(here, found.name) is module, f"{package}.{found.name}"
