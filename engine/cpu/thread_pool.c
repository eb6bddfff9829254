/* A job is begun by the first thread that is there, and every other thread is admitted between two of its steps: so no job
   waits for a thread that sleeps, that has lost its processor, or that runs Python first. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "thread_pool.h"

enum { JOBS = 8 };      /* submitted and not done; submitting one more helps with the oldest first */
enum { YIELDS = 2000 }; /* after SPINS, about a millisecond: then a helper sleeps */
enum { LONG_YIELD = 200000 }; /* nanoseconds, in which another process had the processor, and would have it again */
enum { WARY_JOBS = 128 };     /* for which a helper does not yield any more, but sleeps */

typedef struct {
    PoolJob *job;
    void *argument;
} SubmittedJob;

typedef struct {
    ThreadPool *pool;
    pthread_t thread;
    int processor; /* its own, or -1 */
} Helper;

struct thread_pool {
    Region region;
    int64_t entry;      /* the number of jobs done, and in the lower 16 bits the threads that came to the next job */
    char apart[56];
    Awaited changes;    /* of `entry` by a job that is done, and of `members` */
    int64_t members;    /* of these, the threads that take part */
    int64_t next_step;  /* from which on the last of them do, */
    int64_t barriers;   /* and their Team's counts then */
    uint32_t works;
    int64_t helpers, submitted, asleep, stopping;
    int processor;      /* of the thread that submits, or -1 */
    pthread_mutex_t lock;
    pthread_cond_t more;
    Claims *claims;
    SubmittedJob jobs[JOBS];
    Helper threads[];
};

static int64_t load(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
static void store(int64_t *number, int64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

static int64_t jobs_done(const ThreadPool *p) { return load(&p->entry) >> 16; }

/* Tell those who wait for another `entry`, or for more `members`, that there is one. */
static void note_change(ThreadPool *p)
{
    __atomic_add_fetch(&p->changes.number, 1, __ATOMIC_SEQ_CST);
    wake_sleepers(&p->changes);
}

/* Come to job `number`; returns the number of threads that came before, or -1 if the job is done. */
static int64_t enter_job(ThreadPool *p, int64_t number)
{
    for (int64_t spins = 0;; spins++) {
        const int64_t changes = awaited_number(&p->changes);
        int64_t entry = load(&p->entry);
        if (entry >> 16 > number)
            return -1;
        if (entry >> 16 < number) /* the last threads of the job before are still about to leave it */
            await_change(&p->changes, changes, spins);
        else if (__atomic_compare_exchange_n(&p->entry, &entry, entry + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return entry & 0xffff;
    }
}

/* Whether thread `me` is admitted to the job: it may be done before. */
static int wait_for_admission(ThreadPool *p, int64_t number, int64_t me)
{
    for (int64_t spins = 0; me; spins++) {
        const int64_t changes = awaited_number(&p->changes);
        if (jobs_done(p) > number)
            return 0;
        if (load(&p->members) > me && jobs_done(p) == number)
            break;
        await_change(&p->changes, changes, spins);
    }
    return 1;
}

void barrier_admitting(ThreadPool *p, Team *t, int64_t next_step)
{
    const int64_t all = t->all;
    if (all > 1 && !arrive(t)) {
        t->all = load(&p->members);
        return;
    }
    t->all = load(&p->entry) & 0xffff;
    if (t->all > all) {
        p->next_step = next_step, p->barriers = t->barriers, p->works = t->works;
        store(&p->members, t->all);
        note_change(p);
    }
    if (all > 1)
        release_team(t);
}

/* The job is done when all of its members have arrived here. */
static void finish_job(ThreadPool *p, Team *t, int64_t number)
{
    if (t->all > 1 && !arrive(t))
        return;
    p->next_step = 0, p->barriers = t->barriers, p->works = t->works;
    store(&p->members, 1);
    if (t->all > 1)
        release_team(t);
    store(&p->entry, (number + 1) << 16);
    note_change(p);
}

static void take_part(ThreadPool *p, int64_t number)
{
    const int64_t me = enter_job(p, number);
    if (me < 0 || !wait_for_admission(p, number, me))
        return;
    const SubmittedJob *submitted = p->jobs + number % JOBS;
    Team team = {&p->region, p->claims, me, p->members, p->barriers, p->works};
    submitted->job(p, &team, submitted->argument, p->next_step);
    finish_job(p, &team, number);
}

/* Sleep until there is job `number`; returns 0 if the pool is stopped first. */
static int sleep_until_job(ThreadPool *p, int64_t number)
{
    pthread_mutex_lock(&p->lock);
    p->asleep++;
    while (p->submitted <= number && !p->stopping)
        pthread_cond_wait(&p->more, &p->lock);
    p->asleep--;
    const int there = p->submitted > number;
    pthread_mutex_unlock(&p->lock);
    return there;
}

/* Bind the calling thread to a processor. */
static void bind_thread(int processor)
{
#ifdef __linux__
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(processor, &only);
    sched_setaffinity(0, sizeof only, &only);
#else
    (void)processor;
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Yield once; whether another process took the processor, and kept it. */
static int yield_was_long(void)
{
    const int64_t begin = nanoseconds();
    sched_yield();
    return nanoseconds() - begin > LONG_YIELD;
}

/* Returns 0 if the pool is stopped first. `wary_jobs`: those before which the thread does not yield any more. */
static int wait_for_job(ThreadPool *p, int64_t number, int64_t *wary_jobs)
{
    for (int64_t spins = 0; load(&p->submitted) <= number; spins++) {
        if (spins < SPINS) {
            cpu_pause();
        } else if (*wary_jobs || spins > SPINS + YIELDS) {
            *wary_jobs -= *wary_jobs > 0;
            return sleep_until_job(p, number);
        } else if (yield_was_long()) {
            *wary_jobs = WARY_JOBS;
        }
    }
    return 1;
}

static void *run_helper(void *helper)
{
    ThreadPool *p = ((Helper *)helper)->pool;
    int64_t wary_jobs = 0;
    if (((Helper *)helper)->processor >= 0)
        bind_thread(((Helper *)helper)->processor);
    for (int64_t number = 0; wait_for_job(p, number, &wary_jobs); number++)
        take_part(p, number);
    return 0;
}

static void help_and_wait(ThreadPool *p, int64_t number)
{
    take_part(p, number);
    for (int64_t spins = 0;; spins++) {
        const int64_t changes = awaited_number(&p->changes);
        if (jobs_done(p) > number)
            return;
        await_change(&p->changes, changes, spins);
    }
}

EXPORT void charonia_pool_wait(ThreadPool *p, int64_t number)
{
#ifdef __linux__
    cpu_set_t before, after; /* what other threads that this one starts inherit */
    if (p->processor >= 0 && jobs_done(p) <= number && !sched_getaffinity(0, sizeof before, &before) &&
        CPU_ISSET(p->processor, &before)) {
        bind_thread(p->processor);
        help_and_wait(p, number);
        const int is_bound = !sched_getaffinity(0, sizeof after, &after) && CPU_ISSET(p->processor, &after);
        if (is_bound && CPU_COUNT(&after) == 1) /* nobody has moved it meanwhile, as taskset does */
            sched_setaffinity(0, sizeof before, &before);
        return;
    }
#endif
    help_and_wait(p, number);
}

int64_t submit_job(ThreadPool *p, PoolJob *job, void *argument)
{
    const int64_t number = p->submitted;
    if (number - jobs_done(p) >= JOBS)
        charonia_pool_wait(p, number - JOBS);
    p->jobs[number % JOBS] = (SubmittedJob){job, argument};
    pthread_mutex_lock(&p->lock);
    store(&p->submitted, number + 1);
    if (p->asleep)
        pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    return number;
}

int64_t pool_helpers(const ThreadPool *p) { return p->helpers; }

/* A helper takes no signals: they are for the threads of Python. */
static int start_helper(Helper *helper)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&helper->thread, 0, run_helper, helper);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return !failed;
}

static void stop(ThreadPool *p, int64_t helpers)
{
    pthread_mutex_lock(&p->lock);
    p->stopping = 1;
    pthread_cond_broadcast(&p->more);
    pthread_mutex_unlock(&p->lock);
    for (int64_t i = 0; i < helpers; i++)
        pthread_join(p->threads[i].thread, 0);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->more);
    free(p->claims);
    free(p);
}

/* Give each thread a processor, if there is one for each and no other. Without that the kernel often has two threads of a job
   take turns on one of them, each asleep while the other runs, with the next one idle; it sees no load there to move. */
static void assign_processors(ThreadPool *p)
{
    p->processor = -1;
    for (int64_t i = 0; i < p->helpers; i++)
        p->threads[i].processor = -1;
#ifdef __linux__
    cpu_set_t allowed;
    if (!p->helpers || sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != p->helpers + 1)
        return;
    int64_t thread = 0;
    for (int processor = 0; processor < CPU_SETSIZE; processor++)
        if (CPU_ISSET(processor, &allowed))
            *(thread ? &p->threads[thread - 1].processor : &p->processor) = processor, thread++;
#endif
}

EXPORT void charonia_pool_stop(ThreadPool *p) { stop(p, p->helpers); }

EXPORT ThreadPool *charonia_pool_start(int64_t helpers)
{
    ThreadPool *p = calloc(1, sizeof(ThreadPool) + (size_t)helpers * sizeof(Helper));
    Claims *claims = calloc((size_t)helpers + 1, sizeof(Claims));
    if (!p || !claims) {
        free(p);
        free(claims);
        return 0;
    }
    p->helpers = helpers, p->claims = claims, p->members = 1;
    assign_processors(p);
    pthread_mutex_init(&p->lock, 0);
    pthread_cond_init(&p->more, 0);
    for (int64_t i = 0; i < helpers; i++) {
        p->threads[i].pool = p;
        if (!start_helper(p->threads + i)) {
            stop(p, i);
            return 0;
        }
    }
    return p;
}
