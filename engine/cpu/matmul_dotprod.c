/* Tiles for Arm's processors with the dot product of four bytes (Neoverse N1, Cortex-A76): bf16 widened to fp32. */
#include "matmul.h"

#ifdef CHARONIA_ARM
#define TARGET TARGET_DOTPROD
#define PARTS(kind) ((kind) == FLOAT32 ? 1 : 2)
#define STEP(kind) (4 * PARTS(kind))

#include "matmul_neon.inc"

ALWAYS_INLINE TARGET Ints weights_at(int kind, const char *line, int vector, int part) {
    const Ints pairs = load_ints(line + 16 * vector);
    return kind == BFLOAT16 ? widened(pairs, part) : pairs;
}

#define spread(kind, row, part) ((Ints)vld1q_dup_f32((const float *)(row) + (part)))
#define DOT(kind, sum, x, w) ((Ints)fused((Floats)(x), (Floats)(w), (Floats)(sum)))
#include "matmul_tile.inc"
TILES_OF_16(tile, BFLOAT16) TILES_OF_16(tile, FLOAT32)

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
ALWAYS_INLINE TARGET int8x16_t bytes_at(int kind, const char *line, int vector, int lane) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t *)line + (FOUR_BITS(kind) ? lane / 2 : lane) * LINE + 16 * vector);
    const uint8x16_t half = lane % 2 ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    if (kind == FLOAT4) return vreinterpretq_s8_u8(vqtbl1q_u8((uint8x16_t){FLOAT4_TABLE}, half));
    if (kind == INT4) return vreinterpretq_s8_u8(half);
    return vreinterpretq_s8_u8(kind == INT8 ? bytes : veorq_u8(bytes, vdupq_n_u8(128)));
}

/* The products of sixteen inputs. */
ALWAYS_INLINE TARGET void multiply_lines(int kind, Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                         const char *const line[4], int64_t at, int rows, int groups) {
    int8x16_t inputs[MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) inputs[r] = vld1q_s8((const int8_t *)x + r * row_stride);
    UNROLL for (int lane = 0; lane < 4; lane++)
        UNROLL for (int v = 0; v < groups * VECTORS; v++) {
            const int8x16_t weights = bytes_at(kind, line[v / VECTORS] + at, v % VECTORS, lane);
            UNROLL for (int r = 0; r < rows; r++) dots[r][v] = dot(dots[r][v], weights, inputs[r], lane);
        }
}

/* int8, sixteen inputs at a time, and of the last ones four. */
ALWAYS_INLINE TARGET void int8_tile(const Tile *t, int kind, int rows, int groups) {
    const int64_t bytes = t->steps * LINE;
    const char *row = t->rows, *line[4];
    Ints sums[MOST_ROWS][4 * VECTORS];
    UNROLL for (int g = 0; g < groups; g++) line[g] = t->lines + (g < t->groups ? g : 0) * t->group_stride;
    begin_sums(t, sums, rows, groups);
    int64_t at = 0;
    for (; at + 4 * LINE <= bytes; at += 4 * LINE, row += 16) {
        fetch_lines(t, at, 4, groups);
        multiply_lines(kind, sums, row, t->row_stride, line, at, rows, groups);
    }
    for (; at < bytes; at += LINE, row += 4)
        UNROLL for (int r = 0; r < rows; r++) {
            const int8x16_t four = vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(row + r * t->row_stride)));
            UNROLL for (int v = 0; v < groups * VECTORS; v++)
                sums[r][v] = vdotq_s32(sums[r][v], bytes_at(kind, line[v / VECTORS] + at, v % VECTORS, 0), four);
        }
    end_sums(t, kind, sums, rows, groups);
}
TILES_OF_16(int8_tile, INT8)

/* Weights of grouped int8 are multiplied as 128 less than they are, and so are zero points; with offsets that is to be
   added. */
#define SPAN_LINES(kind) (FOUR_BITS(kind) ? 2 : 4)
#define SPAN_INPUTS(kind) 16
#define WEIGHT_SHIFT(kind) ((kind) == GROUPED_INT8 ? -128 : 0)
#include "matmul_span_tile.inc"
TILES_OF_16(span_tile, INT4) TILES_OF_16(span_tile, GROUPED_INT8) TILES_OF_16(span_tile, FLOAT4)

static const Plan fp32_plans[] = PLANS_OF_16(FLOAT32, 384, 60);
static const Plan bf16_plans[] = PLANS_OF_16(BFLOAT16, 384, 60);
static const Plan int8_plans[] = PLANS_OF_16(INT8, 256, 60);
static const Plan int4_plans[] = PLANS_OF_16(INT4, 256, 60);
static const Plan grouped_plans[] = PLANS_OF_16(GROUPED_INT8, 256, 60);
static const Plan float4_plans[] = PLANS_OF_16(FLOAT4, 256, 60);

const Kernel matmul_dotprod[KINDS] = {
    {fp32_plans, copy_row, 4, LINE, 1},
    {bf16_plans, wide_row, 8, LINE, 0},
    {int8_plans, byte_row, 4, LINE, 0},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, span_row, 1, LINE, 0},
    {float4_plans, span_row, 1, LINE, 0},
};
#endif
