/* Threads that go through the same work together: each does its part, and they meet before anyone reads another's. */
#ifndef CHARONIA_TEAM_H
#define CHARONIA_TEAM_H

#include <sched.h>
#include <stdint.h>
#include <string.h>

#include "level.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif

/* What the threads of a region share; each line is written by others than the next. */
typedef struct {
    int64_t arrived; /* at the meeting to come */
    char apart[56];
    int64_t phase;   /* meetings that are over */
    char aside[56];
    int64_t taken;   /* pieces of the work in hand */
    char away[56];
} Region;

/* What is claimed of one thread's part of the work in hand, on a line of its own; in the upper half, which work. */
typedef struct {
    uint64_t claimed;
    char apart[56];
} Share;

/* One thread of it. All count meetings and works alike. */
typedef struct {
    Region *region;
    Share *shares; /* of all threads */
    int64_t me, all, meetings;
    uint32_t works;
} Team;

/* Elements below which one thread is done before a second one has begun. */
enum { WORTH_THREADS = 16384 };

enum { SPINS = 4096 }; /* about 50 us; whoever is later than that has lost its processor to somebody */

static inline void pause_a_little(void)
{
#ifdef CHARONIA_X86
    __builtin_ia32_pause();
#endif
}

static inline void wait_a_little(int64_t spins) { spins < SPINS ? pause_a_little() : (void)sched_yield(); }

/* Whether this thread is the last to come. The others return when it has called go_on(). */
static inline int come(Team *t)
{
    Region *r = t->region;
    t->meetings++;
    if (__atomic_add_fetch(&r->arrived, 1, __ATOMIC_ACQ_REL) == t->all) {
        __atomic_store_n(&r->arrived, 0, __ATOMIC_RELAXED);
        return 1;
    }
    for (int64_t spins = 0; __atomic_load_n(&r->phase, __ATOMIC_ACQUIRE) < t->meetings; spins++)
        wait_a_little(spins);
    return 0;
}

static inline void go_on(Team *t) { __atomic_store_n(&t->region->phase, t->meetings, __ATOMIC_RELEASE); }

/* Returns when all have come. */
static inline void meet(Team *t)
{
    if (t->all > 1 && come(t))
        go_on(t);
}

/* As meet; afterwards take() counts from 0 again. */
static inline void meet_and_deal(Team *t)
{
    meet(t);
    if (t->me == 0)
        __atomic_store_n(&t->region->taken, 0, __ATOMIC_RELAXED);
    meet(t);
}

/* The next piece that nobody has taken. */
static inline int64_t take(Team *t) { return __atomic_fetch_add(&t->region->taken, 1, __ATOMIC_RELAXED); }

/* Where the part of thread `me` begins, of `count` things; that of the next is where it ends. */
static inline int64_t part(int64_t count, const Team *t, int64_t me) { return count * me / t->all; }

/* From where to where. */
typedef struct {
    int64_t begin, end;
} Piece;

/* The next piece of thread `who`'s part of the work in hand, which has `count` things: half of what is left, in
   multiples of `least`. None is left: it is empty. Whoever is ready early takes from the others, also from one who has not
   begun yet. */
static inline Piece claim(Team *t, int64_t who, int64_t count, int64_t least)
{
    uint64_t *claimed = &t->shares[who].claimed, before = __atomic_load_n(claimed, __ATOMIC_RELAXED), after;
    Piece piece;
    do {
        piece.begin = (uint32_t)(before >> 32) == t->works ? (int64_t)(before & 0xffffffff) : 0;
        const int64_t left = count - piece.begin, size = left / 2 / least * least;
        piece.end = piece.begin + (size ? size : left < least ? left : least);
        if (left <= 0)
            return (Piece){count, count};
        after = (uint64_t)t->works << 32 | (uint64_t)piece.end;
    } while (!__atomic_compare_exchange_n(claimed, &before, after, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return piece;
}

/* Runs the rest with a `team` in a region of so many threads. Names of its own end in _ where `wanted` could mean them. */
#define TOGETHER(wanted, ...)                                                                                 \
    do {                                                                                                      \
        Region region = {0};                                                                                  \
        const int threads_ = (wanted);                                                                        \
        if (threads_ == 1) {                                                                                  \
            Share share = {0};                                                                                \
            Team alone = {&region, &share, 0, 1, 0, 0}, *team = &alone;                                       \
            __VA_ARGS__;                                                                                      \
        } else {                                                                                              \
            Share shares[threads_];                                                                           \
            memset(shares, 0, sizeof shares);                                                                 \
            _Pragma("omp parallel num_threads(threads_)")                                                     \
            {                                                                                                 \
                const int me = omp_get_thread_num();                                                          \
                Team mine = {&region, shares, me, omp_get_num_threads(), 0, 0}, *team = &mine;                \
                __VA_ARGS__;                                                                                  \
            }                                                                                                 \
        }                                                                                                     \
    } while (0)

/* Runs the rest for `row` from 0 to `rows`, which are `elements` together: of few the first thread does all. */
#define FOR_ROWS(team, rows, elements, ...)                                                                   \
    do {                                                                                                      \
        const int few = (elements) < WORTH_THREADS;                                                           \
        const int64_t end = few ? (team->me ? 0 : (rows)) : part(rows, team, team->me + 1);                   \
        for (int64_t row = few ? 0 : part(rows, team, team->me); row < end; row++)                            \
            __VA_ARGS__;                                                                                      \
    } while (0)

#endif
