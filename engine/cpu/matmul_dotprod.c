/* Tiles for Arm's processors with the dot product of four bytes (Neoverse N1, Cortex-A76): bf16 widened to fp32. */
#include "matmul.h"

#ifdef CHARONIA_ARM
#include "matmul_neon.h"

#define TARGET TARGET_DOTPROD
#define VECTORS 4

#define Vector float32x4_t
#define Operand float32x4_t
#define ZERO vdupq_n_f32(0)
#define DOT(sum, x, w) vfmaq_f32(sum, x, w)
#define SPREAD(row, part) vld1q_dup_f32((const float *)(row) + (part))
#define KEEP(to, sum) vst1q_f32((float *)(to), sum)
#define KEPT(from) vld1q_f32((const float *)(from))
#define FINISH(t, sums, row, group) store(t, sums, row, group)

/* Of each pair the even input, moved up, or the odd one, alone. */
ALWAYS_INLINE float32x4_t widened(const char *pairs, int part) {
    const uint32x4_t both = vld1q_u32((const uint32_t *)pairs);
    return vreinterpretq_f32_u32(part ? vandq_u32(both, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(both, 16));
}

#define NAME(x) bf16_##x
#define PARTS 2
#define STEP 8
#define WEIGHTS(line, vector, part) widened((line) + 16 * (vector), part)
#include "matmul_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#undef NAME
#undef PARTS
#undef STEP
#undef WEIGHTS

#define NAME(x) fp32_##x
#define PARTS 1
#define STEP 4
#define WEIGHTS(line, vector, part) vld1q_f32((const float *)(line) + 4 * (vector))
#include "matmul_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)

#include "matmul_row.inc"

#undef NAME
#undef ZERO
#undef FINISH
#define Ints int32x4_t
#define Floats float32x4_t

/* The instruction names the lane of `x` that it multiplies with. */
ALWAYS_INLINE TARGET Ints dot(Ints sum, int8x16_t weights, int8x16_t x, int lane) {
    switch (lane) {
    case 0: return vdotq_laneq_s32(sum, weights, x, 0);
    case 1: return vdotq_laneq_s32(sum, weights, x, 1);
    case 2: return vdotq_laneq_s32(sum, weights, x, 2);
    default: return vdotq_laneq_s32(sum, weights, x, 3);
    }
}

/* Of four outputs the inputs 4 * lane to 4 * lane + 3, as signed numbers: grouped int8 as 128 less than it is. */
ALWAYS_INLINE TARGET int8x16_t weights_at(int kind, const char *line, int vector, int lane) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t *)line + (kind == INT4 ? lane / 2 : lane) * LINE + 16 * vector);
    if (kind == INT4) return vreinterpretq_s8_u8(lane % 2 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
    return vreinterpretq_s8_u8(kind == INT8 ? bytes : veorq_u8(bytes, vdupq_n_u8(128)));
}

/* The products of sixteen inputs. */
ALWAYS_INLINE TARGET void add_products(int kind, Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                       const char *const line[4], int64_t at, int rows, int groups) {
    int8x16_t inputs[MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) inputs[r] = vld1q_s8((const int8_t *)x + r * row_stride);
    UNROLL for (int lane = 0; lane < 4; lane++)
        UNROLL for (int v = 0; v < groups * VECTORS; v++) {
            const int8x16_t weights = weights_at(kind, line[v / VECTORS] + at, v % VECTORS, lane);
            UNROLL for (int r = 0; r < rows; r++) dots[r][v] = dot(dots[r][v], weights, inputs[r], lane);
        }
}

/* Of the last inputs four at a time. */
ALWAYS_INLINE TARGET void add_last(Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                   const char *const line[4], int64_t at, int rows, int groups) {
    UNROLL for (int r = 0; r < rows; r++) {
        const int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(x + r * row_stride)));
        UNROLL for (int v = 0; v < groups * VECTORS; v++)
            dots[r][v] = vdotq_s32(dots[r][v], weights_at(INT8, line[v / VECTORS] + at, v % VECTORS, 0), four);
    }
}

#define NAME(x) int8_##x
ALWAYS_INLINE TARGET void int8_tile(const Tile *t, int rows, int groups) {
    const int64_t bytes = t->steps * LINE;
    const char *row = t->rows, *line[4];
    char *kept = t->sums;
    Ints sums[MOST_ROWS][4 * VECTORS];
    UNROLL for (int g = 0; g < groups; g++) line[g] = t->lines + (g < t->groups ? g : 0) * t->group_stride;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < groups * VECTORS; v++)
            sums[r][v] = t->first ? vdupq_n_s32(0) : vld1q_s32((const int32_t *)kept + (r * groups * VECTORS + v) * 4);
    int64_t at = 0;
    for (; at + 4 * LINE <= bytes; at += 4 * LINE, row += 16) {
        fetch_lines(t, at, 4, groups);
        add_products(INT8, sums, row, t->row_stride, line, at, rows, groups);
    }
    for (; at < bytes; at += LINE, row += 4) add_last(sums, row, t->row_stride, line, at, rows, groups);
    UNROLL for (int r = 0; r < rows; r++) {
        if (t->last) {
            UNROLL for (int g = 0; g < groups; g++) if (g < t->groups) store_scaled(t, &sums[r][g * VECTORS], r, g);
        } else {
            UNROLL for (int v = 0; v < groups * VECTORS; v++)
                vst1q_s32((int32_t *)kept + (r * groups * VECTORS + v) * 4, sums[r][v]);
        }
    }
}
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#undef NAME

#define ZERO vdupq_n_f32(0)
#define ZERO_POINTS(line, vector) four_zeros(line, vector)
#define TIMES(zeros, start) vmulq_n_s32(zeros, start)
#define SCALES(line, vector) four_scales(line, vector)
#define ADD_SPAN(sum, dots, scales, scale) vfmaq_f32(sum, vcvtq_f32_s32(dots), vmulq_n_f32(scales, scale))
#define FINISH(t, sums, row, group) store_spans(t, sums, row, group)

#include "matmul_span_row.inc"

#define NAME(x) int4_##x
#define SPAN_LINES 2
#define SPAN_INPUTS 16
#define SPREAD_INT(value) vdupq_n_s32(value)
#define int4_lines(...) add_products(INT4, __VA_ARGS__)
#include "matmul_span_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#undef NAME
#undef SPAN_LINES
#undef ZERO_POINTS
#undef BEGIN

/* Weights are 128 less than they are, and so are zero points; with offsets that is to be added. */
#define NAME(x) grouped_##x
#define SPAN_LINES 4
#define BEGIN(zeros, start) ((zeros) ? -128 * (start) : 0)
#define ZERO_POINTS(line, vector) vsubq_s32(four_zeros(line, vector), vdupq_n_s32(128))
#define grouped_lines(...) add_products(GROUPED_INT8, __VA_ARGS__)
#include "matmul_span_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)

static const Plan fp32_plans[] = PLANS(fp32, 384);
static const Plan bf16_plans[] = PLANS(bf16, 384);
static const Plan int8_plans[] = PLANS(int8, 256);
static const Plan int4_plans[] = PLANS(int4, 256);
static const Plan grouped_plans[] = PLANS(grouped, 256);

const Kernel matmul_dotprod[KINDS] = {
    {fp32_plans, copy_row, 4, LINE, 1},
    {bf16_plans, wide_row, 8, LINE, 0},
    {int8_plans, byte_row, 4, LINE, 0},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, span_row, 1, LINE, 0},
};
#endif
