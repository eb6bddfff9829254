/* The product of any number of rows: which thread computes which tile, in what order, and what is fetched meanwhile. */
#include "matmul.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif

enum { SUMS_BYTES = 1 << 18, WORTH_THREADS = 1 << 18 };

/* One call: the rows as the tiles read them, and where results go. */
typedef struct {
    const Matrix *matrix;
    const Kernel *kernel;
    const Plan *plan;
    const char *rows;
    int64_t row_stride, steps, chunks;
    const float *row_scales;
    char *out;
    int64_t out_stride;
} Product;

/* Rows and groups that are worked on together, chunk after chunk. */
typedef struct {
    int64_t row, rows, group, end;
    char *sums;
} Block;

static const Kernel *kernel_of(int kind)
{
#ifdef CHARONIA_X86
    const int level = charonia_level();
    if (level == AVX512BF16 || (level == AVX512 && kind != BFLOAT16))
        return &matmul_avx512[kind];
    if (level >= AVX2)
        return &matmul_avx2[kind];
#endif
    return &matmul_portable[kind];
}

static const Plan *plan_for(const Kernel *kernel, int64_t rows)
{
    const Plan *plan = kernel->plans;
    while (plan->upto < rows)
        plan++;
    return plan;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t first_step(const Product *p, int64_t chunk) { return p->steps * chunk / p->chunks; }

static const char *lines_at(const Product *p, int64_t group, int64_t chunk)
{
    return p->matrix->lines + (group * p->steps + first_step(p, chunk)) * LINE;
}

/* What the tiles after these will read. Null at the end of the block: nobody knows what follows. */
static const char *lines_after(const Product *p, const Block *b, int64_t group, int64_t chunk)
{
    if (group + p->plan->groups < b->end)
        return lines_at(p, group + p->plan->groups, chunk);
    return chunk + 1 < p->chunks ? lines_at(p, b->group, chunk + 1) : 0;
}

/* The tiles of a panel share the fetching: which streams fall to tile `index` of `count`, or which part of a single one.
   With nothing left to fetch a tile asks for its own lines, which costs nothing. */
static void fetch_ahead(Tile *t, const char *after, int64_t wide, int64_t index, int64_t count)
{
    const int64_t each = count >= wide || count == 3 ? 1 : wide / count;
    t->next = t->lines;
    t->streams = 1;
    if (wide == 1 && after) {
        while (t->slower < 3 && 2 << t->slower <= count)
            t->slower++;
        if (index < 1 << t->slower)
            t->next = after + ((t->steps * index >> t->slower) * LINE);
        return;
    }
    if (!after || index * each >= wide)
        return;
    t->next = after + index * each * t->group_stride;
    t->streams = each;
}

/* All rows of the block times the groups of one panel, over one chunk. */
static void panel(const Product *p, const Block *b, int64_t group, int64_t chunk)
{
    const Plan *plan = p->plan;
    const int64_t tiles = (b->rows + plan->rows - 1) / plan->rows, from = first_step(p, chunk);
    const char *after = lines_after(p, b, group, chunk);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = b->rows * tile / tiles, rows = b->rows * (tile + 1) / tiles - first;
        const int64_t row = b->row + first, width = p->matrix->out_kind == FLOAT32 ? 4 : 2;
        Tile t = {
            .matrix = p->matrix,
            .rows = p->rows + row * p->row_stride + from * p->kernel->step_bytes,
            .row_stride = p->row_stride,
            .lines = lines_at(p, group, chunk),
            .group_stride = p->steps * LINE,
            .steps = first_step(p, chunk + 1) - from,
            .sums = b->sums + ((group - b->group) * b->rows + first * plan->groups) * p->kernel->sum_bytes,
            .first = chunk == 0,
            .last = chunk == p->chunks - 1,
            .output = group * LANES,
            .groups = least(b->end - group, plan->groups),
            .row_scales = p->row_scales + row,
            .out = p->out + (row * p->out_stride + group * LANES) * width,
            .out_stride = p->out_stride,
        };
        fetch_ahead(&t, after, plan->groups, tile, tiles);
        plan->tiles[rows - 1](&t);
    }
}

/* Groups whose accumulators, for so many rows, stay in the cache between chunks. */
static int64_t groups_together(const Product *p, int64_t rows, int64_t groups)
{
    const int64_t wide = p->plan->groups, fit = SUMS_BYTES / (rows * p->kernel->sum_bytes) / wide * wide;
    return p->chunks == 1 ? groups : fit < wide ? wide : fit;
}

/* Bytes of accumulators that one thread keeps between chunks, at most: fewer rows (the last ones) take more groups. */
static int64_t sums_bytes(const Product *p, int64_t rows)
{
    const int64_t panel = least(rows, p->plan->block) * p->plan->groups * p->kernel->sum_bytes;
    return p->chunks == 1 ? 0 : panel > SUMS_BYTES ? panel : SUMS_BYTES;
}

/* `rows` rows times the groups `from` to `to`. */
static void multiply(const Product *p, int64_t rows, int64_t from, int64_t to, char *sums)
{
    for (int64_t row = 0; row < rows; row += p->plan->block) {
        const int64_t together = least(rows - row, p->plan->block), groups = groups_together(p, together, to - from);
        for (int64_t group = from; group < to; group += groups) {
            const Block b = {row, together, group, least(group + groups, to), sums};
            for (int64_t chunk = 0; chunk < p->chunks; chunk++)
                for (int64_t at = group; at < b.end; at += p->plan->groups)
                    panel(p, &b, at, chunk);
        }
    }
}

/* Bytes between prepared rows: not a multiple of 1 KiB, or they would share a few sets of the first cache. */
static int64_t spread_out(int64_t bytes)
{
    bytes = (bytes + LINE - 1) / LINE * LINE;
    return bytes % 1024 ? bytes : bytes + LINE;
}

EXPORT int charonia_matmul(const Matrix *m, const void *x, int64_t x_stride, int64_t rows, void *out, int64_t out_stride)
{
    const Kernel *kernel = kernel_of(m->kind);
    const int64_t steps = steps_of(m->kind, m->inputs), groups = (m->outputs + LANES - 1) / LANES;
    const int64_t x_bytes = (m->x_kind == BFLOAT16 ? 2 : 4) * x_stride;
    const int direct = kernel->direct && m->inputs % inputs_a_step(m->kind) == 0 && (x_bytes % 1024 || rows == 1);
    Product p = {m, kernel, plan_for(kernel, rows), x, x_bytes, steps, 1, 0, out, out_stride};
    p.chunks = (steps + p.plan->chunk - 1) / p.plan->chunk;
    if (!direct)
        p.row_stride = spread_out(steps * kernel->step_bytes);
    const int threads = rows * m->outputs * m->inputs < WORTH_THREADS ? 1 : omp_get_max_threads();
    const int64_t scales = (rows * 4 + LINE - 1) / LINE * LINE, prepared = direct ? 0 : rows * p.row_stride;
    const int64_t kept = sums_bytes(&p, rows);
    char *memory = aligned_alloc(LINE, (size_t)(scales + prepared + threads * kept));
    if (!memory)
        return 1;
    float *row_scales = (float *)memory;
    char *own = memory + scales, *sums = own + prepared;
    p.row_scales = row_scales;
    if (!direct)
        p.rows = own;
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        if (!direct) {
            for (int64_t r = rows * me / all; r < rows * (me + 1) / all; r++)
                row_scales[r] =
                    kernel->row((const char *)x + r * x_bytes, m->x_kind, m->inputs, steps, own + r * p.row_stride);
#pragma omp barrier
        }
        multiply(&p, rows, groups * me / all, groups * (me + 1) / all, sums + me * kept);
    }
    free(memory);
    return 0;
}
