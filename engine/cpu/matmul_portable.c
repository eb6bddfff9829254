/* Tiles in the compiler's own vectors of 16 bytes, for every other processor: bf16 widened to fp32, int8 to int32. */
#include "matmul.h"

#define TARGET
#define VECTORS 4
#define REGISTER "+m"
#define PARTS(kind) ((kind) == FLOAT32 ? 1 : (kind) == BFLOAT16 ? 2 : 4)
#define STEP(kind) ((kind) == FLOAT32 ? 4 : 8)

#include "matmul_store.inc"
#include "matmul_row.inc"

ALWAYS_INLINE Ints weights_at(int kind, const char *line, int vector, int part) {
    const Ints all = load_ints(line + vector * sizeof(Ints));
    if (kind == INT8) return (all << (24 - 8 * part)) >> 24;
    return kind == BFLOAT16 ? widened(all, part) : all;
}

ALWAYS_INLINE Ints spread(int kind, const char *row, int part) {
    if (kind == INT8) return (Ints){0} + ((const int16_t *)row)[part];
    return (Ints)(((const float *)row)[part] - (Floats){0});
}

#define DOT(kind, sum, x, w) ((kind) == INT8 ? (sum) + (x) * (w) : (Ints)((Floats)(sum) + (Floats)(x) * (Floats)(w)))
#include "matmul_tile.inc"

#define SPAN_LINES(kind) 1
#define SPAN_INPUTS(kind) (FOUR_BITS(kind) ? 8 : 4)

static const int8_t float4_table[16] = {FLOAT4_TABLE};

#define half_floats(line) load_halves(line)
#define times(zeros, start) ((zeros) * (start))

/* In one rounding, as at every level: where there is no instruction, a function does it. */
ALWAYS_INLINE Floats fused(Floats a, Floats b, Floats c) {
    for (int i = 0; i < WIDTH; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

/* One line of one group. */
ALWAYS_INLINE void multiply_lines(int kind, Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                  const char *const line[4], int64_t at, int rows, int groups) {
    const int bits = FOUR_BITS(kind) ? 4 : 8;
    for (int part = 0; part < SPAN_INPUTS(kind); part++)
        for (int v = 0; v < groups * VECTORS; v++) {
            const Ints all = load_ints(line[0] + at + v * sizeof(Ints));
            Ints weights = all >> (8 * (part % 4) + part / 4 * 4) & ((1 << bits) - 1);
            if (kind == FLOAT4)
                for (int i = 0; i < WIDTH; i++) weights[i] = float4_table[weights[i]];
            for (int r = 0; r < rows; r++) dots[r][v] += weights * ((const int8_t *)x)[r * row_stride + part];
        }
}

#include "matmul_span_tile.inc"

#define FOUR_TILES(tile, kind) \
    TILE(tile, kind, 1, 1) TILE(tile, kind, 2, 1) TILE(tile, kind, 3, 1) TILE(tile, kind, 4, 1) \
    static const Plan kind##_plan = {INT64_MAX, 4, 1, 384, 126, {kind##_1x1, kind##_2x1, kind##_3x1, kind##_4x1}};
FOUR_TILES(tile, FLOAT32)
FOUR_TILES(tile, BFLOAT16)
FOUR_TILES(tile, INT8)
FOUR_TILES(span_tile, INT4)
FOUR_TILES(span_tile, GROUPED_INT8)
FOUR_TILES(span_tile, FLOAT4)

const Kernel matmul_portable[KINDS] = {
    {&FLOAT32_plan, copy_row, 4, LINE, 1},
    {&BFLOAT16_plan, wide_row, 8, LINE, 0},
    {&INT8_plan, signed_row, 8, LINE, 0},
    {&INT4_plan, span_row, 1, LINE, 0},
    {&GROUPED_INT8_plan, span_row, 1, LINE, 0},
    {&FLOAT4_plan, span_row, 1, LINE, 0},
};
