"""History: numbers of all iterations so far, and criteria that tell from them when to stop.

A criterion is a function of the history; its `str` is the reason that the solution gives. All
workers stop when one of them would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tessel.imaging.solvers.method import check_count, check_not_negative, check_positive


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


Criterion = Callable[[History], bool]


@dataclass(frozen=True)
class Below:
    """Stop when a number of the history is below a limit.

    >>> from tessel.imaging.solvers import Below, History
    >>> Below("residual", 1e-3)(History({"residual": [0.1, 1e-4]}))
    True
    """

    name: str
    limit: float

    def __post_init__(self) -> None:
        check_positive(self, limit=self.limit)

    def __call__(self, history: History) -> bool:
        return history[self.name][-1] < self.limit

    def __str__(self) -> str:
        return f"{self.name} below {self.limit:g}"


class RelativeChange(Below):
    """Stop when ‖x_k - x_(k-1)‖ < limit ‖x_k‖.

    >>> from tessel.imaging.solvers import RelativeChange
    >>> str(RelativeChange(1e-5))
    'change below 1e-05'
    """

    def __init__(self, limit: float) -> None:
        super().__init__("change", limit)


@dataclass(frozen=True)
class Plateau:
    """Stop when a number has not become better by more than `margin` in so many iterations.

    Args:
        name: of the number in the history.
        patience: the number of iterations.
        margin: what counts as better.
        larger_is_better: as of a PSNR; else as of a loss.

    >>> from tessel.imaging.solvers import History, Plateau
    >>> Plateau("psnr", patience=2)(History({"psnr": [20.0, 25.0, 24.0, 25.0]}))
    True
    """

    name: str
    patience: int = 10
    margin: float = 0.0
    larger_is_better: bool = True

    def __post_init__(self) -> None:
        check_count(self, 1, patience=self.patience)
        check_not_negative(self, margin=self.margin)

    def __call__(self, history: History) -> bool:
        sign = 1 if self.larger_is_better else -1
        numbers = [sign * number for number in history[self.name]]
        before, recent = numbers[: -self.patience], numbers[-self.patience :]
        return bool(before) and max(recent) <= max(before) + self.margin

    def __str__(self) -> str:
        return f"{self.name} no better for {self.patience} iterations"


@dataclass(frozen=True)
class TimeLimit:
    """Stop after so many seconds of iterations, those before a resume included.

    >>> from tessel.imaging.solvers import History, TimeLimit
    >>> TimeLimit(1.0)(History({"seconds": [0.6, 0.6]}))
    True
    """

    seconds: float

    def __post_init__(self) -> None:
        check_positive(self, seconds=self.seconds)

    def __call__(self, history: History) -> bool:
        return sum(history["seconds"]) >= self.seconds

    def __str__(self) -> str:
        return f"{self.seconds:g} seconds"
