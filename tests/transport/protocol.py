"""A model of the shared-memory protocol, small enough to look at every interleaving of it.

Workers run the loop of `Host.wait` one shared access at a time; `explore` visits every state that
any order of their steps can reach. It raises ProtocolError for a slot that is written while it
holds a message; for a message that is lost, doubled, out of order or taken for that of another
call; for memory that is read after its owner went on; for a worker that raises although nothing
happened; for a call that begins in a broken job; and for states in which nobody can take a step
although somebody waits. Naps have no end in the model, but for finding out that the job is broken
or that a worker is gone: a wakeup that gets lost is a deadlock here, where in life it costs 50 ms.

What the steps stand for. The engine does the same in C, names in brackets.

    BEGIN     Group.attempt, Group.follow [py_again]: raise if there is an alarm, else begin the
              next call
    DRAIN     Outgoing._look_for_free [note_emptied]: lower `emptied`, put slots on the free stack
    WRITE     Outgoing._next_slot and Message.write [give]: fill the slot that was freed last; the
              engine one that was freed before, as it does with large messages
    NAME      slot.header[...] = ... [give]: the slot, and the number of the call, in a header
    POST      Outgoing._publish [publish(filled)]: raise `filled`
    CHECK     Wakeup.notify [publish]: read whether the other worker sleeps
    NOTIFY    Wakeup.notify [publish]: raise the semaphore on which it sleeps
    TAKE      Incoming.pull and take, filled.try_wait() [has_come, which lowers nothing]
    FIND      Incoming._next_slot, _asked_for [has_come, came]: read the header, compare the number
    PUT_BACK  Incoming.take, filled.post(): it is something else, which `pull` looks at
    COPY      ReceiveRequest.read [take]: copy the slot, or the tensor that it names (rendezvous)
    LOWER     [let_go: sem_trywait(filled), after the copy]; not in Python
    RETURN    Incoming.pull, emptied.post() [let_go]: the slot is free again
    CHECK_, NOTIFY_   the same as above, for the sender who may wait for room
    DECIDE    Host.wait: all is done, and there is no alarm (Group.attempt, follow [py_again]);
              or something moved, or it is time for a pause
    SLEEPY    Wakeup.set_asleep(True) [pause_once]: say that this worker is about to sleep
    FENCE     its `post` and `try_wait` [__atomic_thread_fence]: the store leaves the processor
    SLEEP     Wakeup.wait [sleep_until]; then another look
    AWAKE     Wakeup.set_asleep(False) [end_waiting]
    RAISE     Watch.break_job, pass_on: the alarm of one worker after the other
    GIVE_UP   [pause_once gives 0]: the engine's time is over, and Python does the rest
    NAP_OVER  Host.check_alive: a nap without a wakeup, after another look in vain

A worker does an exchange by the engine (ENGINE), else by `Host.begin_swap` and `take` (QUICK), else
by `Host.wait` (PATIENT); what the first leaves, the next does. What may happen to workers: one is
interrupted in a wait; one dies; one leaves a call before its first message, by an exception that
its program catches, so that its numbers leap (`Group.give_up`).

Stores of the sign of sleep may stay in the processor until a fence (x86's store buffer). Other
stores are followed by an operation on a semaphore, before which they become visible; alarms are
looked at again after each nap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

NAMES = (
    *("BEGIN", "DRAIN", "WRITE", "NAME", "POST", "CHECK", "NOTIFY", "TAKE", "FIND", "PUT_BACK"),
    *("COPY", "LOWER", "RETURN", "CHECK_", "NOTIFY_", "DECIDE", "SLEEPY", "FENCE", "SLEEP"),
    *("AWAKE", "RAISE", "END", "LOST", "DEAD"),
)
(BEGIN, DRAIN, WRITE, NAME, POST, CHECK, NOTIFY, TAKE, FIND, PUT_BACK) = range(10)
(COPY, LOWER, RETURN, CHECK_, NOTIFY_, DECIDE, SLEEPY, FENCE, SLEEP) = range(10, 19)
(AWAKE, RAISE, END, LOST, DEAD) = range(19, 24)
OVER = (END, LOST, DEAD)  # the program has ended, or all later calls raise, or the process is gone
EARLY = ("published before it is written", "notified before it is published")
MOST_WAKEUPS = 2  # more only wake a worker in vain, which looks and sleeps again
LEAP = 16

# words of a worker: MEMORY is how many calls are over whose tensors were in it, SHIFT what is added
# to the number of a call, CHECKS whether a nap is over, TOLD how many workers it gave the alarm,
# SPOILT whether it has read memory of a worker that had gone on
(PC, ITS_CALL, AT, MOVED, FOUND, ASLEEP, BUFFERED, SAYS, WAKEUPS, MEMORY) = range(10)
(MODE, SHIFT, ALARM, CHECKS, TOLD, HAS_TOLD, SPOILT, WORDS) = range(10, 18)
PATIENT, QUICK, ENGINE = range(3)
# words of a channel: NEXT_OUT and NEXT_IN count pieces in the order of the program
FILLED, EMPTIED, NUM_FILLED, NUM_EMPTIED, NUM_FREE, NUM_TAKEN, NEXT_OUT, NEXT_IN, RINGS = range(9)
# words of all: whether something happened that may break the job, and whether it is broken
ILL, BROKEN, GLOBAL = range(3)


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
        interrupted: a worker that may be interrupted in a wait, once.
        dies: a worker that may die at any moment.
        leaves: a worker that may leave one call.
        mutation: what is done differently from the code.
    """

    channels: tuple[tuple[int, int], ...]
    calls: int = 1
    slots: int = 1
    pieces: int = 1
    ahead: int = 1
    rendezvous: bool = False
    compiled: tuple[int, ...] = ()
    interrupted: int | None = None
    dies: int | None = None
    leaves: int | None = None
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
    def ends(self) -> int:
        """Where the words of all begin, after those of workers and channels."""
        return self.base[-1] + RINGS + 5 * self.slots

    @cached_property
    def base(self) -> list[int]:
        """Where the words of each channel begin; a worker's begin at WORDS times its number."""
        # headers (slot and number), contents, free slots, used slots
        size = RINGS + 5 * self.slots
        return [WORDS * self.num_workers + size * c for c in range(len(self.channels))]

    @cached_property
    def places(self) -> list[list[tuple[int, ...]]]:
        """The channels of each worker, outgoing ones first, with where their words begin.

        Of each: its number, its counts, headers, numbers, contents, free and used slots. Behind
        the last there is none.
        """
        return [
            [
                *((c, *(self.base[c] + n for n in (0, *self._rings))) for c in (*outs, *ins)),
                (-1, *[0] * 6),
            ]
            for outs, ins in zip(self.outs, self.ins, strict=True)
        ]

    @cached_property
    def _rings(self) -> list[int]:
        return [RINGS + k * self.slots for k in range(5)]

    def start(self) -> list[int]:
        state: list[int] = []
        for _ in range(self.num_workers):
            state += [BEGIN, *[0] * (WORDS - 1)]
        for _ in self.channels:
            empty = [0] * self.slots
            counts = [0] * RINGS
            counts[NUM_FREE] = self.slots
            state += [*counts, *empty, *empty, *empty, *range(self.slots), *empty]
        return state + [0] * GLOBAL

    def steps(self, state: bytearray, worker: int) -> Iterator[tuple[str, bytearray]]:
        """What a worker may do next, and what is then."""
        own = WORDS * worker
        pc = state[own]
        if state[own + BUFFERED]:  # the processor may let the store out at any time
            new = state.copy()
            new[own + ASLEEP], new[own + BUFFERED] = 1, 0
            yield "the store leaves", new
        if pc in OVER:
            return
        yield from self._misfortunes(state, worker)
        if pc == SLEEP:
            yield from self._wake(state, worker)
            return
        new = state.copy()
        self._do(new, worker, pc)
        yield NAMES[pc], new

    def _misfortunes(self, state: bytearray, worker: int) -> Iterator[tuple[str, bytearray]]:
        own, pc, ill = WORDS * worker, state[WORDS * worker], self.ends + ILL
        if worker == self.dies:
            new = state.copy()
            new[own], new[ill] = DEAD, 1
            yield "it dies", new
        if state[ill]:
            return
        if worker == self.interrupted and pc in (DECIDE, SLEEP):
            new = state.copy()
            new[ill] = 1
            if self.mutation.startswith("an interrupted exchange breaks nothing"):
                new[self.ends + BROKEN] = not self.mutation.endswith("not compared")
                self._leave_call(new, worker)
            else:
                new[own] = RAISE
            yield "it is interrupted", new
        if worker == self.leaves and pc == BEGIN and state[own + ITS_CALL] < self.calls:
            new = state.copy()
            new[ill] = 1
            same = self.mutation == "numbers do not leap"
            new[own + SHIFT] = 255 if same else LEAP
            self._leave_call(new, worker)
            yield "it leaves a call", new

    def _leave_call(self, s: bytearray, w: int) -> None:
        """Go on with the next call, whatever was done of this one."""
        own = WORDS * w
        s[own + ITS_CALL] += 1
        s[own + MEMORY] += 1
        for c in self.outs[w]:
            s[self.base[c] + NEXT_OUT] = s[own + ITS_CALL] * self.pieces
        for c in self.ins[w]:
            s[self.base[c] + NEXT_IN] = s[own + ITS_CALL] * self.pieces
        s[own] = BEGIN

    def _wake(self, state: bytearray, worker: int) -> Iterator[tuple[str, bytearray]]:
        own = WORDS * worker
        if state[own + MODE] == ENGINE:  # its time may be over, at any time
            new = state.copy()
            new[own + MODE] = QUICK
            new[own] = AWAKE
            yield "GIVE_UP", new
        elif self._is_vain(state, worker):
            new = state.copy()
            new[own + CHECKS] = 1
            new[own] = self._first(worker)
            yield "NAP_OVER", new
        if state[own + WAKEUPS]:
            new = state.copy()
            new[own + WAKEUPS] -= 1
            new[own] = self._first(worker)
            yield "SLEEP", new

    def _is_vain(self, s: bytearray, w: int) -> bool:
        """Whether a worker that looks would find that it waits in vain."""
        if s[WORDS * w + ALARM] and self.mutation != "waits do not look at the alarm":
            return True
        if self.mutation == "waits do not look for those who are gone":
            return False
        goal = (s[WORDS * w + ITS_CALL] + 1) * self.pieces
        senders = [c for c in self.ins[w] if s[self.base[c] + NEXT_IN] < goal]
        readers = [c for c in self.outs[w] if not self._has_gone(s, c, goal)]
        return any(self._is_gone(s, self.channels[c][0], c, FILLED) for c in senders) or any(
            self._is_gone(s, self.channels[c][1], c, EMPTIED) for c in readers
        )

    def _is_gone(self, s: bytearray, other: int, channel: int, count: int) -> bool:
        """Whether a worker is dead, or has ended its program and has left nothing to be looked at.

        One whose calls raise may still compute, for as long as it likes: others need the alarm.
        """
        pc = s[WORDS * other]
        return pc == DEAD or (pc == END and not s[self.base[channel] + count])

    def number(self, s: bytearray, w: int, call: int) -> int:
        """What the messages of a call carry."""
        return (call + s[WORDS * w + SHIFT]) % 256

    def _do(self, s: bytearray, w: int, pc: int) -> None:
        own, S, mutation = WORDS * w, self.slots, self.mutation
        outs, ins = self.outs[w], self.ins[w]
        at = s[own + AT]  # the channel that is looked at, outgoing ones first
        channel, b, heads, numbers, contents, free, used = self.places[w][at]
        goal = (s[own + ITS_CALL] + 1) * self.pieces
        begun = min(s[own + ITS_CALL] + self.ahead, self.calls) * self.pieces
        mode = s[own + MODE]

        def go(pc: int) -> None:
            s[own] = pc

        def next_channel() -> None:
            s[own + AT] = at + 1
            go(DRAIN if at + 1 < len(outs) else TAKE if at + 1 < len(outs) + len(ins) else DECIDE)

        if pc == BEGIN:
            if s[own + ITS_CALL] == self.calls:
                go(END)
            elif s[own + ALARM] and mutation != "calls do not look at the alarm":
                go(LOST if s[own + HAS_TOLD] else RAISE)
            elif s[self.ends + BROKEN]:
                raise ProtocolError(f"worker {w} begins a call in a broken job")
            else:
                is_short = self.pieces == self.ahead == 1 and not self.rendezvous
                s[own + MODE] = ENGINE if w in self.compiled else QUICK if is_short else PATIENT
                s[own + AT] = s[own + MOVED] = s[own + CHECKS] = 0
                go(self._first(w))
        elif pc == DRAIN:
            if s[b + EMPTIED]:
                s[own + MOVED] = 1
            while s[b + EMPTIED]:
                s[b + EMPTIED] -= 1
                place = s[b + NUM_EMPTIED] % S
                taken = place if mutation == "slots return in the order of their numbers" else None
                s[free + s[b + NUM_FREE]] = s[used + place] if taken is None else taken
                s[b + NUM_FREE] += 1
                s[b + NUM_EMPTIED] += 1
            if s[b + NEXT_OUT] >= begun:
                next_channel()
            elif s[b + NUM_FREE]:
                go(POST if mutation == "published before it is written" else WRITE)
                if mutation == "notified before it is published":
                    go(CHECK)
            elif mode != PATIENT:  # no room: nothing of it was done, and another way is taken
                s[own + MODE] = mode - 1
            else:
                next_channel()
        elif pc == WRITE:
            s[b + NUM_FREE] -= 1
            taken = 0 if mode == ENGINE else s[b + NUM_FREE]
            slot = s[free + taken]
            for freed in range(free + taken, free + s[b + NUM_FREE]):
                s[freed] = s[freed + 1]
            if s[contents + slot]:
                raise ProtocolError(f"worker {w} writes slot {slot} while it holds a message")
            s[contents + slot] = s[b + NEXT_OUT] + 1
            s[used + s[b + NUM_FILLED] % S] = slot
            s[own + FOUND] = slot
            go(POST if mutation == "numbered after it is published" else NAME)
            if mutation == "numbered after it is published":
                s[heads + s[b + NUM_FILLED] % S] = slot
        elif pc == NAME:
            filled = s[b + NUM_FILLED] - (mutation == "numbered after it is published")
            piece = s[b + NEXT_OUT] - (mutation == "numbered after it is published")
            s[heads + filled % S] = s[own + FOUND]
            s[numbers + filled % S] = self.number(s, w, piece // self.pieces)
            if mutation in EARLY:
                if mutation == "notified before it is published":
                    s[b + FILLED] += 1
                s[b + NUM_FILLED] += 1
                s[b + NEXT_OUT] += 1
                s[own + MOVED] = 1
                go(DRAIN)
            else:
                go(CHECK if mutation == "numbered after it is published" else POST)
        elif pc == POST:
            s[b + FILLED] += 1
            if mutation != "published before it is written":
                s[b + NUM_FILLED] += 1
                s[b + NEXT_OUT] += 1
            s[own + MOVED] = 1
            go(NAME if mutation == "numbered after it is published" else CHECK)
        elif pc in (CHECK, CHECK_):
            sender, receiver = self.channels[channel]
            other = receiver if pc == CHECK else sender
            notify, otherwise = (NOTIFY, DRAIN) if pc == CHECK else (NOTIFY_, TAKE)
            otherwise = WRITE if mutation in EARLY and pc == CHECK else otherwise
            go(notify if s[WORDS * other + ASLEEP] else otherwise)
        elif pc in (NOTIFY, NOTIFY_):
            sender, receiver = self.channels[channel]
            self._notify(s, receiver if pc == NOTIFY else sender)
            go(TAKE if pc == NOTIFY_ else WRITE if mutation in EARLY else DRAIN)
        elif pc == TAKE:
            # others may wait until this worker has read what they keep for it, also for later calls
            most = begun if self.rendezvous and mode == PATIENT else goal
            if s[b + NEXT_IN] >= most or not s[b + FILLED]:
                next_channel()
            else:
                s[b + FILLED] -= mode != ENGINE
                go(FIND)
        elif pc == FIND:
            place = s[b + NUM_TAKEN] % S
            s[own + FOUND] = s[heads + place]
            expected = self.number(s, w, s[b + NEXT_IN] // self.pieces)
            is_asked = s[numbers + place] == expected or bool(s[b + NEXT_IN] % self.pieces)
            is_asked = is_asked or mutation.endswith("numbers are not compared")
            is_asked |= mode == ENGINE and mutation == "the engine does not compare numbers"
            is_asked = is_asked and not (mode == QUICK and self.rendezvous)
            if is_asked:
                go(RETURN if mutation == "returned before it is copied" else COPY)
            elif mode == ENGINE:
                s[own + MODE] = QUICK
                go(TAKE)
            elif mode == QUICK:
                go(PUT_BACK)
            else:  # the slot is free again, and the job is broken
                s[contents + s[own + FOUND]] = 0
                s[b + EMPTIED] += 1
                s[b + NUM_TAKEN] += 1
                go(RAISE)
        elif pc == PUT_BACK:
            s[b + FILLED] += mutation != "what is put back is lost"
            s[own + MODE] = PATIENT
            go(TAKE)
        elif pc == COPY:
            if mutation == "returned before it is copied":
                s[b + NUM_TAKEN] -= 1
                s[b + NEXT_IN] -= 1
            slot, expected = s[own + FOUND], s[b + NEXT_IN] + 1
            if s[contents + slot] != expected:
                found = s[contents + slot]
                raise ProtocolError(f"worker {w} took piece {found} where {expected} was expected")
            sender = WORDS * self.channels[channel][0]
            call = s[b + NEXT_IN] // self.pieces
            if self.rendezvous and s[sender + MEMORY] > call:  # it is used for something else
                s[own + SPOILT] = 1
            s[contents + slot] = 0
            if mutation == "returned before it is copied":
                s[b + NUM_TAKEN] += 1
                s[b + NEXT_IN] += 1
                go(TAKE)
            else:
                go(LOWER if mode == ENGINE else RETURN)
        elif pc == LOWER:
            s[b + FILLED] -= 1
            go(RETURN)
        elif pc == RETURN:
            s[b + EMPTIED] += 1
            s[b + NUM_TAKEN] += 1
            s[b + NEXT_IN] += 1
            s[own + MOVED] = 1
            if mutation == "returned before it is copied":
                if mode == ENGINE:
                    s[b + FILLED] -= 1
                go(COPY)
            elif mutation == "senders are not notified":
                go(TAKE)
            else:
                go(CHECK_)
        elif pc == DECIDE:
            self._decide(s, w, goal)
        elif pc == SLEEPY:
            s[own + SAYS] = s[own + BUFFERED] = 1
            go(FENCE)
            if mutation == "no fence after the sign of sleep":
                go(self._first(w))
        elif pc == FENCE:
            if s[own + BUFFERED]:
                s[own + ASLEEP], s[own + BUFFERED] = 1, 0
            go(SLEEP if mutation == "no look before sleep" else self._first(w))
        elif pc == AWAKE:
            s[own + SAYS] = s[own + ASLEEP] = s[own + BUFFERED] = 0
            go(self._first(w) if s[own + MODE] != PATIENT or s[own + MOVED] else BEGIN)
            s[own + MOVED] = 0
        elif pc == RAISE:
            self._raise(s, w)
        else:
            raise AssertionError(pc)

    def _notify(self, s: bytearray, other: int) -> None:
        wakeups = WORDS * other + WAKEUPS
        s[wakeups] = min(s[wakeups] + 1, MOST_WAKEUPS)

    def _has_gone(self, s: bytearray, channel: int, goal: int) -> bool:
        """Whether a worker has sent all of a call, and all was read that lies in its memory."""
        b = self.base[channel]
        left_out = s[b + NEXT_OUT] - s[b + NUM_FILLED]  # of calls that this worker has left
        if self.rendezvous and self.mutation != "memory is reused before it is read":
            return s[b + NUM_EMPTIED] + left_out >= goal
        return s[b + NEXT_OUT] >= goal

    def _decide(self, s: bytearray, w: int, goal: int) -> None:
        own = WORDS * w
        is_done = all(self._has_gone(s, c, goal) for c in self.outs[w]) and all(
            s[self.base[c] + NEXT_IN] >= goal for c in self.ins[w]
        )
        moved, checks = s[own + MOVED], s[own + CHECKS]
        s[own + MOVED] = s[own + CHECKS] = s[own + AT] = 0
        looks = self.mutation != "nobody looks at the alarm after reading"
        if is_done and s[own + ALARM] and looks:
            s[own] = RAISE
        elif is_done:
            if s[own + SPOILT]:
                raise ProtocolError(f"worker {w} read memory of another worker after its call")
            s[own + ITS_CALL] += 1
            s[own + MEMORY] += 1
            s[own + MODE] = PATIENT
            s[own] = AWAKE if s[own + SAYS] else BEGIN
        elif moved:
            s[own + MOVED] = s[own + SAYS]  # for AWAKE: the call goes on
            s[own] = AWAKE if s[own + SAYS] else self._first(w)
        elif checks and self._is_vain(s, w):
            s[own] = RAISE
        elif s[own + MODE] == QUICK:
            s[own + MODE] = PATIENT
            s[own] = self._first(w)
        else:
            s[own] = SLEEP if s[own + SAYS] else SLEEPY

    def _raise(self, s: bytearray, w: int) -> None:
        """Tell one worker after the other, this one first; then its program goes on."""
        own, told = WORDS * w, s[WORDS * w + TOLD]
        is_passed_on = self.mutation != "the alarm is not passed on"
        if not told and s[own + ALARM] and not is_passed_on:
            told = self.num_workers
        else:
            other = (w + told) % self.num_workers
            if self.mutation != "nobody else is told" or not told:
                s[WORDS * other + ALARM] = 1
            if s[WORDS * other + ASLEEP]:
                self._notify(s, other)
            told += 1
        s[own + TOLD] = told
        if told == self.num_workers:
            s[self.ends + BROKEN] = 1
            s[own + TOLD], s[own + HAS_TOLD] = 0, 1
            if s[own + ITS_CALL] < self.calls:
                self._leave_call(s, w)

    def _first(self, w: int) -> int:
        """Where a look at all channels begins."""
        return DRAIN if self.outs[w] else TAKE

    def check_end(self, state: Sequence[int]) -> None:
        """What must be true when nobody takes a step any more."""
        pcs = [state[WORDS * w] for w in range(self.num_workers)]
        if any(pc not in OVER for pc in pcs):
            raise ProtocolError("nobody can go on")
        has_raised = any(state[WORDS * w + HAS_TOLD] for w in range(self.num_workers))
        if not state[self.ends + ILL] and (has_raised or any(pc != END for pc in pcs)):
            raise ProtocolError("a worker raised although nothing happened")

    def describe(self, state: Sequence[int]) -> str:
        workers = (
            f"worker {w} in call {state[WORDS * w + ITS_CALL]} at {NAMES[state[WORDS * w]]}"
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
            state, can_step = bytearray(key), False
            try:
                for worker in range(model.num_workers):
                    for name, new in model.steps(state, worker):
                        can_step = True
                        after = bytes(new)
                        if after not in came:
                            came[after] = key, f"{worker} {name}"
                            found.append(after)
                if not can_step:
                    model.check_end(state)
            except ProtocolError as error:
                raise ProtocolError(f"{error}\n{_history(model, came, key)}") from None
        level = found
        assert len(came) <= limit, "a smaller model is needed"
    return len(came)


def _history(model: Model, came: dict[bytes, tuple[bytes, str] | None], key: bytes) -> str:
    steps, text = [], model.describe(key)
    while (before := came[key]) is not None:
        key, step = before
        steps.append(step)
    return f"{text}, after: {'; '.join(reversed(steps))}"
