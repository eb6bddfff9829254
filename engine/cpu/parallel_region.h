/* Threads that go through the same work as a team: each does its share, and barriers stand before one reads what another
   wrote. */
#ifndef CHARONIA_PARALLEL_REGION_H
#define CHARONIA_PARALLEL_REGION_H

#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "level.h"

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif

/* A number that grows, and threads wait for that; on a cache line of its own. */
typedef struct {
    int64_t number;
    int64_t sleepers; /* threads */
    char apart[48];
} Awaited;

/* The state that the threads of a region share, each number on a cache line of its own. */
typedef struct {
    int64_t arrived; /* at the next barrier */
    char apart[56];
    Awaited phase;   /* barriers that are over */
    int64_t taken;   /* pieces of the current work */
    char away[56];
} Region;

/* The claimed part of one thread's share, on a cache line of its own; the number of the work is in the upper half. */
typedef struct {
    uint64_t claimed;
    char apart[56];
} Claims;

/* A region as one of its threads sees it. All threads count barriers and works alike. */
typedef struct {
    Region *region;
    Claims *claims; /* of all threads */
    int64_t me, all, barriers;
    uint32_t works;
} Team;

/* With fewer elements, one thread is done before a second one has begun. */
enum { WORTH_THREADS = 16384 };

/* The half of an awaited number that changes with it: a futex has 32 bits. */
#define FUTEX_WORD(awaited) ((uint32_t *)&(awaited)->number + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__))

enum { SPINS = 4096 }; /* about 50 us; a thread that is later has lost its processor */

static inline void cpu_pause(void)
{
#ifdef CHARONIA_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* many processors do nothing at a yield */
#endif
}

static inline int64_t awaited_number(const Awaited *a) { return __atomic_load_n(&a->number, __ATOMIC_ACQUIRE); }

/* One turn of a loop that waits until the number is no longer `seen`: after SPINS of them the thread sleeps. A thread that
   yielded in place of it would lose its processor until the kernel's next tick, at each barrier, to a process that is ready
   there, of the lowest class, too; one that is woken has it back from such a process at once. */
static inline void await_change(Awaited *a, int64_t seen, int64_t spins)
{
    if (spins < SPINS) {
        cpu_pause();
        return;
    }
#ifdef __linux__
    __atomic_add_fetch(&a->sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, FUTEX_WORD(a), FUTEX_WAIT_PRIVATE, (uint32_t)seen, (void *)0, (void *)0, 0);
    __atomic_sub_fetch(&a->sleepers, 1, __ATOMIC_RELAXED);
#else
    (void)seen;
    sched_yield();
#endif
}

/* For whoever has changed the number, in the order of __ATOMIC_SEQ_CST: a sleeper counts itself before the kernel compares
   the number with what it has seen. */
static inline void wake_sleepers(Awaited *a)
{
#ifdef __linux__
    if (__atomic_load_n(&a->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, FUTEX_WORD(a), FUTEX_WAKE_PRIVATE, INT_MAX, (void *)0, (void *)0, 0);
#else
    (void)a;
#endif
}

/* Whether this thread is the last to arrive. The others return when it has called release_team(). */
static inline int arrive(Team *t)
{
    Region *r = t->region;
    t->barriers++;
    if (__atomic_add_fetch(&r->arrived, 1, __ATOMIC_ACQ_REL) == t->all) {
        __atomic_store_n(&r->arrived, 0, __ATOMIC_RELAXED);
        return 1;
    }
    int64_t phase;
    for (int64_t spins = 0; (phase = awaited_number(&r->phase)) < t->barriers; spins++)
        await_change(&r->phase, phase, spins);
    return 0;
}

static inline void release_team(Team *t)
{
    __atomic_store_n(&t->region->phase.number, t->barriers, __ATOMIC_SEQ_CST);
    wake_sleepers(&t->region->phase);
}

/* Returns when all have arrived. */
static inline void barrier(Team *t)
{
    if (t->all > 1 && arrive(t))
        release_team(t);
}

/* A barrier, after which next_piece() counts from 0 again. */
static inline void barrier_and_restart(Team *t)
{
    barrier(t);
    if (t->me == 0)
        __atomic_store_n(&t->region->taken, 0, __ATOMIC_RELAXED);
    barrier(t);
}

/* The number of the next piece that no thread has taken. */
static inline int64_t next_piece(Team *t) { return __atomic_fetch_add(&t->region->taken, 1, __ATOMIC_RELAXED); }

/* The beginning of thread `me`'s share of `count` things; it ends where the next thread's begins. */
static inline int64_t share_begin(int64_t count, const Team *t, int64_t me) { return count * me / t->all; }

typedef struct {
    int64_t begin, end;
} Piece;

/* The next piece of thread `owner`'s share of the current work, which has `count` things: half of the rest, in multiples of
   `least`; empty if nothing is left. A thread that is ready early claims from the others' shares, also from one that has
   not begun yet. */
static inline Piece claim_piece(Team *t, int64_t owner, int64_t count, int64_t least)
{
    uint64_t *claimed = &t->claims[owner].claimed, before = __atomic_load_n(claimed, __ATOMIC_RELAXED), after;
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

/* Runs the rest for each `piece` of `count`, which take unlike times: a thread that is ready early takes what is left of the
   others' shares. */
#define FOR_CLAIMED(team, count, ...)                                                                         \
    do {                                                                                                      \
        (team)->works++;                                                                                      \
        for (int64_t away_ = 0; away_ < (team)->all; away_++) {                                               \
            const int64_t owner_ = ((team)->me + away_) % (team)->all;                                        \
            const int64_t first_ = share_begin(count, team, owner_);                                          \
            const int64_t own_ = share_begin(count, team, owner_ + 1) - first_;                               \
            for (Piece claimed_; (claimed_ = claim_piece(team, owner_, own_, 1)).begin < own_;)               \
                for (int64_t piece = first_ + claimed_.begin; piece < first_ + claimed_.end; piece++)         \
                    __VA_ARGS__;                                                                              \
        }                                                                                                     \
    } while (0)

/* Runs the rest with a `team` in a region of `wanted` threads. The macro's own names end in _ where `wanted` may use them. */
#define PARALLEL_REGION(wanted, ...)                                                                          \
    do {                                                                                                      \
        Region region = {0};                                                                                  \
        const int threads_ = (wanted);                                                                        \
        if (threads_ == 1) {                                                                                  \
            Claims own = {0};                                                                                 \
            Team alone = {&region, &own, 0, 1, 0, 0}, *team = &alone;                                         \
            __VA_ARGS__;                                                                                      \
        } else {                                                                                              \
            Claims claims[threads_];                                                                          \
            memset(claims, 0, sizeof claims);                                                                 \
            _Pragma("omp parallel num_threads(threads_)")                                                     \
            {                                                                                                 \
                const int me = omp_get_thread_num();                                                          \
                Team mine = {&region, claims, me, omp_get_num_threads(), 0, 0}, *team = &mine;                \
                __VA_ARGS__;                                                                                  \
            }                                                                                                 \
        }                                                                                                     \
    } while (0)

/* Runs the rest for each `row` of `rows`, which have so many `elements` together: of few, the first thread does all. */
#define FOR_ROWS(team, rows, elements, ...)                                                                   \
    do {                                                                                                      \
        const int few = (elements) < WORTH_THREADS;                                                           \
        const int64_t end = few ? (team->me ? 0 : (rows)) : share_begin(rows, team, team->me + 1);            \
        for (int64_t row = few ? 0 : share_begin(rows, team, team->me); row < end; row++)                     \
            __VA_ARGS__;                                                                                      \
    } while (0)

#endif
