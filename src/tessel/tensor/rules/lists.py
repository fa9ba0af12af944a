"""Functions of lists of tensors, as optimizers use them: the function of each tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.tensor.table import Arguments, Settings, rule

_EACH = "_foreach_"
# where the function of one tensor has another name, or none for tensors and numbers alike
_SINGLE: dict[str, Any] = {
    "norm": torch.linalg.vector_norm,
    "maximum": Tensor.clamp_min,
    "maximum_": Tensor.clamp_min_,
    "minimum": Tensor.clamp_max,
    "minimum_": Tensor.clamp_max_,
    "pow": torch.pow,  # also of a number
}
_SCALED = ("addcmul", "addcdiv", "addcmul_", "addcdiv_")  # by a fourth argument, their `value`


def _single(name: str) -> Any:
    """The function of one tensor; None if there is none."""
    base = name.removeprefix(_EACH)
    return _SINGLE.get(base) or getattr(Tensor, base, None)


_NAMES = [each for each in dir(torch._C._VariableFunctions) if each.startswith(_EACH)]


@rule(*filter(_single, _NAMES), plain=True)
def of_each(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The results of the function of one tensor, for each place of the lists."""
    base, named = name.removeprefix(_EACH), dict(kwargs)
    if base in _SCALED and len(args) > 3:
        args, named = args[:3], {"value": args[3]} | named
    if isinstance(named.get("value"), Tensor):  # one number for each
        named["value"] = named["value"].tolist()
    lists = [each for each in (*args, *named.values()) if isinstance(each, list | tuple)]
    if len({len(each) for each in lists}) > 1:
        lengths = [len(each) for each in lists]
        raise RuntimeError(f"`{name}`: all lists must have the same length, got {lengths}")

    def at(value: Any, place: int) -> Any:
        return value[place] if isinstance(value, list | tuple) else value

    results = [
        _single(name)(
            *(at(each, place) for each in args),
            **{key: at(each, place) for key, each in named.items()},
        )
        for place in range(len(lists[0]))
    ]
    return args[0] if base.endswith("_") else tuple(results)
