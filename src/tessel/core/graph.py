"""How a compiler sees this library: operators are opaque nodes of its graph, layers not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from tessel.core.handles import object_of

F = TypeVar("F", bound=Callable[..., Any])


@torch.library.custom_op("tessel::apply", mutates_args=())
def node(x: Tensor, handle: str) -> Tensor:
    """Apply the operator of this handle."""
    return object_of(handle)._apply(x)


@node.register_fake
def _(x: Tensor, handle: str) -> Tensor:
    return x.new_empty(object_of(handle).codomain.local_shape)


def eagerly(function: F) -> F:
    """Let compiled code call a function as it is, outside of its graph.

    What it moves depends on an agreement of all workers at each call.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def untraced(function: F) -> F:
    """Keep compilers out of a function, and of all that it calls: what they compile ends before it.

    A compiler that meets something it cannot trace calls it, and would go on with compiling what is
    called inside. A call of the function itself is as fast as before.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the function, of what it calls
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
