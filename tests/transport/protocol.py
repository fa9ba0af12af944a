"""A model of the shared-memory protocol, small enough to look at every interleaving of it.

Workers run the loop of `Host.wait` one shared access at a time; `explore` visits every state that
any order of their steps can reach. It raises ProtocolError for a slot that is written while it
holds a message, a message that is lost, doubled or out of order, memory that is read after its
owner went on, and for states in which nobody can take a step although messages are missing. Naps
have no end in the model: a wakeup that gets lost is a deadlock here, where in life it costs 50 ms.

What the steps stand for. The engine does the same in C, names in brackets.

    DRAIN     Outgoing._look_for_free [note_emptied]: lower `emptied`, put slots on the free stack
    WRITE     Outgoing._next_slot and Message.write [give]: fill the slot that was freed last
    NAME      slot.header[...] = ... [give]: name the slot in the next header of the ring
    POST      Outgoing._publish [publish(filled)]: raise `filled`
    CHECK     Wakeup.notify [publish]: read whether the other worker sleeps
    NOTIFY    Wakeup.notify [publish]: raise the semaphore on which it sleeps
    TAKE      Incoming.pull, filled.try_wait() [has_come, which looks and lowers nothing]
    FIND      Incoming._next_slot [came]: read the header
    COPY      ReceiveRequest.read [take]: copy the slot, or the tensor that it names (rendezvous)
    LOWER     [let_go: sem_trywait(filled), after the copy]; not in Python
    RETURN    Incoming.pull, emptied.post() [let_go]: the slot is free again
    CHECK_, NOTIFY_   the same as above, for the sender who may wait for room
    DECIDE    Host.wait: all is done, or something moved, or it is time for a pause
    SLEEPY    Wakeup.set_asleep(True) [pause_once]: say that this worker is about to sleep
    FENCE     its `post` and `try_wait` [__atomic_thread_fence]: the store leaves the processor
    SLEEP     Wakeup.wait [sleep_until]; then another look
    GIVE_UP   [pause_once gives 0]: the engine's time is over, and Python does the rest
    AWAKE     Wakeup.set_asleep(False) [end_waiting]

Stores of the sign of sleep may stay in the processor until a fence (x86's store buffer). Other
stores are followed by an operation on a semaphore, before which they become visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

(DRAIN, WRITE, NAME, POST, CHECK, NOTIFY, TAKE, FIND, COPY, LOWER, RETURN, CHECK_, NOTIFY_) = range(
    13
)
(DECIDE, SLEEPY, FENCE, SLEEP, AWAKE, END) = range(13, 19)
NAMES = (
    *("DRAIN", "WRITE", "NAME", "POST", "CHECK", "NOTIFY", "TAKE", "FIND", "COPY", "LOWER"),
    *("RETURN", "CHECK_", "NOTIFY_", "DECIDE", "SLEEPY", "FENCE", "SLEEP", "AWAKE", "END"),
)
EARLY = ("published before it is written", "notified before it is published")
MOST_WAKEUPS = 2  # more only wake a worker in vain, which looks and sleeps again

# words of a worker, of a channel; MEMORY is how many calls are over whose tensors were in it
PC, CALL, AT, MOVED, FOUND, ASLEEP, BUFFERED, SAYS, WAKEUPS, MEMORY, COMPILED = range(11)
FILLED, EMPTIED, NUM_FILLED, NUM_EMPTIED, NUM_FREE, NUM_TAKEN, RINGS = range(7)


class ProtocolError(AssertionError):
    """What went wrong, and the steps that lead there."""


@dataclass(frozen=True)
class Model:
    """What workers do, and what is changed in the protocol to see that it is noticed.

    Args:
        channels: (sender, receiver), each pair of workers that exchange messages.
        calls: exchanges, one after the other, in each of which every channel carries a message.
        slots: of a channel.
        pieces: slots that a message takes.
        ahead: exchanges that may be begun before the first of them is waited for.
        rendezvous: whether messages only say where a tensor lies, which the receiver reads.
        compiled: workers that use the engine.
        mutation: what is done differently from the code.
    """

    channels: tuple[tuple[int, int], ...]
    calls: int = 1
    slots: int = 1
    pieces: int = 1
    ahead: int = 1
    rendezvous: bool = False
    compiled: tuple[int, ...] = ()
    mutation: str = ""

    @cached_property
    def num_workers(self) -> int:
        return 1 + max(max(pair) for pair in self.channels)

    @cached_property
    def outs(self) -> list[list[int]]:
        return [
            [c for c, (a, _) in enumerate(self.channels) if a == w] for w in range(self.num_workers)
        ]

    @cached_property
    def ins(self) -> list[list[int]]:
        return [
            [c for c, (_, b) in enumerate(self.channels) if b == w] for w in range(self.num_workers)
        ]

    @cached_property
    def base(self) -> list[int]:
        """Where the words of each channel begin; a worker's begin at 11 times its number."""
        size = RINGS + 4 * self.slots  # headers, contents, free slots, used slots
        return [11 * self.num_workers + size * c for c in range(len(self.channels))]

    def start(self) -> list[int]:
        state: list[int] = []
        for worker in range(self.num_workers):
            begin = DRAIN if self.outs[worker] else TAKE
            state += [begin, 0, 0, 0, 0, 0, 0, 0, 0, 0, int(worker in self.compiled)]
        for _ in self.channels:
            empty = [0] * self.slots
            state += [0, 0, 0, 0, self.slots, 0, *empty, *empty, *range(self.slots), *empty]
        return state

    def steps(self, state: list[int], worker: int) -> Iterator[tuple[str, list[int]]]:
        """What a worker may do next, and what is then."""
        own = 11 * worker
        if state[own + BUFFERED]:  # the processor may let the store out at any time
            new = state.copy()
            new[own + ASLEEP], new[own + BUFFERED] = 1, 0
            yield "the store leaves", new
        pc = state[own]
        if pc == END or (pc == SLEEP and not state[own + WAKEUPS] and not state[own + COMPILED]):
            return
        if pc == SLEEP and state[own + COMPILED]:  # its time may be over, at any time
            new = state.copy()
            new[own + COMPILED] = 0
            new[own] = AWAKE
            yield "GIVE_UP", new
            if not state[own + WAKEUPS]:
                return
        new = state.copy()
        self._do(new, worker, pc)
        yield NAMES[pc], new

    def _do(self, s: list[int], w: int, pc: int) -> None:
        own, S, mutation = 11 * w, self.slots, self.mutation
        outs, ins = self.outs[w], self.ins[w]
        at = s[own + AT]  # the channel that is looked at, outgoing ones first
        if at < len(outs):
            channel = outs[at]
        elif at < len(outs) + len(ins):
            channel = ins[at - len(outs)]
        else:
            channel = -1
        b = self.base[channel] if channel >= 0 else 0
        heads, contents = b + RINGS, b + RINGS + S
        free, used = contents + S, contents + 2 * S
        goal = (s[own + CALL] + 1) * self.pieces

        def go(pc: int) -> None:
            s[own] = pc

        def next_channel() -> None:
            s[own + AT] = at + 1
            go(DRAIN if at + 1 < len(outs) else TAKE if at + 1 < len(outs) + len(ins) else DECIDE)

        if pc == DRAIN:
            if s[b + EMPTIED]:
                s[own + MOVED] = 1
            while s[b + EMPTIED]:
                s[b + EMPTIED] -= 1
                place = s[b + NUM_EMPTIED] % S
                taken = place if mutation == "slots return in the order of their numbers" else None
                s[free + s[b + NUM_FREE]] = s[used + place] if taken is None else taken
                s[b + NUM_FREE] += 1
                s[b + NUM_EMPTIED] += 1
            allowed = min(s[own + CALL] + self.ahead, self.calls) * self.pieces
            if s[b + NUM_FILLED] < allowed and s[b + NUM_FREE]:
                go(POST if mutation == "published before it is written" else WRITE)
                if mutation == "notified before it is published":
                    go(CHECK)
            else:
                next_channel()
        elif pc == WRITE:
            s[b + NUM_FREE] -= 1
            slot = s[free + s[b + NUM_FREE]]
            if s[contents + slot]:
                raise ProtocolError(f"worker {w} writes slot {slot} while it holds a message")
            s[contents + slot] = s[b + NUM_FILLED] + 1
            s[used + s[b + NUM_FILLED] % S] = slot
            s[own + FOUND] = slot
            go(NAME)
        elif pc == NAME:
            s[heads + s[b + NUM_FILLED] % S] = s[own + FOUND]
            if mutation in EARLY:
                if mutation == "notified before it is published":
                    s[b + FILLED] += 1
                s[b + NUM_FILLED] += 1
                s[own + MOVED] = 1
                go(DRAIN)
            else:
                go(POST)
        elif pc == POST:
            s[b + FILLED] += 1
            if mutation != "published before it is written":
                s[b + NUM_FILLED] += 1
            s[own + MOVED] = 1
            go(CHECK)
        elif pc in (CHECK, CHECK_):
            sender, receiver = self.channels[channel]
            other = receiver if pc == CHECK else sender
            notify, otherwise = (NOTIFY, DRAIN) if pc == CHECK else (NOTIFY_, TAKE)
            otherwise = WRITE if mutation in EARLY and pc == CHECK else otherwise
            go(notify if s[11 * other + ASLEEP] else otherwise)
        elif pc in (NOTIFY, NOTIFY_):
            sender, receiver = self.channels[channel]
            other = 11 * (receiver if pc == NOTIFY else sender)
            s[other + WAKEUPS] = min(s[other + WAKEUPS] + 1, MOST_WAKEUPS)
            go(TAKE if pc == NOTIFY_ else WRITE if mutation in EARLY else DRAIN)
        elif pc == TAKE:
            if s[b + NUM_TAKEN] >= goal or not s[b + FILLED]:
                next_channel()
            else:
                s[b + FILLED] -= not s[own + COMPILED]
                go(FIND)
        elif pc == FIND:
            s[own + FOUND] = s[heads + s[b + NUM_TAKEN] % S]
            go(RETURN if mutation == "returned before it is copied" else COPY)
        elif pc == COPY:
            if mutation == "returned before it is copied":
                s[b + NUM_TAKEN] -= 1
            slot, expected = s[own + FOUND], s[b + NUM_TAKEN] + 1
            if s[contents + slot] != expected:
                found = s[contents + slot]
                raise ProtocolError(f"worker {w} took piece {found} where {expected} was expected")
            sender = 11 * self.channels[channel][0]
            call = s[b + NUM_TAKEN] // self.pieces
            if self.rendezvous and s[sender + MEMORY] > call:  # it is used for something else
                raise ProtocolError(
                    f"worker {w} read memory of worker {sender // 11} after its call"
                )
            s[contents + slot] = 0
            if mutation == "returned before it is copied":
                s[b + NUM_TAKEN] += 1
                go(TAKE)
            else:
                go(LOWER if s[own + COMPILED] else RETURN)
        elif pc == LOWER:
            s[b + FILLED] -= 1
            go(RETURN)
        elif pc == RETURN:
            s[b + EMPTIED] += 1
            s[b + NUM_TAKEN] += 1
            s[own + MOVED] = 1
            if mutation == "returned before it is copied":
                if s[own + COMPILED]:
                    s[b + FILLED] -= 1
                go(COPY)
            elif mutation == "senders are not notified":
                go(TAKE)
            else:
                go(CHECK_)
        elif pc == DECIDE:
            sent = (
                NUM_EMPTIED
                if self.rendezvous and mutation != "memory is reused before it is read"
                else NUM_FILLED
            )
            is_done = all(s[self.base[c] + sent] >= goal for c in outs) and all(
                s[self.base[c] + NUM_TAKEN] >= goal for c in ins
            )
            if is_done:
                s[own + CALL] += 1
                s[own + MEMORY] += 1
            moved, s[own + MOVED], s[own + AT] = s[own + MOVED], 0, 0
            if is_done or moved:
                go(AWAKE if s[own + SAYS] else self._first(s, w))
            else:
                go(SLEEP if s[own + SAYS] else SLEEPY)
        elif pc == SLEEPY:
            s[own + SAYS] = s[own + BUFFERED] = 1
            go(FENCE)
            if mutation == "no fence after the sign of sleep":
                go(self._first(s, w))
        elif pc == FENCE:
            if s[own + BUFFERED]:
                s[own + ASLEEP], s[own + BUFFERED] = 1, 0
            go(SLEEP if mutation == "no look before sleep" else self._first(s, w))
        elif pc == SLEEP:
            s[own + WAKEUPS] -= 1
            go(self._first(s, w))
        elif pc == AWAKE:
            s[own + SAYS] = s[own + ASLEEP] = s[own + BUFFERED] = 0
            go(self._first(s, w))
        else:
            raise AssertionError(pc)

    def _first(self, s: list[int], w: int) -> int:
        """Where a look at all channels begins."""
        if s[11 * w + CALL] == self.calls:
            return END
        return DRAIN if self.outs[w] else TAKE

    def describe(self, state: Sequence[int]) -> str:
        workers = (
            f"worker {w} in call {state[11 * w + CALL]} at {NAMES[state[11 * w]]}"
            for w in range(self.num_workers)
        )
        return ", ".join(workers)


def explore(model: Model, limit: int = 2_000_000) -> int:
    """Visit every state that can be reached; how many there are."""
    first = bytes(model.start())
    came: dict[bytes, tuple[bytes, str] | None] = {first: None}
    level = [first]
    while level:
        found: list[bytes] = []
        for key in level:
            state, can_step = list(key), False
            for worker in range(model.num_workers):
                try:
                    for name, new in model.steps(state, worker):
                        can_step = True
                        after = bytes(new)
                        if after not in came:
                            came[after] = key, f"{worker} {name}"
                            found.append(after)
                except ProtocolError as error:
                    raise ProtocolError(f"{error}\n{_history(model, came, key)}") from None
            if not can_step and any(state[11 * w] != END for w in range(model.num_workers)):
                raise ProtocolError(f"nobody can go on\n{_history(model, came, key)}")
        level = found
        assert len(came) <= limit, "a smaller model is needed"
    return len(came)


def _history(model: Model, came: dict[bytes, tuple[bytes, str] | None], key: bytes) -> str:
    steps, text = [], model.describe(key)
    while (before := came[key]) is not None:
        key, step = before
        steps.append(step)
    return f"{text}, after: {'; '.join(reversed(steps))}"
