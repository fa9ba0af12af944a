"""Claims: cases in which Tessel is compared with its peers, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.machine import Usage, description
from harness.results import CaseResult, Result
from harness.samples import Comparison, Summary

TESSEL = "Tessel"
Settings = dict[str, Any]  # what JSON can say


@dataclass(frozen=True)
class Case:
    """One thing to do, the same for all contenders.

    Args:
        name: for the reader.
        workers: that take part.
        settings: what contenders are told, as JSON can say it.
        aims: for each peer what Tessel's samples over its own are to be at most; None, as for
            peers that are not named, if the ratio is only reported.
        calls: that a sample is the mean of; they follow each other at once.
        seconds: that a turn of one contender lasts about.
        most: samples in a turn; what is counted rather than timed has just as many.
        unit: of samples: "s", or "bytes" or whatever a contender counts.
        rounds: at most, where one is enough for what is counted exactly.
    """

    name: str
    workers: int
    settings: Settings = field(default_factory=dict)
    aims: Mapping[str, float | None] = field(default_factory=dict)
    calls: int = 1
    seconds: float = 0.1
    most: int = 20
    unit: str = "s"
    rounds: int | None = None

    @classmethod
    def counted(
        cls,
        name: str,
        workers: int,
        settings: Settings,
        aims: Mapping[str, float | None] | None = None,
    ) -> Case:
        """One in which bytes are counted, and seconds are not measured: one sample is exact."""
        return cls(name, workers, settings, aims or {}, most=1, unit="bytes", rounds=1)


def is_timed(case: Case) -> bool:
    """Whether seconds are measured."""
    return case.unit == "s"


def is_counted(case: Case) -> bool:
    """Whether bytes are counted."""
    return case.unit == "bytes"


@dataclass(frozen=True)
class Turn:
    """What one contender's turn gave.

    Args:
        samples: each of the slowest worker, for one call.
        parts: where the time of a call went, the mean over the workers.
    """

    samples: Sequence[float]
    parts: Mapping[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """Somebody who can do what a case asks for."""

    name: str

    def covers(self, case: Case) -> bool:
        """Whether this contender takes part in a case."""

    def missing(self) -> str | None:
        """What has to be installed first, in a sentence; None if all is there."""

    def turn(self, case: Case, repeats: int) -> Turn:
        """Give so many samples."""

    def leave(self, case: Case) -> None:
        """A case is over."""

    def close(self) -> None:
        """End all processes."""


@dataclass(frozen=True)
class Claim:
    """What is said of Tessel, and how to see whether it holds.

    Args:
        name: of the script, and of its results.
        title: one line.
        cases: in which it is measured.
        contenders: Tessel and its peers.
        rounds: in each of which every contender has one turn.
        note: what a reader of the results has to know.
    """

    name: str
    title: str
    cases: Sequence[Case]
    contenders: Sequence[Contender]
    rounds: int = 6
    note: str = ""


def measure(claim: Claim, rounds: int, told: Callable[[str], None] = lambda _: None) -> Result:
    """Let the contenders take turns in each case."""
    machine, before = description(), Usage.now()
    found = []
    try:
        for number, case in enumerate(claim.cases):
            told(f"{number + 1} of {len(claim.cases)}: {case.name}")
            found.append(_measure_case(claim, case, rounds))
    finally:
        for contender in claim.contenders:
            contender.close()
    after = Usage.now()
    return Result(
        claim=claim.name,
        title=claim.title,
        note=" ".join(claim.note.split()),
        machine=machine,
        rounds=rounds,
        seconds=after.clock - before.clock,
        others=after.others_since(before),
        cases=tuple(found),
    )


def _measure_case(claim: Claim, case: Case, rounds: int) -> CaseResult:
    before = Usage.now()
    present = [each for each in claim.contenders if each.covers(case)]
    repeats = {each.name: _repeats(each, case) for each in present}
    turns: dict[str, list[Turn]] = {each.name: [] for each in present}
    for number in range(min(rounds, case.rounds or rounds)):
        shift = number % len(present)
        for each in present[shift:] + present[:shift]:  # nobody always comes after the same one
            turns[each.name].append(each.turn(case, repeats[each.name]))
    for each in present:
        each.leave(case)
    summaries = {name: _summary(every) for name, every in turns.items()}
    return CaseResult(
        name=case.name,
        workers=case.workers,
        settings=case.settings,
        unit=case.unit,
        summaries=summaries,
        parts={name: _mean_parts(every) for name, every in turns.items() if every[0].parts},
        comparisons=_comparisons(case, summaries),
        others=Usage.now().others_since(before),
    )


def _repeats(contender: Contender, case: Case) -> int:
    """How many samples fit a turn; the first turns, which are not counted, warm up too."""
    if not is_timed(case):
        return case.most
    shortest = min(contender.turn(case, 1).samples) * case.calls
    if shortest < case.seconds:
        shortest = min(contender.turn(case, 2).samples) * case.calls
    return max(1, min(case.most, int(case.seconds / max(shortest, 1e-9))))


def _summary(turns: Sequence[Turn]) -> Summary:
    return Summary.of([sample for turn in turns for sample in turn.samples])


def _mean_parts(turns: Sequence[Turn]) -> dict[str, float]:
    return {part: sum(turn.parts[part] for turn in turns) / len(turns) for part in turns[0].parts}


def _comparisons(case: Case, summaries: Mapping[str, Summary]) -> tuple[Comparison, ...]:
    mine = summaries[TESSEL]
    return tuple(
        Comparison.of(mine, name, other, case.aims.get(name))
        for name, other in summaries.items()
        if name != TESSEL
    )
