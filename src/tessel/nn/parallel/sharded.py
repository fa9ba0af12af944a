"""The common base of layers with sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from tessel.core.handles import HasHandle, constant_in_graphs, object_of
from tessel.core.layout import Layout
from tessel.core.numbers import to_keep
from tessel.core.partition import Partition
from tessel.core.shared import equalize
from tessel.distributed.shards import Sharding, call, drop_shardings, note, sharding_of, share
from tessel.nn.layer import Layer, copied
from tessel.nn.parallel.agreed import agree_on_spread


class ShardedLayer(HasHandle, torch.nn.Module):
    """A layer of torch that defines the layouts of its parameters, which also carry shardings.

    A subclass implements `layouts`. Parameters that it does not name are not touched.

    Attributes:
        dim: the dimension that is split, in the layer's convention; None if nothing is split.
        partition: the workers, in a row.
    """

    dim: int | None = None
    partition: Partition
    _derived = HasHandle._derived | {"_traces", "_given_kind", "_plain", "_words"}
    gives_kinds = True
    can_be_traced = Layer.can_be_traced
    __deepcopy__ = copied

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layouts of parameters, by name; empty if they are not split."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Call torch's layer: with parameters that are not split, or with a spread tensor."""
        if self.dim is not None:
            agree_on_spread(self.partition, f"{type(self).__name__}({self.extra_repr()})")
        found: Tensor = super().forward(input)
        return found

    @classmethod
    def _like(cls, layer: torch.nn.Module, dim: int | None, partition: Partition) -> Self:
        """The layer that one of torch's becomes, with no parameters yet."""
        new = cls.__new__(cls)
        # hooks, mode and settings are the layer's own
        own = {name: each for name, each in vars(layer).items() if name not in cls._derived}
        new.__dict__.update(own)
        new.__dict__.update(_parameters={}, dim=dim, partition=partition)
        return new

    def _equalize_own_values(self, ours: type[ShardedLayer]) -> None:
        """Make whole parameters equal if a subclass draws its values in its own way."""
        if type(self).reset_parameters is not ours.reset_parameters:  # type: ignore[attr-defined]
            whole = (
                p for p in self._parameters.values() if p is not None and sharding_of(p) is None
            )
            equalize(whole, self.partition)

    def plain_parameters(self) -> dict[str, Tensor]:
        """The parameters as plain views, for compiled code, which does not support shardings.

        In a run, `settings_in` checks that they are still views of these parameters.
        """
        for each in self._parameters.values():  # trace again when one is replaced
            _ = each is None or each.requires_grad
        _make_plain(self.handle)
        return self._plain

    def _note_shardings(self) -> None:
        """Record the shardings of the parameters on them."""
        self.__dict__.pop("_plain", None)
        if "partition" not in self.__dict__:
            return  # torch's layer is still being made
        layouts = self.layouts
        for name, parameter in self._parameters.items():
            if parameter is None or (layouts and name not in layouts):
                continue
            sharding = Sharding.of(layouts[name]) if layouts else None
            # The bias of a row-parallel layer, and all of a layer that is not split, are shared
            # values of the group: code that draws or writes them must know the group.
            if sharding is None:
                share(parameter, self.partition)
            else:
                note(parameter, sharding)
                call(parameter, self.dim)

    # The other ways in which parameters get into a layer: assignment, `module.to(…)`,
    # `load_state_dict(assign=True)` and unpickling.

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._note_shardings()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._note_shardings()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._note_shardings()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # files contain plain tensors
            drop_shardings(destination, prefix, self._parameters)

    _plain: dict[str, Tensor]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"


def refused(device: torch.device | str | None, dtype: torch.dtype | None) -> str:
    """Why this worker can make no such parameters, for the text of an agreement."""
    try:
        torch.empty(0, device=device, dtype=dtype)
    except (RuntimeError, TypeError, AssertionError) as error:  # the last one of missing devices
        return f", refused: {error}"
    return ""


@constant_in_graphs
def _make_plain(handle: str) -> bool:
    layer = object_of(handle)
    with to_keep(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        layer.__dict__["_plain"] = {
            name: each.as_subclass(Tensor) for name, each in layer.named_parameters()
        }
    return True
