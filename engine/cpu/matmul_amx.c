/* Tiles in the registers of AMX (Sapphire Rapids): up to 32 rows times two groups.
 *
 * Sixteen lines of a group, as they lie, fill one register, and the same steps of sixteen rows another. int4 is written out
 * as int8, span by span, and each span's sums leave the registers to be scaled. bf16 is summed as
 * tdpbf16ps does it: of each 32 inputs the even ones in ascending order, each product fused with the addition, likewise the
 * odd ones, then even plus odd, and that is added to the sum so far. What is too small to be normal counts as zero, in
 * operands and in every result. */
#include "matmul.h"

#ifdef CHARONIA_AMX
#include "tile_registers.h"

/* The registers: sums of two blocks of rows times two groups, those rows, and those groups' weights. */
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define ROWS_0 4
#define ROWS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

enum { GROUPS = 2, SUMS_STRIDE = GROUPS * LINE, SUMS_BYTES = 2 * TILE_ROWS * SUMS_STRIDE };

/* How far ahead the weights that are read but once are fetched. */
enum { AHEAD = 4096 };

#define VECTORS 1
#define REGISTER "+m"
#include "matmul_store.inc"
#include "matmul_row.inc"

ALWAYS_INLINE TARGET void store_rows(const Tile *t, int kind, const char *sums) {
    for (int64_t row = 0; row < t->count; row++)
        for (int64_t group = 0; group < t->groups; group++) {
            const Ints own = load_ints(sums + row * SUMS_STRIDE + group * LINE);
            finish(t, kind, &own, row, group);
        }
}

ALWAYS_INLINE TARGET void load_sums(const char *kept, int first, int blocks) {
    if (first) {
        tile_zero(SUMS_00);
        tile_zero(SUMS_01);
        if (blocks == 1) return;
        tile_zero(SUMS_10);
        tile_zero(SUMS_11);
    } else {
        tile_load(SUMS_00, kept, SUMS_STRIDE);
        tile_load(SUMS_01, kept + LINE, SUMS_STRIDE);
        if (blocks == 1) return;
        tile_load(SUMS_10, kept + TILE_ROWS * SUMS_STRIDE, SUMS_STRIDE);
        tile_load(SUMS_11, kept + TILE_ROWS * SUMS_STRIDE + LINE, SUMS_STRIDE);
    }
}

ALWAYS_INLINE TARGET void keep_sums(char *to, int blocks) {
    tile_store(SUMS_00, to, SUMS_STRIDE);
    tile_store(SUMS_01, to + LINE, SUMS_STRIDE);
    if (blocks == 1) return;
    tile_store(SUMS_10, to + TILE_ROWS * SUMS_STRIDE, SUMS_STRIDE);
    tile_store(SUMS_11, to + TILE_ROWS * SUMS_STRIDE + LINE, SUMS_STRIDE);
}

#define ADD(sums, rows, weights) \
    do { \
        if (kind == INT8) tile_dot_int8(sums, rows, weights); \
        else if (kind == INT4) tile_dot_int4(sums, rows, weights); \
        else tile_dot_bf16(sums, rows, weights); \
    } while (0)

/* The products of TILE_STEPS steps. `once`: whether the weights are not read again for other rows. */
ALWAYS_INLINE TARGET void add_products(int kind, int blocks, int once, const char *rows, int64_t row_stride,
                                       const char *first, const char *second) {
    tile_load(ROWS_0, rows, row_stride);
    if (once) tile_load_once(WEIGHTS_0, first, LINE);
    else tile_load(WEIGHTS_0, first, LINE);
    ADD(SUMS_00, ROWS_0, WEIGHTS_0);
    if (once) tile_load_once(WEIGHTS_1, second, LINE);
    else tile_load(WEIGHTS_1, second, LINE);
    ADD(SUMS_01, ROWS_0, WEIGHTS_1);
    if (blocks == 1) return;
    tile_load(ROWS_1, rows + TILE_ROWS * row_stride, row_stride);
    ADD(SUMS_10, ROWS_1, WEIGHTS_0);
    ADD(SUMS_11, ROWS_1, WEIGHTS_1);
}

ALWAYS_INLINE TARGET void fetch(const char *lines, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(lines + at, 0, 2);
}

/* Of lines that are read but once, `bytes` shortly before they are read; of others, those of the panel to come. */
ALWAYS_INLINE TARGET void fetch_meanwhile(const Tile *t, int64_t at, int64_t bytes, int64_t end, int once) {
    if (!once) {
        if (t->next != t->lines) fetch(t->next + at, bytes);
    } else {
        const char *from = at + AHEAD < end ? t->lines + at + AHEAD : t->next + at + AHEAD - end;
        fetch(from, bytes);
        fetch(from + t->group_stride, bytes);
    }
}

/* A group that does not exist is computed as the one before it. */
ALWAYS_INLINE TARGET void multiply_tile(const Tile *t, int blocks, int kind, int once) {
    const int64_t apart = t->groups > 1 ? t->group_stride : 0, bytes = t->steps / TILE_STEPS * TILE_BYTES;
    const char *rows = t->rows;
    WRITTEN(t);
    load_sums(t->sums, t->first, blocks);
    for (int64_t at = 0; at < bytes; at += TILE_BYTES, rows += LINE) {
        fetch_meanwhile(t, at, TILE_BYTES, bytes, once);
        add_products(kind, blocks, once, rows, t->row_stride, t->lines + at, t->lines + apart + at);
    }
    if (t->steps % TILE_STEPS) {
        char rest[GROUPS][TILE_BYTES] __attribute__((aligned(LINE))) = {{0}};
        for (int64_t g = 0; g < GROUPS; g++)
            memcpy(rest[g], t->lines + g * apart + bytes, t->steps % TILE_STEPS * LINE);
        WRITTEN(rest);
        add_products(kind, blocks, 0, rows, t->row_stride, rest[0], rest[1]);
        WRITTEN(rest);
    }
    if (!t->last) {
        keep_sums(t->sums, blocks);
        return;
    }
    char sums[SUMS_BYTES] __attribute__((aligned(LINE)));
    keep_sums(sums, blocks);
    store_rows(t, kind, sums);
}

/* Where the tests' model stands in for the processor, so does plain C for its vectors. */
ALWAYS_INLINE TARGET Floats fused(Floats a, Floats b, Floats c) {
#ifdef CHARONIA_TILE_MODEL
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#else
    return _mm512_fmadd_ps(a, b, c);
#endif
}

typedef int8_t Bytes __attribute__((vector_size(LINE)));

/* At most; without zero points a step has two. */
enum { STEP_SPANS = 2, SPAN_TILES = 2 };

/* The spans of one step of two groups: what the processor multiplies, and what turns its sums into parts of the product. */
typedef struct {
    char lines[STEP_SPANS][GROUPS][SPAN_TILES * TILE_BYTES]; /* as int8; without zero points the middle is taken off */
    Floats scales[STEP_SPANS][GROUPS], offsets[GROUPS];
    Ints points[GROUPS];
} __attribute__((aligned(LINE))) SpanStep;

/* Exact sums of a step's spans: [span][row][group]. */
typedef Ints StepDots[STEP_SPANS][2 * TILE_ROWS][GROUPS];

ALWAYS_INLINE TARGET void read_step(const Tile *t, int zeros, int64_t apart, int64_t at, SpanStep *to) {
    const int spans = zeros ? 1 : STEP_SPANS;
    const Bytes middle = (Bytes){0} + (int8_t)(zeros ? 0 : 8);
    for (int g = 0; g < GROUPS; g++) {
        const char *line = t->lines + g * apart + at, *from = line + LINE;
        if (zeros == ZERO_POINTS_EACH) to->points[g] = load_shorts(line + LINE / 2);
        if (zeros == OFFSETS_EACH) to->offsets[g] = load_halves(line + LINE / 2);
        for (int each = 0; each < spans; each++) {
            Bytes *lines = (Bytes *)to->lines[each][g];
            to->scales[each][g] = load_halves(line + each * LINE / 2);
            for (int64_t i = 0; i < t->matrix->span / 8; i++, from += LINE) {
                const Ints both = load_ints(from);
                lines[2 * i] = (Bytes)(both & 0x0f0f0f0f) - middle;
                lines[2 * i + 1] = (Bytes)(both >> 4 & 0x0f0f0f0f) - middle;
            }
        }
    }
    WRITTEN(to);
}

ALWAYS_INLINE TARGET void multiply_step(const Tile *t, int blocks, int zeros, const char *row, const SpanStep *step,
                                        StepDots dots) {
    const int64_t span = t->matrix->span;
    for (int each = 0; each < (zeros ? 1 : STEP_SPANS); each++, row += sizeof(SpanHead) + span) {
        load_sums(0, 1, blocks);
        for (int64_t at = 0; at < span; at += LINE)
            add_products(zeros ? INT4 : INT8, blocks, 0, row + sizeof(SpanHead) + at, t->row_stride,
                         step->lines[each][0] + at * LANES, step->lines[each][1] + at * LANES);
        keep_sums((char *)dots[each], blocks);
    }
    WRITTEN(dots);
}

/* As the other levels do it: exact sums, added in one rounding. */
ALWAYS_INLINE TARGET void add_scaled(const Tile *t, int zeros, const char *row, const SpanStep *step,
                                     const StepDots dots, Floats sums[][GROUPS]) {
    const int64_t next = sizeof(SpanHead) + t->matrix->span;
    const int spans = zeros ? 1 : STEP_SPANS;
    for (int64_t r = 0; r < t->count; r++, row += t->row_stride)
        UNROLL for (int g = 0; g < GROUPS; g++) {
            Floats sum = sums[r][g];
            UNROLL for (int each = 0; each < spans; each++) {
                const SpanHead *head = (const SpanHead *)(row + each * next);
                Ints dot = dots[each][r][g];
                if (zeros == ZERO_POINTS_EACH) dot += step->points[g] * head->start;
                sum = fused(__builtin_convertvector(dot, Floats), step->scales[each][g] * head->scale, sum);
                if (zeros != OFFSETS_EACH) continue;
                const Floats start = (Floats){0} + (float)head->start;
                sum = fused(start, step->offsets[g] * head->scale, sum);
            }
            sums[r][g] = sum;
        }
}

/* Each step is multiplied before the one before it is scaled: so vectors are busy while the tiles are. */
ALWAYS_INLINE TARGET void multiply_spans(const Tile *t, int blocks, int once, int zeros) {
    const Matrix *m = t->matrix;
    const int64_t apart = t->groups > 1 ? t->group_stride : 0, bytes = lines_a_step(m) * LINE, end = t->steps * bytes;
    const int64_t row_bytes = (zeros ? 1 : STEP_SPANS) * (sizeof(SpanHead) + m->span);
    SpanStep steps[2];
    StepDots dots[2] __attribute__((aligned(LINE)));
    Floats sums[2 * TILE_ROWS][GROUPS];
    const char *row = t->rows;
    if (t->first) memset(sums, 0, t->count * SUMS_STRIDE);
    else memcpy(sums, t->sums, t->count * SUMS_STRIDE);
    int now = 0;
    for (int64_t at = 0; at < end; at += bytes, row += row_bytes, now = !now) {
        fetch_meanwhile(t, at, bytes, end, once);
        read_step(t, zeros, apart, at, steps + now);
        multiply_step(t, blocks, zeros, row, steps + now, dots[now]);
        if (at) add_scaled(t, zeros, row - row_bytes, steps + !now, dots[!now], sums);
    }
    if (end) add_scaled(t, zeros, row - row_bytes, steps + !now, dots[!now], sums);
    if (t->last) store_rows(t, INT4, (const char *)sums);
    else memcpy(t->sums, sums, t->count * SUMS_STRIDE);
}

ALWAYS_INLINE TARGET void multiply_any_spans(const Tile *t, int blocks, int once) {
    switch (t->matrix->zeros) {
        case NO_ZEROS: multiply_spans(t, blocks, once, NO_ZEROS); break;
        case ZERO_POINTS_EACH: multiply_spans(t, blocks, once, ZERO_POINTS_EACH); break;
        default: multiply_spans(t, blocks, once, OFFSETS_EACH);
    }
}

#define TILES(name, multiply, ...)                                                \
    TARGET static void name(const Tile *t) {                                      \
        t->count > TILE_ROWS ? multiply(t, 2, __VA_ARGS__) : multiply(t, 1, __VA_ARGS__); \
    }

TILES(int8_once, multiply_tile, INT8, 1)
TILES(int8_again, multiply_tile, INT8, 0)
TILES(bf16_once, multiply_tile, BFLOAT16, 1)
TILES(bf16_again, multiply_tile, BFLOAT16, 0)
TILES(int4_once, multiply_any_spans, 1)
TILES(int4_again, multiply_any_spans, 0)

static TARGET void shape(const Matrix *m, int64_t rows) {
    if (!rows) {
        tile_release();
        return;
    }
    const uint8_t top = rows < TILE_ROWS ? rows : TILE_ROWS, rest = rows - top;
    const uint8_t wide = m->kind == INT4 && m->span < LINE ? m->span : LINE, deep = wide / 4;
    const uint8_t heights[TILE_REGISTERS] = {top, top, rest, rest, top, rest, deep, deep};
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.rows[i] = heights[i];
        shapes.row_bytes[i] = !heights[i] ? 0 : i == ROWS_0 || i == ROWS_1 ? wide : LINE;
    }
    WRITTEN(&shapes);
    tile_configure(&shapes);
}

static const Plan int8_plans[] = {{32, 32, 2, 4096, 32, {int8_once}}, {INT64_MAX, 32, 2, 1280, 256, {int8_again}}};
static const Plan bf16_plans[] = {{32, 32, 2, 4096, 32, {bf16_once}}, {INT64_MAX, 32, 2, 1280, 256, {bf16_again}}};
static const Plan int4_plans[] = {{32, 32, 2, 2048, 32, {int4_once}}, {INT64_MAX, 32, 2, 640, 256, {int4_again}}};

const Kernel matmul_amx[KINDS] = {
    [BFLOAT16] = {bf16_plans, copy_row, 4, LINE, 1, PLAIN, TILE_STEPS, shape},
    [INT8] = {int8_plans, byte_row, 4, LINE, 0, PLAIN, TILE_STEPS, shape},
    [INT4] = {int4_plans, span_row, 1, LINE, 0, PLAIN, 1, shape},
};
#endif
