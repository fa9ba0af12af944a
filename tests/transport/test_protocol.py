"""Every interleaving of the shared-memory protocol, and what is noticed if it is changed.

Tests `transport/channel.py`, `transport/semaphore.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol import Model, ProtocolError, explore

PAIR = ((0, 1), (1, 0))
RING = ((0, 1), (1, 2), (2, 0))
CHAIN = ((0, 1), (1, 2))

MODELS = {
    "two workers": Model(PAIR, calls=2),
    "two slots": Model(PAIR, slots=2, pieces=2),
    "pieces that wait for room": Model(PAIR, pieces=2),
    "calls ahead": Model(PAIR, calls=2, slots=2, ahead=2),
    "rendezvous": Model(PAIR, calls=2, rendezvous=True),
    "one way": Model(PAIR[:1], calls=2, slots=2, pieces=2),
    "engine and Python": Model(PAIR, calls=2, slots=2, compiled=(0,)),
    "three workers": Model(CHAIN),
    "an interrupted worker": Model(PAIR, calls=2, interrupted=0),
    "a worker that dies": Model(PAIR, calls=2, dies=0),
    "a worker that leaves a call": Model(PAIR, calls=2, leaves=0),
    "a worker that leaves a call of the engine": Model(PAIR, calls=2, leaves=0, compiled=(1,)),
}
LARGER = {
    "more pieces than slots": Model(PAIR, slots=2, pieces=3),
    "engine": Model(PAIR, calls=2, compiled=(0, 1)),
    "engine with rendezvous": Model(PAIR, calls=2, rendezvous=True, compiled=(0, 1)),
    "three workers in a ring": Model(RING),
    "three workers and rendezvous": Model(CHAIN, rendezvous=True),
    "three workers and the engine": Model(CHAIN, compiled=(1,)),
    "rendezvous ahead": Model(PAIR, calls=3, slots=2, ahead=2, rendezvous=True),
    "an interrupted engine": Model(PAIR, calls=2, compiled=(0, 1), interrupted=0),
    "an interrupted rendezvous": Model(PAIR, calls=2, rendezvous=True, interrupted=0),
    "an engine that dies": Model(PAIR, calls=2, compiled=(0, 1), dies=0),
    "pieces of a worker that dies": Model(PAIR, pieces=2, dies=0),
    "two engines, one of which leaves a call": Model(PAIR, calls=2, compiled=(0, 1), leaves=0),
    "an interrupted worker that dies": Model(CHAIN, interrupted=0, dies=0),
    "three workers, one of which dies": Model(CHAIN, dies=1),
}
# what is changed, and in which model
MUTATIONS = {
    "notified before it is published": MODELS["pieces that wait for room"],
    "no look before sleep": MODELS["two workers"],
    "no fence after the sign of sleep": MODELS["two workers"],
    "published before it is written": MODELS["two workers"],
    "returned before it is copied": MODELS["pieces that wait for room"],
    "senders are not notified": MODELS["pieces that wait for room"],
    "memory is reused before it is read": MODELS["rendezvous"],
    "slots return in the order of their numbers": LARGER["more pieces than slots"],
    "numbered after it is published": MODELS["two workers"],
    "numbers are not compared": MODELS["a worker that leaves a call"],
    "the engine does not compare numbers": MODELS["a worker that leaves a call of the engine"],
    "numbers do not leap": MODELS["a worker that leaves a call"],
    "what is put back is lost": MODELS["a worker that leaves a call"],
    "an interrupted exchange breaks nothing": MODELS["an interrupted worker"],
    "an interrupted exchange breaks nothing, and numbers are not compared": MODELS[
        "an interrupted worker"
    ],
    "calls do not look at the alarm": MODELS["an interrupted worker"],
    "waits do not look at the alarm": MODELS["an interrupted worker"],
    "nobody else is told": MODELS["an interrupted worker"],
    "waits do not look for those who are gone": MODELS["a worker that dies"],
    "nobody looks at the alarm after reading": LARGER["an interrupted rendezvous"],
    "the alarm is not passed on": LARGER["an interrupted worker that dies"],
}


@pytest.mark.parametrize("name", MODELS)
def test_workers_always_get_what_was_sent(name: str) -> None:
    assert explore(MODELS[name]) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_larger_models(name: str) -> None:
    assert explore(LARGER[name]) > 10_000


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_protocol_is_noticed(mutation: str) -> None:
    with pytest.raises(ProtocolError):
        explore(replace(MUTATIONS[mutation], mutation=mutation))
