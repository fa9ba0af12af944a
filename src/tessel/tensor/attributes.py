"""The attributes of a spread tensor: its own, and those that it takes from its part.

Most of them describe the whole, and the wrapper has them. The state of autograd is that of the
part. Values can be read from a tensor that every worker has whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from tessel import transport
from tessel.core.layout import Layout
from tessel.tensor.table import Arguments, Settings, made, rule
from tessel.tensor.tensor import Tensor, absent, open_part, open_plain

OF_THE_WHOLE = frozenset(
    (
        *("get shape", "get ndim", "get is_cuda", "get itemsize"),
        *("get is_mps", "get is_xpu", "get is_cpu", "get is_sparse", "get is_quantized"),
        *("get is_meta", "get nbytes", "get is_sparse_csr", "get is_mkldnn"),
        *("get is_vulkan", "get is_ipu", "get is_xla", "get is_mtia", "get is_maia"),
        *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride"),
        *("is_floating_point", "is_complex", "get_device", "element_size", "__hash__"),
        *("is_signed", "is_same_size", "is_inference", "is_storage_offset", "storage_offset"),
        *("get names", "get name", "has_names", "__dir__", "__dlpack_device__"),
        "_has_compatible_shallow_copy_type",
    )
)
OF_THE_PART = frozenset(
    (
        *(
            "get output_nr",
            "get _base",
            "get _version",
            "get retains_grad",
            "is_contiguous",
            "is_conj",
            "is_neg",
        ),
        *("get _backward_hooks", "get _post_accumulate_grad_hooks", "is_pinned", "is_shared"),
    )
)


def of_the_whole(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The attribute of the wrapper, which has the shape, dtype and device of the whole."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def of_the_part(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The attribute of the part, if it is that of the whole too, or belongs to autograd's graph."""
    return func(open_part(args[0]), *args[1:], **kwargs)


_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


@rule("get is_nested")
def is_nested(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """False for a spread tensor; raises in `flex_attention`, which reads this first.

    That passes its operands to a compiler without reading anything else of them, so this is the
    only place for an error.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):  # our own frames, and that of the caller
        if frame is not None and frame.f_globals.get("__name__") == _FLEX_ATTENTION:
            raise NotImplementedError(
                f"flex_attention compiles its own code and has no rule for spread tensors, got "
                f"{args[0]._layout}; use torch.nn.functional.scaled_dot_product_attention with "
                f"is_causal=True or attn_mask=..., a tensor of what the mask_mod or score_mod "
                f"gives: it leaves batch, heads and sequence split"
            )
        frame = None if frame is None else frame.f_back
    return of_the_whole(name, func, args, kwargs)


_COLLECTIVES = "torch.distributed.distributed_c10d"


@rule("get dtype")
def dtype(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The dtype of the part; raises in collectives for lists of split tensors, which read this.

    Nothing else is read of lists of lists, which go to C++ code that reads memory.
    """
    asks = sys._getframe(3)  # the caller of `__torch_function__`, which calls `above`
    if asks.f_globals.get("__name__") == _COLLECTIVES:
        check_values(args[0], "a collective of torch.distributed")
    return of_the_whole(name, func, args, kwargs)


_BATCH_NORMS = "torch.nn.modules.batchnorm"


@rule("get device")
def device(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The device of the part; raises in `nn.SyncBatchNorm`, which reads this before its exchange.

    It would add up the statistics of all processes, each of which already has those of the whole.
    No other batch norm reads it.
    """
    asks = sys._getframe(3)  # the caller of `__torch_function__`, which calls `above`
    if asks.f_globals.get("__name__") == _BATCH_NORMS:
        raise NotImplementedError(
            f"torch's SyncBatchNorm exchanges statistics of plain tensors between processes, got "
            f"a spread one, {args[0]._layout}: convert the model, "
            f"tessel.nn.distribute_module(model, P_x), where it has the statistics of the whole, "
            f"or use torch.nn.BatchNorm1d, 2d or 3d, which have those of a spread tensor"
        )
    return of_the_whole(name, func, args, kwargs)


@rule("get requires_grad", "get grad_fn", "get is_leaf")
def history(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The attribute of the part, or of the wrapper if code bypassed torch's functions."""
    x = args[0]
    with DisableTorchFunctionSubclass():
        if x.grad_fn is not None or (name == "get requires_grad" and "_unfinished" in x.__dict__):
            return func(x)
    return func(open_part(x))


@rule("get grad")
def gradient(name: str, func: Any, args: Arguments, kwargs: Settings) -> Tensor | None:
    """The gradient, in the layout of its tensor."""
    grad = args[0]._part.grad
    return None if grad is None else Tensor(grad, args[0]._layout)


@rule("set grad")
def set_gradient(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    x, grad = args
    x._part.grad = None if grad is None else part_like(grad, x._layout)


@rule("delete grad")
def delete_gradient(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    args[0]._part.grad = None


@rule("set data")
def set_data(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    """Give the part other values, and the wrapper their dtype and device."""
    x, new = args
    part = part_like(new, x._layout).detach()
    x._part.data = part
    if part.dtype != x.dtype or part.device != x.device:
        with DisableTorchFunctionSubclass():
            func(x, Tensor(part, x._layout))


@rule("requires_grad_", "set requires_grad")
def set_requires_grad(name: str, func: Any, args: Arguments, kwargs: Settings) -> Tensor | None:
    """Set `requires_grad` of the part, and of the wrapper, which some code reads instead."""
    x, *rest = args
    needs = bool(rest[0] if rest else kwargs.get("requires_grad", True))
    open_part(x).requires_grad_(needs)
    with DisableTorchFunctionSubclass():
        x.requires_grad_(needs)
    return x if name == "requires_grad_" else None


@rule("detach_")
def detach_in_place(name: str, func: Any, args: Arguments, kwargs: Settings) -> Tensor:
    x: Tensor = args[0]
    x._part = open_part(x)
    x.__dict__.pop("_bridge", None)
    func(x._part)
    with DisableTorchFunctionSubclass():
        func(x)
        x.requires_grad_(False)
    return x


def part_like(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This worker's part of a tensor in a layout; a plain tensor is whole on all workers."""
    if not isinstance(value, Tensor):
        return layout.local_part(value)
    return open_part(value.move_to(layout))


@rule("register_hook")
def register_hook(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Register a hook that gets the gradient as a spread tensor."""
    x, hook = args
    layout = x._layout

    def spread_hook(grad: torch.Tensor) -> torch.Tensor | None:
        found = hook(Tensor(grad, layout))
        return None if found is None else part_like(found, layout)

    x.__dict__["_is_hooked"] = True
    return _derived(x).register_hook(spread_hook)


@rule("retain_grad")
def retain_grad(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    _derived(args[0]).retain_grad()


@rule("register_post_accumulate_grad_hook")
def register_post_accumulate_grad_hook(
    name: str, func: Any, args: Arguments, kwargs: Settings
) -> Any:
    """Register a hook that gets the spread tensor, with its gradient."""
    x, hook = args
    return x._part.register_post_accumulate_grad_hook(lambda part: hook(x))


@rule("backward")
def backward(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    """`Tensor.backward` and `torch.autograd.backward` on the parts."""
    settings = dict(zip(_BACKWARD[func is torch.autograd.backward], args[1:], strict=False))
    settings |= kwargs
    single = isinstance(args[0], torch.Tensor)
    outputs: Sequence[Any] = (args[0],) if single else args[0]
    key = "grad_tensors" if func is torch.autograd.backward else "gradient"
    given = settings.pop(key, None)
    grads = [given] * len(outputs) if given is None or isinstance(given, torch.Tensor) else given
    inputs = settings.pop("inputs", None)
    torch.autograd.backward(
        [_loss(each) for each in outputs],
        [_seed(each, grad) for each, grad in zip(outputs, grads, strict=True)],
        inputs=None if inputs is None else [_derived(each) for each in _listed(inputs)],
        **settings,
    )


_BACKWARD = (
    ("gradient", "retain_graph", "create_graph", "inputs"),
    ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs"),
)


@rule("grad")
def derive(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.autograd.grad` on the parts; gradients have the layouts of their tensors."""
    settings = dict(zip(_GRAD, args, strict=False)) | kwargs
    outputs, inputs = _listed(settings.pop("outputs")), _listed(settings.pop("inputs"))
    given = settings.pop("grad_outputs", None)
    if settings.get("is_grads_batched"):
        raise NotImplementedError("torch.autograd.grad(is_grads_batched=True) of a spread tensor")
    grads = [None] * len(outputs) if given is None else _listed(given)
    found = torch.autograd.grad(
        [_loss(each) for each in outputs],
        [_derived(each) for each in inputs],
        [_seed(each, grad) for each, grad in zip(outputs, grads, strict=True)],
        **settings,
    )
    return tuple(
        made(grad, each._layout) if isinstance(each, Tensor) and grad is not None else grad
        for grad, each in zip(found, inputs, strict=True)
    )


_GRAD = (
    *("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs"),
    *("allow_unused", "is_grads_batched", "materialize_grads"),
)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _derived(value: Any) -> Any:
    """The tensor of autograd's graph that represents one whose gradient is computed."""
    if isinstance(value, Tensor) and "_was_cut" in value.__dict__:
        raise ValueError(
            f"the gradient of this tensor of shape {tuple(value._layout.shape)} is unknown: slices "
            f"were computed without the rest of it; ask for it (retain_grad, register_hook) before "
            f"the first slice is taken, or derive by the slices"
        )
    with torch.enable_grad():
        return _raw(value)


def _raw(value: Any) -> Any:
    return open_part(value) if isinstance(value, Tensor) else value


def _loss(value: Any) -> Any:
    """The tensor of autograd's graph that represents one that is differentiated."""
    # Also where nothing is recorded: checkpoints differentiate in a backward pass.
    with torch.enable_grad():
        return open_plain(value) if type(value) is torch.Tensor else _raw(value)


def _seed(output: Any, grad: Any) -> torch.Tensor | None:
    """The gradient of an output, in its layout; None for a scalar that all workers have."""
    if not isinstance(output, Tensor):
        return grad.full() if isinstance(grad, Tensor) else grad
    if grad is not None:
        return part_like(grad, output._layout)
    if output._layout.is_outside:  # no values here, but a part in the other workers' exchanges
        return torch.zeros_like(open_part(output))
    if output._layout.shape and output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    check_values(output, "backward()")
    return None


def check_values(x: Tensor, what: str) -> None:
    """Raise unless this worker has all values."""
    if x._layout.is_outside:
        raise absent(what, x._layout)
    if not x._layout.is_whole:
        raise ValueError(
            f"{what} needs all values, and this worker has a part of {x._layout}; gather them "
            f"first, on all workers: x.full()"
        )


@rule(
    *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"),
    *("__complex__", "__array_wrap__", "is_nonzero"),
)
def value(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Values of a tensor that every worker has whole."""
    for each in args[:2]:
        if isinstance(each, Tensor):
            check_values(each, name.strip("_"))
    return func(*(_raw(each) for each in args), **kwargs)


@rule("equal", "allclose")
def alike(name: str, func: Any, args: Arguments, kwargs: Settings) -> bool:
    """The same answer on all workers, reduced over their parts."""
    named = [kwargs[key] for key in ("input", "other") if key in kwargs]
    x, y, *bounds = (*args, *named) if len(args) < 2 else args
    rest = {key: each for key, each in kwargs.items() if key not in ("input", "other")}
    if all(each._layout.is_whole for each in (x, y) if isinstance(each, Tensor)):
        return bool(value(name, func, (x, y, *bounds), rest))
    if name == "allclose":
        return bool(torch.isclose(x, y, *bounds, **rest).all())
    nothing = (torch.empty(0, dtype=each.dtype, device=each.device) for each in (x, y))
    return bool(func(*nothing)) and x.shape == y.shape and bool((x == y).all())


@rule("__contains__")
def contains(name: str, func: Any, args: Arguments, kwargs: Settings) -> bool:
    """Whether any worker has an equal value."""
    return bool((args[0] == args[1]).any())


@rule("__format__")
def formatted(name: str, func: Any, args: Arguments, kwargs: Settings) -> str:
    """The formatted number of a 0-d tensor, as in torch, else its repr; nothing is sent."""
    x, form = args
    layout = x._layout
    is_here = layout.is_whole and not layout.is_outside
    is_shown = is_here and (form or not layout.shape)
    return format(open_part(x).detach(), form) if is_shown else repr(x)


@rule("__repr__", "_str")
def shown(name: str, func: Any, args: Arguments, kwargs: Settings) -> str:
    """The global shape, the layout, and this worker's values; nothing is sent."""
    x = args[0]
    if "_unfinished" in x.__dict__:  # to finish it takes all workers, and others may not print it
        return f"tessel.Tensor(shape={tuple(x._layout.shape)}, {x._layout}, not computed yet)"
    layout, part = x._layout, x._part
    if layout.is_whole and not layout.is_outside:
        where = f"whole on {layout.partition}"
        values = str(part.detach())
    else:
        where = f"{layout}"
        box = ", ".join(f"{start}:{stop}" for start, stop in layout.box() or ())
        held = "nothing" if layout.is_outside else f"[{box}]:\n{part.detach()}"
        values = f"worker {transport.this_worker()} holds {held}"
    grad = ", requires_grad=True" if part.requires_grad else ""
    return f"tessel.Tensor(shape={tuple(layout.shape)}, {where}{grad})\n{values}"


@rule("__iter__")
def iterate(name: str, func: Any, args: Arguments, kwargs: Settings) -> Iterator[Any]:
    if not args[0]._layout.shape:
        raise TypeError("iteration over a 0-d tensor")
    return iter(args[0].unbind(0))


@rule("as_subclass", "__dlpack__", "data_ptr", "untyped_storage", "storage", "share_memory_")
def refused(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Raise for functions that would mistake the part for the whole."""
    raise ValueError(
        f"`{name}` of a spread tensor would take this worker's part for the whole; write x.local "
        f"for the part, or x.full() for the whole"
    )
