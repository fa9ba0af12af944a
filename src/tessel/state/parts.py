"""Whole values from the parts of workers, and the parts of workers from whole values."""

from __future__ import annotations

from collections.abc import Mapping
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


class StateCollector:
    """Puts values together on all workers, or on the first; one value once."""

    def __init__(self, places: Places, rank0_only: bool, cpu_offload: bool) -> None:
        self._places, self._cpu = places, cpu_offload
        self._target = places.first if rank0_only else places.row
        self._known: dict[int, Tensor] = {}  # by identity: tied weights travel once and stay tied

    @property
    def is_empty(self) -> bool:
        """Whether this worker gets nothing."""
        return not self._target.active

    def __call__(self, value: Any, layout: Layout | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            whole = as_plain(value).detach()
            if layout is not None and self._places.is_apart(layout):
                target = shared_whole(self._target, layout.shape)
                whole = move(layout, target).apply(whole)
            # at once, so that the device needs room for one whole value, not for all of them
            self._known[id(value)] = whole.cpu() if self._cpu and not self.is_empty else whole
        return self._known[id(value)]


class Relocator:
    """Takes this worker's parts out of whole values; what shares memory does so afterwards."""

    def __init__(self, places: Places, state: Mapping[str, Any]) -> None:
        self._places, self.outline = places, state
        self._known: dict[Any, Tensor] = {}

    def __call__(self, value: Any, layout: Layout | None) -> Any:
        if layout is None or not isinstance(value, Tensor) or not self._places.is_apart(layout):
            return value
        # by memory, not by identity: `state_dict` detaches tied weights once for each name
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), layout)
        if key not in self._known:
            self._known[key] = layout.local_part(as_plain(value).detach()).clone()
        return self._known[key]


class Receiver(Relocator):
    """Takes parts out of values that the first worker has: others know what shapes they have."""

    def __init__(
        self, places: Places, state: Mapping[str, Any], device: torch.device | str
    ) -> None:
        def outlined(value: Tensor) -> Tensor:
            # what all workers get to know of a value: a single number, or the shape and the dtype
            plain = as_plain(value).detach()
            return plain.to("cpu" if plain.dim() == 0 else "meta")

        told = tell(places.row, mapped(outlined, dict(state)))
        super().__init__(places, told[places.row.ranks[0]])
        self._device = device
        # Outline and state have their tensors in the same order; other workers have no state.
        given = tensors_in(dict(state)) if places.first.active else []
        self._given = dict(zip(map(id, tensors_in(self.outline)), given, strict=False))

    def __call__(self, value: Any, layout: Layout | None) -> Any:
        if not isinstance(value, Tensor):
            return mapped(lambda each: self(each, None), value)
        if not value.is_meta:
            return value
        shape = tuple(value.shape)
        target = layout or shared_whole(self._places.row, shape)
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        given = self._given.get(id(value))
        whole = empty if given is None else as_plain(given).detach().to(self._device)
        return Move(Layout.whole(self._places.first, shape), target).apply(whole)


def relocator(
    places: Places,
    state: Mapping[str, Any] | None,
    rank0_only: bool,
    call: str,
    parameter: Tensor | None,
) -> Relocator:
    """What gives this worker its parts of a state, and the outline of the state on all workers."""
    needs = not rank0_only or places.first.active
    missing = ["expected the whole state, got None"] if needs and state is None else []
    # Before anything is sent, all hear that the first worker has a state. Where each brings one of
    # its own, who has none says so while others say what they have: all raise.
    if rank0_only or missing:
        places.agree(call, (), missing)
    given: Mapping[str, Any] = state if needs and state is not None else {}
    if not rank0_only:
        return Relocator(places, given)
    return Receiver(places, given, "cpu" if parameter is None else parameter.device)


def local_problem(name: str, value: Any, layout: Layout) -> str:
    """What is wrong with a value that should be this worker's part."""
    expected = layout.local_shape
    if isinstance(value, Tensor) and tuple(value.shape) == expected:
        return ""
    return (
        f"{name} on this worker must be its part of {layout}, of shape {expected}, "
        f"got {_words(value)}"
    )


def whole_problem(name: str, value: Any, layout: Layout) -> str:
    """What is wrong with a value that should be whole."""
    if isinstance(value, Tensor) and tuple(value.shape) == layout.shape:
        return ""
    return (
        f"{name} must be whole, of shape {layout.shape}, got {_words(value)}; what lies in "
        f"parts on workers is made whole by collect_state_dict"
    )


def _words(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def shape_text(value: Any) -> str:
    """The shape of a tensor, as part of a text."""
    return f" and shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""


def kinds(state: Mapping[str, Any]) -> list[str]:
    """What of a state must be alike on all workers: names, dtypes, and which values are one."""
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
