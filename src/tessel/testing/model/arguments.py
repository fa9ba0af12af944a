"""Arguments of a model's call, whole in one process and spread over workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor import spread
from tessel.tensor.tensor import layout_on


@dataclass
class ModelArguments:
    """Arguments of a model, in any nesting; tensors among them are whole, or spread ones.

    Args:
        args: of the call.
        kwargs: the same by their names.
        where: the layout of spread arguments.
        dtype: the dtype of floating-point tensors; None to keep theirs.
    """

    args: Any
    kwargs: Any
    where: Partition | Layout
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.partition, Partition):
            raise TypeError(
                f"where must be a tessel.Partition or a tessel.Layout, got {self.where!r}"
            )

    @property
    def partition(self) -> Partition:
        return self.where.partition if isinstance(self.where, Layout) else self.where

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors with their names."""
        return [
            (f"input{keystr(path)}", value)
            for part in (self.args, self.kwargs)
            for path, value in tree_flatten_with_path(part)[0]
            if isinstance(value, Tensor)
        ]

    def leaves(self) -> list[Tensor]:
        """The tensors among them that get gradients."""
        return [value for _, value in self.tensors() if value.requires_grad]

    def described(self) -> dict[str, str]:
        """The layout and a description of each tensor, the same on workers with equal arguments."""
        where = self.where
        found = {
            "where": where.identity
            if isinstance(where, Layout)
            else str((where.ranks, where.shape))
        }
        for name, value in self.tensors():
            if isinstance(value, SpreadTensor):
                found[name] = f"{value.layout.identity} {value.dtype}"
            else:  # values by a checksum, so that little is sent
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                checksum = zlib.crc32(data.numpy().tobytes())
                found[name] = f"{tuple(value.shape)} {value.dtype} {checksum}"
        return found

    def check(self) -> None:
        """Raise ValueError unless a tensor is spread, and a layout fits an input."""
        values = [value for _, value in self.tensors()]
        if all(layout is None for layout in self.layouts()):
            raise ValueError(
                f"check_model: expected an input with {self.partition.dim} dimensions, as many as "
                f"the grid has axes, got tensors of {[value.dim() for value in values]} "
                f"dimensions; pass tessel.spread(x, layout) for another layout"
            )
        shapes = [tuple(value.shape) for value in values]
        if isinstance(self.where, Layout) and self.where.shape not in shapes:
            raise ValueError(f"check_model: no input has the shape of {self.where}, got {shapes}")

    def layouts(self) -> list[Layout | None]:
        """The layout of each tensor; None for one that stays whole."""
        found: list[Layout | None] = []
        for _, value in self.tensors():
            if isinstance(value, SpreadTensor):
                found.append(value.layout)
            elif value.dim() != self.partition.dim:
                found.append(None)
            elif isinstance(self.where, Layout) and self.where.shape == tuple(value.shape):
                found.append(self.where)
            else:
                found.append(layout_on(self.partition, value.shape))
        return found

    def with_tensors(self, change: Callable[[int, Tensor], Tensor]) -> tuple[Any, Any]:
        """Arguments and keyword arguments with their tensors replaced."""
        numbers = iter(range(len(self.tensors())))
        return tree_map(
            lambda value: change(next(numbers), value) if isinstance(value, Tensor) else value,
            (self.args, self.kwargs),
        )

    def wholes(self) -> ModelArguments:
        """The same arguments with new whole tensors, which get gradients.

        Spread tensors are gathered by all workers of the partition together; workers outside get
        empty tensors.
        """

        def whole(number: int, value: Tensor) -> Tensor:
            value = value.full().detach() if isinstance(value, SpreadTensor) else value.detach()
            floating = value.is_floating_point() or value.is_complex()
            if self.dtype is not None and floating:
                value = value.to(self.dtype.to_complex() if value.is_complex() else self.dtype)
            return value.clone().requires_grad_(floating and torch.is_grad_enabled())

        def nothing(number: int, value: Tensor) -> Tensor:
            return torch.empty(0)

        args, kwargs = self.with_tensors(whole if self.partition.active else nothing)
        return ModelArguments(args, kwargs, self.where)

    def entered(self, layouts: list[Layout | None]) -> ModelArguments:
        """The arguments of the converted model: each tensor spread in its layout.

        Spread tensors get gradients in their layout: tensors that are whole only in a check, like
        the gradient of a whole input, are no part of a step.
        """

        def enter(number: int, value: Tensor) -> Tensor:
            layout = layouts[number]
            if layout is None:
                return value
            entered = spread(value.detach(), layout)
            # others have nothing of it
            needs_grad = self.partition.active and value.requires_grad
            return entered.detach().requires_grad_() if needs_grad else entered

        return ModelArguments(*self.with_tensors(enter), self.where)

    def copies(self) -> tuple[Any, Any]:
        """Arguments and keyword arguments for a call, in which the model may change them."""
        return self.with_tensors(lambda number, value: value.clone())
