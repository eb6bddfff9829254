/* Threads that stay. A job is begun by whoever is there first, and everybody else is let in between two of its steps: so
   nobody waits for a thread that sleeps, that has lost its processor, or that runs Python first. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "thread_pool.h"

enum { JOBS = 8 };      /* given and not done; whoever gives more helps first */
enum { YIELDS = 2000 }; /* after SPINS, about a millisecond: then a helper sleeps */

typedef struct {
    Job *job;
    void *what;
} Given;

typedef struct {
    Crew *crew;
    pthread_t thread;
} Helper;

struct crew {
    Region region;
    int64_t door;       /* jobs that are done, and in the lower 16 bits how many came to the next one */
    char apart[56];
    int64_t all;        /* of these, who take part */
    int64_t next;       /* the step from which on the last of them did */
    int64_t meetings;   /* as they then count */
    uint32_t works;
    int64_t helpers, given, asleep, dismissed;
    pthread_mutex_t lock;
    pthread_cond_t more;
    Share *shares;
    Given jobs[JOBS];
    Helper crew[];
};

static int64_t seen(const int64_t *number) { return __atomic_load_n(number, __ATOMIC_ACQUIRE); }
static void publish(int64_t *number, int64_t value) { __atomic_store_n(number, value, __ATOMIC_RELEASE); }

static int64_t done(const Crew *c) { return seen(&c->door) >> 16; }

/* Comes to job `number`; returns how many came before, or -1 if it is done. */
static int64_t come_to(Crew *c, int64_t number)
{
    int64_t door = seen(&c->door);
    for (int64_t spins = 0; door >> 16 <= number; spins++) {
        if (door >> 16 < number) { /* who were the last to leave the one before are still at the door */
            wait_a_little(spins);
            door = seen(&c->door);
        } else if (__atomic_compare_exchange_n(&c->door, &door, door + 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            return door & 0xffff;
        }
    }
    return -1;
}

/* Whether the job goes on with whoever came as number `me`: it may be done before he is let in. */
static int let_in(Crew *c, int64_t number, int64_t me)
{
    for (int64_t spins = 0; me && !(seen(&c->all) > me && done(c) == number); spins++) {
        if (done(c) > number)
            return 0;
        wait_a_little(spins);
    }
    return 1;
}

void part_ways(Crew *c, Team *t, int64_t next)
{
    const int64_t all = t->all;
    if (all > 1 && !come(t)) {
        t->all = seen(&c->all);
        return;
    }
    t->all = seen(&c->door) & 0xffff;
    if (t->all > all) {
        c->next = next, c->meetings = t->meetings, c->works = t->works;
        publish(&c->all, t->all);
    }
    if (all > 1)
        go_on(t);
}

/* The job is done when all who take part have come. */
static void end(Crew *c, Team *t, int64_t number)
{
    if (t->all > 1 && !come(t))
        return;
    c->next = 0, c->meetings = t->meetings, c->works = t->works;
    publish(&c->all, 1);
    if (t->all > 1)
        go_on(t);
    publish(&c->door, (number + 1) << 16);
}

static void take_part(Crew *c, int64_t number)
{
    const int64_t me = come_to(c, number);
    if (me < 0 || !let_in(c, number, me))
        return;
    const Given *given = c->jobs + number % JOBS;
    Team team = {&c->region, c->shares, me, c->all, c->meetings, c->works};
    given->job(c, &team, given->what, c->next);
    end(c, &team, number);
}

/* Whether there is job `number`, or else everybody is dismissed. */
static int sleep_until(Crew *c, int64_t number)
{
    pthread_mutex_lock(&c->lock);
    c->asleep++;
    while (c->given <= number && !c->dismissed)
        pthread_cond_wait(&c->more, &c->lock);
    c->asleep--;
    const int there = c->given > number;
    pthread_mutex_unlock(&c->lock);
    return there;
}

static int wait_for(Crew *c, int64_t number)
{
    for (int64_t spins = 0; seen(&c->given) <= number; spins++) {
        if (spins > SPINS + YIELDS)
            return sleep_until(c, number);
        wait_a_little(spins);
    }
    return 1;
}

static void *help(void *given)
{
    Crew *c = ((Helper *)given)->crew;
    for (int64_t number = 0; wait_for(c, number); number++)
        take_part(c, number);
    return 0;
}

EXPORT void charonia_join(Crew *c, int64_t number)
{
    take_part(c, number);
    for (int64_t spins = 0; done(c) <= number; spins++)
        wait_a_little(spins);
}

int64_t give(Crew *c, Job *job, void *what)
{
    const int64_t number = c->given;
    if (number - done(c) >= JOBS)
        charonia_join(c, number - JOBS);
    c->jobs[number % JOBS] = (Given){job, what};
    pthread_mutex_lock(&c->lock);
    publish(&c->given, number + 1);
    if (c->asleep)
        pthread_cond_broadcast(&c->more);
    pthread_mutex_unlock(&c->lock);
    return number;
}

int64_t helpers_of(const Crew *c) { return c->helpers; }

/* Signals are for the threads of Python. */
static int begin(Helper *helper)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&helper->thread, 0, help, helper);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return !failed;
}

static void leave(Crew *c, int64_t helpers)
{
    pthread_mutex_lock(&c->lock);
    c->dismissed = 1;
    pthread_cond_broadcast(&c->more);
    pthread_mutex_unlock(&c->lock);
    for (int64_t i = 0; i < helpers; i++)
        pthread_join(c->crew[i].thread, 0);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->more);
    free(c->shares);
    free(c);
}

EXPORT void charonia_dismiss(Crew *c) { leave(c, c->helpers); }

EXPORT Crew *charonia_crew(int64_t helpers)
{
    Crew *c = calloc(1, sizeof(Crew) + (size_t)helpers * sizeof(Helper));
    Share *shares = calloc((size_t)helpers + 1, sizeof(Share));
    if (!c || !shares) {
        free(c);
        free(shares);
        return 0;
    }
    c->helpers = helpers, c->shares = shares, c->all = 1;
    pthread_mutex_init(&c->lock, 0);
    pthread_cond_init(&c->more, 0);
    for (int64_t i = 0; i < helpers; i++) {
        c->crew[i].crew = c;
        if (!begin(c->crew + i)) {
            leave(c, i);
            return 0;
        }
    }
    return c;
}
