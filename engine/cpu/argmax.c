/* The place of the largest number of each row. */
#include "argmax.h"
#include "parallel_region.h"

enum { PIECE = 2048 }; /* numbers among which the largest is looked for at a time */

#define SUBJECT "argmax.inc"
#include "each_level.h"

typedef int64_t largest_in(const void *, int64_t);

static largest_in *const largest_f32[LEVELS] = ALL_LEVELS(largest_f32);
static largest_in *const largest_bf16[LEVELS] = ALL_LEVELS(largest_bf16);

int64_t largest_of(const void *x, int64_t n, int kind)
{
    return (kind == F32 ? largest_f32 : largest_bf16)[charonia_level()](x, n);
}

/* out [rows] = the first place of the largest of n numbers, of each row of x, rows `stride` elements apart. */
EXPORT void charonia_largest(const void *x, int64_t *out, int64_t rows, int64_t stride, int64_t n, int kind)
{
    const int64_t bytes = kind == F32 ? 4 : 2;
    const int threads = rows < 2 || rows * n < WORTH_THREADS ? 1 : omp_get_max_threads();
    TOGETHER(threads, FOR_ROWS(team, rows, rows * n, {
                 out[row] = largest_of((const char *)x + row * stride * bytes, n, kind);
             }));
}
