"""Results of a claim, as they are saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.samples import Comparison, Summary, overall


@dataclass(frozen=True)
class CaseResult:
    """What was found in one case.

    Args:
        name: of the case.
        workers: that took part.
        settings: of the case.
        unit: of the samples.
        summaries: of each contender's samples.
        parts: where the time went, for contenders that know it.
        comparisons: of Tessel with each peer.
        others: the share of the processors that other processes used meanwhile.
    """

    name: str
    workers: int
    settings: Mapping[str, Any]
    unit: str
    summaries: Mapping[str, Summary]
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    others: float = 0.0

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> CaseResult:
        summaries = {name: Summary(**each) for name, each in found["summaries"].items()}
        comparisons = tuple(
            Comparison(each["peer"], each["p5"], each["median"], each["aim"])
            for each in found["comparisons"]
        )
        return cls(**{**found, "summaries": summaries, "comparisons": comparisons})


@dataclass(frozen=True)
class Result:
    """What was found for a claim.

    Args:
        claim: its name.
        title: of it.
        note: what a reader has to know.
        machine: on which it was measured.
        rounds: in which contenders took turns.
        seconds: that it took.
        others: the share of the processors that other processes used meanwhile.
        cases: what was found in each.
    """

    claim: str
    title: str
    note: str
    machine: Mapping[str, str]
    rounds: int
    seconds: float
    others: float
    cases: tuple[CaseResult, ...]

    @property
    def verdict(self) -> str:
        """Met if every aim is."""
        return overall(each.verdict for case in self.cases for each in case.comparisons)

    def to_json(self) -> str:
        found = {"verdict": self.verdict, **asdict(self)}
        for case, saved in zip(self.cases, found["cases"], strict=True):
            for each, comparison in zip(case.comparisons, saved["comparisons"], strict=True):
                comparison["verdict"] = each.verdict
        return json.dumps(_rounded(found), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def of_json(cls, text: str) -> Result:
        found = json.loads(text)
        found.pop("verdict")
        found["cases"] = tuple(CaseResult.of_json(each) for each in found["cases"])
        return cls(**found)

    def save(self, folder: Path) -> Path:
        """Write `<claim>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.claim}.json"
        path.write_text(self.to_json())
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        return cls.of_json(path.read_text())


def _rounded(value: Any) -> Any:
    """Five digits of every number: more are noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
