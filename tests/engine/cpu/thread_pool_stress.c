/* Jobs of many steps for a pool: `thread_pool_stress HELPERS JOBS` prints an error, or "right". */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "thread_pool.h"

enum { ROWS = 37, STEPS = 9, AHEAD = 4 };

typedef struct {
    int64_t steps, naps, rows[ROWS], taken[ROWS], sum;
} Thing;

int charonia_threads(void) { return 1; }

/* In each step every row is counted once by the thread whose share it is in, and once by the thread that takes it. */
static void work(ThreadPool *pool, Team *team, void *what, int64_t from)
{
    Thing *thing = what;
    for (int64_t step = from; step < thing->steps; step++) {
        if (thing->naps && (step + team->me) % 4 == 0)
            usleep(300); /* for longer than the others spin */
        FOR_ROWS(team, ROWS, WORTH_THREADS, thing->rows[row] += step + 1);
        barrier(team);
        if (team->me == 0)
            thing->sum += thing->rows[step % ROWS];
        barrier_and_restart(team);
        for (int64_t row; (row = next_piece(team)) < ROWS;)
            thing->taken[row] += step + 1;
        barrier_admitting(pool, team, step + 1);
    }
}

static int wrong(const Thing *thing)
{
    const int64_t right = thing->steps * (thing->steps + 1) / 2;
    for (int row = 0; row < ROWS; row++)
        if (thing->rows[row] != right || thing->taken[row] != right)
            return 1;
    return 0;
}

int main(int argc, char **argv)
{
    const int jobs = atoi(argv[argc - 1]);
    ThreadPool *pool = charonia_pool_start(atoi(argv[1]));
    Thing *things = calloc((size_t)jobs, sizeof(Thing));
    unsigned seed = 1;
    int64_t joined = 0;
    for (int i = 0; i < jobs; i++) {
        things[i].steps = rand_r(&seed) % STEPS;
        things[i].naps = rand_r(&seed) % 8 == 0;
        if (submit_job(pool, work, things + i) != i)
            return puts("a job has another number"), 1;
        if (rand_r(&seed) % 16 == 0)
            usleep(rand_r(&seed) % 3000);
        while (joined < i - rand_r(&seed) % AHEAD)
            charonia_pool_wait(pool, joined++);
    }
    while (joined < jobs)
        charonia_pool_wait(pool, joined++);
    charonia_pool_stop(pool);
    for (int i = 0; i < jobs; i++)
        if (wrong(things + i))
            return printf("job %d is wrong\n", i), 1;
    return puts("right"), 0;
}
