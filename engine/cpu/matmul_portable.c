/* Tiles in the compiler's own vectors, for every other processor: bf16 widened to fp32, int8 to int32. */
#include "matmul.h"
#include <string.h>

#define TARGET

/* These products are rounded before a bias is added, as at every level. */
#define NOT_FUSED(products) __asm__("" : "+m"(products))

typedef float Floats __attribute__((vector_size(LINE)));
typedef int32_t Ints __attribute__((vector_size(LINE)));

ALWAYS_INLINE void store(const Tile *t, const Floats *values, int row, int group) {
    const int64_t output = t->output + group * LANES, left = t->matrix->outputs - output;
    const int64_t at = row * t->out_stride + group * LANES;
    for (int i = 0; i < LANES && i < left; i++) {
        const float value = (*values)[i] + (t->matrix->bias ? t->matrix->bias[output + i] : 0.0f);
        if (t->matrix->out_kind == FLOAT32) {
            ((float *)t->out)[at + i] = value;
        } else {
            uint32_t bits;
            memcpy(&bits, &value, 4);
            bits = value != value ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
            ((uint16_t *)t->out)[at + i] = bits >> 16;
        }
    }
}

ALWAYS_INLINE void store_scaled(const Tile *t, const Ints *sums, int row, int group) {
    const float *scales = t->matrix->scales + t->output + group * LANES;
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = (float)(*sums)[i] * (t->row_scales[row] * scales[i]);
    NOT_FUSED(values);
    store(t, &values, row, group);
}

/* Of each output's four inputs the one at `part`, with its sign. */
ALWAYS_INLINE Ints fourth(const char *line, int part) {
    Ints all;
    memcpy(&all, line, LINE);
    return (all << (24 - 8 * part)) >> 24;
}

/* Of each output's pair of inputs the one at `part`. */
ALWAYS_INLINE Floats half(const char *line, int part) {
    Ints pairs;
    memcpy(&pairs, line, LINE);
    return (Floats)(part ? pairs & (int32_t)0xffff0000 : pairs << 16);
}

ALWAYS_INLINE Floats floats(const char *line) {
    Floats all;
    memcpy(&all, line, LINE);
    return all;
}

ALWAYS_INLINE Ints ints(const char *line) {
    Ints all;
    memcpy(&all, line, LINE);
    return all;
}

#define VECTORS 1
#define DOT(sum, x, w) ((sum) + (x) * (w))
#define KEEP(to, sum) memcpy(to, &(sum), LINE)

#define NAME(x) int8_##x
#define PARTS 4
#define STEP 8
#define Vector Ints
#define Operand Ints
#define ZERO ((Ints){0})
#define WEIGHTS(line, vector, part) fourth(line, part)
#define SPREAD(row, part) ((Ints){0} + ((const int16_t *)(row))[part])
#define KEPT(from) ints(from)
#define FINISH(t, sums, row, group) store_scaled(t, sums, row, group)
#include "matmul_tile.inc"
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
#undef NAME
#undef PARTS
#undef STEP
#undef Vector
#undef Operand
#undef ZERO
#undef WEIGHTS
#undef SPREAD
#undef KEPT
#undef FINISH

#define Vector Floats
#define Operand Floats
#define ZERO ((Floats){0})
#define SPREAD(row, part) ((Floats){0} + ((const float *)(row))[part])
#define KEPT(from) floats(from)
#define FINISH(t, sums, row, group) store(t, sums, row, group)

#define NAME(x) bf16_##x
#define PARTS 2
#define STEP 8
#define WEIGHTS(line, vector, part) half(line, part)
#include "matmul_tile.inc"
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
#undef NAME
#undef PARTS
#undef STEP
#undef WEIGHTS

#define NAME(x) fp32_##x
#define PARTS 1
#define STEP 4
#define WEIGHTS(line, vector, part) floats(line)
#include "matmul_tile.inc"
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)

#include "matmul_row.inc"

/* One line, whose numbers have so many bits, of sixteen outputs. */
ALWAYS_INLINE void span_line(Ints *dots, const int8_t *x, int64_t row_stride, const char *line, int bits, int rows) {
    for (int part = 0; part < 32 / bits; part++) {
        const Ints weights = ints(line) >> (8 * (part % 4) + part / 4 * 4) & ((1 << bits) - 1);
        for (int r = 0; r < rows; r++) dots[4 * r] += weights * x[r * row_stride + part];
    }
}

#define LINES_OF(kind, bits)                                                                                           \
    ALWAYS_INLINE void kind##_lines(Ints dots[MOST_ROWS][4], const char *x, int64_t row_stride,                        \
                                    const char *const line[4], int64_t at, int rows, int groups) {                     \
        (void)groups;                                                                                                  \
        span_line(dots[0], (const int8_t *)x, row_stride, line[0] + at, bits, rows);                                   \
    }
LINES_OF(int4, 4)
LINES_OF(grouped, 8)

ALWAYS_INLINE Ints zero_points(const char *line) {
    Ints zeros;
    for (int i = 0; i < LANES; i++) zeros[i] = ((const int16_t *)(line + LINE / 2))[i];
    return zeros;
}

/* fp16 that are numbers. */
ALWAYS_INLINE Floats half_floats(const char *line) {
    Ints halves;
    for (int i = 0; i < LANES; i++) halves[i] = ((const int16_t *)line)[i];
    const Floats size = (Floats)((halves & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Ints)size | (halves & (int32_t)0x80000000));
}

ALWAYS_INLINE Floats added(Floats sum, Ints dots, Floats scales, float scale) {
    for (int i = 0; i < LANES; i++) sum[i] = fmaf((float)dots[i], scales[i] * scale, sum[i]);
    return sum;
}

ALWAYS_INLINE void store_spans(const Tile *t, const Floats *sums, int row, int group) {
    Floats values = *sums;
    for (int i = 0; i < LANES; i++) values[i] *= t->matrix->scales[t->output + group * LANES + i];
    NOT_FUSED(values);
    store(t, &values, row, group);
}

#undef NAME
#undef FINISH
#define NAME(x) int4_##x
#define SPAN_LINES 1
#define SPAN_INPUTS 8
#define SPREAD_INT(value) ((Ints){0} + (value))
#define ZERO_POINTS(line, vector) zero_points(line)
#define TIMES(zeros, start) ((zeros) * (start))
#define SCALES(line, vector) half_floats(line)
#define ADD_SPAN(sum, dots, scales, scale) added(sum, dots, scales, scale)
#define FINISH(t, sums, row, group) store_spans(t, sums, row, group)
#include "matmul_span_row.inc"
#include "matmul_span_tile.inc"
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
#undef NAME
#undef SPAN_INPUTS
#define NAME(x) grouped_##x
#define SPAN_INPUTS 4
#include "matmul_span_tile.inc"
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)

#define FOUR_ROWS(kind) {kind##_1x1, kind##_2x1, kind##_3x1, kind##_4x1}

static const Plan fp32_plan = {INT64_MAX, 4, 1, 384, 126, FOUR_ROWS(fp32)};
static const Plan bf16_plan = {INT64_MAX, 4, 1, 384, 126, FOUR_ROWS(bf16)};
static const Plan int8_plan = {INT64_MAX, 4, 1, 384, 126, FOUR_ROWS(int8)};
static const Plan int4_plan = {INT64_MAX, 4, 1, 384, 126, FOUR_ROWS(int4)};
static const Plan grouped_plan = {INT64_MAX, 4, 1, 384, 126, FOUR_ROWS(grouped)};

const Kernel matmul_portable[KINDS] = {
    {&fp32_plan, copy_row, 4, LINE, 1},
    {&bf16_plan, wide_row, 8, LINE, 0},
    {&int8_plan, signed_row, 8, LINE, 0},
    {&int4_plan, span_row, 1, LINE, 0},
    {&grouped_plan, span_row, 1, LINE, 0},
};
