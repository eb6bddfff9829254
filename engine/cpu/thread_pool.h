/* Threads that stay, and whoever gives them work and comes to help later. */
#ifndef CHARONIA_CREW_H
#define CHARONIA_CREW_H

#include "parallel_region.h"

typedef struct crew Crew;

/* What each who takes part does of a job from step `from` on. After each step all call part_ways() with the number of the
   next one. */
typedef void Job(Crew *, Team *, void *what, int64_t from);

/* Of so many threads beside the one that gives work; 0 if there is no memory, or no thread. */
Crew *charonia_crew(int64_t helpers);

/* Returns when everything given is done; without helpers, what nobody came for is not. */
void charonia_dismiss(Crew *);

int64_t helpers_of(const Crew *);

/* A job to be done after those before it; returns its number. The helpers begin at once. By one thread only. */
int64_t give(Crew *, Job *, void *what);

/* Help with job `number`, until it is done. By the thread that gave it, one job after the other. */
void charonia_join(Crew *, int64_t number);

/* As meet(), between two steps of a job: whoever came meanwhile takes part from here on. */
void part_ways(Crew *, Team *, int64_t next);

#endif
