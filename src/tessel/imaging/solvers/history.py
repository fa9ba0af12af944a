"""History: numbers of all iterations so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class History(Mapping[str, list[float]]):
    """For each name a number for each iteration, the same on all workers but for `seconds`.

    `change` is ‖x_k - x_(k-1)‖ / ‖x_k‖, `seconds` how long the iteration took. The others are
    those of the method and the metrics that were asked for.

    >>> from tessel.imaging.solvers import History
    >>> history = History()
    >>> history.append({"psnr": 20.0})
    >>> history["psnr"], history.iterations
    ([20.0], 1)
    """

    columns: dict[str, list[float]] = field(default_factory=dict)

    def append(self, numbers: Mapping[str, float]) -> None:
        """Add those of one iteration."""
        for name, number in numbers.items():
            self.columns.setdefault(name, []).append(number)

    @property
    def iterations(self) -> int:
        """How many there are."""
        return max(map(len, self.columns.values()), default=0)

    def last(self) -> dict[str, float]:
        """The numbers of the last iteration."""
        return {name: numbers[-1] for name, numbers in self.columns.items()}

    def __getitem__(self, name: str) -> list[float]:
        if name not in self.columns:
            known = ", ".join(self.columns) or "nothing yet"
            raise KeyError(f"the history has no {name!r}; it has {known}")
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)
