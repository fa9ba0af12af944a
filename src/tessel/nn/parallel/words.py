"""Words: a few numbers that each worker tells the others beside what it says of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessel.agreement import CLAIM, Claim, Meeting, Terms
from tessel.layout import Shape
from tessel.transport import NUM_WORDS, Group


@dataclass(frozen=True)
class Words(Claim):
    """Some numbers of 64 bits, in the place of a claim: they are others in each call."""

    said: tuple[int, ...] = ()

    @classmethod
    def saying(cls, *numbers: int) -> Words:
        assert len(numbers) <= CLAIM
        return cls((), None, "cpu", said=numbers)

    def words(self) -> list[int]:
        return [*self.said, *[0] * (CLAIM - len(self.said))]


class WordsMeeting(Meeting[np.ndarray]):
    """Where workers hear each other's words: a row for each worker of the group."""

    @classmethod
    def of(cls, group: Group, label: str) -> WordsMeeting:
        return cls(group, label, group.workers, _no_conclusion)

    def settle(self, everyones: bytes) -> np.ndarray:
        rows = np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS)
        return rows[:, 1 : 1 + CLAIM]


def _no_conclusion(shapes: dict[int, Shape], terms: Terms) -> np.ndarray:
    raise AssertionError("words say nothing of a tensor")
