"""The state of models with sharded parameters: whole for files, in shards for workers.

The whole state is that of the same model of plain torch in one process. It does not depend on the
split dimensions or on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.distributed.torch_call import tensors_in
from tessel.state.parts import (
    collector,
    kinds,
    local_problem,
    no_state,
    relocator,
    shape_text,
    whole_problem,
)
from tessel.state.places import Places

StateDict = dict[str, Any]
GROUPED = ("state", "param_groups")  # what the state of an optimizer consists of


def collect_state_dict(
    module: Module,
    state: Mapping[str, Any] | None = None,
    prefix: str = "",
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    partition: Partition | None = None,
) -> StateDict:
    """Collect the whole state of a model with parallel layers, as in plain torch in one process.

    All workers of the group call this together. Values that are whole on each worker are not copied
    and, as in `state_dict()`, share their memory with the model.

    Args:
        module: the model.
        state: its state on this worker; None for `module.state_dict()`. Any other one, such as an
            average of weights, must have the layouts of the module's parameters.
        prefix: a prefix of all names in the result.
        rank0_only: whether only the first worker of the group gets it, and all others an empty
            dictionary.
        cpu_offload: whether each value is moved to the CPU once it is whole.
        partition: the workers that together hold the model; None for those of its shards.

    >>> import tessel, torch
    >>> model = torch.nn.Sequential(tessel.nn.ParallelLinear(3, 2, dim=-1))
    >>> {name: tuple(value.shape) for name, value in tessel.nn.collect_state_dict(model).items()}
    {'0.weight': (2, 3), '0.bias': (2,)}
    """
    call = f"collect_state_dict({rank0_only=}, {cpu_offload=})"
    places = Places.of(module, partition, call)
    if not places.row.active:
        return {}
    given = module.state_dict(keep_vars=True) if state is None else state
    if problems := no_state(given, "a state of the module"):  # or else others wait for its values
        places.agree(call, (), problems)
    places.agree(call, kinds(given), places.problems(given, local_problem))
    collect = collector(places, rank0_only, cpu_offload)
    whole = {name: collect(value, places.layouts.get(name)) for name, value in given.items()}
    named = {prefix + name: value for name, value in whole.items()}
    return _like(given, {} if rank0_only and not places.first.active else named)


def relocate_state_dict(
    module: Module,
    state: Mapping[str, Any] | None,
    prefix: str = "",
    *,
    rank0_only: bool = False,
    partition: Partition | None = None,
) -> StateDict:
    """Extract this worker's shards of a whole state, for `module.load_state_dict`.

    The state is a result of `collect_state_dict`, for any `dim` and any number of workers, or that
    of the model of plain torch. All workers of the group pass the same one, and only a small
    agreement is sent. Shards are copies: the whole state can be deleted.

    Args:
        module: the model that loads the result.
        state: the whole state; keys that the module does not have are kept, so that
            `load_state_dict` reports them on all workers.
        prefix: a prefix of the names in `state`, which is removed in the result.
        rank0_only: whether only the first worker of the group has the state, and sends others their
            shards; their argument, such as None, is ignored.
        partition: the workers that together hold the model; None for those of its shards.

    >>> import tessel, torch
    >>> model = torch.nn.Sequential(tessel.nn.ParallelLinear(3, 2, dim=-1))
    >>> plain = torch.nn.Sequential(torch.nn.Linear(3, 2))
    >>> model.load_state_dict(tessel.nn.relocate_state_dict(model, plain.state_dict()))
    <All keys matched successfully>
    """
    call = f"relocate_state_dict(rank0_only={rank0_only})"
    places = Places.of(module, partition, call)
    if rank0_only and not places.row.active:
        return module.state_dict()
    if prefix and isinstance(state, Mapping):
        state = _like(state, {name.removeprefix(prefix): each for name, each in state.items()})
    first = next(module.parameters(), None)
    outline, relocate = relocator(places, state, rank0_only, call, first)
    # Shapes are listed as well: a whole state must be the same on all workers, shards need not.
    shapes = map(shape_text, outline.values())
    listing = [f"{kind}{each}" for kind, each in zip(kinds(outline), shapes, strict=True)]
    places.agree(call, listing, places.problems(outline, whole_problem))
    return _like(
        outline, {name: relocate(each, places.layouts.get(name)) for name, each in outline.items()}
    )


def collect_optimizer_state_dict(
    module: Module,
    optimizer: Optimizer,
    *,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    partition: Partition | None = None,
) -> StateDict:
    """Collect the whole state of an optimizer, as in one process.

    The elementwise state of a parameter, such as a momentum or Adam's averages, has its sharding
    and is gathered; single numbers, such as the step, are kept. Optimizers that keep anything else
    for a sharded parameter raise NotImplementedError.

    Args:
        module: the model whose parameters the optimizer has.
        optimizer: an optimizer of torch, or one with state of the same form.
        rank0_only: as in `collect_state_dict`.
        cpu_offload: as in `collect_state_dict`.
        partition: the workers that together hold the model; None for those of its shards.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> state = tessel.nn.collect_optimizer_state_dict(layer, optimizer)
    >>> tuple(state["state"][0]["momentum_buffer"].shape)
    (2, 3)
    """
    call = f"collect_optimizer_state_dict({rank0_only=}, {cpu_offload=})"
    places = Places.of(module, partition, call)
    if not places.row.active:
        return {}
    given = optimizer.state_dict()
    entries = list(_entries(given, optimizer, places))
    problems = [text for each in entries if (text := each.problem(whole=False))]
    places.agree(call, [each.identity for each in entries], problems, NotImplementedError)
    collect = collector(places, rank0_only, cpu_offload)
    whole = _with_values(given, {e.path: collect(e.value, e.layout) for e in entries})
    return {} if rank0_only and not places.first.active else whole


def relocate_optimizer_state_dict(
    module: Module,
    optimizer: Optimizer,
    state: Mapping[str, Any] | None,
    *,
    rank0_only: bool = False,
    partition: Partition | None = None,
) -> StateDict:
    """Extract this worker's part of an optimizer's whole state, for `optimizer.load_state_dict`.

    Args:
        module: the model whose parameters the optimizer has.
        optimizer: the optimizer that loads the result; its parameters have the order of those in
            the state.
        state: a result of `collect_optimizer_state_dict`, for any `dim` and any number of workers,
            or the state of the plain model's optimizer in one process.
        rank0_only: as in `relocate_state_dict`.
        partition: the workers that together hold the model; None for those of its shards.

    >>> import tessel, torch
    >>> plain, layer = torch.nn.Linear(3, 2), tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> state = torch.optim.Adam(plain.parameters(), lr=0.1).state_dict()
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> state = tessel.nn.relocate_optimizer_state_dict(layer, optimizer, state)
    >>> optimizer.load_state_dict(state)
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """
    call = f"relocate_optimizer_state_dict(rank0_only={rank0_only})"
    places = Places.of(module, partition, call)
    if rank0_only and not places.row.active:
        return optimizer.state_dict()
    first = next(module.parameters(), None)
    outline, relocate = relocator(places, state, rank0_only, call, first)
    missing = [f"the state has no {key!r}" for key in GROUPED if key not in outline]
    if missing:
        places.agree(call, (), missing)
    expected, got = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, outline["param_groups"])
    )
    entries = list(_entries(outline, optimizer, places)) if expected == got else []
    problems = [text for each in entries if (text := each.problem(whole=True))]
    if expected != got:
        problems = [
            f"the groups of the optimizer have {expected} parameters, those of the state {got}"
        ]
    listing = [f"{each.identity}{shape_text(each.value)}" for each in entries]
    places.agree(call, listing, problems)
    own = {each.path: relocate(each.value, each.layout) for each in entries}
    # groups, with rates that may be tensors: if only the first worker has them, they are sent
    others = {name: relocate(value, None) for name, value in outline.items() if name != "state"}
    return _with_values({**outline, **others}, own)


class _Entry:
    """A value that an optimizer keeps for a parameter, possibly a container of several."""

    def __init__(
        self, path: tuple[Any, str], value: Any, name: str, places: Places, layout: Layout | None
    ) -> None:
        self.path, self.value, self.name = path, value, name
        self._of_parameter = layout if places.is_apart(layout) else None
        self._some_apart = places.some_apart

    @property
    def layout(self) -> Layout | None:
        """The layout of the value, that of its parameter; None if it is the same for all shards."""
        value = self.value
        if not isinstance(value, Tensor):
            return self._of_parameter if tensors_in(value) else None
        # the step may be a tensor, even of one dimension
        is_number = value.dim() == 0 or (self.path[1] == "step" and value.numel() == 1)
        return None if is_number else self._of_parameter

    @property
    def identity(self) -> str:
        """The description that must be equal on all workers."""
        dtype = self.value.dtype if isinstance(self.value, Tensor) else type(self.value).__name__
        how = "" if self.layout is None else " in shards"
        return f"the value {self.path[1]!r} for {self.name}, of {dtype}{how}"

    def problem(self, whole: bool) -> str:
        """Why it cannot be gathered or split, or an empty text."""
        what = f"the value {self.path[1]!r} of an optimizer for {self.name}"
        if not isinstance(self.value, Tensor):
            several = self._some_apart and tensors_in(self.value)
            return f"{what} holds several tensors, whose layout is unknown" if several else ""
        if self.layout is None:
            return ""
        found = whole_problem if whole else local_problem
        return found(what, self.value, self.layout)


def _entries(state: Mapping[str, Any], optimizer: Optimizer, places: Places) -> Iterator[_Entry]:
    """All values that an optimizer keeps for its parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]  # in their order
    for key, parameter in zip(keys, parameters, strict=True):
        layout = places.of_value.get(id(parameter))
        name = places.names.get(id(parameter), "a parameter that is not of the module")
        for what, value in state["state"].get(key, {}).items():
            yield _Entry((key, what), value, name, places, layout)


def _with_values(state: Mapping[str, Any], values: Mapping[tuple[Any, str], Any]) -> StateDict:
    """The state of an optimizer with other values."""
    replaced: dict[Any, StateDict] = {key: {} for key in state["state"]}
    for (key, what), value in values.items():
        replaced[key][what] = value
    return {**state, "state": replaced}


def _like(state: Mapping[str, Any], values: dict[str, Any]) -> StateDict:
    """Values in a dictionary like that of `state_dict`, with its metadata of versions."""
    # a copy for its attributes: torch keeps the versions of modules in `_metadata`
    result = copy(state) if isinstance(state, dict) else {}
    result.clear()
    result.update(values)
    return result
