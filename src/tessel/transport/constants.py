"""Numbers on which Python and the compiled engine must agree.

This is their one source: setup.py writes them into a header for engine.c. Words have 64 bits.
"""

SLOTS = 8  # of a channel
HEADER = 8  # words that a slot has for its header
SIZE = 64  # bytes to keep for a semaphore: a cache line of its own; sem_t itself takes 32

# the words of a header: of the message its group, its call and its bytes, the bytes in the slot
# (RENDEZVOUS if it says where the tensor lies instead, FAILED if it says why nothing more comes),
# the number of the slot, where in it the bytes begin, and whether what it names is also offered
GROUP, CALL, WHOLE, PART, SLOT, OFFSET, IS_OFFERED = range(7)
RENDEZVOUS, FAILED = -1, -2
# the words of a sender's state: counts, free slots as a stack, those in use as a ring, and how many
# had been filled when the engine last let a receiver read a tensor where it is; for how many more
# messages the engine writes past the cache; the bytes around which it spreads large messages; and
# how many had been filled when it last offered something
NUM_FILLED, NUM_EMPTIED, IS_BUSY, NUM_FREE, FREE = range(5)
USED = FREE + SLOTS
LAST_DIRECT = USED + SLOTS
PAST_CACHE, AROUND, LAST_OFFERED = range(LAST_DIRECT + 1, LAST_DIRECT + 4)
# the words of a receiver's state; POSTED is the address of the first receive that the engine makes
# when its message comes, each of which names the next
NUM_TAKEN, IS_ACTIVE, POSTED = range(3)
# the words of such a receive: the next one, its message, where it belongs, and whether it came;
# before all those of an exchange come, for each send, how many slots were filled with it, if others
# read it where it is
NEXT, ASKED_GROUP, ASKED_CALL, ASKED_ENTRY, ASKED_Y, HAS_COME, RECEIVE = range(7)
# the words of a rendezvous: where a tensor lies
START, RUN_LENGTH, NUM_COUNTS, COUNTS = range(4)
MOST_DIMS = 30
# Of what is offered, after those words: from which block of OFFER bytes on, and up to which one, it
# was copied to the staging buffer of the channel, which has room for RING of them; in a line of
# its own, how many the receiver needs there no more.
OFFERED_FROM, OFFERED, RING, PASSED = 64, 65, 66, 72
OFFER = 2**16

# the words of a copy program, and of each of its steps, which come after them
CODE, NUM_GIVES, NUM_TAKES, BACKOFF, YIELDS, NAP = range(6)
OWN_WAKEUP, OWN_ASLEEP, IS_LARGE, IS_BLOCKED, ENTRIES = range(6, 11)
# DIRECT: of what goes, whether the receiver reads it where it is, or where it is packed; of what
# comes, the process whose memory is read
LENGTH, CONTROL, SLOT_START, SLOT_SIZE, WAKEUP, ASLEEP, STATE, DIRECT = range(8)
BYTES, X_OFFSET, Y_OFFSET, KIND, RUN, NUM_DIMS, DIMS = range(8, 15)
IN_PLACE, PACKED = 1, 2
MOST_TERMS = 16  # of a sum that the engine makes block by block

# Messages from SPREAD bytes on are written to one place after the other, until AROUND bytes of a
# channel were, so that all channels of a worker have FAR: by then the caches of both cores have let
# go of the first place, whose lines would be fetched from the other core before they are written.
SPREAD, FAR = 2**14, 3 * 2**20

# reading another process's memory: bytes of a run below which a copy through a slot is as quick, a
# page; and bytes that one call of the system reads, a little less than what Linux allows
SHORTEST = 4096
MOST_BYTES = 2**30
# what a step does: copy, or add numbers of a kind; complex ones are pairs
COPIES, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64 = range(7)

# how a program may end: not begun; all was taken, but others still read from this worker's memory
NOTHING, UNREAD = -1, -2
