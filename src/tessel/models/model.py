"""Model: what whole models over partitioned tensors have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.agreement import Meeting
from tessel.graph import eagerly
from tessel.nn import fusion
from tessel.nn.layer import ComputingLayer, Entry, Layer, needs_of
from tessel.partition import Partition


class Model(ComputingLayer):
    """A layer that holds others: the workers agree once for all of it.

    A subclass derives from this and from `torch.nn.Module`, and gives `compute` as layers do.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        """A model says all of its arguments itself."""
        super(Layer, cls).__init_subclass__(**settings)

    def place_on(self, P_x: Partition) -> None:
        super().place_on(P_x)
        self.habit = fusion.Habit()

    @eagerly
    def forward(self, input: Tensor, *args: Any, **settings: Any) -> Tensor:
        """As a layer does; gradients of shared parameters travel in few messages."""
        if self.P_x.size == 1:
            return super().forward(input, *args, **settings)
        assert isinstance(self, torch.nn.Module)
        with fusion.guided(self.habit, self.parameters()):
            return super().forward(input, *args, **settings)

    @property
    def _meeting(self) -> Meeting[Entry]:
        """One for each state of the model, in which all workers must be alike."""
        assert isinstance(self, torch.nn.Module)
        needs, is_off = needs_of(self.parameters())
        kinds = (is_off, fusion.foreseen(), *needs, *(each.dtype for each in self.parameters()))
        meetings: dict[Any, Meeting[Entry]] = self.__dict__.setdefault("_meetings", {})
        if kinds not in meetings:
            label = f"{self.label} under torch.no_grad()" if is_off else self.label
            meetings[kinds] = Meeting(
                self._group, label, self.P_x.ranks, self._conclude, f"{self!r} {kinds}"
            )
        return meetings[kinds]

    @property
    def label(self) -> str:
        """The model in a few words, for messages."""
        return f"{type(self).__name__}({self.extra_repr()})"
