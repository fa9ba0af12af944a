"""The spread tensor: this worker's part, its layout, and the shape of the whole.

A `Tensor` has no storage of its own. It holds this worker's part, a plain tensor, and stands for
the whole: `x.shape` is the global shape, and a torch function of it does what it does in one
process, by the table of rules in `tessel.tensor.table`.

Two levels of autograd meet here.

*The parts' graph.* Rules compute with parts, and movements between them are linear operators that
autograd knows. So the graph of a computation lies on the parts; `x.grad`, hooks and `backward` are
handed on to the part, and no rule has a backward of its own.

*The wrappers' graph.* Code that goes round torch's functions gets the wrapper itself: a function
with a backward pass of its own, the backward hooks of modules, scripted code, C++. Torch records
such code between wrappers, which for that reason say that they need gradients when their parts do.
`open_part` turns a history of this kind into one node of the parts' graph. The data that such code
asks for comes from `__torch_dispatch__`, which never takes a part for the whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C import _functorch as functorch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from tessel.core.graph import untraced
from tessel.core.layout import Layout
from tessel.core.linop import operator_of, record_product
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.transport import group_of, kept_in_job, num_workers, this_worker

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_run_backward = torch.autograd.Variable._execution_engine.run_backward
FRIENDS = (torch.Tensor, torch.nn.Parameter)  # kinds that meet spread tensors as whole ones

# other kinds that know how they lie, and what makes them spread tensors on a partition; on none,
# after an agreement, on one of their own
converters: dict[type, Callable[[Any, Partition | None], Tensor]] = {}


def is_spread(x: Any) -> bool:
    """Whether a tensor is spread, or stands for one that is inside a transform of `torch.func`.

    Transforms wrap all tensors that they are given: what has the shape of the whole and is of
    torch's own kind may still be spread, and is neither plain nor a part.
    """
    if isinstance(x, Tensor):
        return True
    # what a compiler traces is no wrapper, and it cannot look into one
    if torch.compiler.is_dynamo_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    while isinstance(x, torch.Tensor) and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return isinstance(x, Tensor)


class _Missing:
    """In the place of a part that is not there.

    It is not computed yet: then it is now. Or it was taken away: see `outdate_copies`,
    `withhold_original`.
    """

    def __get__(self, x: Tensor | None, kind: Any = None) -> Any:
        if x is None:
            return self
        unfinished = x.__dict__.get("_unfinished")
        if unfinished is not None:
            x._part = unfinished.finished(x._layout)
            del x.__dict__["_unfinished"]
            return x._part
        if "_withheld" in x.__dict__:
            raise ValueError(
                f"this tensor of shape {tuple(x._layout.shape)} was changed in place by way of a "
                f"view, which is a copy here, since values had to move: put it back, as in "
                f"x[items] = view, or write x[items] += y without a name for the view"
            )
        raise ValueError(
            f"this tensor of shape {tuple(x._layout.shape)} is a copy, since values had to move, "
            f"where torch has a view of another tensor, which was changed in place afterwards: "
            f"take the view after the change, or write .clone() before it"
        )


class Tensor(torch.Tensor):
    """A tensor that is spread over workers and knows how.

    It is made by `tessel.spread`, `tessel.from_local`, functions such as `tessel.zeros`, and by
    torch's functions of other spread tensors. Its shape, dtype and device are those of the whole.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> x = tessel.spread(torch.ones(4, 6), P)
    >>> x.shape, x.local.shape, float(x.sum())
    (torch.Size([4, 6]), torch.Size([4, 6]), 24.0)
    """

    _part: torch.Tensor = _Missing()  # type: ignore[assignment]  # found if there is none
    _layout: Layout
    _originals: tuple[Any, ...]  # what torch would have a view of, and this is a copy of
    above: ClassVar[Handler]  # what is done with a torch function
    beside: ClassVar[
        Any
    ]  # what is done with one of spread tensors and others that know their layouts
    below: ClassVar[Handler]  # what is done for code that went round torch's functions
    as_shard: ClassVar[Callable[[Tensor], torch.Tensor]]  # what `tessel.distributed` makes of parts
    as_dtensor: ClassVar[Callable[[Tensor, Any], Any]]  # what `tessel.interop` makes of them

    @staticmethod
    def __new__(cls, part: torch.Tensor, layout: Layout, records: bool = True) -> Tensor:
        new: Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            dtype=part.dtype,
            device=part.device,
            requires_grad=records and part.requires_grad,
        )
        # C++ code that asks for the memory of the wrapper gets an error, and not a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(new)
        new._part = part
        new._layout = layout
        new._originals = ()
        return new

    # torch's own would take the arguments for values; object's ignores them
    __init__ = object.__init__

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in types:
            if each is not Tensor and each not in FRIENDS and not issubclass(each, Tensor):
                return Tensor.beside(func, types, args, kwargs or {})
        return Tensor.above(func, args, kwargs or {})

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return Tensor.below(func, args, kwargs or {})

    @property
    @untraced
    def layout(self) -> Layout:  # type: ignore[override]
        """Which box of the whole each worker stores, and what its copies mean."""
        # Torch's own code asks whether a tensor is dense, as `torch.masked` does.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return torch.strided  # type: ignore[return-value]
        return self._layout

    @property
    @untraced
    def local(self) -> torch.Tensor:
        """This worker's part, a plain tensor; gradients pass both ways."""
        part = open_part(self)
        with DisableTorchFunctionSubclass():
            return part.view_as(part)

    @untraced
    def full(self) -> torch.Tensor:
        """The whole tensor, plain, on every worker of its partition, as one shared value.

        Gradients pass.
        """
        layout = self._layout
        if layout.is_outside:
            raise absent("full()", layout)
        found: torch.Tensor = self.move_to(
            Layout.whole(layout.partition, layout.shape, shared=True)
        ).local
        return found

    @untraced
    def move_to(self, where: Partition | Layout) -> Tensor:
        """The same values in another layout, a `Move`; all workers of both call this.

        Args:
            where: a layout of the same shape, or a partition whose axis d splits dimension d.
        """
        target = layout_on(where, self._layout.shape)
        if target == self._layout:
            return self
        moved = move(self._layout, target)
        part = open_part(self)
        if target.is_outside and not moved.takes_part:
            # nothing, which hangs on the part: this worker is there in the backward pass
            return Tensor(part.reshape(-1)[:0], target)
        return Tensor(moved.apply(part), target)

    @untraced
    def shard(self) -> torch.Tensor:
        """This worker's part as a shard of parallel layers: it has the shape of the part.

        It shares memory with this tensor, gradients pass both ways, and `y.spread()` is this
        tensor again. Of one that every worker has whole, the whole, plain. ValueError for what is
        split along several dimensions, or unevenly: `move_to` brings it there.
        """
        return Tensor.as_shard(self)

    @untraced
    def to_dtensor(self, mesh: Any = None) -> Any:
        """This tensor as a `torch.distributed.tensor.DTensor`, without a copy; gradients pass.

        An axis that splits dimension d is `Shard(d)`, shared copies are `Replicate()`, separate
        ones `Partial()`. `tessel.from_dtensor` is the way back.

        Args:
            mesh: a `DeviceMesh` with the same workers on the same grid; None for that of the last
                DTensor that came from them by `from_dtensor`, or else for `partition.to_mesh()`,
                for which all workers of the job call this.

        Raises:
            ValueError: if placements cannot say it, as parts that are not those of `torch.chunk`.
        """
        return Tensor.as_dtensor(self, mesh)

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = new = Tensor(deepcopy(self._part, memo), self._layout)
            if getattr(self, "_is_param", False):  # torch's way to say that it is a Parameter
                new._is_param = True
        found: Tensor = memo[id(self)]
        return found

    @untraced
    def __reduce_ex__(self, protocol: Any) -> Any:
        part = self._part.detach().requires_grad_(self._part.requires_grad)
        is_parameter = getattr(self, "_is_param", False)
        return restored, (part, self._layout, is_parameter, this_worker())


# What compilers say where their graph may not end, as inside of a higher-order operator.
_METHOD: Any = Tensor.__torch_function__
_METHOD.__func__._torchdynamo_disable_msg = (
    "functions of spread tensors follow rules, which compilers call and do not trace; in the place "
    "of flex_attention use torch.nn.functional.scaled_dot_product_attention with a mask"
)


def absent(what: str, layout: Layout) -> ValueError:
    """What to raise on a worker outside of a partition if it asks for values."""
    return ValueError(
        f"{what} needs values, and worker {this_worker()} is outside of {layout.partition}, which "
        "has them; call it on these workers alone (`if x.layout.partition.active:`), or move the "
        "tensor to others first, on all workers: x.move_to(...)"
    )


def restored(
    part: torch.Tensor, layout: Layout, is_parameter: bool, worker: int | None = None
) -> Tensor:
    """A spread tensor as this worker wrote it into a file.

    That of another worker has another part, which would be taken for the own one.
    """
    here = this_worker()
    if worker not in (None, here) and num_workers() > 1 and layout.box(worker) != layout.box(here):
        raise ValueError(
            f"worker {here} got the part that worker {worker} has of {layout}, from its file or in "
            f"a message; let each worker save and load its own, or save x.full(), or tessel.save(x)"
        )
    new = Tensor(part, layout)
    if is_parameter:
        new._is_param = True
    return new


@kept_in_job
def move(source: Layout, target: Layout) -> Move:
    """The move between two layouts."""
    return Move(source, target)


def layout_on(where: Partition | Layout, shape: Sequence[int]) -> Layout:
    """A layout for a tensor of this shape: the one that is given, or balanced on a partition."""
    lengths = tuple(shape)
    if isinstance(where, Layout):
        if where.shape != lengths:
            raise ValueError(f"expected a layout of shape {lengths}, got {where}")
        return where
    if not isinstance(where, Partition):
        raise TypeError(f"where: expected a tessel.Partition or a tessel.Layout, got {where!r}")
    return _balanced(where, lengths)


_balanced = kept_in_job(Layout.balanced)


def open_part(x: Tensor) -> torch.Tensor:
    """The part of a spread tensor, with all of its history in the parts' graph."""
    bridge: torch.Tensor | None = x.__dict__.get("_bridge")
    if bridge is not None:
        return bridge
    with DisableTorchFunctionSubclass():
        if x.grad_fn is None:
            part = x._part
            # When a checkpoint computes again, those inside of it get their inputs without the
            # history that these had, in wrappers made by C++ code, which say that they need
            # gradients. Their parts must, too, so that the same is saved as before.
            if x.requires_grad and not part.requires_grad:
                x._part = part = part.detach().requires_grad_()
            return part
        if not torch.is_grad_enabled():
            return x._part.detach()
        x.__dict__["_bridge"] = bridge = _bridged(x)
        return bridge


def open_plain(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor, with all of its history in the parts' graph.

    A function with a backward pass of its own may write values of spread tensors into a plain one,
    and give that. Its gradients would end at wrappers, and parts would never get them.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None:
        return x
    if torch._C._are_functorch_transforms_active():  # which have a graph of their own
        return x
    last: Any = x.grad_fn
    nodes, seen = [last], set[Any]()
    while nodes:
        node = nodes.pop()
        # no history in the parts' graph leads to a wrapper, nor does one that was looked at before
        if node is None or node in seen or _PLAIN in node.metadata or operator_of(node) is not None:
            continue
        if isinstance(getattr(node, "variable", None), Tensor):
            return _bridged(x)
        seen.add(node)
        nodes += [source for source, _ in node.next_functions]
    last.metadata[_PLAIN] = True
    return x


_PLAIN = "tessel: plain"  # in the metadata of a node
_RECOMPUTED = "tessel: recomputed"  # the same, of a reentrant checkpoint


def _bridged(x: torch.Tensor) -> torch.Tensor:
    """A tensor, or the part of one, whose history between wrappers is one node of the parts' graph.

    The node holds the end of that history: `x`, or a view of it, would hold the node and be held by
    it for ever.
    """
    with DisableTorchFunctionSubclass():
        return _recorded(_WrapperHistory(x))


def _recorded(history: _WrapperHistory | _Recomputed) -> torch.Tensor:
    """What a history ends in, in the parts' graph."""
    first, *rest = inputs = history.inputs()
    given = {id(each) for each in inputs}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Of what the node gives only the values: it would hold the node and be held by it for ever.
        return x if id(x) in given else x.detach()

    # It stays with the result: a checkpoint in which a tensor is opened first must not count what
    # this saves, which is not saved when the checkpoint computes again.
    with saved_tensors_hooks(pack, lambda kept: kept):
        return record_product(history, first, *rest)


def opened(x: Any) -> tuple[torch.Tensor, Layout]:
    """The part of a spread tensor and its layout."""
    return open_part(x), x._layout


def made(part: torch.Tensor, layout: Layout) -> Tensor:
    """The spread tensor of a part, which must have the shape that the layout says."""
    assert tuple(part.shape) == layout.local_shape, (tuple(part.shape), layout)
    return Tensor(part, layout)


class _WrapperNode:
    """A piece of the wrappers' graph as one node of the parts' graph, and its derivative.

    It begins at leaves, and at results of reentrant checkpoints. Each of these is a node of its
    own, so that it computes once in a pass, as in one process, whoever uses what it gave.

    Args:
        ends: edges of the wrappers' graph, at which gradients come in.
        like: a tensor on the device of the result.
    """

    def __init__(self, ends: Sequence[Any], like: torch.Tensor) -> None:
        self.ends = ends
        # inputs may lie on other workers than the result: all workers of the job pass here
        self.group = group_of(range(num_workers()))
        nodes = [node for node, _ in ends]
        between = [*_nodes_behind(nodes, _is_checkpoint)]
        used = [*dict.fromkeys(each for each in ends if _is_checkpoint(each[0]))]
        for node in between:
            used += [each for each in node.next_functions if _is_checkpoint(each[0])]
        leaves = [node for node in between if hasattr(node, "variable")]
        behind = {*_nodes_behind([node for node, _ in used])}
        # A pass that stops at a checkpoint has no gradient for a leaf that is also behind it, and
        # other packages have reentrant checkpoints of their own. There one pass leads to all
        # leaves, for which torch has no `autograd.grad`.
        others = any(
            "CheckpointFunction" in node.name()
            for node in (*between, *behind)
            if not _is_checkpoint(node)
        )
        self.is_one_pass = others or any(node in behind for node in leaves)
        if self.is_one_pass:
            leaves = [node for node in _nodes_behind(nodes) if hasattr(node, "variable")]
            used = []
        self.leaves = [node.variable for node in leaves]
        self.used = [GradientEdge(*each) for each in dict.fromkeys(used)]
        found = [_recomputed(node, like) for node in dict.fromkeys(node for node, _ in used)]
        self.checkpoints = {each.node: each for each, _ in found}
        # Who makes the node of the parts' graph has them keep it alive.
        self._tokens = [token for _, token in found]

    def inputs(self) -> list[torch.Tensor]:
        """What the node is computed from in the parts' graph; called once."""
        tokens, self._tokens = self._tokens, []
        parts = [open_part(each) if isinstance(each, Tensor) else each for each in self.leaves]
        return parts + tokens

    def _derived(self, seeds: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs, by a pass over the wrappers' graph alone.

        Those of checkpoints wait there, until all who used their results have come by.
        """
        pairs = zip(self.ends, seeds, strict=True)
        given = [(end, seed) for end, seed in pairs if end[0] is not None and seed is not None]
        if not given:
            return (None,) * (len(self.leaves) + len(self.checkpoints))
        ends, seeds = tuple(GradientEdge(*end) for end, _ in given), tuple(s for _, s in given)
        # The engine itself: torch.autograd.grad would hand this on to the parts, and a pass with
        # torch's functions switched off would let the backward code of users gather everything.
        if self.is_one_pass:
            # As `backward()` leaves gradients, which a reentrant checkpoint asks for; what the
            # inputs have of other passes is put aside meanwhile.
            before = self._exchanged([None] * len(self.leaves))
            try:
                _run_backward(ends, seeds, True, False, (), True, accumulate_grad=True)
            finally:
                found = tuple(self._exchanged(before))
        else:
            found = _run_backward(
                ends,
                seeds,
                True,  # the parts' graph says when it is over
                torch.is_grad_enabled(),
                (*self.leaves, *self.used),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        grads: list[torch.Tensor | None] = []
        for each, of in zip(found, self.leaves, strict=False):
            # as the parts' graph has it: in the layout of its tensor, plain if that is
            if isinstance(each, Tensor) and isinstance(of, Tensor):
                each = open_part(each.move_to(of._layout))
            elif isinstance(each, Tensor):
                each = each.full()
            elif each is not None and isinstance(of, Tensor):
                each = of._layout.local_part(each)
            grads.append(each)
        for each, edge in zip(found[len(grads) :], self.used, strict=True):
            self.checkpoints[edge.node].give(edge.output_nr, each)
        return *grads, *(each.nothing for each in self.checkpoints.values())

    def _exchanged(self, new: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients of the leaves, of wrappers and not of their parts, which get others."""
        with DisableTorchFunctionSubclass():
            found = [each.grad for each in self.leaves]
            for each, grad in zip(self.leaves, new, strict=True):
                each.grad = grad
        return found


class _WrapperHistory(_WrapperNode):
    """What code that went round torch's functions made of its inputs, and its derivative.

    Args:
        result: whose history, between wrappers, leads to the inputs; it may be plain itself.
    """

    def __init__(self, result: torch.Tensor) -> None:
        self.layout = result._layout if isinstance(result, Tensor) else None
        self.part = result._part if isinstance(result, Tensor) else result.detach()
        super().__init__([get_gradient_edge(result)[:2]], self.part)

    def _apply(self, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        return self.part.detach()

    def vjp(
        self,
        grad: torch.Tensor,
        anchor: torch.Tensor | None,
        needs: Sequence[bool],
        *parts: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs, by a pass over the wrappers' graph alone."""
        spread = grad if self.layout is None else Tensor(grad, self.layout, records=False)
        return self._derived([spread])


class _Recomputed(_WrapperNode):
    """A reentrant checkpoint, which computes again when all gradients of its results are there.

    In the parts' graph it gives a token, which has no values: those who used its results hang on
    it, and leave their gradients here. So it need not be known who used which, or will.

    Args:
        node: of the wrappers' graph.
        like: a tensor on the device of the results.
    """

    def __init__(self, node: Any, like: torch.Tensor) -> None:
        super().__init__(node.next_functions, like)
        self.node = node
        self.nothing = like.new_empty(0)
        # by the passes that run, and the number of the result
        self._grads: dict[int, dict[int, torch.Tensor]] = {}
        self.token: Callable[[], torch.Tensor | None] = lambda: None

    def _apply(self, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        return self.nothing.detach()

    def give(self, number: int, grad: torch.Tensor | None) -> None:
        """Add a gradient of a result in the pass that runs now."""
        if grad is not None:
            found = self._grads.setdefault(torch._C._current_graph_task_id(), {})
            found[number] = found[number] + grad if number in found else grad

    def vjp(
        self,
        grad: torch.Tensor,
        anchor: torch.Tensor | None,
        needs: Sequence[bool],
        *parts: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what the checkpoint got."""
        grads = self._grads.pop(torch._C._current_graph_task_id(), {})
        if not grads:
            return (None,) * len(parts)
        # zeros for results that nobody used, as torch gives them
        given = [
            grads[number]
            if number in grads
            else torch.zeros((), dtype=kind.dtype, device=kind.device).expand(tuple(kind.shape))
            for number, kind in enumerate(self.node._input_metadata)
        ]
        with torch.no_grad():  # it has no derivatives of higher order
            found = self.node.apply(*given)
            _, _, *inputs = found  # of the function and of a setting there is no gradient
            return self._derived([inputs[place] for place in self.node.tensor_indices])


def _is_checkpoint(node: Any) -> bool:
    """Whether a node of autograd's graph is a reentrant checkpoint of torch."""
    return isinstance(node, BackwardCFunction) and issubclass(
        getattr(node, "_forward_cls", object), CheckpointFunction
    )


def _recomputed(node: Any, like: torch.Tensor) -> tuple[_Recomputed, torch.Tensor]:
    """A reentrant checkpoint in the parts' graph, and its token: one for all who use it."""
    known = node.metadata.get(_RECOMPUTED, lambda: None)()
    token = None if known is None else known.token()
    if token is None:
        known = _Recomputed(node, like)
        token = _recorded(known)
        # A node that held what holds it would live for ever. The token lives as long as any node
        # of the parts' graph that was computed from it.
        known.token, node.metadata[_RECOMPUTED] = weakref.ref(token), weakref.ref(known)
    return known, token


def nodes_of(x: torch.Tensor) -> Iterator[Any]:
    """All nodes of autograd's graph that a tensor was computed by."""
    return _nodes_behind([x.grad_fn])


def _nodes_behind(
    nodes: Sequence[Any], is_end: Callable[[Any], bool] | None = None
) -> Iterator[Any]:
    """These nodes and all behind them, but for ends and what is behind these alone."""
    seen: set[Any] = set()
    left = [*nodes]
    while left:
        node = left.pop()
        if node is None or node in seen or (is_end is not None and is_end(node)):
            continue
        seen.add(node)
        yield node
        left += [source for source, _ in node.next_functions]
