/* Rows shared out over threads, where there is enough to do. */
#ifndef CHARONIA_ROWS_H
#define CHARONIA_ROWS_H

#include <stdint.h>

/* Elements below which one thread is done before a second one has begun. */
#define WORTH_THREADS 16384

/* Runs BODY for `row` from 0 to `rows`. The runtime is not even asked for few: a region of one thread costs too. */
#define FOR_ROWS(rows, elements, body)                                      \
    do {                                                                    \
        if ((elements) < WORTH_THREADS) {                                   \
            for (int64_t row = 0; row < (rows); row++)                      \
                body;                                                       \
        } else {                                                            \
            _Pragma("omp parallel for schedule(static)")                    \
            for (int64_t row = 0; row < (rows); row++)                      \
                body;                                                       \
        }                                                                   \
    } while (0)

#endif
