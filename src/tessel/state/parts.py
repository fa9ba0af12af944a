"""Whole values from the parts of workers, and the parts of workers from whole values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import tell
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.core.shared import shared_whole
from tessel.distributed.shards import as_plain
from tessel.distributed.torch_call import mapped, tensors_in
from tessel.state.places import Places
from tessel.tensor.tensor import move

# returns the whole of a value of a state, or this worker's part of it, by its layout
Change = Callable[[Any, Layout | None], Any]


def collector(places: Places, rank0_only: bool, cpu_offload: bool) -> Change:
    """A function that puts values together on all workers, or on the first; each value once."""
    target = places.first if rank0_only else places.row
    known: dict[int, Tensor] = {}  # by identity: tied weights are sent once and stay tied

    def collect(value: Any, layout: Layout | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            whole = as_plain(value).detach()
            if layout is not None and places.is_apart(layout):
                whole = move(layout, shared_whole(target, layout.shape)).apply(whole)
            # at once, so that the device needs memory for one whole value, not for all of them
            known[id(value)] = whole.cpu() if cpu_offload and target.active else whole
        return known[id(value)]

    return collect


def relocator(
    places: Places,
    state: Mapping[str, Any] | None,
    rank0_only: bool,
    call: str,
    parameter: Tensor | None,
) -> tuple[Mapping[str, Any], Change]:
    """The outline of a state, on all workers, and the function that returns this worker's parts."""
    needs = not rank0_only or places.first.active
    missing = no_state(state, "the whole state") if needs else []
    # Before anything is sent, all learn that the first worker has a state. If each should have its
    # own, the text of a worker without one differs from the others': all raise.
    if rank0_only or missing:
        places.agree(call, (), missing)
    given: Mapping[str, Any] = state if needs and isinstance(state, Mapping) else {}
    if rank0_only:
        return _receiving(places, given, "cpu" if parameter is None else parameter.device)
    known: dict[Any, Tensor] = {}

    def take(value: Any, layout: Layout | None) -> Any:
        if layout is None or not isinstance(value, Tensor) or not places.is_apart(layout):
            return value
        # Values that share memory do so afterwards, and are recognised by it: `state_dict` detaches
        # tied weights once for each name.
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), layout)
        if key not in known:
            known[key] = layout.local_part(as_plain(value).detach()).clone()
        return known[key]

    return given, take


def _receiving(
    places: Places, state: Mapping[str, Any], device: torch.device | str
) -> tuple[Mapping[str, Any], Change]:
    """The same with values of the first worker, of which others know the shapes."""

    def outlined(value: Tensor) -> Tensor:
        # the outline of a value for all workers: a single number, or the shape and the dtype
        plain = as_plain(value).detach()
        return plain.to("cpu" if plain.dim() == 0 else "meta")

    told = tell(places.row, mapped(outlined, dict(state)))
    outline: Mapping[str, Any] = told[places.row.ranks[0]]
    # Outline and state have their tensors in the same order; other workers have no state.
    given = tensors_in(dict(state)) if places.first.active else []
    known = dict(zip(map(id, tensors_in(outline)), given, strict=False))

    def receive(value: Any, layout: Layout | None) -> Any:
        if not isinstance(value, Tensor):
            return mapped(lambda each: receive(each, None), value)
        if not value.is_meta:
            return value
        shape = tuple(value.shape)
        whole = torch.empty(0, dtype=value.dtype, device=device)
        if id(value) in known:
            whole = as_plain(known[id(value)]).detach().to(device)
        target = layout or shared_whole(places.row, shape)
        return Move(Layout.whole(places.first, shape), target).apply(whole)

    return outline, receive


def no_state(state: Any, what: str) -> list[str]:
    """What is wrong with a state that is no dictionary."""
    if isinstance(state, Mapping):
        return []
    return [f"expected {what}, got {'None' if state is None else type(state).__name__}"]


def local_problem(name: str, value: Any, layout: Layout) -> str:
    """What is wrong with a value that must be this worker's part."""
    expected = layout.local_shape
    if isinstance(value, Tensor) and tuple(value.shape) == expected:
        return ""
    return (
        f"{name} on this worker must be its part of {layout}, of shape {expected}, "
        f"got {_words(value)}"
    )


def whole_problem(name: str, value: Any, layout: Layout) -> str:
    """What is wrong with a value that must be whole."""
    if isinstance(value, Tensor) and tuple(value.shape) == layout.shape:
        return ""
    return (
        f"{name} must be whole, of shape {layout.shape}, got {_words(value)}; collect_state_dict "
        "makes states in parts whole"
    )


def _words(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def shape_text(value: Any) -> str:
    """The shape of a tensor, as part of a text."""
    return f" and shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""


def kinds(state: Mapping[str, Any]) -> list[str]:
    """What must be equal in a state on all workers: names, dtypes, and which values are tied."""
    first: dict[int, str] = {}
    found = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            found.append(repr(name))
            continue
        same = first.setdefault(id(value), name)
        tie = "" if same == name else f", which is {same!r},"
        found.append(f"{name!r} of {value.dtype}{tie}")
    return found
