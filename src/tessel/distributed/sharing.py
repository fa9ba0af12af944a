"""Shards in the history of plain tensors, found in autograd's graph, and errors about mixing them.

A parameter that is whole on every worker and multiplies a shard gets, on each worker, only the
gradient of that worker's part. `tessel.distributed.copy` makes autograd sum these; without it the
gradient would be wrong without any sign of it.

Results that the transforms of `torch.func` compute from a shard have no sharding, and are not
whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped
from torch.autograd.function import BackwardCFunction

from tessel import tensor as spread
from tessel.core import boxes
from tessel.core.linop import LinearOperator, operator_of
from tessel.distributed.propagation import EXTREMA
from tessel.distributed.shardings import Sharding, State, UnknownSharding, is_wrapped, state_of
from tessel.distributed.torch_call import TorchCall, is_pointwise

_WITHOUT_GRADIENT = frozenset(
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "isclose", "not_equal", "greater", "greater_equal"),
        *("less", "less_equal", "logical_and", "logical_or", "logical_xor"),
    )
)
_BATCHED = frozenset(("matmul", "bmm", "baddbmm"))
_PLAIN = "tessel: not a shard"  # in the metadata of a node at which searches of the graph end


def check_uses(call: TorchCall) -> None:
    """Raise if a value that is whole on all workers would get a partial gradient on each."""
    if call.base in _WITHOUT_GRADIENT or not torch.is_grad_enabled():
        return
    sharding, shape = call.first_shard
    pairs = zip(call.tensors, call.states, strict=True)
    plain = [tensor for tensor, state in pairs if state is None and tensor.requires_grad]
    if sharding is None or sharding.partition.size == 1 or not plain:
        return
    # The split dimension, counted from the end as in broadcasting; plain tensors of the same length
    # there may be parts, too. None where that length may be a coincidence: in other functions, such
    # as a convolution, the tensor may be a weight; and where some worker's part has length 1, a
    # whole tensor that broadcasts may have the same length.
    place: int | None = sharding.dim - len(shape)
    lengths = [shape[sharding.dim]]
    if sharding.size is not None:
        lengths = [b - a for a, b in boxes.balanced(sharding.size, sharding.partition.size)]
    is_batched = call.base in _BATCHED and sharding.dim < len(shape) - 2
    if 1 in lengths or not (is_pointwise(call.base) or is_batched):
        place = None
    for tensor in plain:
        if _is_shared(tensor, place, shape[sharding.dim]):
            raise ValueError(
                f"`{call.name}` combines {sharding} with a tensor of shape {tuple(tensor.shape)} "
                "that is whole on every worker: each worker would compute only a part of its "
                "gradient; write tessel.distributed.copy(tensor) for that tensor, which sums the "
                "parts; if it is this worker's part, register it with "
                "tessel.register_parallel_dim(tensor, dim)"
            )


def check_classes(call: TorchCall) -> None:
    """Raise if torch's own loss would take the classes of one worker for all classes."""
    if call.base not in ("cross_entropy", "nll_loss"):
        return
    state = state_of(call.argument(0, "input"))
    if isinstance(state, UnknownSharding) and (state.partition is None or state.partition.size > 1):
        raise ValueError(f"the input of `{call.base}`: {state.remedy}; {_OWN_LOSS}")
    sharding, shape = call.first_shard
    if (
        sharding is not None
        and sharding.partition.size > 1
        and sharding.dim == min(1, len(shape) - 1)
    ):
        raise ValueError(
            f"`{call.base}` of {sharding}: torch would treat the classes of one worker as all of "
            f"them; {_OWN_LOSS}, or call tessel.distributed.gather(x) first"
        )


_OWN_LOSS = (
    "of logits whose classes are split the loss is tessel.nn.ParallelCrossEntropyLoss() or "
    "tessel.nn.functional.parallel_cross_entropy"
)


def check_factor(call: TorchCall) -> None:
    """Raise if a shard would be scaled in place by a number that differs between workers.

    This happens in code that bounds the norm of a weight, by the norm of one worker's shard.
    """
    if call.base != "mul" or call.name == call.base or torch.is_grad_enabled():
        return
    sharding, factor = state_of(call.args[0]), call.argument(1, "other")
    lost = state_of(factor)
    if not (isinstance(sharding, Sharding) and isinstance(lost, UnknownSharding)) or factor.ndim:
        return
    if sharding.partition.size > 1:
        raise ValueError(
            f"`{call.name}` of {sharding} by a number {lost}: each worker would use its own "
            "number; if it is the same on every worker, as after tessel.distributed.reduce, "
            "register it: tessel.register_parallel_dim(number, None)"
        )


def traced_state(x: Any) -> State:
    """The state of a tensor; a lost sharding if it has none but was computed from a shard."""
    state = state_of(x)
    if state is not None or not isinstance(x, Tensor) or isinstance(x, spread.Tensor):
        return state

    def is_known(node: Any) -> bool:  # a function of the user's own is not searched
        return isinstance(node, BackwardCFunction) or _PLAIN in node.metadata

    for value in _levels(x):
        found = [value] if value.grad_fn is None else _origins([value.grad_fn], is_known)
        for origin in found:
            states = [*map(state_of, _levels(origin))] if isinstance(origin, Tensor) else []
            of_shard = any(isinstance(s, Sharding) and s.partition.size > 1 for s in states)
            # an origin that is neither is a product with a shard
            if of_shard or not isinstance(origin, Tensor | LinearOperator):
                why = "functions of a parameter, or another tensor, that is a shard"
                workers = next((each.partition for each in states if each is not None), None)
                return UnknownSharding("torch", why, workers)
        conclusion_of(value)  # the next layer need not search beyond it
    return None


def _levels(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, then the tensors inside it that transforms of `torch.func` wrapped."""
    yield x
    while is_wrapped(x):
        x = get_unwrapped(x)
        yield x


def known_plain(x: Tensor) -> Tensor:
    """The same plain tensor, not taken for a shard, regardless of how it was computed."""
    # with a node of its own: other uses of `x` are not affected
    return x if x.grad_fn is None else conclusion_of(x.as_subclass(Tensor))


def conclusion_of(x: Tensor) -> Tensor:
    """Mark a plain tensor, which from now on is not taken for a shard, and return it."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[_PLAIN] = True
    return x


def _is_shared(tensor: Tensor, place: int | None, length: int) -> bool:
    """Whether a gradient reaches a parameter or an input of all workers without being summed.

    Args:
        tensor: a plain operand of a call with a shard.
        place: the split dimension, counted from the end, if tensors may be parts along it.
        length: the length of the parts on this worker.
    """

    def is_part(leaf: Tensor) -> bool:
        if place is None or -place > leaf.dim() or leaf.shape[place] != length:
            return False
        # an expanded tensor has one value along this dimension, the same on all workers
        return leaf.layout is not torch.strided or leaf.stride(place) != 0

    if tensor.grad_fn is None:
        return not is_part(tensor)
    # Only a leaf shows whether it is a part, and only if each of its elements kept its place: a
    # value that was expanded, or multiplied by a matrix, may also end up as long as a part.
    ends: list[Any] = []

    def may_move(node: Any) -> bool:
        # a user's class may have the name of one of torch's
        return isinstance(node, BackwardCFunction) or not _keeps_places(node.name())

    for each in _origins([tensor.grad_fn], may_move, ends):
        if _is_of_all(each) and not (isinstance(each, Tensor) and is_part(each)):
            return True
    return any(map(_is_of_all, _origins(ends)))


def _is_of_all(origin: Any) -> bool:
    """Whether a value with this origin is the same value on all workers."""
    if isinstance(origin, LinearOperator):
        return bool(origin.codomain.shared)
    return isinstance(origin, Tensor) and state_of(origin) is None


@lru_cache(maxsize=1024)
def _keeps_places(name: str) -> bool:
    """Whether a node belongs to a pointwise function, as `LeakyReluBackward0` to `leaky_relu`.

    Places count from the end, as in broadcasting; so elements that are expanded keep theirs.
    """
    found = re.fullmatch(r"(?:torch::autograd::)?(\w+?)Backward(?:s|\d+)", name)
    if found is None:
        return False
    function = re.sub("(?<=[a-z])(?=[A-Z])", "_", found[1]).lower()
    # `max` and `min` are pointwise for two tensors only, and then autograd calls them `maximum`
    return function in _KEEP_PLACES or (is_pointwise(function) and function not in EXTREMA)


# nodes of pointwise functions that have other names in autograd, and of broadcasting
_KEEP_PLACES = frozenset(
    ("to_copy", "expand", "prelu_kernel", "native_dropout", "rrelu_with_noise")
)


def _origins(
    nodes: list[Any],
    is_end: Callable[[Any], bool] = lambda node: False,
    ends: list[Any] | None = None,
) -> Iterator[Any]:
    """The origins from which values were computed: parameters, inputs, and Tessel's operators.

    Args:
        nodes: the nodes of the values in autograd's graph.
        is_end: whether the search ends at a node.
        ends: a list to which those nodes are appended.
    """
    seen: set[Any] = set()
    nodes = list(nodes)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        sources = node.next_functions
        # a linear operator, or the product of a column layer, which is no single operator
        ours = operator_of(node)
        if isinstance(ours, LinearOperator) or (ours is not None and hasattr(node, "product")):
            yield ours
        elif not sources and hasattr(node, "variable"):
            yield node.variable
        elif not is_end(node):
            nodes += [source for source, _ in sources]
        elif ends is not None:
            ends.append(node)
