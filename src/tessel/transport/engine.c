/* The engine: exchanges between workers of one host, in one call.

   A program (copy_program.py) lists, as 64-bit words, the copies of an exchange: from a tensor into slots of
   channels to other workers, and out of slots into another tensor. For a large tensor a slot contains only
   its address, and the receiver reads it in place. The engine makes these copies, publishes slots by
   semaphores, and waits a short while for the slots of others. Everything else is left to Python: it may
   always complete an exchange, since the state of a channel is kept in words that both see. The caller
   holds the lock of the host.  */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef int64_t word;

#include "constants.h" /* the layout of headers, states and programs; see constants.py */

static word spent[3]; /* nanoseconds spent packing, moving and waiting, if they are measured */
static int is_clocked;

static word now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (word)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* --- copies */

/* Copies of at least so many bytes bypass the cache, which they would only fill: a line that is written whole is not
 * read before. STREAMS is a kind of copy in addition to those of programs. */
enum { STREAMS = -1, MUCH = 1 << 22, MOST = 1 << 24 };

/* Copy past the cache. The next run is `ahead` bytes further: processors do not predict skipped lines. */
static void stream(char *to, const char *from, size_t bytes, word ahead) {
#ifdef __SSE2__
    for (size_t i = 0; i < bytes; i += 64) {
        _mm_prefetch((const char *)((uintptr_t)from + i + (uintptr_t)ahead), _MM_HINT_T0);
        const __m128i *s = (const __m128i *)(from + i);
        const __m128i a = _mm_loadu_si128(s), b = _mm_loadu_si128(s + 1), c = _mm_loadu_si128(s + 2),
                      d = _mm_loadu_si128(s + 3);
        __m128i *t = (__m128i *)(to + i);
        _mm_stream_si128(t, a), _mm_stream_si128(t + 1, b), _mm_stream_si128(t + 2, c), _mm_stream_si128(t + 3, d);
    }
#else
    (void)ahead;
    memcpy(to, from, bytes);
#endif
}

static void end_stream(void) {
#ifdef __SSE2__
    _mm_sfence(); /* streaming stores are not ordered with others */
#endif
}

#define ADD(type)                                                    \
    do {                                                             \
        type *restrict d = (type *)to;                               \
        const type *restrict s = (const type *)from;                 \
        for (size_t i = 0; i < bytes / sizeof(type); i++) d[i] += s[i]; \
    } while (0)

/* Write the sum of two terms. */
#define SUM(type)                                                    \
    do {                                                             \
        type *restrict d = (type *)to;                               \
        const type *restrict s = (const type *)first, *restrict t = (const type *)second; \
        for (size_t i = 0; i < bytes / sizeof(type); i++) d[i] = s[i] + t[i]; \
    } while (0)

static void put_sum(char *to, const char *first, const char *second, size_t bytes, word kind) {
    switch (kind) {
    case FLOAT32: SUM(float); break;
    case FLOAT64: SUM(double); break;
    case INT8: SUM(uint8_t); break;
    case INT16: SUM(uint16_t); break;
    case INT32: SUM(uint32_t); break;
    case INT64: SUM(uint64_t); break;
    }
}

static void put(char *to, const char *from, size_t bytes, word kind) {
    switch (kind) {
    case COPIES: memcpy(to, from, bytes); break;
    case STREAMS: stream(to, from, bytes, 0); break;
    case FLOAT32: ADD(float); break;
    case FLOAT64: ADD(double); break;
    case INT8: ADD(uint8_t); break;
    case INT16: ADD(uint16_t); break;
    case INT32: ADD(uint32_t); break;
    case INT64: ADD(uint64_t); break;
    }
}

#define COPY_RUNS(bytes)                                             \
    do {                                                             \
        for (word i = 0; i < count; i++, to += to_step, from += from_step) memcpy(to, from, bytes); \
    } while (0)

static void put_runs(char *to, const char *from, const word *dim, size_t run, word kind) {
    const word count = dim[0], to_step = dim[1], from_step = dim[2];
    if (kind == COPIES && run == 4) COPY_RUNS(4);
    else if (kind == COPIES && run == 8) COPY_RUNS(8);
    else if (kind == COPIES && run == 16) COPY_RUNS(16);
    else if (kind == STREAMS)
        for (word i = 0; i < count; i++, to += to_step, from += from_step) stream(to, from, run, from_step);
    else
        for (word i = 0; i < count; i++, to += to_step, from += from_step) put(to, from, run, kind);
}

/* Loop over all dimensions, each (count, step of `to`, step of `from`), and put the runs of the last one. */
static void put_all(char *to, const char *from, const word *dims, word num_dims, size_t run,
                    word kind) {
    if (num_dims == 0) put(to, from, run, kind);
    else if (num_dims == 1) put_runs(to, from, dims, run, kind);
    else
        for (word i = 0; i < dims[0]; i++, to += dims[1], from += dims[2])
            put_all(to, from, dims + 3, num_dims - 1, run, kind);
}

/* Whether a copy is large and has runs of whole, aligned cache lines; a contiguous one must be larger still. */
static int can_stream(const char *to, const word *entry) {
    word odd = (word)to | entry[RUN];
    for (word d = 0; d < entry[NUM_DIMS]; d++) odd |= entry[DIMS + 3 * d + 1];
    return entry[KIND] == COPIES && entry[BYTES] >= (entry[NUM_DIMS] ? MUCH : MOST) && odd % 64 == 0;
}

static void carry(char *to, const char *from, const word *entry) {
    const int streams = can_stream(to, entry);
    put_all(to, from, entry + DIMS, entry[NUM_DIMS], (size_t)entry[RUN], streams ? STREAMS : entry[KIND]);
    if (streams) end_stream();
}

/* --- the memory of other processes */

/* Pieces of memory in one system call: Linux takes 1,024, and two lists of 256 easily fit on the stack; bytes of the
 * staging buffer; and the shortest run that is read together with the gap after it. */
enum { SEGMENTS = 256, STAGING = 1 << 18, LEAST = 256 };

/* A position in a tensor that consists of runs of bytes. */
struct cursor {
    char *start, *at; /* of the current run, and the position in it */
    size_t run, left;
    word num_dims, counts[MOST_DIMS], steps[MOST_DIMS], index[MOST_DIMS];
};

static void advance(struct cursor *c, size_t bytes) {
    c->at += bytes;
    c->left -= bytes;
    if (c->left) return;
    for (word d = c->num_dims - 1; d >= 0; d--) {
        c->start += c->steps[d];
        if (++c->index[d] < c->counts[d]) break;
        c->start -= c->steps[d] * c->counts[d];
        c->index[d] = 0;
    }
    c->at = c->start;
    c->left = c->run;
}

static void begin(struct cursor *c, char *start, size_t run, word num_dims) {
    c->start = c->at = start;
    c->run = c->left = run;
    c->num_dims = num_dims;
    memset(c->index, 0, sizeof c->index);
}

/* Begin at the tensor that a slot names; return whether it has few enough dimensions. */
static int begin_at_rendezvous(struct cursor *c, const word *rendezvous) {
    const word n = rendezvous[NUM_COUNTS];
    if (n > MOST_DIMS) return 0;
    begin(c, (char *)rendezvous[START], (size_t)rendezvous[RUN_LENGTH], n);
    memcpy(c->counts, rendezvous + COUNTS, (size_t)n * sizeof(word));
    memcpy(c->steps, rendezvous + COUNTS + n, (size_t)n * sizeof(word));
    return 1;
}

static void begin_at_target(struct cursor *c, char *y, const word *entry) {
    begin(c, y + entry[Y_OFFSET], (size_t)entry[RUN], entry[NUM_DIMS]);
    for (word d = 0; d < entry[NUM_DIMS]; d++) {
        c->counts[d] = entry[DIMS + 3 * d];
        c->steps[d] = entry[DIMS + 3 * d + 1];
    }
}

/* Copy bytes from another process; return whether that was possible. */
static int read_from(pid_t pid, struct cursor *to, struct cursor *from, size_t bytes) {
    struct iovec here[SEGMENTS], there[SEGMENTS];
    while (bytes) {
        int n = 0;
        size_t sum = 0;
        while (n < SEGMENTS && sum < bytes && sum < MOST_BYTES) {
            size_t part = to->left < from->left ? to->left : from->left;
            if (part > bytes - sum) part = bytes - sum;
            if (part > MOST_BYTES - sum) part = MOST_BYTES - sum;
            here[n] = (struct iovec){to->at, part};
            there[n++] = (struct iovec){from->at, part};
            advance(to, part);
            advance(from, part);
            sum += part;
        }
        if (process_vm_readv(pid, here, n, there, n, 0) != (ssize_t)sum) return 0;
        bytes -= sum;
    }
    return 1;
}

/* Prefetch the run after the next: processors do not predict skipped lines. */
static void fetch_ahead(const struct cursor *from) {
#ifdef __SSE2__
    if (!from->num_dims || from->run >= SHORTEST) return;
    const uintptr_t ahead = (uintptr_t)from->start + 2 * (uintptr_t)from->steps[from->num_dims - 1];
    for (size_t i = 0; i < from->run; i += 64) _mm_prefetch((const char *)(ahead + i), _MM_HINT_T0);
#else
    (void)from;
#endif
}

/* Whether the gaps between runs may be read with them: at most as many bytes again, which takes less time than looking
 * up a page for each run. */
static int is_close(word step, word run) { return run >= LEAST && step >= run && step <= 2 * run; }

/* Copies between positions in a tensor and contiguous memory. */
static void gather(char *to, struct cursor *from, size_t bytes, int streams) {
    while (bytes) {
        const size_t part = bytes < from->left ? bytes : from->left;
        fetch_ahead(from);
        put(to, from->at, part, streams && part % 64 == 0 && (uintptr_t)to % 64 == 0 ? STREAMS : COPIES);
        advance(from, part);
        to += part;
        bytes -= part;
    }
}

static void scatter(struct cursor *to, const char *from, size_t bytes, int streams) {
    while (bytes) {
        const size_t part = bytes < to->left ? bytes : to->left;
        put(to->at, from, part, streams && part % 64 == 0 && (uintptr_t)to->at % 64 == 0 ? STREAMS : COPIES);
        advance(to, part);
        from += part;
        bytes -= part;
    }
}

static void pass_over(struct cursor *c, size_t bytes) {
    while (bytes) {
        const size_t part = bytes < c->left ? bytes : c->left;
        advance(c, part);
        bytes -= part;
    }
}

/* --- channels */

static word *state_of(const word *entry) { return (word *)entry[STATE]; }
static sem_t *filled(const word *entry) { return (sem_t *)entry[CONTROL]; }
static sem_t *emptied(const word *entry) { return (sem_t *)(entry[CONTROL] + SIZE); }
static word *header(const word *entry, word number) {
    return (word *)(entry[CONTROL] + 2 * SIZE) + HEADER * (number % SLOTS);
}
static char *slot(const word *entry, word number) {
    return (char *)(entry[SLOT_START] + number * entry[SLOT_SIZE]);
}

/* Raise a count, and wake the worker at the other end if it sleeps. */
static void publish(const word *entry, sem_t *count) {
    sem_post(count);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n((word *)entry[ASLEEP], __ATOMIC_RELAXED)) sem_post((sem_t *)entry[WAKEUP]);
}

static void note_emptied(const word *entry) {
    word *state = state_of(entry);
    while (sem_trywait(emptied(entry)) == 0)
        state[FREE + state[NUM_FREE]++] = state[USED + state[NUM_EMPTIED]++ % SLOTS];
}

static int has_room(const word *entry) {
    const word *state = state_of(entry);
    if (state[IS_BUSY]) return 0;
    note_emptied(entry);
    return state[NUM_FREE] > 0;
}

/* Pack short runs, which take longer to read from another process than to copy, and describe the packed bytes. */
static void pack(const word *entry, const char *x, char *room, word *rendezvous) {
    char *packed = room + entry[Y_OFFSET];
    carry(packed, x + entry[X_OFFSET], entry);
    rendezvous[START] = (word)packed, rendezvous[RUN_LENGTH] = entry[BYTES], rendezvous[NUM_COUNTS] = 0;
}

/* Write the address of a part of x to a slot, as Python does: runs with their counts and steps. */
static void write_rendezvous(const word *entry, const char *x, word *rendezvous) {
    const word n = entry[NUM_DIMS];
    rendezvous[START] = (word)(x + entry[X_OFFSET]);
    rendezvous[RUN_LENGTH] = entry[RUN];
    rendezvous[NUM_COUNTS] = n;
    for (word d = 0; d < n; d++) {
        rendezvous[COUNTS + d] = entry[DIMS + 3 * d];
        rendezvous[COUNTS + n + d] = entry[DIMS + 3 * d + 2];
    }
}

/* Take a free slot, and the offset of a message in it: small messages use the last slot again, which is still in the
 * cache, and larger ones rotate over several places of each slot. */
static word free_slot(const word *entry, word *offset) {
    word *state = state_of(entry), depth = 1;
    *offset = 0;
    if (!entry[DIRECT] && entry[BYTES] >= SPREAD) {
        const word around = state[AROUND], share = around / SLOTS;
        const word most = share < entry[SLOT_SIZE] ? share : entry[SLOT_SIZE];
        const word length = (entry[BYTES] + 63) / 64 * 64, places = length < most ? most / length : 1;
        depth = (around - 1) / (places * length) + 1;
        *offset = state[NUM_FILLED] / SLOTS % places * length;
    }
    word *free = state + FREE, at = depth < state[NUM_FREE] ? state[NUM_FREE] - depth : 0;
    const word number = free[at];
    for (state[NUM_FREE]--; at < state[NUM_FREE]; at++) free[at] = free[at + 1];
    return number;
}

/* Nanoseconds per KiB above which slots are written past the cache, for so many messages: the other core is then far
 * away, and a write has to fetch its lines first. */
enum { SLOW = 100, FOR_A_WHILE = 32 };

static int is_past_cache(const word *entry) {
    word *past_cache = state_of(entry) + PAST_CACHE;
    return *past_cache > 0 && (*past_cache)--;
}

static void note_speed(const word *entry, word bytes, word since) {
    if (now() - since > bytes / 1024 * SLOW) state_of(entry)[PAST_CACHE] = FOR_A_WHILE;
}

static void write_slot(const word *entry, char *to, const char *from) {
    if (entry[BYTES] < 2 * SPREAD || entry[RUN] % 64) {
        carry(to, from, entry);
    } else if (is_past_cache(entry)) {
        put_all(to, from, entry + DIMS, entry[NUM_DIMS], (size_t)entry[RUN], STREAMS);
        end_stream();
    } else {
        const word since = now();
        carry(to, from, entry);
        note_speed(entry, entry[BYTES], since);
    }
}

/* --- offers: a worker that waits until others have read its memory meanwhile copies blocks of it to the staging buffer
 * of the channel. Receivers take blocks from there, which is faster than a copy by the system, and read the blocks that
 * are not there yet: nobody depends on an offer, and it ends when the slot that names the memory is emptied. */

/* The largest number of offers; nanoseconds to wait for a block from an owner that is copying; blocks by which an
 * owner skips ahead of a receiver that has overtaken it; and blocks that are read at once if none is offered. */
enum { MOST_OFFERS = 16, MOST_NANOSECONDS = 4000, LEAD = 2, AT_ONCE = 4 };

struct offer {
    const word *entry;
    word *counts, next, ring;
    struct cursor from;
    size_t left;
};
static _Thread_local struct {
    int count, waits_for_owner, spares_packing;
    struct offer each[MOST_OFFERS];
} offers;

static char *staging_of(const word *entry) { return slot(entry, SLOTS); }

/* Begin to offer the tensor that a slot names; return whether it is offered. It is not while the buffer has blocks of
 * an earlier message that is not read yet. */
static int begin_offer(const word *entry, word *rendezvous) {
    word *state = state_of(entry);
    struct offer *one = offers.each + offers.count;
    const word ring = state[AROUND] / OFFER;
    if (offers.count == MOST_OFFERS || ring < 2 || state[NUM_EMPTIED] < state[LAST_OFFERED]) return 0;
    if (!begin_at_rendezvous(&one->from, rendezvous)) return 0;
    one->entry = entry, one->counts = rendezvous, one->next = 0, one->ring = ring;
    one->left = (size_t)entry[BYTES];
    rendezvous[OFFERED_FROM] = rendezvous[OFFERED] = rendezvous[PASSED] = 0, rendezvous[RING] = ring;
    state[LAST_OFFERED] = state[NUM_FILLED] + 1;
    offers.count++;
    return 1;
}

/* Copy one more block to a staging buffer with room; return whether there was one to copy. */
static int offer_block(void) {
    for (struct offer *one = offers.each; one < offers.each + offers.count; one++) {
        const word passed = __atomic_load_n(one->counts + PASSED, __ATOMIC_ACQUIRE);
        if (one->next < passed) {
            for (const word until = passed + LEAD; one->next < until && one->left; one->next++) {
                const size_t part = one->left < OFFER ? one->left : OFFER;
                pass_over(&one->from, part);
                one->left -= part;
            }
            __atomic_store_n(one->counts + OFFERED_FROM, one->next, __ATOMIC_RELEASE);
        }
        const size_t part = one->left < OFFER ? one->left : OFFER;
        if (!one->left || one->next - passed >= one->ring) continue;
        char *to = staging_of(one->entry) + one->next % one->ring * OFFER;
        if (is_past_cache(one->entry)) {
            gather(to, &one->from, part, 1);
            end_stream();
        } else {
            const word since = now();
            gather(to, &one->from, part, 0);
            note_speed(one->entry, (word)part, since);
        }
        one->left -= part;
        __atomic_store_n(one->counts + OFFERED, ++one->next, __ATOMIC_RELEASE);
        return 1;
    }
    return 0;
}

/* Write the address of what others read, and offer it; return whether it is offered. Short runs that are close together
 * are not packed if the receiver can find them in the staging buffer: those of a large tensor then stay in the cache on
 * their way. */
static int name(const word *entry, const char *x, char *room, word *rendezvous, int offers_it) {
    const int is_packed = entry[DIRECT] == PACKED;
    const word n = entry[NUM_DIMS], step = n ? entry[DIMS + 3 * (n - 1) + 2] : 0; /* of x, along the last dimension */
    if (!is_packed || (offers.spares_packing && entry[BYTES] >= MUCH && is_close(step, entry[RUN]))) {
        write_rendezvous(entry, x, rendezvous);
        if ((offers_it || is_packed) && begin_offer(entry, rendezvous)) return 1;
    }
    if (is_packed) pack(entry, x, room, rendezvous);
    return 0;
}

static void give(const word *entry, const char *x, char *room, word code, word call, int offers_it) {
    word *state = state_of(entry), offset, number = free_slot(entry, &offset);
    word *head = header(entry, state[NUM_FILLED]), *rendezvous = (word *)slot(entry, number);
    head[IS_OFFERED] = entry[DIRECT] && name(entry, x, room, rendezvous, offers_it);
    if (!entry[DIRECT]) write_slot(entry, slot(entry, number) + offset, x + entry[X_OFFSET]);
    head[GROUP] = code, head[CALL] = call;
    head[WHOLE] = entry[BYTES], head[PART] = entry[DIRECT] ? RENDEZVOUS : entry[BYTES];
    head[SLOT] = number, head[OFFSET] = offset;
    state[USED + state[NUM_FILLED]++ % SLOTS] = number;
    if (entry[DIRECT]) state[LAST_DIRECT] = state[NUM_FILLED];
    publish(entry, filled(entry));
}

/* Whether a message has come: 1 if it is the requested one, -1 if it is another, 0 if there is none. */
static int has_come(const word *entry, word code, word call) {
    int count = 0;
    sem_getvalue(filled(entry), &count);
    if (count <= 0) return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const word *head = header(entry, state_of(entry)[NUM_TAKEN]);
    const int is_asked =
        head[GROUP] == code && head[CALL] == call && head[WHOLE] == entry[BYTES] &&
        (head[PART] == entry[BYTES] || (head[PART] == RENDEZVOUS && entry[DIRECT]));
    return is_asked ? 1 : -1;
}

/* The content of the next message, and whether it is a rendezvous. */
static char *came(const word *entry, int *is_rendezvous) {
    const word *head = header(entry, state_of(entry)[NUM_TAKEN]);
    *is_rendezvous = head[PART] == RENDEZVOUS;
    return slot(entry, head[SLOT]) + head[OFFSET];
}

static void let_go(const word *entry) {
    while (sem_trywait(filled(entry))) {} /* does not wait: the count is known to be positive */
    state_of(entry)[NUM_TAKEN]++;
    publish(entry, emptied(entry));
}

/* Copy from another process if runs at either end are short, through a staging buffer that stays in the cache. */
static int read_staged(pid_t pid, struct cursor *to, struct cursor *from, size_t bytes, int streams) {
    static char staging[STAGING] __attribute__((aligned(64)));
    const int reads_rows = from->run < SHORTEST && from->num_dims &&
                           is_close(from->steps[from->num_dims - 1], (word)from->run);
    while (bytes) {
        struct cursor here;
        size_t left = bytes < STAGING ? bytes : STAGING;
        if (!reads_rows) {
            begin(&here, staging, left, 0);
            if (!read_from(pid, &here, from, left)) return 0;
            scatter(to, staging, left, streams);
        } else { /* whole runs with the gaps between them; a part of a run alone */
            const word last = from->num_dims - 1;
            const size_t run = from->run, step = (size_t)from->steps[last];
            size_t rows = (size_t)(from->counts[last] - from->index[last]);
            if (rows > bytes / run) rows = bytes / run;
            if (rows > STAGING / step) rows = STAGING / step;
            const int is_whole = from->left == run && rows;
            left = is_whole ? rows * run : bytes < from->left ? bytes : from->left;
            const size_t span = is_whole ? (rows - 1) * step + run : left;
            struct cursor there;
            begin(&here, staging, span, 0);
            begin(&there, from->at, span, 0);
            if (!read_from(pid, &here, &there, span)) return 0;
            for (size_t i = 0; is_whole && i < rows; i++) scatter(to, staging + i * step, run, streams);
            if (!is_whole) scatter(to, staging, left, streams);
            pass_over(from, left);
        }
        bytes -= left;
    }
    if (streams) end_stream();
    return 1;
}

/* The words of the next message's offer; NULL if there is none. */
static word *offer_of(const word *entry) {
    const word *head = header(entry, state_of(entry)[NUM_TAKEN]);
    return head[PART] == RENDEZVOUS && head[IS_OFFERED] ? (word *)slot(entry, head[SLOT]) : NULL;
}

/* A block in the staging buffer, if it is there or its owner is copying it; else NULL, and the caller reads it. */
static const char *await_block(const word *entry, word *counts, word number) {
    for (word until = 0; counts; relax()) {
        const word offered = __atomic_load_n(counts + OFFERED, __ATOMIC_ACQUIRE);
        const word from = __atomic_load_n(counts + OFFERED_FROM, __ATOMIC_ACQUIRE);
        if (number < from) break;
        if (number < offered) return staging_of(entry) + number % counts[RING] * OFFER;
        if (offer_block()) continue; /* the owner may wait for blocks of this worker */
        if (!offered || !offers.waits_for_owner) break;
        const word at = now();
        if (!until) until = at + MOST_NANOSECONDS;
        else if (at > until) break;
    }
    return NULL;
}

static void pass(word *counts, word number) { __atomic_store_n(counts + PASSED, number, __ATOMIC_RELEASE); }

/* Copy from another process block by block, taking offered blocks from the staging buffer. */
static int read_blocks(const word *entry, struct cursor *to, struct cursor *from, word *counts, int streams) {
    const pid_t pid = (pid_t)entry[DIRECT];
    word number = 0;
    for (size_t left = (size_t)entry[BYTES], part; left; left -= part) {
        const char *values = await_block(entry, counts, number);
        const word offered = __atomic_load_n(counts + OFFERED, __ATOMIC_ACQUIRE);
        const word before = __atomic_load_n(counts + OFFERED_FROM, __ATOMIC_ACQUIRE) - number;
        const word blocks = !offered || before > AT_ONCE ? AT_ONCE : before > 1 ? before : 1;
        const size_t most = values ? OFFER : (size_t)blocks * OFFER;
        part = left < most ? left : most;
        if (values) {
            scatter(to, values, part, streams);
            pass_over(from, part);
            pass(counts, ++number);
        } else {
            number += (word)((part + OFFER - 1) / OFFER);
            pass(counts, number); /* before reading: the owner goes on after it */
            const int is_short = to->run < SHORTEST || from->run < SHORTEST;
            if (!(is_short ? read_staged(pid, to, from, part, streams) : read_from(pid, to, from, part))) return 0;
        }
    }
    if (streams) end_stream();
    return 1;
}

/* One term of a sum: this worker's own, or in a slot, or in another process. */
struct term {
    const word *entry;
    const char *values; /* NULL if they have to be read from another process */
    word *counts;       /* of an offer, or NULL */
    int is_staged;      /* whether the current block comes from the staging buffer */
    struct cursor there;
};

/* Add contiguous terms block by block, so that the sum stays in the cache. */
static int sum_up(struct term *terms, word num_terms, char *y, size_t bytes) {
    static char staging[OFFER] __attribute__((aligned(64)));
    for (size_t at = 0; at < bytes; at += OFFER) {
        const word number = (word)(at / OFFER);
        const size_t part = bytes - at < OFFER ? bytes - at : OFFER;
        const char *first = NULL; /* the first term, if it is not in its place yet */
        for (struct term *term = terms; term < terms + num_terms; term++) {
            const word kind = term->entry[KIND];
            const char *from =
                term->values ? term->values + at : await_block(term->entry, term->counts, number);
            term->is_staged = from && !term->values;
            if (term->is_staged) pass_over(&term->there, part);
            if (!from) {
                struct cursor here;
                if (term->counts) pass(term->counts, number + 1);
                begin(&here, kind == COPIES ? y + at : staging, part, 0);
                if (!read_from((pid_t)term->entry[DIRECT], &here, &term->there, part)) return 0;
                if (kind == COPIES) continue;
                from = staging;
            }
            if (kind == COPIES) {
                first = from;
                continue;
            }
            if (first) put_sum(y + at, first, from, part, kind);
            else put(y + at, from, part, kind);
            first = NULL;
        }
        if (first) put(y + at, first, part, COPIES);
        for (struct term *term = terms; term < terms + num_terms; term++)
            if (term->is_staged) pass(term->counts, number + 1);
        offer_block();
    }
    return 1;
}

/* Copy a message that has come to its place; return whether it could be read. */
static int take(const word *entry, char *y) {
    int is_rendezvous;
    char *from = came(entry, &is_rendezvous);
    if (is_rendezvous) {
        struct term term = {.entry = entry, .counts = offer_of(entry)};
        struct cursor here;
        if (!begin_at_rendezvous(&term.there, (word *)from)) return 0;
        begin_at_target(&here, y, entry);
        const pid_t pid = (pid_t)entry[DIRECT];
        const size_t bytes = (size_t)entry[BYTES];
        const int is_read = entry[KIND] != COPIES ? sum_up(&term, 1, here.at, bytes)
                            : term.counts
                                ? read_blocks(entry, &here, &term.there, term.counts, can_stream(here.at, entry))
                            : here.run < SHORTEST || term.there.run < SHORTEST
                                ? read_staged(pid, &here, &term.there, bytes, can_stream(here.at, entry))
                                : read_from(pid, &here, &term.there, bytes);
        if (!is_read) return 0;
    } else {
        carry(y + entry[Y_OFFSET], from, entry);
    }
    let_go(entry);
    return 1;
}

/* --- receives of started exchanges: their messages are taken whenever any thread looks */

/* Take the next message if a started exchange requests it: 1 if so, 0 if nothing came, -1 if no exchange requests it,
 * -2 if only Python can take it. */
static int take_posted(const word *entry) {
    word *state = state_of(entry), *before = state + POSTED;
    int count = 0;
    sem_getvalue(filled(entry), &count);
    if (count <= 0) return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const word *head = header(entry, state[NUM_TAKEN]);
    for (word *one = (word *)*before; one; before = one + NEXT, one = (word *)*before) {
        if (one[ASKED_GROUP] != head[GROUP] || one[ASKED_CALL] != head[CALL]) continue;
        const word *asked = (const word *)one[ASKED_ENTRY];
        /* messages in pieces, of a wrong length, or that failed are left to Python */
        if (has_come(asked, head[GROUP], head[CALL]) < 0 || !take(asked, (char *)one[ASKED_Y])) return -2;
        *before = one[NEXT];
        one[HAS_COME] = 1;
        return 1;
    }
    return -1;
}

static void post(const word *entry, word *one) {
    word *last = state_of(entry) + POSTED;
    while (*last) last = (word *)*last + NEXT;
    *last = (word)one;
}

/* --- backoff: spin or yield, then sleep until another worker notifies this one */

static _Thread_local int holds_python; /* whether this thread holds Python's lock */

struct backoff {
    const word *program;
    word until;    /* when spinning ends, and later sleeping */
    int is_asleep; /* whether others have to notify this worker */
};

static struct backoff begin_waiting(const word *program) {
    return (struct backoff){program, now() + program[BACKOFF], 0};
}

static void end_waiting(const struct backoff *p) {
    if (p->is_asleep) __atomic_store_n((word *)p->program[OWN_ASLEEP], 0, __ATOMIC_SEQ_CST);
}

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
#define CLOCK CLOCK_MONOTONIC
#define wait_until(wakeup, t) sem_clockwait(wakeup, CLOCK, t)
#else
#define CLOCK CLOCK_REALTIME
#define wait_until(wakeup, t) sem_timedwait(wakeup, t)
#endif

static void sleep_until(sem_t *wakeup, word nanoseconds) {
    struct timespec t;
    clock_gettime(CLOCK, &t);
    nanoseconds += t.tv_nsec;
    t.tv_sec += nanoseconds / 1000000000;
    t.tv_nsec = nanoseconds % 1000000000;
    PyThreadState *python = holds_python ? PyEval_SaveThread() : NULL;
    while (wait_until(wakeup, &t) && errno == EINTR) {}
    if (python) PyEval_RestoreThread(python);
}

/* Pause between two looks in vain; return 0 when backoff is at its end. */
static int pause_once(struct backoff *p) {
    const word *program = p->program;
    if (!p->is_asleep) {
        if (program[YIELDS]) sched_yield();
        else relax();
        const word at = now();
        if (at < p->until) return 1;
        p->is_asleep = 1; /* and look once more before sleeping */
        p->until = at + program[NAP];
        __atomic_store_n((word *)program[OWN_ASLEEP], 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        return 1;
    }
    const word left = p->until - now();
    if (left <= 0) return 0;
    sleep_until((sem_t *)program[OWN_WAKEUP], left);
    return 1;
}

/* Wait until one of several semaphores is not 0, as long as backoff lasts; return whether one is. */
static int await_any(const word *waiting) {
    struct backoff backoff = begin_waiting(waiting);
    const word *semaphores = waiting + ENTRIES;
    int count = 0;
    do
        for (word i = 0; i < waiting[NUM_TAKES] && count <= 0; i++)
            sem_getvalue((sem_t *)semaphores[i], &count);
    while (count <= 0 && pause_once(&backoff));
    end_waiting(&backoff);
    return count > 0;
}

/* Like `has_come`, but after the requests of exchanges that were started before: in a backward pass several have the
 * same number, and messages come in the order in which they were requested. */
static int look_for(const word *entry, word code, word call) {
    int found = -1;
    while (state_of(entry)[POSTED] && (found = take_posted(entry)) > 0) {}
    if (!found) return 0; /* the next message may be for them */
    return found == -2 ? -1 : has_come(entry, code, call);
}

/* Wait for the requested message; return whether it came. */
static int await_entry(const word *entry, const word *program, word call) {
    int found = look_for(entry, program[CODE], call);
    if (found) return found > 0;
    struct backoff backoff = begin_waiting(program);
    while (!found && (offer_block() || pause_once(&backoff))) found = look_for(entry, program[CODE], call);
    end_waiting(&backoff);
    return found > 0;
}

/* Wait until others have read this worker's memory, as long as backoff lasts; return whether they have. */
static int await_readers(const word *program, const word *gives) {
    struct backoff backoff = begin_waiting(program);
    const word *entry = gives;
    int are_done = 1;
    for (word i = 0; i < program[NUM_GIVES] && are_done; i++, entry += entry[LENGTH]) {
        const word *state = state_of(entry);
        for (note_emptied(entry); entry[DIRECT] && state[NUM_EMPTIED] < state[LAST_DIRECT];
             note_emptied(entry)) {
            if (offer_block()) {
                if (!backoff.is_asleep) backoff.until = now() + program[BACKOFF];
            } else if (!pause_once(&backoff)) {
                are_done = 0;
                break;
            }
        }
    }
    end_waiting(&backoff);
    return are_done;
}

/* Add the time since `*since` to that of a part. */
static void count_time(int part, word *since) {
    if (!is_clocked) return;
    const word then = now();
    spent[part] += then - *since;
    *since = then;
}

enum { PACK, MOVE, WAIT };

/* Compute a sum of contiguous terms: all of them are taken, or none. */
static long take_blocked(const word *program, const word *entry, char *y, const char *x, word call,
                         word *since) {
    struct term terms[MOST_TERMS] = {0};
    const word num_takes = program[NUM_TAKES];
    char *to = y + entry[Y_OFFSET];
    for (word i = 0; i < num_takes; i++, entry += entry[LENGTH]) {
        int is_rendezvous = 0;
        terms[i].entry = entry;
        terms[i].values = x + entry[X_OFFSET];
        if (!entry[CONTROL]) continue;
        const int is_there = await_entry(entry, program, call);
        count_time(WAIT, since);
        if (!is_there) return 0;
        char *from = came(entry, &is_rendezvous);
        terms[i].values = is_rendezvous ? NULL : from;
        terms[i].counts = offer_of(entry);
        if (is_rendezvous && !begin_at_rendezvous(&terms[i].there, (word *)from)) return 0;
    }
    if (!sum_up(terms, num_takes, to, (size_t)terms[0].entry[BYTES])) return 0;
    for (word i = 0; i < num_takes; i++)
        if (terms[i].entry[CONTROL]) let_go(terms[i].entry);
    count_time(MOVE, since);
    return (long)num_takes;
}

static long take_in_order(const word *program, const word *entry, char *y, const char *x, word call,
                          word *since) {
    for (long i = 0; i < program[NUM_TAKES]; i++, entry += entry[LENGTH]) {
        if (!entry[CONTROL]) {
            carry(y + entry[Y_OFFSET], x + entry[X_OFFSET], entry);
        } else {
            const int is_there = await_entry(entry, program, call);
            count_time(WAIT, since);
            if (!is_there || !take(entry, y)) return i;
        }
        count_time(MOVE, since);
    }
    return (long)program[NUM_TAKES];
}

/* The first of the takes, if there is room for all gives and Python waits for nothing on their channels; else NULL. */
static const word *ready(const word *program) {
    const word *takes = program + ENTRIES, *entry;
    for (word i = 0; i < program[NUM_GIVES]; i++, takes += takes[LENGTH])
        if (!has_room(takes)) return NULL;
    entry = takes;
    for (word i = 0; i < program[NUM_TAKES]; i++, entry += entry[LENGTH])
        if (entry[CONTROL] && state_of(entry)[IS_ACTIVE]) return NULL;
    return takes;
}

/* Like `ready`, but wait a short while for room: a worker that only sends may have run ahead of the receivers. */
static const word *await_ready(const word *program) {
    const word *takes = ready(program);
    if (takes) return takes;
    for (const word until = now() + program[BACKOFF]; !takes && now() < until; takes = ready(program)) {
        const word *entry = program + ENTRIES;
        for (word i = 0; i < program[NUM_GIVES]; i++, entry += entry[LENGTH])
            if (state_of(entry)[IS_BUSY]) return NULL; /* left to Python */
        for (word i = 0; i < program[NUM_TAKES]; i++, entry += entry[LENGTH])
            if (entry[CONTROL] && state_of(entry)[IS_ACTIVE]) return NULL;
        if (program[YIELDS]) sched_yield();
        else relax();
    }
    return takes;
}

/* Whether this worker should offer its memory to readers: it waits for them anyway, or for terms of a sum. Two workers
 * that copy from each other are as fast if the system makes all copies. */
static int should_offer(const word *program, const word *takes) {
    for (word i = 0; i < program[NUM_TAKES] && !program[IS_BLOCKED]; i++, takes += takes[LENGTH])
        if (takes[CONTROL] && takes[KIND] == COPIES) return 0;
    return program[IS_LARGE];
}

/* Whether workers with a core each copy from each other: both are then active, and have offers for each other. */
static int copies_both_ways(const word *program, const word *takes) {
    int copies = 0;
    for (word i = 0; i < program[NUM_TAKES]; i++, takes += takes[LENGTH]) {
        if (takes[KIND] != COPIES) return 0;
        copies |= takes[CONTROL] != 0;
    }
    return copies && !program[YIELDS];
}

/* Run a program; return the number of entries that were taken, in order, or NOTHING or UNREAD. */
static long run(const word *program, char *y, const char *x, word call, char *room) {
    const word num_gives = program[NUM_GIVES], num_takes = program[NUM_TAKES];
    word since = is_clocked ? now() : 0;
    const word *gives = program + ENTRIES, *takes = await_ready(program), *entry = gives;
    if (!takes) return NOTHING;
    offers.waits_for_owner = !program[YIELDS];
    offers.spares_packing = copies_both_ways(program, takes);
    const int offers_it = should_offer(program, takes);
    for (word i = 0; i < num_gives; i++, entry += entry[LENGTH])
        give(entry, x, room, program[CODE], call, offers_it);
    count_time(PACK, &since);
    const long taken = program[IS_BLOCKED] ? take_blocked(program, takes, y, x, call, &since)
                                         : take_in_order(program, takes, y, x, call, &since);
    const int is_unread = taken == num_takes && program[IS_LARGE] && !await_readers(program, gives);
    count_time(WAIT, &since);
    offers.count = 0; /* the remaining blocks are read directly */
    return is_unread ? UNREAD : taken;
}

/* Start an exchange: send, and post receives; return whether it was started. The words of `started` are all 0. */
static int start(const word *program, char *y, const char *x, word call, word *started) {
    const word num_gives = program[NUM_GIVES];
    word since = is_clocked ? now() : 0;
    const word *entry = program + ENTRIES, *takes = ready(program);
    if (!takes) return 0;
    for (word i = 0; i < num_gives; i++, entry += entry[LENGTH]) {
        give(entry, x, NULL, program[CODE], call, 0);
        if (entry[DIRECT]) started[i] = state_of(entry)[NUM_FILLED];
    }
    count_time(PACK, &since);
    word *one = started + num_gives;
    for (word i = 0; i < program[NUM_TAKES]; i++, entry += entry[LENGTH], one += RECEIVE) {
        one[ASKED_GROUP] = program[CODE], one[ASKED_CALL] = call;
        one[ASKED_ENTRY] = (word)entry, one[ASKED_Y] = (word)y;
        if (entry[CONTROL]) {
            post(entry, one);
        } else {
            carry(y + entry[Y_OFFSET], x + entry[X_OFFSET], entry);
            one[HAS_COME] = 1;
        }
    }
    count_time(MOVE, &since);
    return 1;
}

/* Take requested messages on all channels, rows of words that begin like entries; return whether there were any. */
static int take_all_posted(const word *channels, word num_channels) {
    int moved = 0;
    for (word i = 0; i < num_channels; i++, channels += channels[LENGTH])
        while (state_of(channels)[POSTED] && take_posted(channels) > 0) moved = 1;
    return moved;
}

/* The state of an exchange: 0 if it is complete, 1 if it has to wait, -1 if another message came. */
static int left_of(const word *program, const word *started) {
    const word num_gives = program[NUM_GIVES], *entry = program + ENTRIES, *one = started + num_gives;
    int left = 0;
    for (word i = 0; i < num_gives; i++, entry += entry[LENGTH]) {
        if (!started[i]) continue;
        note_emptied(entry);
        left |= state_of(entry)[NUM_EMPTIED] < started[i];
    }
    for (word i = 0; i < program[NUM_TAKES]; i++, entry += entry[LENGTH], one += RECEIVE) {
        while (!one[HAS_COME]) {
            const int found = take_posted(entry);
            if (found < 0) return -1;
            left |= !found;
            if (!found) break;
        }
    }
    return left;
}

/* Wait until everything of an exchange has come, and was read; return whether it has. */
static int finish(const word *program, word *started, const word *channels, word num_channels) {
    word since = is_clocked ? now() : 0;
    struct backoff backoff = begin_waiting(program);
    int left;
    /* Others may wait until this worker has read their memory for other exchanges. */
    while ((left = left_of(program, started)) > 0)
        if (!take_all_posted(channels, num_channels) && !pause_once(&backoff)) break;
    end_waiting(&backoff);
    count_time(WAIT, &since);
    return !left;
}

/* --- Python */

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "run takes a program, two addresses, a call and an address");
        return NULL;
    }
    const word *program = PyLong_AsVoidPtr(args[0]);
    char *y = PyLong_AsVoidPtr(args[1]);
    const char *x = PyLong_AsVoidPtr(args[2]);
    const word call = PyLong_AsLongLong(args[3]);
    char *room = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred()) return NULL;
    long taken;
    holds_python = !program[IS_LARGE];
    if (holds_python) return PyLong_FromLong(run(program, y, x, call, room));
    Py_BEGIN_ALLOW_THREADS
    taken = run(program, y, x, call, room);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(taken);
}

static PyObject *py_share(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "share takes a program, bytes, a number and a call");
        return NULL;
    }
    const word *program = PyLong_AsVoidPtr(args[0]);
    const char *said = PyBytes_AsString(args[1]);
    const Py_ssize_t size = PyLong_AsSsize_t(args[2]);
    const word call = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    PyObject *heard = PyBytes_FromStringAndSize(NULL, size * PyBytes_Size(args[1]));
    if (!heard) return NULL;
    holds_python = 1;
    const long taken = run(program, PyBytes_AsString(heard), said, call, NULL);
    return Py_BuildValue("lN", taken, heard);
}

static PyObject *py_start(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "start takes a program, two addresses, a call and words");
        return NULL;
    }
    const word *program = PyLong_AsVoidPtr(args[0]);
    char *y = PyLong_AsVoidPtr(args[1]);
    const char *x = PyLong_AsVoidPtr(args[2]);
    const word call = PyLong_AsLongLong(args[3]);
    word *started = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(start(program, y, x, call, started));
}

static PyObject *py_finish(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "finish takes a program, words, channels and their number");
        return NULL;
    }
    const word *program = PyLong_AsVoidPtr(args[0]);
    word *started = PyLong_AsVoidPtr(args[1]);
    const word *channels = PyLong_AsVoidPtr(args[2]);
    const word num_channels = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    int is_done;
    holds_python = 0;
    Py_BEGIN_ALLOW_THREADS
    is_done = finish(program, started, channels, num_channels);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_done);
}

static PyObject *py_await_any(PyObject *self, PyObject *waiting) {
    const word *words = PyLong_AsVoidPtr(waiting);
    if (PyErr_Occurred()) return NULL;
    int has_come;
    holds_python = 0;
    Py_BEGIN_ALLOW_THREADS
    has_come = await_any(words);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_come);
}

static PyObject *py_clock(PyObject *self, PyObject *on) {
    is_clocked = PyObject_IsTrue(on);
    PyObject *seconds = Py_BuildValue("ddd", 1e-9 * (double)spent[0], 1e-9 * (double)spent[1],
                                      1e-9 * (double)spent[2]);
    memset(spent, 0, sizeof spent);
    return seconds;
}

/* --- repeated exchanges: everything from the tensor to the engine, in one call */

/* A tensor as DLPack shows it to C: `DLTensor` of version 1, and the table of torch's functions for it. */
struct shown {
    char *data;
    int32_t device, number, num_dims;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *steps;
    uint64_t offset;
};
struct table {
    uint32_t major, minor;
    const void *earlier, *allocate, *from_object, *to_object;
    int (*show)(void *tensor, struct shown *found);
};
enum { ON_CPU = 1, COMPLEX = 5 };

/* The functions of torch that are called, and the attributes that must be unchanged: code that observes movements, such
 * as traces, replaces them. */
enum { TENSOR, IS_NEG, IS_CONJ, IS_TRANSFORMED, IS_GRAD_ENABLED, FORWARD_MODE, NUM_ASKED };
static PyObject *asked[NUM_ASKED], *tag_name, *count_name, *level_name, *grad_name;
static int (*show)(void *tensor, struct shown *found);
enum { MOST_UNCHANGED = 8 };
static struct { PyObject *owner, *name, *value; } unchanged[MOST_UNCHANGED];
static int num_unchanged;
static pid_t this_process; /* cached, since a system call takes as long as a small copy */

static void note_process(void) { this_process = getpid(); }

/* Objects that an exchange needs and keeps alive: PROGRAM owns the words of its program, MAKE returns a tensor for its
 * result. */
enum { PROGRAM, GROUP_OBJECT, OWN, ACQUIRE, RELEASE, BROKEN, PINNED, MAKE, ALARM, COUNTED, OWNER, EARLIER, NUM_KEPT };
struct again {
    const struct again *earlier; /* for tensors of other shapes and strides */
    PyObject *kept[NUM_KEPT];
    const word *program, *alarm, *owner; /* the process that is in the job; 0 when it has left it */
    word *counted, sent, received;
    struct shown lies;
    int64_t dims[2 * MOST_DIMS];
};

static int is_like(const struct again *again, const struct shown *x) {
    const struct shown *lies = &again->lies;
    const size_t size = (size_t)x->num_dims * sizeof(int64_t);
    return x->device == ON_CPU && x->num_dims == lies->num_dims && x->code == lies->code && x->bits == lies->bits &&
           x->lanes == lies->lanes && !memcmp(x->shape, again->dims, size) &&
           !memcmp(x->steps, again->dims + x->num_dims, size);
}

static int truth(PyObject *found) {
    const int is_true = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return is_true;
}

static word number(PyObject *found) {
    const word value = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return value;
}

/* Whether the values of x are those in its memory, without derivatives, and no code observes movements; -1: raised. */
static int is_plain(PyObject *x, const struct shown *lies) {
    for (int i = 0; i < num_unchanged; i++) {
        PyObject *now = PyObject_GetAttr(unchanged[i].owner, unchanged[i].name);
        Py_XDECREF(now); /* compared, not used */
        if (!now) return -1;
        if (now != unchanged[i].value) return 0;
    }
    int is_other = truth(PyObject_GetAttr(x, grad_name));
    if (is_other > 0) is_other = truth(PyObject_CallNoArgs(asked[IS_GRAD_ENABLED]));
    if (!is_other) is_other = truth(PyObject_CallNoArgs(asked[IS_TRANSFORMED]));
    if (!is_other) is_other = truth(PyObject_CallFunctionObjArgs(asked[IS_NEG], x, NULL));
    if (!is_other && lies->code == COMPLEX) is_other = truth(PyObject_CallFunctionObjArgs(asked[IS_CONJ], x, NULL));
    if (is_other) return is_other < 0 ? -1 : 0;
    PyObject *level = PyDict_GetItemWithError(asked[FORWARD_MODE], level_name); /* borrowed */
    const word value = level ? PyLong_AsLongLong(level) : 0;
    return PyErr_Occurred() ? -1 : value < 0;
}

/* A tensor for the result; None if torch makes something else now. */
static PyObject *make_result(const struct again *again, struct shown *to) {
    PyObject *y = PyObject_CallNoArgs(again->kept[MAKE]);
    if (!y || ((PyObject *)Py_TYPE(y) == asked[TENSOR] && !show(y, to) && to->device == ON_CPU)) return y;
    PyErr_Clear();
    Py_DECREF(y);
    Py_RETURN_NONE;
}

static void forget(PyObject *capsule) {
    struct again *again = PyCapsule_GetPointer(capsule, NULL);
    for (int i = 0; i < NUM_KEPT; i++) Py_XDECREF(again->kept[i]);
    PyMem_Free(again);
}

/* The result; None if the exchange is left to Python; (program, result, number taken) if it is incomplete. */
static PyObject *py_again(PyObject *self, PyObject *x) {
    const struct again *again = PyCapsule_GetPointer(self, NULL);
    struct shown from, to;
    if ((PyObject *)Py_TYPE(x) != asked[TENSOR]) Py_RETURN_NONE;
    if (show(x, &from)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    while (again && !is_like(again, &from)) again = again->earlier;
    if (!again || *again->alarm || *again->owner != this_process) Py_RETURN_NONE;
    PyObject *const *kept = again->kept;
    word length = 1;
    for (int d = 0; d < from.num_dims; d++) length *= from.shape[d];
    if (!from.data && length) Py_RETURN_NONE;
    int is_other = 0, can = is_plain(x, &from);
    if (can > 0 && kept[PINNED] != Py_None)
        is_other = truth(PyObject_CallFunctionObjArgs(kept[PINNED], x, NULL));
    if (can < 0 || is_other < 0) return NULL;
    if (!can || is_other) Py_RETURN_NONE;
    PyObject *y = make_result(again, &to);
    if (!y || y == Py_None) return y;
    const word tag = number(PyObject_GetAttr(kept[OWN], tag_name));
    const word count = number(PyObject_GetAttr(kept[GROUP_OBJECT], count_name));
    const int is_held = PyErr_Occurred() ? -1 : truth(PyObject_CallFunctionObjArgs(kept[ACQUIRE], Py_False, NULL));
    if (is_held <= 0) { /* raised, or another thread has the lock */
        Py_DECREF(y);
        if (is_held < 0) return NULL;
        Py_RETURN_NONE;
    }
    const word *program = again->program, call = tag ? tag : ~(word)((uint64_t)count << 1);
    char *target = to.data + to.offset;
    const char *source = from.data + from.offset;
    long taken;
    holds_python = !program[IS_LARGE];
    if (holds_python) {
        taken = run(program, target, source, call, NULL);
    } else {
        Py_BEGIN_ALLOW_THREADS
        taken = run(program, target, source, call, NULL);
        Py_END_ALLOW_THREADS
    }
    PyObject *found = PyObject_CallNoArgs(kept[RELEASE]);
    Py_XDECREF(found);
    if (found && *again->alarm) { /* a worker whose memory was read may have gone on after it raised the alarm */
        found = PyObject_CallNoArgs(kept[BROKEN]);
        Py_XDECREF(found);
    }
    if (found && taken != NOTHING && !tag) {
        PyObject *next = PyObject_GetAttr(kept[GROUP_OBJECT], count_name);
        const word made = number(next) + 1;
        next = PyErr_Occurred() ? NULL : PyLong_FromLongLong(made);
        if (!next || PyObject_SetAttr(kept[GROUP_OBJECT], count_name, next)) found = NULL;
        Py_XDECREF(next);
    }
    if (!found) {
        Py_DECREF(y);
        return NULL;
    }
    if (taken == NOTHING) {
        Py_DECREF(y);
        Py_RETURN_NONE;
    }
    again->counted[0] += program[NUM_GIVES];
    again->counted[1] += again->sent;
    again->counted[2] += again->received;
    return taken == program[NUM_TAKES] ? y : Py_BuildValue("ONl", kept[PROGRAM], y, taken);
}

static PyMethodDef again_method = {"again", py_again, METH_O, "again(x): repeat an exchange."};

static PyObject *py_repeat(PyObject *self, PyObject *args) {
    PyObject *kept[NUM_KEPT] = {0}, *x;
    word program, alarm, counted, sent, received, owner;
    if (!PyArg_ParseTuple(args, "OOLO(LLLLL)(OOOOO)OOOOO:repeat", &x, &kept[MAKE], &program, &kept[PROGRAM], &alarm,
                          &counted, &sent, &received, &owner, &kept[GROUP_OBJECT], &kept[OWN], &kept[ACQUIRE],
                          &kept[RELEASE], &kept[BROKEN], &kept[PINNED], &kept[ALARM], &kept[COUNTED], &kept[OWNER],
                          &kept[EARLIER]))
        return NULL;
    struct shown lies;
    if (!show || (PyObject *)Py_TYPE(x) != asked[TENSOR] || show(x, &lies) || lies.num_dims > MOST_DIMS) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    struct again *again = PyMem_Calloc(1, sizeof *again);
    if (!again) return PyErr_NoMemory();
    *again = (struct again){.program = (const word *)program, .alarm = (const word *)alarm, .counted = (word *)counted,
                            .sent = sent, .received = received, .owner = (const word *)owner, .lies = lies};
    memcpy(again->dims, lies.shape, (size_t)lies.num_dims * sizeof(int64_t));
    memcpy(again->dims + lies.num_dims, lies.steps, (size_t)lies.num_dims * sizeof(int64_t));
    for (int i = 0; i < NUM_KEPT; i++) again->kept[i] = Py_NewRef(kept[i]);
    PyObject *capsule = PyCapsule_New(again, NULL, forget);
    if (!capsule) return NULL;
    if (kept[EARLIER] != Py_None) again->earlier = PyCapsule_GetPointer(PyCFunction_GetSelf(kept[EARLIER]), NULL);
    PyObject *made = PyErr_Occurred() ? NULL : PyCFunction_NewEx(&again_method, capsule, NULL);
    Py_DECREF(capsule);
    return made;
}

static PyObject *py_ask(PyObject *self, PyObject *args) {
    PyObject *capsule, *given[NUM_ASKED];
    if (!PyArg_ParseTuple(args, "OOOOOOO:ask", &capsule, &given[0], &given[1], &given[2], &given[3], &given[4],
                          &given[5]))
        return NULL;
    const struct table *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table) PyErr_Clear(); /* this version of torch has none, or a different one */
    if (!table || table->major != 1 || !table->show) Py_RETURN_FALSE;
    for (int i = 0; i < NUM_ASKED; i++) {
        Py_XDECREF(asked[i]);
        asked[i] = Py_NewRef(given[i]);
    }
    show = table->show;
    Py_RETURN_TRUE;
}

static PyObject *py_keep_unchanged(PyObject *self, PyObject *args) {
    PyObject *owner, *name;
    if (!PyArg_ParseTuple(args, "OU:keep_unchanged", &owner, &name)) return NULL;
    if (num_unchanged == MOST_UNCHANGED) {
        PyErr_Format(PyExc_RuntimeError, "at most %d attributes can be watched", MOST_UNCHANGED);
        return NULL;
    }
    PyObject *value = PyObject_GetAttr(owner, name);
    if (!value) return NULL;
    unchanged[num_unchanged].owner = Py_NewRef(owner), unchanged[num_unchanged].name = Py_NewRef(name);
    unchanged[num_unchanged++].value = value;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL,
     "run(program, y, x, call, room): run an exchange; return the number of entries taken, -1 or -2."},
    {"share", (PyCFunction)(void (*)(void))py_share, METH_FASTCALL,
     "share(program, said, size, call): the same from bytes; also return `size` times as many bytes."},
    {"start", (PyCFunction)(void (*)(void))py_start, METH_FASTCALL,
     "start(program, y, x, call, started): start an exchange; return whether it is complete."},
    {"finish", (PyCFunction)(void (*)(void))py_finish, METH_FASTCALL,
     "finish(program, started, channels, count): wait briefly for the rest; return whether it came."},
    {"await_any", py_await_any, METH_O,
     "await_any(waiting): wait for a semaphore until a time limit; return whether one is not 0."},
    {"repeat", py_repeat, METH_VARARGS,
     "repeat(…): return a function that repeats an exchange for tensors like this one, or None."},
    {"ask", py_ask, METH_VARARGS, "ask(…): set the torch functions that the engine may call; return whether it can."},
    {"keep_unchanged", py_keep_unchanged, METH_VARARGS,
     "keep_unchanged(owner, name): repeat nothing while this attribute has another value."},
    {"clock", py_clock, METH_O,
     "clock(on): return the seconds of packing, moving and waiting since the last call."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "engine", "Exchanges between workers of one host.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_engine(void) {
    tag_name = PyUnicode_InternFromString("tag"), count_name = PyUnicode_InternFromString("num_exchanges");
    level_name = PyUnicode_InternFromString("_current_level"), grad_name = PyUnicode_InternFromString("requires_grad");
    if (!tag_name || !count_name || !level_name || !grad_name) return NULL;
    note_process();
    pthread_atfork(NULL, NULL, note_process);
    return PyModule_Create(&module);
}
