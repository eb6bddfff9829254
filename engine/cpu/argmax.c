/* The index of the largest number of each row. */
#include "argmax.h"
#include "parallel_region.h"

enum { PIECE = 2048 }; /* numbers that are searched at a time */

#define SUBJECT "argmax.inc"
#include "each_level.h"

typedef int64_t argmax_row(const void *, int64_t);

static argmax_row *const argmax_f32[LEVELS] = ALL_LEVELS(argmax_f32);
static argmax_row *const argmax_bf16[LEVELS] = ALL_LEVELS(argmax_bf16);

int64_t argmax_of(const void *x, int64_t n, int kind)
{
    return (kind == F32 ? argmax_f32 : argmax_bf16)[charonia_level()](x, n);
}

/* out [rows] = the index of the first largest of the n numbers of each row of x, rows `stride` elements apart. */
EXPORT void charonia_argmax(const void *x, int64_t *out, int64_t rows, int64_t stride, int64_t n, int kind)
{
    const int64_t bytes = kind == F32 ? 4 : 2;
    const int threads = rows < 2 || rows * n < WORTH_THREADS ? 1 : omp_get_max_threads();
    PARALLEL_REGION(threads, FOR_ROWS(team, rows, rows * n, {
                 out[row] = argmax_of((const char *)x + row * stride * bytes, n, kind);
             }));
}
