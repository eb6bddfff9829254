/* Products x W^T + b of activations [rows, inputs] with weights [outputs, inputs] that never change.
 *
 * Weights are packed once. Sixteen outputs beside each other are a group; a step is four bytes of each of its outputs: one
 * fp32, two bf16 or four int8 inputs. So one step of a group is one 64-byte line, a group is one stream of lines, and what
 * is missing to whole groups and steps is zero. A level that wants another order within lines (`order`) multiplies only
 * what it packed itself. Every sum runs over the inputs in ascending order, one accumulator an output,
 * whatever else is computed with it: a row's result does not depend on the number of rows.
 *
 * float4 are floats of four bits in lines like those of int4, without zero points: a table makes small integers of them.
 *
 * int4 and grouped int8 have a scale for each span of 16 (int8 alone), 32, 64 or 128 inputs of an output. Weights are
 * unsigned, with a zero point: 8 or 128, or one for each span; or each span has an offset, which is taken from the weight
 * times the scale. A line of int4 is eight inputs of each output: in its four
 * bytes the low halves are the first four inputs, the high halves the others. A step is a line of scales (fp16), and then
 * the lines of the two spans that they belong to; with zero points it is scales, zero points (int16), and the lines of one
 * span; with offsets (fp16) likewise. Activations are int8, with a scale for each span. Sums within a span are exact; spans are added in fp32, one fused
 * multiplication and addition each, so results are the same bits at every level. */
#ifndef CHARONIA_MATMUL_H
#define CHARONIA_MATMUL_H

#include <stdint.h>

#include "parallel_region.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* A TileFunction: `tile` for constants. And those of one group with up to six rows, and of two with up to two. */
#define TILE(tile, kind, rows, groups) \
    TARGET static inline void kind##_##rows##x##groups(const Tile *t) { tile(t, kind, rows, groups); }
#define SIX_TILES(tile, kind, groups) \
    TILE(tile, kind, 1, groups) TILE(tile, kind, 2, groups) TILE(tile, kind, 3, groups) \
    TILE(tile, kind, 4, groups) TILE(tile, kind, 5, groups) TILE(tile, kind, 6, groups)
#define TILES_OF_16(tile, kind) SIX_TILES(tile, kind, 1) TILE(tile, kind, 1, 2) TILE(tile, kind, 2, 2)
#define SIX(kind, groups) \
    {kind##_1x##groups, kind##_2x##groups, kind##_3x##groups, kind##_4x##groups, kind##_5x##groups, kind##_6x##groups}

/* Plans of TILES_OF_16, for processors with sixteen or so registers: for two rows, for few, and for many. */
#define PLANS_OF_16(kind, chunk, block) \
    {{2, 2, 2, 1280, 2, {kind##_1x2, kind##_2x2}}, {6, 6, 1, 1280, 6, SIX(kind, 1)}, \
     {INT64_MAX, 6, 1, chunk, block, SIX(kind, 1)}}

enum { FLOAT32, BFLOAT16, INT8, INT4, GROUPED_INT8, FLOAT4, KINDS };

/* Lines of both are alike. */
#define FOUR_BITS(kind) ((kind) == INT4 || (kind) == FLOAT4)

/* Twice each float of four bits (E2M1) by its code, and FLOAT4_ZERO more, so that none is negative. */
enum { FLOAT4_ZERO = 12 };
#define FLOAT4_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

/* What a span has beside its scale. */
enum { NO_ZEROS, ZERO_POINTS_EACH, OFFSETS_EACH };

enum { LANES = 16, LINE = 64, MOST_ROWS = 6, TILE_STEPS = 16 };

/* Rows of a tile where a kernel has 32 registers. From MOST_ROWS on they have an address of their own: there are too few
   registers for twelve multiples of a stride. */
enum { TALL_ROWS = 12 };

/* Packed weights, and the types around them. `scales`, `offsets` and `bias` are [outputs], filled up to whole groups. */
typedef struct {
    const char *lines;
    const float *scales;    /* int8: of each output; in spans: what theirs are multiplied with, a power of two; else null */
    const int32_t *offsets; /* int8: 128 times the sum of each output's weights, else null */
    const float *bias;      /* or null */
    int64_t outputs, inputs;
    int32_t kind;           /* of the weights */
    int32_t x_kind;         /* of the activations: fp32 or bf16 */
    int32_t out_kind;       /* of the results: fp32 or bf16 */
    int32_t span;           /* inputs with one scale, or 0 */
    int32_t zeros;          /* NO_ZEROS, ... */
    const int32_t *order;   /* in spans: which activation each input is, or null: as they come */
} Matrix;

/* A few rows times a few groups, over one chunk of the inputs. */
typedef struct {
    const Matrix *matrix;
    int64_t count;          /* of its rows */
    const char *rows;       /* the first row, at the chunk's first step */
    int64_t row_stride;     /* bytes */
    const char *lines;      /* the first group, at the chunk's first step */
    int64_t group_stride;   /* bytes */
    int64_t steps;
    const char *next;       /* lines to fetch meanwhile: as many steps of `streams` groups */
    int64_t streams;        /* 1, 2, or all of the tile's groups */
    int32_t slower;         /* a single stream: a line only every 2^slower steps */
    char *sums;             /* the accumulators between chunks */
    int32_t first, last;    /* whether the chunk begins the sums, and whether it completes them */
    int64_t output;         /* of the tile's first column */
    int64_t groups;         /* of the tile's groups, those that exist */
    const float *row_scales; /* int8: of the tile's rows */
    char *out;              /* the first row's result, at `output` */
    int64_t out_stride;     /* elements */
} Tile;

typedef void (*TileFunction)(const Tile *);

/* Inputs within lines: four bytes of each output; the first two bytes of each, then the other two; or, of two lines
   together, eight bytes of each output, where a last line without another is plain. */
enum { PLAIN, HALVED, PAIRED };

/* Tiles of `groups` groups and up to `rows` rows, for products of at most `upto` rows. */
typedef struct {
    int64_t upto, rows, groups;
    int64_t chunk;  /* lines of a group at a time */
    int64_t block;  /* rows at a time: so many of a chunk stay in the second cache */
    TileFunction tiles[TALL_ROWS]; /* by rows - 1; of a kernel with a shape the first, for all */
} Plan;

/* One row of activations as the tiles read it, filled with zeros to whole steps. Returns the row's scale (int8), else 1. */
typedef float (*RowFunction)(const Matrix *, const void *x, int64_t steps, void *row);

typedef struct {
    const Plan *plans;
    RowFunction row;
    int32_t step_bytes; /* of a row as the tiles read it; in spans: of an input */
    int32_t sum_bytes;  /* of a group's accumulators */
    int32_t direct;     /* whether that is how the activations are stored */
    int32_t order;      /* of inputs within lines of weights of a tile: PLAIN, HALVED or PAIRED */
    int32_t whole;      /* steps that a tile takes at once, and of which every chunk but the last is made; 0: one */
    void (*shape)(const Matrix *, int64_t rows); /* null, or: makes this thread's tile registers ready for tiles of so many
                                                    rows; 0: gives them back */
} Kernel;

/* out [rows, outputs] = x [rows, inputs] W^T + b; strides in elements. `next`: the matrix that the same threads multiply
   after this one, whose first lines are fetched, or null. */
typedef struct {
    const Matrix *matrix, *next;
    const void *x;
    int64_t x_stride, rows;
    void *out;
    int64_t out_stride;
} MatmulCall;

/* Bytes of memory that so many threads need for it; a multiple of a line. */
int64_t product_bytes(const MatmulCall *, int threads);

/* With product_bytes() of memory, at the beginning of a line. */
void multiply_in_team(Team *, const MatmulCall *, char *memory);

/* Bytes that `count` products with matrices like the `kinds` need together, if they have `rows` rows in all. */
int64_t products_bytes(const Matrix *const *kinds, int64_t kind_count, int64_t count, int64_t rows, int threads);

/* Several products as one work, with products_bytes() of memory at the beginning of a line. Nothing follows them (`next`). */
void multiply_each_in_team(Team *, const MatmulCall *calls, int64_t count, char *memory);

/* The kernel of the level in use, for products of so many rows with weights in such spans, or in none (0). */
const Kernel *kernel_of(int kind, int span, int64_t rows);

/* What a row has for each span before its numbers: their scale, and minus their sum, times the zero point if all have
   the same: what the sum of products begins with, or what offsets are multiplied with. */
typedef struct {
    float scale;
    int32_t start;
} SpanHead;

extern const Kernel matmul_portable[KINDS], matmul_avx2[KINDS], matmul_avx512core[KINDS];
extern const Kernel matmul_avx512[KINDS], matmul_amx[KINDS];
extern const Kernel matmul_dotprod[KINDS], matmul_i8mm[KINDS];

ALWAYS_INLINE int inputs_a_step(int kind) { return kind == FLOAT32 ? 1 : kind == BFLOAT16 ? 2 : 4; }

ALWAYS_INLINE int spans_a_step(const Matrix *m) { return m->zeros ? 1 : 2; }

ALWAYS_INLINE int64_t span_lines(const Matrix *m) { return m->span / (FOUR_BITS(m->kind) ? 8 : 4); }

ALWAYS_INLINE int64_t lines_a_step(const Matrix *m) { return m->span ? 1 + spans_a_step(m) * span_lines(m) : 1; }

ALWAYS_INLINE int64_t step_bytes(const Kernel *k, const Matrix *m) {
    return m->span ? spans_a_step(m) * ((int64_t)sizeof(SpanHead) + m->span * k->step_bytes) : k->step_bytes;
}

ALWAYS_INLINE int64_t steps_of(int kind, int64_t inputs) {
    return (inputs + inputs_a_step(kind) - 1) / inputs_a_step(kind);
}

ALWAYS_INLINE int64_t matrix_steps(const Matrix *m) {
    const int64_t step = m->span ? spans_a_step(m) * m->span : inputs_a_step(m->kind);
    return (m->inputs + step - 1) / step;
}

/* Asks for `lines` lines of what is multiplied next, while a tile is at byte `at` of its groups. */
ALWAYS_INLINE void fetch_lines(const Tile *t, int64_t at, int lines, int groups) {
    if (groups > 1 && t->streams == groups) {
        UNROLL for (int g = 0; g < groups; g++)
            UNROLL for (int i = 0; i < lines; i++)
                __builtin_prefetch(t->next + g * t->group_stride + at + i * LINE, 0, 2);
    } else {
        const char *next = t->next + (at >> t->slower);
        UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * (LINE >> t->slower), 0, 2);
        if (groups > 1 && t->streams == 2)
            UNROLL for (int i = 0; i < lines; i++) __builtin_prefetch(t->next + t->group_stride + at + i * LINE, 0, 2);
    }
}

#endif
