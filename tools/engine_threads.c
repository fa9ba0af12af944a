/* Several workers of the engine as threads of one process, so that ThreadSanitizer sees both ends of
   every channel. Each thread sends a vector to every other one and takes theirs, call after call,
   through slots or where the vector lies; values are checked. Calls are made one by one, or two are
   started, of which the second is waited for first. One way, the first thread sends to all others.

   Usage: engine_threads WORKERS CALLS BYTES MODE
   MODE: "slots" or "direct", which "early" or "one way" may precede. tools/sanitize.py builds and runs it; it defines ENGINE, the file with
   the engine, which a test changes to see that mistakes are reported.  */

#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>

/* ThreadSanitizer does not look into memcpy of every C library: copies that it follows. */
static void *copy(void *to, const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ((volatile char *)to)[i] = ((const volatile char *)from)[i];
    return to;
}
#define memcpy(to, from, bytes) copy(to, from, bytes)

#include ENGINE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_WORKERS = 8, CONTROL_BYTES = 2 * SIZE + 8 * HEADER * SLOTS };
enum { WORDS_OF_ENTRY = DIMS, OWN_CODE = 7 };

static int num_workers, num_calls, is_direct, is_early, is_one_way;
static size_t num_bytes, slot_size;
static sem_t wakeups[MOST_WORKERS];
static word asleep[MOST_WORKERS];
static char *controls[MOST_WORKERS][MOST_WORKERS], *slots[MOST_WORKERS][MOST_WORKERS];
static word sent[MOST_WORKERS][MOST_WORKERS][LAST_OFFERED + 1], taken[MOST_WORKERS][MOST_WORKERS][POSTED + 1];

static word *write_entry(word *at, int from, int to, int is_give, word offset) {
    const int other = is_give ? to : from;
    memset(at, 0, WORDS_OF_ENTRY * sizeof(word));
    at[LENGTH] = WORDS_OF_ENTRY;
    at[CONTROL] = (word)controls[from][to];
    at[SLOT_START] = (word)slots[from][to];
    at[SLOT_SIZE] = (word)slot_size;
    at[WAKEUP] = (word)&wakeups[other];
    at[ASLEEP] = (word)&asleep[other];
    at[STATE] = (word)(is_give ? sent[from][to] : taken[from][to]);
    at[DIRECT] = !is_direct ? 0 : is_give ? 1 : getpid();
    at[BYTES] = at[RUN] = (word)num_bytes;
    at[is_give ? X_OFFSET : Y_OFFSET] = offset;
    at[KIND] = COPIES;
    return at + WORDS_OF_ENTRY;
}

static int goes(int from, int to) { return from != to && (!is_one_way || !from); }

static void fill(word *x, int me, word call) {
    for (size_t i = 0; i < num_bytes / sizeof(word); i++) x[i] = 1000 * call + 10 * me + (word)(i % 7);
}

static void check(const word *row, int me, word call) {
    const size_t count = num_bytes / sizeof(word);
    for (int other = 0; other < num_workers; other++) {
        if (!goes(other, me)) continue;
        for (size_t i = 0; i < count; i++)
            if (row[i] != 1000 * call + 10 * other + (word)(i % 7)) {
                fprintf(stderr, "worker %d got a wrong value in call %ld\n", me, (long)call);
                exit(3);
            }
        row += count;
    }
}

static void *work(void *argument) {
    const int me = (int)(intptr_t)argument;
    const int others = num_workers - 1;
    word *program = calloc(ENTRIES + 2 * MOST_WORKERS * WORDS_OF_ENTRY, sizeof(word));
    const size_t num_words = MOST_WORKERS * (1 + RECEIVE);
    word *x[2], *y[2], *started[2];
    for (int k = 0; k < 2; k++) {
        x[k] = malloc(num_bytes), y[k] = malloc(num_bytes * (size_t)others);
        started[k] = calloc(num_words, sizeof(word));
    }
    program[CODE] = OWN_CODE;
    for (int other = 0; other < num_workers; other++)
        program[NUM_GIVES] += goes(me, other), program[NUM_TAKES] += goes(other, me);
    program[BACKOFF] = 2000, program[YIELDS] = 1; /* sleep soon: that is what is tried here */
    program[NAP] = 60000000000;
    program[OWN_WAKEUP] = (word)&wakeups[me];
    program[OWN_ASLEEP] = (word)&asleep[me];
    program[IS_LARGE] = is_direct;
    word *at = program + ENTRIES;
    for (int other = 0; other < num_workers; other++)
        if (goes(me, other)) at = write_entry(at, me, other, 1, 0);
    const word *takes = at;
    word offset = 0;
    for (int other = 0; other < num_workers; other++)
        if (goes(other, me)) {
            at = write_entry(at, other, me, 0, offset);
            offset += (word)num_bytes;
        }
    for (word call = 0; is_early && call + 1 < num_calls; call += 2) {
        for (int k = 0; k < 2; k++) {
            fill(x[k], me, call + k);
            memset(started[k], 0, num_words * sizeof(word));
            while (!start(program, (char *)y[k], (const char *)x[k], call + k, started[k])) sched_yield();
        }
        for (int k = 1; k >= 0; k--) {
            if (!finish(program, started[k], takes, others)) {
                fprintf(stderr, "worker %d did not finish call %ld\n", me, (long)call + k);
                exit(2);
            }
            check(y[k], me, call + k);
        }
    }
    for (word call = 0; !is_early && call < num_calls; call++) {
        fill(x[0], me, call);
        long done;
        while ((done = run(program, (char *)y[0], (const char *)x[0], call, NULL)) == NOTHING) sched_yield();
        while (done == UNREAD && !await_readers(program, program + ENTRIES)) {}
        if (done != UNREAD && done != program[NUM_TAKES]) {
            fprintf(stderr, "worker %d took %ld messages in call %ld\n", me, done, (long)call);
            exit(2);
        }
        check(y[0], me, call);
    }
    free(program);
    for (int k = 0; k < 2; k++) free(x[k]), free(y[k]), free(started[k]);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) return 1;
    num_workers = atoi(argv[1]), num_calls = atoi(argv[2]);
    num_bytes = (size_t)atol(argv[3]);
    is_direct = !!strstr(argv[4], "direct"), is_early = !!strstr(argv[4], "early");
    is_one_way = !!strstr(argv[4], "one way");
    slot_size = num_bytes > 4096 ? num_bytes : 4096;
    pthread_t threads[MOST_WORKERS];
    for (int from = 0; from < num_workers; from++) {
        sem_init(&wakeups[from], 1, 0);
        for (int to = 0; to < num_workers; to++) {
            controls[from][to] = aligned_alloc(SIZE, CONTROL_BYTES);
            memset(controls[from][to], 0, CONTROL_BYTES);
            slots[from][to] = aligned_alloc(SIZE, SLOTS * slot_size + 3 * OFFER);
            sem_init((sem_t *)controls[from][to], 1, 0);
            sem_init((sem_t *)(controls[from][to] + SIZE), 1, 0);
            sent[from][to][NUM_FREE] = SLOTS, sent[from][to][AROUND] = 3 * OFFER;
            for (int i = 0; i < SLOTS; i++) sent[from][to][FREE + i] = SLOTS - 1 - i;
        }
    }
    for (intptr_t w = 0; w < num_workers; w++) pthread_create(&threads[w], NULL, work, (void *)w);
    for (int w = 0; w < num_workers; w++) pthread_join(threads[w], NULL);
    printf("%d workers, %d calls of %zu bytes, %s: right\n", num_workers, num_calls, num_bytes, argv[4]);
    return 0;
}
