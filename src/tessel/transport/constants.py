"""Constants that Python and the compiled engine share.

This file is their only source: setup.py writes them into a header for engine.c. Words have 64 bits.
"""

SLOTS = 8  # slots of a channel
HEADER = 8  # words of the header of a slot
SIZE = 64  # bytes to keep for a semaphore: a cache line of its own; sem_t itself takes 32

# the words of a header: the message's group, call and bytes, the bytes in the slot (or RENDEZVOUS
# if the slot contains the address of the tensor, FAILED if it contains the reason why nothing more
# comes), the number of the slot, where in it the bytes begin, and whether the tensor at the address
# is also offered
GROUP, CALL, WHOLE, PART, SLOT, OFFSET, IS_OFFERED = range(7)
RENDEZVOUS, FAILED = -1, -2
# the words of a sender's state: counts, free slots as a stack, slots in use as a ring, and the
# number of slots filled when the engine last let a receiver read a tensor in place; the number of
# further messages that the engine writes past the cache; the bytes over which it spreads large
# messages; and the number of slots filled when it last offered a tensor
NUM_FILLED, NUM_EMPTIED, IS_BUSY, NUM_FREE, FREE = range(5)
USED = FREE + SLOTS
LAST_DIRECT = USED + SLOTS
PAST_CACHE, AROUND, LAST_OFFERED = range(LAST_DIRECT + 1, LAST_DIRECT + 4)
# the words of a receiver's state; POSTED is the address of the first receive that the engine makes
# when its message arrives; each receive has the address of the next
NUM_TAKEN, IS_ACTIVE, POSTED = range(3)
# the words of such a receive: the next one, its message, its place, and whether it has arrived;
# before the receives of an exchange there is a word for each send: the number of slots filled with
# it, if others read it in place
NEXT, ASKED_GROUP, ASKED_CALL, ASKED_ENTRY, ASKED_Y, HAS_COME, RECEIVE = range(7)
# the words of a rendezvous: the address of a tensor, as runs with counts and steps
START, RUN_LENGTH, NUM_COUNTS, COUNTS = range(4)
MOST_DIMS = 30
# For an offer, after those words: the first block of OFFER bytes, and the one after the last, that
# was copied to the staging buffer of the channel, which has room for RING blocks; in a cache line
# of its own, the number of blocks that the receiver no longer needs there.
OFFERED_FROM, OFFERED, RING, PASSED = 64, 65, 66, 72
OFFER = 2**16

# the words of a copy program, and of each of its steps, which follow
CODE, NUM_GIVES, NUM_TAKES, BACKOFF, YIELDS, NAP = range(6)
OWN_WAKEUP, OWN_ASLEEP, IS_LARGE, IS_BLOCKED, ENTRIES = range(6, 11)
# DIRECT: for a send, whether the receiver reads it in place, or where it is packed; for a receive,
# the process whose memory is read
LENGTH, CONTROL, SLOT_START, SLOT_SIZE, WAKEUP, ASLEEP, STATE, DIRECT = range(8)
BYTES, X_OFFSET, Y_OFFSET, KIND, RUN, NUM_DIMS, DIMS = range(8, 15)
IN_PLACE, PACKED = 1, 2
MOST_TERMS = 16  # terms of a sum that the engine computes block by block

# Messages of at least SPREAD bytes are written to one place after the other, over AROUND bytes of a
# channel, so that all channels of a worker together use FAR bytes: by then the caches of both cores
# have evicted the first place, whose lines would else be fetched from the other core before they
# are written.
SPREAD, FAR = 2**14, 3 * 2**20

# reading another process's memory: the length of a run below which a copy through a slot is as
# fast, a page; and the bytes that one system call reads, a little less than Linux allows
SHORTEST = 4096
MOST_BYTES = 2**30
# the operation of a step: copy, or add numbers of a type; complex numbers are pairs
COPIES, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64 = range(7)

# how a program may end: not begun; all received, but others still read from this worker's memory
NOTHING, UNREAD = -1, -2
