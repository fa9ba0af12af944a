"""Conversion: the layers of a torch model become parallel ones, with the same values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tessel.core.agreement import agree
from tessel.core.partition import Partition
from tessel.core.shared import equalize, keep_part
from tessel.nn.parallel.sharded import ShardedLayer


@dataclass(frozen=True)
class Conversion:
    """The rules of a conversion to parallel layers.

    Args:
        name: the function that the user calls.
        dim: the dimension of the new layers; with None parameters stay whole, with values of the
            first worker.
        partition: the workers of the new layers.
        wanted: torch's layer, and subclasses that compute the same.
        becomes: the class of the new layers.
        done: a predicate for layers that are already converted, and stay as they are.
        also: another type of layers, which compute like torch's if they are not split.
        refused: modules that use such layers in their own way.
        is_strict: whether to raise if a layer cannot be converted.
    """

    name: str
    dim: int | None
    partition: Partition
    wanted: type[Module]
    becomes: type[ShardedLayer]
    done: Callable[[Module], bool]
    also: type[Module]
    refused: tuple[type[Module], ...] = ()
    is_strict: bool = True

    @property
    def splits(self) -> bool:
        return self.dim is not None

    def new_layers(self, layers: Sequence[Module]) -> dict[int, Module]:
        """The new layers by identities of the old ones; all workers keep parts of the values."""
        new: dict[int, Module] = {}
        known: dict[Any, Parameter] = {}
        for layer in layers:
            new[id(layer)] = fresh = self.becomes._like(layer, self.dim, self.partition)
            for name, parameter in layer._parameters.items():
                layout = fresh.layouts.get(name)
                if parameter is not None and layout is not None:
                    key = id(parameter), layout  # tied weights stay tied if they are split alike
                    if key not in known:
                        whole = parameter.detach()
                        # a view of the whole would keep all of its memory
                        part = whole.new_empty(layout.local_shape)
                        keep_part(part, layout, whole)
                        known[key] = Parameter(part, requires_grad=parameter.requires_grad)
                    parameter = known[key]
                fresh.register_parameter(name, parameter)
        if not self.splits:
            shared = {id(p): p for layer in layers for p in layer.parameters(recurse=False)}
            equalize(shared.values(), self.partition)
        return new


def convert(module: Module, conversion: Conversion) -> Module:
    """Replace all wanted layers of a module in place; if it is one itself, return the new one.

    Layers that cannot be converted stay as they are, and one warning names them with reasons; a
    strict conversion raises NotImplementedError instead and converts nothing.
    """
    wanted = [
        (name, each)
        for name, each in module.named_modules()
        if isinstance(each, conversion.wanted) and not conversion.done(each)
    ]
    problems = _problems(module, wanted, conversion)
    layers = [(name, each) for name, each in wanted if id(each) not in problems]
    problem = "; ".join(dict.fromkeys(text for text in problems.values() if text))
    # a wrapper has lists of the parameters that it was made with
    wrappers = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
    inside = {id(inner) for wrapper in wrappers for inner in wrapper.modules()}
    wrapped = conversion.splits and any(id(each) in inside for _, each in layers)
    # workers with different models raise now, before the first parameter is sent
    listing = ""
    for name, layer in layers:
        own = layer.named_parameters(recurse=False)
        kinds = [(key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in own]
        listing += f"\n{name}: {layer!r} {kinds}"
    agree(conversion.partition, f"{conversion.name} {problem} {wrapped=}{listing}")
    if wrapped:
        raise ValueError(
            f"{conversion.name}: DistributedDataParallel averages the parameters that it was "
            "created with, and would not know of shards that replace them; convert the model "
            "first, then wrap it. Nothing was converted"
        )
    if problem and conversion.is_strict:
        raise NotImplementedError(f"{conversion.name}: {problem}; nothing was converted")
    new = conversion.new_layers([layer for _, layer in layers])
    # by identity, and past __setattr__: a layer may stand in several places, and stays one
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in new:
                parent._modules[name] = new[id(child)]
    if problem:
        text = f"{conversion.name}: {problem}; these are left unchanged, and strict=True raises"
        warnings.warn(text, stacklevel=3)
    return new.get(id(module), module)


def _problems(
    module: Module, layers: list[tuple[str, Module]], conversion: Conversion
) -> dict[int, str]:
    """Why some layers stay as they are, in words, by the identity of the layer.

    A layer for which the text of another speaks has an empty one.
    """
    found: dict[int, str] = {}
    for name, each in module.named_modules():
        if isinstance(each, conversion.refused):
            # the layers inside stay, too: the text of the module around them speaks for them
            for inner in each.modules():
                found.setdefault(id(inner), "")
            found[id(each)] = (
                f"{_named(name, each)} uses its weights in its own way; write it with layers of "
                f"type {conversion.wanted.__name__}"
            )
    for name, layer in layers:
        texts = [] if id(layer) in found else list(_problems_of(name, layer, conversion))
        if texts:
            found[id(layer)] = "; ".join(texts)
    if conversion.splits:
        _add_ties(module, {id(layer) for _, layer in layers}, found)
    return found


def _problems_of(name: str, layer: Module, conversion: Conversion) -> Iterator[str]:
    what = _named(name, layer)
    # After one of the first three the rest would only confuse: it is about parameters that the
    # layer does not have yet, or about another kind of layer. All others are reported at once.
    if any(each is not None and is_lazy(each) for each in layer._parameters.values()):
        yield f"{what} does not know its sizes yet; let it see an input before the conversion"
        return
    order = type(layer).__mro__
    between = order[: order.index(conversion.wanted)]  # torch's own layer has none
    if type(layer) is not conversion.also and any(not {*vars(c)} <= _HARMLESS for c in between):
        yield (
            f"{what} is a subclass of torch.nn.{conversion.wanted.__name__}, which may compute "
            f"something else; convert it by hand"
        )
        return
    if getattr(layer, "dim", None) is not None:
        yield (
            f"{what} is already split in a different way; create a new layer from its whole values"
        )
        return
    if not {*layer._parameters} <= {"weight", "bias"} or layer._modules or layer._buffers:
        yield f"{what} has other parameters, buffers or modules than torch's layer"
    if "forward" in layer.__dict__:
        yield f"{what} has a forward of its own"
    for key, parameter in layer._parameters.items():
        if parameter is None or not conversion.splits:
            continue
        # both would stay with a parameter that is no longer used
        if parameter.grad is not None:
            yield f"the {key} of {what} has a gradient; set it to None first"
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        if any(hooks):
            yield f"the {key} of {what} has hooks; register them after the conversion"


# attributes that a class may define and still compute like torch's layer, with the same first
# values
_HARMLESS = frozenset(
    (
        *("__init__", "__doc__", "__module__", "__qualname__", "__annotations__", "__parameters__"),
        *("__constants__", "__firstlineno__", "__static_attributes__", "__annotate_func__"),
        *("__annotations_cache__", "__annotate__", "extra_repr"),
    )
)


def _add_ties(module: Module, wanted: set[int], found: dict[int, str]) -> None:
    """Also keep layers that share a parameter with a layer that is not converted.

    These may share parameters with further layers: repeat until there are none.
    """
    users: dict[int, list[tuple[str, int]]] = {}
    for name, each in module.named_modules():
        for key, parameter in each._parameters.items():
            if parameter is not None:
                label = f"{name}.{key}" if name else key
                users.setdefault(id(parameter), []).append((label, id(each)))
    changed = True
    while changed:
        changed = False
        for uses in users.values():
            converted = [layer for _, layer in uses if layer in wanted and layer not in found]
            if converted and len(converted) < len(uses):
                names = ", ".join(name for name, _ in uses)
                text = (
                    f"{names} are one parameter, and only some of them would become shards; tie "
                    "parallel layers instead, after the conversion"
                )
                found.update(dict.fromkeys(converted, text))
                changed = True


def _named(name: str, module: Module) -> str:
    return f"{name or 'the module'} ({type(module).__name__})"
