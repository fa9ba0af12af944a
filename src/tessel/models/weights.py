"""Weights of the layers of a model: whole on all workers, or in parts with the modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.models.spectral import Modes, usual_convolution
from tessel.operators.parameters import StoredInParts, draw


class Mixing(torch.nn.Module):
    """A matrix and a bias over the channels, the same at each point and whole on all workers.

    Args:
        m, n: the numbers of channels of the result and of the input.
        generator: the generator of the random numbers, equal on all workers.
        dtype: the dtype of the parameters.
    """

    def __init__(self, m: int, n: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        bound = n**-0.5  # as torch's own linear layers begin

        def uniform(*shape: int) -> Parameter:
            drawn = torch.rand(shape, generator=generator, dtype=dtype, device="cpu")
            return Parameter((2 * drawn - 1) * bound)

        self.weight, self.bias = uniform(m, n), uniform(m)

    def extra_repr(self) -> str:
        m, n = self.weight.shape
        return f"{n}, {m}"


class SpectralWeight(StoredInParts, torch.nn.Module):
    """A complex matrix for each kept mode; each worker stores those of its modes.

    The real and the imaginary parts are a last dimension, so that everything in torch for real
    parameters works: casts and every optimizer. `state_dict` collects the parts and
    `load_state_dict` extracts them from the whole.

    Args:
        P_x: the workers.
        width: the number of channels.
        modes: the modes.
        seed: the seed of the random numbers; with equal seeds workers draw their parts of one
            whole.
        dtype: the dtype of the real parts.
    """

    def __init__(
        self, P_x: Partition, width: int, modes: Modes, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        usual = usual_convolution(P_x, width, modes, dtype)
        # The real and the imaginary part are a last dimension, which is never split.
        layout = usual.operator.parameter_layout(usual.weights)
        cuts = (*layout.cuts, Cut.whole(2))
        self.layout = replace(layout, shape=(*layout.shape, 2), cuts=cuts)
        if P_x.active:
            part = draw(usual.weights, seed, usual.operator.part_boxes[usual.weights])
            self.weight = Parameter(torch.view_as_real(part).contiguous())
        else:
            self.weight = Parameter(torch.empty(0, dtype=dtype))

    @property
    def complex(self) -> Tensor:
        """This worker's part as complex numbers."""
        return torch.view_as_complex(self.weight)

    def stored_parameters(self) -> Iterator[tuple[str, Layout]]:
        yield "weight", self.layout

    def extra_repr(self) -> str:
        return "×".join(map(str, self.layout.shape[:-1]))
