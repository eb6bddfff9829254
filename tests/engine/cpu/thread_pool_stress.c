/* Jobs of many steps for a crew: `thread_pool_stress HELPERS JOBS` says what went wrong, or that all is right. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "thread_pool.h"

enum { ROWS = 37, STEPS = 9, AHEAD = 4 };

typedef struct {
    int64_t steps, rows[ROWS], taken[ROWS], sum;
} Thing;

int charonia_threads(void) { return 1; }

/* In each step every row is counted once by the thread whose part it is, and once by whoever takes it. */
static void work(Crew *crew, Team *team, void *what, int64_t from)
{
    Thing *thing = what;
    for (int64_t step = from; step < thing->steps; step++) {
        FOR_ROWS(team, ROWS, WORTH_THREADS, thing->rows[row] += step + 1);
        meet(team);
        if (team->me == 0)
            thing->sum += thing->rows[step % ROWS];
        meet_and_deal(team);
        for (int64_t row; (row = take(team)) < ROWS;)
            thing->taken[row] += step + 1;
        part_ways(crew, team, step + 1);
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
    Crew *crew = charonia_crew(atoi(argv[1]));
    Thing *things = calloc((size_t)jobs, sizeof(Thing));
    unsigned seed = 1;
    int64_t joined = 0;
    for (int i = 0; i < jobs; i++) {
        things[i].steps = rand_r(&seed) % STEPS;
        if (give(crew, work, things + i) != i)
            return puts("a job has another number"), 1;
        if (rand_r(&seed) % 16 == 0)
            usleep(rand_r(&seed) % 3000);
        while (joined < i - rand_r(&seed) % AHEAD)
            charonia_join(crew, joined++);
    }
    while (joined < jobs)
        charonia_join(crew, joined++);
    charonia_dismiss(crew);
    for (int i = 0; i < jobs; i++)
        if (wrong(things + i))
            return printf("job %d is wrong\n", i), 1;
    return puts("right"), 0;
}
