"""Conversion: the layers of a torch model become parallel ones, with the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, Parameter

from tessel.distributed.agreeing import agree_on_call
from tessel.layout import Layout
from tessel.nn.parallel.drawing import equalize_, keep_part_
from tessel.partition import Partition


@dataclass(frozen=True)
class Conversion:
    """What becomes of which layers.

    Args:
        name: what the user calls.
        partition: the workers of the new layers.
        wanted: torch's layer; subclasses of it are refused, as they may compute something else.
        done: whether a layer is one of the new ones already, which stays as it is.
        make: the new layer for one of torch's, with all that it has but parameters.
        layouts: where the parameters of a new layer lie, by name; nothing if they stay whole.
        refused: modules that use such layers in a way of their own.
        splits: whether parameters become shards; else they stay, with values of the first worker.
        also: another type of layers, which compute as torch's do where they are not split.
    """

    name: str
    partition: Partition
    wanted: type[Module]
    done: Callable[[Module], bool]
    make: Callable[[Any], Any]
    layouts: Callable[[Any], Mapping[str, Layout]]
    refused: tuple[type[Module], ...] = ()
    splits: bool = True
    also: type[Module] | None = None


def convert(module: Module, conversion: Conversion) -> Module:
    """Replace all wanted layers of a module, in place; if it is one itself, return the new one."""
    layers = [(name, each) for name, each in module.named_modules() if _is_wanted(each, conversion)]
    problem = "; ".join(_problems(module, layers, conversion))
    listing = "\n".join(f"{name}: {_summary(layer)}" for name, layer in layers)
    agree_on_call(conversion.partition, f"{conversion.name} {problem}\n{listing}")
    if problem:
        raise NotImplementedError(f"{conversion.name}: {problem}; nothing was converted")
    known: dict[Any, Parameter] = {}
    new = {id(layer): _converted(layer, conversion, known) for _, layer in layers}
    if not conversion.splits:
        whole = {id(p): p for _, layer in layers for p in layer.parameters(recurse=False)}
        equalize_(whole.values(), conversion.partition)
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[name] = new[id(child)]
    return new.get(id(module), module)


def _is_wanted(layer: Module, conversion: Conversion) -> bool:
    return isinstance(layer, conversion.wanted) and not conversion.done(layer)


def _summary(layer: Module) -> str:
    values = [
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in layer.named_parameters(recurse=False)
    ]
    return f"{layer!r} {values}"


def _converted(layer: Module, conversion: Conversion, known: dict[Any, Parameter]) -> Module:
    new: Module = conversion.make(layer)
    layouts = conversion.layouts(new)
    for name, parameter in layer._parameters.items():
        layout = layouts.get(name)
        if parameter is None or layout is None:
            new.register_parameter(name, parameter)
            continue
        if (id(parameter), layout) not in known:
            known[id(parameter), layout] = _shard(parameter, layout)
        new.register_parameter(name, known[id(parameter), layout])
    return new


def _shard(parameter: Parameter, layout: Layout) -> Parameter:
    """This worker's part of a parameter, in memory of its own."""
    whole = parameter.detach()
    part = whole.new_empty(layout.local_shape)
    keep_part_(part, layout, whole)
    return Parameter(part, requires_grad=parameter.requires_grad)


def _problems(
    module: Module, layers: list[tuple[str, Module]], conversion: Conversion
) -> Iterator[str]:
    for name, each in module.named_modules():
        if isinstance(each, conversion.refused):
            yield (
                f"{_named(name, each)} uses its weights in a way of its own; write it with "
                f"layers of type {conversion.wanted.__name__}"
            )
    for name, layer in layers:
        yield from _problems_of(name, layer, conversion)
    if conversion.splits:
        yield from _ties(module, {id(layer) for _, layer in layers})


def _problems_of(name: str, layer: Module, conversion: Conversion) -> Iterator[str]:
    what = _named(name, layer)
    if type(layer) not in (conversion.wanted, conversion.also):
        yield (
            f"{what} is a subclass of torch.nn.{conversion.wanted.__name__}, which may compute "
            f"something else; convert it by hand"
        )
        return
    if getattr(layer, "dim", None) is not None:
        yield f"{what} is split already, in another way; make a new layer of its whole values"
        return
    if not {*layer._parameters} <= {"weight", "bias"} or layer._modules or layer._buffers:
        yield f"{what} has other parameters, buffers or modules than torch's layer"
    if "forward" in layer.__dict__:
        yield f"{what} has a forward of its own"
    for key, parameter in layer._parameters.items():
        if parameter is None or not conversion.splits:
            continue
        if parameter.grad is not None:
            yield f"the {key} of {what} has a gradient; set it to None first"
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        if any(hooks):
            yield f"the {key} of {what} has hooks; register them after the conversion"


def _ties(module: Module, converted: set[int]) -> Iterator[str]:
    """Parameters that a layer of the conversion shares with one that stays as it is."""
    users: dict[int, list[tuple[str, bool]]] = {}
    for name, each in module.named_modules():
        for key, parameter in each._parameters.items():
            if parameter is not None:
                label = f"{name}.{key}" if name else key
                users.setdefault(id(parameter), []).append((label, id(each) in converted))
    for found in users.values():
        if len({is_converted for _, is_converted in found}) == 2:
            names = ", ".join(name for name, _ in found)
            yield (
                f"{names} are one parameter, of which some would become shards; tie parallel "
                f"layers instead, after the conversion"
            )


def _named(name: str, module: Module) -> str:
    return f"{name or 'the module'} ({type(module).__name__})"
