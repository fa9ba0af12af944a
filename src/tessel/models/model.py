"""Model: what whole models over partitioned tensors have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import Agreement
from tessel.core.graph import in_graphs
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.machine import keep_freed_memory
from tessel.nn import buckets
from tessel.nn.layer import ComputingLayer, Entry, Layer, needs_of, parts_agreement


class Model(ComputingLayer):
    """A layer that holds others: the workers agree once for all of it.

    A subclass derives from this and from `torch.nn.Module`, and gives `compute` as layers do.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        """A model says all of its arguments itself."""
        # Past `Layer`, which adds the arguments of torch's own layer: there is none of a model.
        super(Layer, cls).__init_subclass__(**settings)

    def place_on(self, P_x: Partition) -> None:
        super().place_on(P_x)
        # In a plain process, too: pages that are cleared anew take half of the time of an FNO.
        keep_freed_memory()
        self.schedule = buckets.BucketSchedule()

    @in_graphs()
    def forward(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        """As a layer does; gradients of shared parameters travel in few messages."""
        if self.P_x.size == 1:  # whose gradients need no messages
            return super().forward(input, *args, **settings)
        assert isinstance(self, torch.nn.Module)
        with buckets.in_buckets(self.schedule, self.parameters()):
            return super().forward(input, *args, **settings)

    def fits_torch(self, layout: Layout, *others: Any) -> bool:
        return False  # torch has no such model

    def _agreement(self) -> Agreement[Entry]:
        """One for each state of the model, in which all workers must be alike."""
        assert isinstance(self, torch.nn.Module)
        needs, is_off = needs_of(self.parameters())
        # Whether parameters need gradients decides on messages of the backward pass.
        kinds = (
            is_off,
            buckets.planned_uses(),
            *needs,
            *(each.dtype for each in self.parameters()),
        )
        agreements: dict[Any, Agreement[Entry]] = self.__dict__.setdefault("_agreements", {})
        if kinds not in agreements:
            label = f"{self.label} under torch.no_grad()" if is_off else self.label
            agreements[kinds] = parts_agreement(
                self.prepare(), self.P_x, label, f"{self!r} {kinds}"
            )
        return agreements[kinds]

    @property
    def label(self) -> str:
        """The model in a few words, for messages."""
        return f"{type(self).__name__}({self.extra_repr()})"
