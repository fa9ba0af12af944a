/* The engine: exchanges between workers of one host, in one call.

   A track (track.py) lists, as 64-bit words, what an exchange copies: from a tensor into slots of
   channels that lead to others, and out of slots into another tensor. Here these copies are made,
   slots are published by semaphores, and what others publish is waited for, a short while. What
   cannot be done so is left to Python: it may always do the rest of an exchange, since the state of
   a channel lies in words that both see. The caller holds the lock of the host.  */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef int64_t word;

/* --- what channel.py knows by the same names */

enum { SLOTS = 8, HEADER = 8, SIZE = 64 };
enum { GROUP, CALL, WHOLE, PART, SLOT };                 /* words of a header */
enum { NUM_FILLED, NUM_EMPTIED, IS_BUSY, NUM_FREE, FREE, /* words of a sender's state */
       USED = FREE + SLOTS };
enum { NUM_TAKEN, IS_ASTIR };                            /* words of a receiver's state */

/* --- what track.py writes */

enum { CODE, NUM_GIVES, NUM_TAKES, PATIENCE, YIELDS, ENTRIES };
enum { LENGTH, CONTROL, SLOT_START, SLOT_SIZE, BELL, ASLEEP, STATE, BYTES,
       X_OFFSET, Y_OFFSET, KIND, RUN, NUM_DIMS, DIMS };
enum { COPIES, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64 };

static word spent[3]; /* nanoseconds that were spent packing, moving and waiting, if asked for */
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

#define ADD(type)                                                    \
    do {                                                             \
        type *restrict d = (type *)to;                               \
        const type *restrict s = (const type *)from;                 \
        for (size_t i = 0; i < bytes / sizeof(type); i++) d[i] += s[i]; \
    } while (0)

static void put(char *to, const char *from, size_t bytes, word kind) {
    switch (kind) {
    case COPIES: memcpy(to, from, bytes); break;
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
    else
        for (word i = 0; i < count; i++, to += to_step, from += from_step) put(to, from, run, kind);
}

/* Over all but the last dimension, which is (count, step of `to`, step of `from`). */
static void put_all(char *to, const char *from, const word *dims, word num_dims, size_t run,
                    word kind) {
    if (num_dims == 0) put(to, from, run, kind);
    else if (num_dims == 1) put_runs(to, from, dims, run, kind);
    else
        for (word i = 0; i < dims[0]; i++, to += dims[1], from += dims[2])
            put_all(to, from, dims + 3, num_dims - 1, run, kind);
}

static void carry(char *to, const char *from, const word *entry) {
    put_all(to, from, entry + DIMS, entry[NUM_DIMS], (size_t)entry[RUN], entry[KIND]);
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
    if (__atomic_load_n((word *)entry[ASLEEP], __ATOMIC_RELAXED)) sem_post((sem_t *)entry[BELL]);
}

static int has_room(const word *entry) {
    word *state = state_of(entry);
    if (state[IS_BUSY]) return 0;
    while (sem_trywait(emptied(entry)) == 0)
        state[FREE + state[NUM_FREE]++] = state[USED + state[NUM_EMPTIED]++ % SLOTS];
    return state[NUM_FREE] > 0;
}

static void give(const word *entry, const char *x, word code, word call) {
    word *state = state_of(entry), number = state[FREE + --state[NUM_FREE]];
    word *head = header(entry, state[NUM_FILLED]);
    carry(slot(entry, number), x + entry[X_OFFSET], entry);
    head[GROUP] = code, head[CALL] = call;
    head[WHOLE] = head[PART] = entry[BYTES];
    head[SLOT] = number;
    state[USED + state[NUM_FILLED]++ % SLOTS] = number;
    publish(entry, filled(entry));
}

/* Whether something came: 1 if it is what is asked for, -1 if it is something else. */
static int has_come(const word *entry, word code, word call) {
    int count = 0;
    sem_getvalue(filled(entry), &count);
    if (count <= 0) return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const word *head = header(entry, state_of(entry)[NUM_TAKEN]);
    return head[GROUP] == code && head[CALL] == call && head[WHOLE] == entry[BYTES] &&
                   head[PART] == entry[BYTES]
               ? 1
               : -1;
}

static void take(const word *entry, char *y) {
    word *state = state_of(entry);
    while (sem_trywait(filled(entry))) {} /* cannot fail for long: it has been seen */
    const word *head = header(entry, state[NUM_TAKEN]++);
    carry(y + entry[Y_OFFSET], slot(entry, head[SLOT]), entry);
    publish(entry, emptied(entry));
}

/* Wait for what is asked for; whether it came. */
static int await_entry(const word *entry, const word *track, word call) {
    int found = has_come(entry, track[CODE], call);
    if (found) return found > 0;
    const word until = now() + track[PATIENCE];
    do {
        for (int looks = track[YIELDS] ? 1 : 64; looks > 0; looks--) {
            if (track[YIELDS]) sched_yield();
            else relax();
            found = has_come(entry, track[CODE], call);
            if (found) return found > 0;
        }
    } while (now() < until);
    return 0;
}

/* The time since `*since` counts for a part. */
static void count_time(int part, word *since) {
    if (!is_clocked) return;
    const word then = now();
    spent[part] += then - *since;
    *since = then;
}

/* How many of the entries were taken, in their order; -1 if nothing was done. */
static long run(const word *track, char *y, const char *x, word call) {
    enum { PACK, MOVE, WAIT };
    const word num_gives = track[NUM_GIVES], num_takes = track[NUM_TAKES];
    const word *gives = track + ENTRIES, *takes = gives, *entry;
    word since = is_clocked ? now() : 0;
    for (word i = 0; i < num_gives; i++, takes += takes[LENGTH])
        if (!has_room(takes)) return -1;
    entry = takes;
    for (word i = 0; i < num_takes; i++, entry += entry[LENGTH])
        if (entry[CONTROL] && state_of(entry)[IS_ASTIR]) return -1;
    entry = gives;
    for (word i = 0; i < num_gives; i++, entry += entry[LENGTH]) give(entry, x, track[CODE], call);
    count_time(PACK, &since);
    for (long i = 0; i < num_takes; i++, entry += entry[LENGTH]) {
        if (!entry[CONTROL]) {
            carry(y + entry[Y_OFFSET], x + entry[X_OFFSET], entry);
        } else {
            const int came = await_entry(entry, track, call);
            count_time(WAIT, &since);
            if (!came) return i;
            take(entry, y);
        }
        count_time(MOVE, &since);
    }
    return (long)num_takes;
}

/* --- Python */

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "run takes a track, two addresses and a call");
        return NULL;
    }
    const word *track = PyLong_AsVoidPtr(args[0]);
    char *y = PyLong_AsVoidPtr(args[1]);
    const char *x = PyLong_AsVoidPtr(args[2]);
    const word call = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(run(track, y, x, call));
}

static PyObject *py_clock(PyObject *self, PyObject *on) {
    is_clocked = PyObject_IsTrue(on);
    PyObject *seconds = Py_BuildValue("ddd", 1e-9 * (double)spent[0], 1e-9 * (double)spent[1],
                                      1e-9 * (double)spent[2]);
    memset(spent, 0, sizeof spent);
    return seconds;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL,
     "run(track, y, x, call): make an exchange; how many entries were taken, or -1."},
    {"clock", py_clock, METH_O,
     "clock(on): the seconds of packing, moving and waiting since the last call."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "engine", "Exchanges between workers of one host.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_engine(void) { return PyModule_Create(&module); }
