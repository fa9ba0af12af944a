"""Samples, and what may be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOW, MIDDLE = 0.05, 0.5
MET, MISSED, NOISY, REPORTED = "met", "missed", "noisy", "reported"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between two of them if need be."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Summary:
    """The 5th percentile and the median of samples, and how many there are."""

    p5: float
    median: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(percentile(values, LOW), percentile(values, MIDDLE), len(values))


@dataclass(frozen=True)
class Comparison:
    """Tessel's samples over those of a peer, by 5th percentile and by median.

    Args:
        peer: its name.
        p5: the ratio of the 5th percentiles.
        median: the ratio of the medians.
        aim: what the ratio is to be at most; None if it is only reported.
    """

    peer: str
    p5: float
    median: float
    aim: float | None = None

    @classmethod
    def of(cls, mine: Summary, peer: str, other: Summary, aim: float | None) -> Comparison:
        return cls(peer, _ratio(mine.p5, other.p5), _ratio(mine.median, other.median), aim)

    @property
    def verdict(self) -> str:
        """Whether the aim is met; noisy if 5th percentile and median do not agree on it."""
        if self.aim is None:
            return REPORTED
        within = [ratio <= self.aim for ratio in (self.p5, self.median)]
        return MET if all(within) else NOISY if any(within) else MISSED

    @property
    def worst(self) -> float:
        """The larger of the two ratios, as a multiple of the aim."""
        return max(self.p5, self.median) / (self.aim or 1.0)


def overall(verdicts: Iterable[str]) -> str:
    """The verdict on many comparisons: met if all that have an aim are."""
    found = set(verdicts)
    return next((each for each in (MISSED, NOISY, MET) if each in found), REPORTED)


def _ratio(mine: float, other: float) -> float:
    if other == 0:
        return 1.0 if mine == 0 else float("inf")
    return mine / other
