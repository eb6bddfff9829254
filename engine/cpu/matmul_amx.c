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

/* One span of one group: what the processor multiplies, and what turns its sums into a part of the product. */
typedef struct {
    char lines[2][TILE_BYTES]; /* as int8, a register's share each */
    int32_t zeros[LANES];      /* zero points, if it has them */
    float scales[LANES], offsets[LANES];
} __attribute__((aligned(LINE))) Span;

/* The span number `each` of the step at `step`. */
ALWAYS_INLINE TARGET void read_span(const Matrix *m, const char *step, int64_t each, Span *to) {
    const char *lines = step + LINE + each * m->span / 8 * LINE;
    char *half = to->lines[0];
    const Floats scales = load_halves(step + each * LINE / 2), offsets = load_halves(step + LINE / 2);
    memcpy(to->scales, &scales, LINE);
    memcpy(to->offsets, &offsets, LINE);
    const Ints zeros = load_shorts(step + LINE / 2);
    memcpy(to->zeros, &zeros, LINE);
    for (int64_t line = 0; line < m->span / 8; line++, half += 2 * LINE) {
        const Ints both = load_ints(lines + line * LINE), first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
        memcpy(half, &first, LINE);
        memcpy(half + LINE, &second, LINE);
    }
}

/* As the other levels do it: exact sums, added in one rounding. */
ALWAYS_INLINE TARGET void add_scaled(const Tile *t, const char *row, int zeros, const Span spans[GROUPS],
                                     int32_t dots[][GROUPS][LANES], float sums[][GROUPS][LANES]) {
    for (int64_t r = 0; r < t->count; r++, row += t->row_stride) {
        const SpanHead *head = (const SpanHead *)row;
        for (int g = 0; g < GROUPS; g++)
            for (int i = 0; i < LANES; i++) {
                const int32_t times = zeros == ZERO_POINTS_EACH ? spans[g].zeros[i] : !zeros;
                const float dot = (float)(dots[r][g][i] + times * head->start);
                sums[r][g][i] = fmaf(dot, spans[g].scales[i] * head->scale, sums[r][g][i]);
                if (zeros == OFFSETS_EACH)
                    sums[r][g][i] = fmaf((float)head->start, spans[g].offsets[i] * head->scale, sums[r][g][i]);
            }
    }
}

ALWAYS_INLINE TARGET void add_span(const Tile *t, const char *row, int blocks, const Span spans[GROUPS],
                                   float sums[][GROUPS][LANES]) {
    int32_t dots[2 * TILE_ROWS][GROUPS][LANES] __attribute__((aligned(LINE)));
    WRITTEN(spans);
    load_sums(0, 1, blocks);
    for (int64_t at = 0; at < t->matrix->span; at += LINE)
        add_products(INT4, blocks, 0, row + sizeof(SpanHead) + at, t->row_stride, spans[0].lines[at / LINE],
                     spans[1].lines[at / LINE]);
    keep_sums((char *)dots, blocks);
    WRITTEN(spans);
    switch (t->matrix->zeros) {
        case NO_ZEROS: add_scaled(t, row, NO_ZEROS, spans, dots, sums); break;
        case ZERO_POINTS_EACH: add_scaled(t, row, ZERO_POINTS_EACH, spans, dots, sums); break;
        default: add_scaled(t, row, OFFSETS_EACH, spans, dots, sums);
    }
}

ALWAYS_INLINE TARGET void multiply_spans(const Tile *t, int blocks, int once) {
    const Matrix *m = t->matrix;
    const int64_t apart = t->groups > 1 ? t->group_stride : 0, step = lines_a_step(m) * LINE, end = t->steps * step;
    float sums[2 * TILE_ROWS][GROUPS][LANES] __attribute__((aligned(LINE)));
    const char *row = t->rows;
    if (t->first) memset(sums, 0, t->count * SUMS_STRIDE);
    else memcpy(sums, t->sums, t->count * SUMS_STRIDE);
    for (int64_t at = 0; at < end; at += step) {
        fetch_meanwhile(t, at, step, end, once);
        for (int64_t each = 0; each < spans_a_step(m); each++, row += sizeof(SpanHead) + m->span) {
            Span spans[GROUPS];
            for (int g = 0; g < GROUPS; g++) read_span(m, t->lines + g * apart + at, each, spans + g);
            add_span(t, row, blocks, spans, sums);
        }
    }
    if (t->last) store_rows(t, INT4, (const char *)sums);
    else memcpy(t->sums, sums, t->count * SUMS_STRIDE);
}

#define TILES(name, multiply, ...)                                                \
    TARGET static void name(const Tile *t) {                                      \
        t->count > TILE_ROWS ? multiply(t, 2, __VA_ARGS__) : multiply(t, 1, __VA_ARGS__); \
    }

TILES(int8_once, multiply_tile, INT8, 1)
TILES(int8_again, multiply_tile, INT8, 0)
TILES(bf16_once, multiply_tile, BFLOAT16, 1)
TILES(bf16_again, multiply_tile, BFLOAT16, 0)
TILES(int4_once, multiply_spans, 1)
TILES(int4_again, multiply_spans, 0)

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
