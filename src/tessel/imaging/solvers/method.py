"""Method: what a solver does in one iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from tessel.imaging.solvers.space import Space

Values = dict[str, Any]  # tensors by name, or lists of them; "x" is the image


class Method(ABC):
    """An iterative method: how its values begin, and how they change.

    All that it keeps between iterations is in its values, so that these can be written to a
    checkpoint. Tensors that begin with the shape of the image lie where it lies, numbers are the
    same on all workers. A method of one's own gives `iterate`, and `begin` if it keeps more than
    the image.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Half(solvers.Method):
    ...     def iterate(self, values, iteration, space):
    ...         return {"x": values["x"] / 2}
    >>> solvers.solve(Half(), torch.ones(2), max_iterations=2).x
    tensor([0.2500, 0.2500])
    """

    reports: ClassVar[tuple[str, ...]] = ()  # the names of values that go into the history

    def begin(self, x: Tensor, space: Space) -> Values:
        """The values before the first iteration."""
        return {"x": x}

    @abstractmethod
    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        """The values after an iteration; those before stay as they are."""

    def complete(self, values: Values, space: Space) -> Values:
        """All values from those of a checkpoint that lie as the image does, and numbers.

        For a run that goes on with the image in other parts; a method that keeps more, as
        measurements, computes it anew.
        """
        return values

    @property
    def name(self) -> str:
        """What a progress bar says."""
        return type(self).__name__
