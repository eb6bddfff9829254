/* A pool of threads that compute jobs beside the thread that submits them, which helps when it waits. */
#ifndef CHARONIA_THREAD_POOL_H
#define CHARONIA_THREAD_POOL_H

#include "parallel_region.h"

typedef struct thread_pool ThreadPool;

/* A job of several steps, as each member of its team computes it from step `from` on. After each step all members call
   barrier_admitting() with the number of the next step. */
typedef void PoolJob(ThreadPool *, Team *, void *argument, int64_t from);

/* Start `helpers` threads; returns 0 if there is no memory, or no thread. */
ThreadPool *charonia_pool_start(int64_t helpers);

/* End the threads and free the pool when every submitted job is done. Without helpers, a job that nobody waited for is
   dropped. */
void charonia_pool_stop(ThreadPool *);

int64_t pool_helpers(const ThreadPool *);

/* Have a job computed after those submitted before; returns its number. The helpers begin at once. For one thread only. */
int64_t submit_job(ThreadPool *, PoolJob *, void *argument);

/* Help with job `number`, and return when it is done. For the thread that submits, one job after the other. */
void charonia_pool_wait(ThreadPool *, int64_t number);

/* A barrier between two steps of a job. Threads that came to the job meanwhile are members from here on. */
void barrier_admitting(ThreadPool *, Team *, int64_t next_step);

#endif
