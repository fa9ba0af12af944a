"""Offers: every interleaving of an owner that offers blocks and a receiver that takes them.

The steps are those of `offer_block` and of `await_block` with `read_blocks` (engine.c), one shared
access each. The receiver may stop waiting at any time, and read a block itself.

Tests `transport/constants.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

BLOCKS, LEAD = 6, 2
# of the owner: its place, the next block, `passed` as it saw it; of both, shared: where offers
# begin and end, how many blocks the receiver passed, and what is in the staging buffer; of the
# receiver: its place, its block, and `offered` as it saw it
State = tuple[str, int, int, int, int, int, tuple[int, ...], str, int, int]
UNWRITTEN = -1


def after_owner(state: State, ring: int, mistake: str) -> Iterator[State]:
    at, next_, seen, begin, end, passed, stage, *receiver = state
    rest = (*receiver,)
    if next_ >= BLOCKS:
        return
    if at == "look":
        yield ("ahead", next_, passed, begin, end, passed, stage, *rest)  # type: ignore[misc]
    elif at == "ahead":
        if next_ < seen:
            next_ = begin = seen + LEAD
            if mistake == "does not say from where on":
                begin = 0
        has_room = next_ - seen < ring + (mistake == "one block too many")
        goes_on = next_ < BLOCKS and has_room
        place = "write" if goes_on else "look"
        yield (place, next_, seen, begin, end, passed, stage, *rest)  # type: ignore[misc]
    elif at == "write":
        torn = (*stage[: next_ % ring], UNWRITTEN, *stage[next_ % ring + 1 :])
        end = next_ + 1 if mistake == "offers before it has written" else end
        yield ("written", next_, seen, begin, end, passed, torn, *rest)  # type: ignore[misc]
    else:
        whole = (*stage[: next_ % ring], next_, *stage[next_ % ring + 1 :])
        yield ("look", next_ + 1, seen, begin, next_ + 1, passed, whole, *rest)  # type: ignore[misc]


def after_receiver(state: State, ring: int, mistake: str) -> Iterator[State]:
    *owner, begin, end, passed, stage, at, number, offered = state
    if number >= BLOCKS:
        return

    def to(at: str, number: int, offered: int, passed: int = passed) -> State:
        return (*owner, begin, end, passed, stage, at, number, offered)  # type: ignore[return-value]

    if at == "look":
        yield to("from", number, end)
    elif at == "from":
        if number < begin:
            yield to("read", number, 0)
        elif number < offered:
            yield to("take", number, 0)
        else:
            yield to("look", number, 0)
            yield to("read", number, 0)  # the block took too long
    elif at == "read":  # where it lies: the buffer is not needed for it
        yield to("look", number + 1, 0, number + 1)
    elif at == "take":
        if mistake == "passed before it is taken":
            passed = number + 1
        assert stage[number % ring] == number, "another block is in the stage"
        yield to("taken", number, 0, passed)
    else:
        assert stage[number % ring] == number, "a block was overwritten while it was taken"
        yield to("look", number + 1, 0, number + 1)


def explore(ring: int, mistake: str = "") -> tuple[int, int]:
    """All states; how many there are, and in how many all blocks have come."""
    first: State = ("look", 0, 0, 0, 0, 0, (UNWRITTEN,) * ring, "look", 0, 0)
    seen, left, complete = {first}, [first], 0
    while left:
        state = left.pop()
        following = [*after_owner(state, ring, mistake), *after_receiver(state, ring, mistake)]
        complete += state[8] == BLOCKS
        # the receiver can always go on: it depends on no offer
        assert state[8] == BLOCKS or any(each[7:] != state[7:] for each in following)
        for each in following:
            if each not in seen:
                seen.add(each)
                left.append(each)
    return len(seen), complete


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_what_is_taken_is_what_was_offered(ring: int) -> None:
    states, complete = explore(ring)
    assert states > 1000 and complete > 0


@pytest.mark.parametrize(
    "mistake",
    [
        "does not say from where on",
        "one block too many",
        "offers before it has written",
        "passed before it is taken",
    ],
)
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(AssertionError, match="block"):
        explore(2, mistake)
