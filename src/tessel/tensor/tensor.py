"""The spread tensor: this worker's part, its layout, and the shape of the whole.

A `Tensor` has no storage of its own. It holds this worker's part, a plain tensor, and represents
the whole: `x.shape` is the global shape, and torch functions compute what they do in one process,
by the table of rules in `tessel.tensor.table`.

Two levels of autograd meet here.

*The parts' graph.* Rules compute with parts, and movements between them are linear operators that
autograd knows. So the graph of a computation is that of the parts; `x.grad`, hooks and `backward`
are delegated to the part, and no rule has a backward of its own.

*The wrappers' graph.* Code that bypasses torch's functions gets the wrapper itself: functions with
their own backward passes, backward hooks of modules, scripted code, C++. Torch records such code
between wrappers, which therefore require gradients when their parts do. `open_part` turns such a
history into one node of the parts' graph. The data that such code reads come from
`__torch_dispatch__`, which never takes a part for the whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
FRIENDS = (torch.Tensor, torch.nn.Parameter)  # kinds that are whole beside spread tensors

# other kinds with layouts, and functions that convert them to spread tensors on a partition; with
# None, after an agreement, on one of their own
converters: dict[type, Callable[[Any, Partition | None], Tensor]] = {}


def is_spread(x: Any) -> bool:
    """Whether a tensor is spread, or wraps one that is, in a transform of `torch.func`.

    Transforms wrap all tensors that they are given: a wrapper of torch's own kind with the shape of
    the whole may be spread inside, and is neither plain nor a part.
    """
    if isinstance(x, Tensor):
        return True
    # compilers do not trace wrappers, and cannot inspect them
    if torch.compiler.is_dynamo_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    while isinstance(x, torch.Tensor) and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return isinstance(x, Tensor)


class _Missing:
    """A descriptor in the place of a part that does not exist.

    If the part is not computed yet, it is computed now. Else it was taken away, and access raises:
    see `outdate_copies`, `withhold_original`.
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
                f"this tensor of shape {tuple(x._layout.shape)} was changed in place through a "
                "view, which is a copy here, since values had to move: write it back, as in "
                "x[items] = view, or use x[items] += y without a name for the view"
            )
        raise ValueError(
            f"this tensor of shape {tuple(x._layout.shape)} is a copy, since values had to move, "
            "where torch has a view of another tensor, which was changed in place afterwards: "
            "take the view after the change, or call .clone() before it"
        )


class Tensor(torch.Tensor):
    """A tensor that is spread over workers, with its layout.

    It is made by `tessel.spread`, `tessel.from_local`, functions such as `tessel.zeros`, and by
    torch's functions of other spread tensors. Its shape, dtype and device are those of the whole.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> x = tessel.spread(torch.ones(4, 6), P)
    >>> x.shape, x.local.shape, float(x.sum())
    (torch.Size([4, 6]), torch.Size([4, 6]), 24.0)
    """

    _part: torch.Tensor = _Missing()  # type: ignore[assignment]  # read if there is no part
    _layout: Layout
    _originals: tuple[Any, ...]  # aliases that this is a copy of, and torch would have a view of
    above: ClassVar[Handler]  # calls torch functions
    beside: ClassVar[Any]  # calls torch functions of spread tensors and other kinds with layouts
    below: ClassVar[Handler]  # calls operators for code that bypasses torch's functions
    as_shard: ClassVar[Callable[[Tensor], torch.Tensor]]  # set by `tessel.distributed`
    as_dtensor: ClassVar[Callable[[Tensor, Any], Any]]  # set by `tessel.interop`

    @staticmethod
    def __new__(cls, part: torch.Tensor, layout: Layout, records: bool = True) -> Tensor:
        new: Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            dtype=part.dtype,
            device=part.device,
            requires_grad=records and part.requires_grad,
        )
        # C++ code that accesses the memory of the wrapper gets an error instead of a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(new)
        new._part = part
        new._layout = layout
        new._originals = ()
        return new

    # torch's own would take the arguments as values; that of object ignores them
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
        """The box of the whole that each worker stores, and the meaning of copies."""
        # Torch's own code reads it to see whether a tensor is dense, as `torch.masked` does.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return torch.strided  # type: ignore[return-value]
        return self._layout

    @property
    @untraced
    def local(self) -> torch.Tensor:
        """This worker's part, a plain tensor; gradients flow through it."""
        part = open_part(self)
        with DisableTorchFunctionSubclass():
            return part.view_as(part)

    @untraced
    def full(self) -> torch.Tensor:
        """The whole tensor, plain, on every worker of its partition, as one shared value.

        Gradients flow through it.
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
        """Move the tensor to another layout, by a `Move`; all workers of both layouts call this.

        Args:
            where: a layout of the same shape, or a partition whose axis d splits dimension d.
        """
        target = layout_on(where, self._layout.shape)
        if target == self._layout:
            return self
        moved = move(self._layout, target)
        part = open_part(self)
        if target.is_outside and not moved.takes_part:
            # empty, but it depends on the part: this worker takes part in the backward pass
            return Tensor(part.reshape(-1)[:0], target)
        return Tensor(moved.apply(part), target)

    @untraced
    def shard(self) -> torch.Tensor:
        """This worker's part as a shard of parallel layers: it has the shape of the part.

        It shares memory with this tensor, gradients flow through it, and `y.spread()` is this
        tensor again. For a tensor that every worker has whole, it is the whole, plain. Tensors that
        are split along several dimensions, or unevenly, raise ValueError: move them with `move_to`
        first.
        """
        return Tensor.as_shard(self)

    @untraced
    def to_dtensor(self, mesh: Any = None) -> Any:
        """Convert to a `torch.distributed.tensor.DTensor`, without a copy; gradients flow through.

        An axis that splits dimension d becomes `Shard(d)`, shared copies become `Replicate()`,
        separate ones `Partial()`. `tessel.from_dtensor` converts back.

        Args:
            mesh: a `DeviceMesh` with the same workers on the same grid; None for the mesh of the
                last DTensor on this grid that `from_dtensor` converted, or else for
                `partition.to_mesh()`, for which all workers of the job call this.

        Raises:
            ValueError: if placements cannot express the layout, such as parts that differ from
                those of `torch.chunk`.
        """
        return Tensor.as_dtensor(self, mesh)

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = new = Tensor(deepcopy(self._part, memo), self._layout)
            if getattr(self, "_is_param", False):  # torch's mark of a Parameter
                new._is_param = True
        found: Tensor = memo[id(self)]
        return found

    @untraced
    def __reduce_ex__(self, protocol: Any) -> Any:
        part = self._part.detach().requires_grad_(self._part.requires_grad)
        is_parameter = getattr(self, "_is_param", False)
        return restored, (part, self._layout, is_parameter, this_worker())


# The message of compilers where a graph must not break, as inside of a higher-order operator.
_METHOD: Any = Tensor.__torch_function__
_METHOD.__func__._torchdynamo_disable_msg = (
    "functions of spread tensors follow rules, which compilers call but cannot trace; instead of "
    "flex_attention use torch.nn.functional.scaled_dot_product_attention with a mask"
)


def absent(what: str, layout: Layout) -> ValueError:
    """The error to raise on a worker outside of a partition that needs values."""
    return ValueError(
        f"{what} needs values, and worker {this_worker()} is outside of {layout.partition}, which "
        "has them; call it on these workers alone (`if x.layout.partition.active:`), or move the "
        "tensor to others first, on all workers: x.move_to(...)"
    )


def restored(
    part: torch.Tensor, layout: Layout, is_parameter: bool, worker: int | None = None
) -> Tensor:
    """Restore a spread tensor that this worker wrote into a file.

    The file of another worker has another part, which would be taken for this worker's own.
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
    """The move from one layout to another."""
    return Move(source, target)


def layout_on(where: Partition | Layout, shape: Sequence[int]) -> Layout:
    """The layout of a tensor of this shape: the given one, or a balanced one on a partition."""
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
            # When a checkpoint recomputes, nested ones get their inputs without their former
            # history, in wrappers made by C++ code, which require gradients. Their parts must, too,
            # so that the same tensors are saved as before.
            if x.requires_grad and not part.requires_grad:
                x._part = part = part.detach().requires_grad_()
            if x.requires_grad and not torch.is_grad_enabled() and "_guarded" not in x.__dict__:
                # perhaps in a function with its own backward pass, whose result may be plain
                x.__dict__["_guarded"] = True
                x.register_hook(_arrived)
            return part
        if not torch.is_grad_enabled():
            return x._part.detach()
        x.__dict__["_bridge"] = bridge = _bridged(x)
        return bridge


def _arrived(grad: torch.Tensor) -> None:
    """Raise where a gradient ends at a wrapper that no node of the parts' graph asked for."""
    if not _WrapperNode.running:
        raise NotImplementedError(
            "the gradient of a spread tensor would be lost: a torch.autograd.Function computed a "
            "plain tensor from it, and the loss was computed from plain tensors alone; return a "
            "spread tensor from its forward, such as one written into a tessel.zeros(…, where=…)"
        )


def open_plain(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor, with all of its history in the parts' graph.

    A function with its own backward pass may write values of spread tensors into a plain one and
    return it. Its gradients would end at wrappers, and parts would never get them.
    """
    if not torch.is_grad_enabled() or x.grad_fn is None:
        return x
    if torch._C._are_functorch_transforms_active():  # they have a graph of their own
        return x
    last: Any = x.grad_fn
    nodes, seen = [last], set[Any]()
    while nodes:
        node = nodes.pop()
        # nodes of the parts' graph do not lead to wrappers, nor do those that were searched before
        if node is None or node in seen or _PLAIN in node.metadata or operator_of(node) is not None:
            continue
        if isinstance(getattr(node, "variable", None), Tensor):
            return _bridged(x)
        seen.add(node)
        nodes += [source for source, _ in node.next_functions]
    last.metadata[_PLAIN] = True
    return x


_PLAIN = "tessel: plain"  # a key in the metadata of a node
_RECOMPUTED = "tessel: recomputed"  # the same, for a reentrant checkpoint


def _bridged(x: torch.Tensor) -> torch.Tensor:
    """A tensor, or its part, with its history between wrappers as one node of the parts' graph.

    The node holds the end of that history: `x`, or a view of it, would hold the node and form a
    reference cycle.
    """
    with DisableTorchFunctionSubclass():
        return _recorded(_WrapperHistory(x))


def _recorded(history: _WrapperHistory | _Recomputed) -> torch.Tensor:
    """The result of a history in the parts' graph."""
    first, *rest = inputs = history.inputs()
    given = {id(each) for each in inputs}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Of the node's result only the values: the result itself would form a reference cycle.
        return x if id(x) in given else x.detach()

    # Saved tensors stay with the node: a checkpoint in which a tensor is first opened must not
    # count them, since they are not saved again when it recomputes.
    with saved_tensors_hooks(pack, lambda kept: kept):
        return record_product(history, first, *rest)


def opened(x: Any) -> tuple[torch.Tensor, Layout]:
    """The part of a spread tensor and its layout."""
    return open_part(x), x._layout


def made(part: torch.Tensor, layout: Layout) -> Tensor:
    """The spread tensor of a part, which must have the local shape of the layout."""
    assert tuple(part.shape) == layout.local_shape, (tuple(part.shape), layout)
    return Tensor(part, layout)


@contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Call no hooks of leaves: the parts' pass calls them, for the whole gradient."""
    with DisableTorchFunctionSubclass():
        hooks: list[Any] = [
            each
            for leaf in leaves
            for each in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks)
            if each
        ]
    put_aside = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()  # autograd refers to these dictionaries
    try:
        yield
    finally:
        for each, them in zip(hooks, put_aside, strict=True):
            each.update(them)


class _WrapperNode:
    """A piece of the wrappers' graph as one node of the parts' graph, and its derivative.

    It begins at leaves, and at results of reentrant checkpoints. Each checkpoint is a node of its
    own, so that it recomputes once in a pass, as in one process, whoever uses its results.

    Args:
        ends: the edges of the wrappers' graph at which gradients arrive.
        like: a tensor on the device of the result.
    """

    running: ClassVar[int] = 0  # passes over the wrappers' graph, of any thread

    def __init__(self, ends: Sequence[Any], like: torch.Tensor) -> None:
        self.ends = ends
        # inputs may be on other workers than the result: all workers of the job come here
        self.group = group_of(range(num_workers()))
        nodes = [node for node, _ in ends]
        between = [*_nodes_behind(nodes, _is_checkpoint)]
        used = [*dict.fromkeys(each for each in ends if _is_checkpoint(each[0]))]
        for node in between:
            used += [each for each in node.next_functions if _is_checkpoint(each[0])]
        leaves = [node for node in between if hasattr(node, "variable")]
        behind = {*_nodes_behind([node for node, _ in used])}
        # A pass that stops at a checkpoint has no gradient for a leaf that is also behind it, and
        # other packages have their own reentrant checkpoints. Then one pass must reach all leaves,
        # for which torch has no `autograd.grad`.
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
        # The node of the parts' graph that takes them as inputs keeps them alive.
        self._tokens = [token for _, token in found]

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the node in the parts' graph; called once."""
        tokens, self._tokens = self._tokens, []
        parts = [open_part(each) if isinstance(each, Tensor) else each for each in self.leaves]
        return parts + tokens

    def _derived(self, seeds: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs, by a pass over the wrappers' graph alone.

        Gradients of checkpoints wait there until all uses of their results have added theirs.
        """
        pairs = zip(self.ends, seeds, strict=True)
        given = [(end, seed) for end, seed in pairs if end[0] is not None and seed is not None]
        if not given:
            return (None,) * (len(self.leaves) + len(self.checkpoints))
        ends, seeds = tuple(GradientEdge(*end) for end, _ in given), tuple(s for _, s in given)
        _WrapperNode.running += 1
        try:
            with _without_hooks(self.leaves):
                found = self._passed(ends, seeds)
        finally:
            _WrapperNode.running -= 1
        grads: list[torch.Tensor | None] = []
        for each, of in zip(found, self.leaves, strict=False):
            # as in the parts' graph: in the layout of its tensor, or plain if that is plain
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

    def _passed(self, ends: Any, seeds: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of leaves and of used checkpoints.

        By the engine itself: torch.autograd.grad would delegate to the parts, and a pass with
        torch's functions switched off would let users' backward code gather everything.
        """
        if not self.is_one_pass:
            return _run_backward(
                ends,
                seeds,
                True,  # only the parts' graph knows when it can be freed
                torch.is_grad_enabled(),
                (*self.leaves, *self.used),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        # Accumulate gradients as `backward()` does, which a reentrant checkpoint requires;
        # meanwhile, gradients of other passes are put aside.
        before = self._exchanged([None] * len(self.leaves))
        try:
            _run_backward(ends, seeds, True, False, (), True, accumulate_grad=True)
        finally:
            found = tuple(self._exchanged(before))
        return found

    def _exchanged(self, new: Sequence[Any]) -> list[torch.Tensor | None]:
        """Replace the gradients of the leaves, those of wrappers; return the former ones."""
        with DisableTorchFunctionSubclass():
            found = [each.grad for each in self.leaves]
            for each, grad in zip(self.leaves, new, strict=True):
                each.grad = grad
        return found


class _WrapperHistory(_WrapperNode):
    """The result of code that bypassed torch's functions, and its derivative.

    Args:
        result: the result, possibly plain, whose history between wrappers leads to the inputs.
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


def in_users_backward() -> bool:
    """Whether code between wrappers is differentiated now, where plain tensors are whole."""
    return _WrapperNode.running > 0


class _Recomputed(_WrapperNode):
    """A reentrant checkpoint, which recomputes when all gradients of its results have arrived.

    In the parts' graph its result is a token without values: nodes that use the checkpoint's
    results depend on it, and leave their gradients here. So it need not be known which nodes use
    them.

    Args:
        node: the node of the wrappers' graph.
        like: a tensor on the device of the results.
    """

    def __init__(self, node: Any, like: torch.Tensor) -> None:
        super().__init__(node.next_functions, like)
        self.node = node
        self.nothing = like.new_empty(0)
        # by running pass, and by the number of the result
        self._grads: dict[int, dict[int, torch.Tensor]] = {}
        self.token: Callable[[], torch.Tensor | None] = lambda: None

    def _apply(self, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        return self.nothing.detach()

    def give(self, number: int, grad: torch.Tensor | None) -> None:
        """Add a gradient of a result in the current pass."""
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
        """The gradients of the inputs of the checkpoint."""
        grads = self._grads.pop(torch._C._current_graph_task_id(), {})
        if not grads:
            return (None,) * len(parts)
        # zeros for results that were not used, as in torch
        given = [
            grads[number]
            if number in grads
            else torch.zeros((), dtype=kind.dtype, device=kind.device).expand(tuple(kind.shape))
            for number, kind in enumerate(self.node._input_metadata)
        ]
        with torch.no_grad():  # it has no derivatives of higher order
            found = self.node.apply(*given)
            _, _, *inputs = found  # the first two arguments are a function and a flag
            return self._derived([inputs[place] for place in self.node.tensor_indices])


def _is_checkpoint(node: Any) -> bool:
    """Whether a node of autograd's graph is a reentrant checkpoint of torch."""
    return isinstance(node, BackwardCFunction) and issubclass(
        getattr(node, "_forward_cls", object), CheckpointFunction
    )


def _recomputed(node: Any, like: torch.Tensor) -> tuple[_Recomputed, torch.Tensor]:
    """A reentrant checkpoint in the parts' graph, and its token: one for all of its uses."""
    known = node.metadata.get(_RECOMPUTED, lambda: None)()
    token = None if known is None else known.token()
    if token is None:
        known = _Recomputed(node, like)
        token = _recorded(known)
        # Weak, to avoid reference cycles. The token lives as long as any node of the parts' graph
        # that was computed from it.
        known.token, node.metadata[_RECOMPUTED] = weakref.ref(token), weakref.ref(known)
    return known, token


def nodes_of(x: torch.Tensor) -> Iterator[Any]:
    """All nodes of autograd's graph by which a tensor was computed."""
    return _nodes_behind([x.grad_fn])


def _nodes_behind(
    nodes: Sequence[Any], is_end: Callable[[Any], bool] | None = None
) -> Iterator[Any]:
    """These nodes and all behind them, but not ends, nor nodes that are only behind ends."""
    seen: set[Any] = set()
    left = [*nodes]
    while left:
        node = left.pop()
        if node is None or node in seen or (is_end is not None and is_end(node)):
            continue
        seen.add(node)
        yield node
        left += [source for source, _ in node.next_functions]
