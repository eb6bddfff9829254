/* Tiles for Arm's processors with matrix instructions (Neoverse V1 and N2, Cortex-X2): int8 and int4, and bf16 where they
 * have it.
 *
 * One instruction multiplies eight bytes of two outputs with eight of two rows; a row without a neighbour is its own. bf16
 * is summed as bfmmla does it: of each four inputs first the first two, whose products are added to each other and
 * then to the sum so far, then the other two. Each result is rounded to odd: cut off, and its last bit set if anything was
 * lost. What is too small to be normal counts as zero, in operands and in every result. */
#include "matmul.h"

#ifdef CHARONIA_ARM
#define TARGET TARGET_I8MM
#include "matmul_neon.inc"

#define PAIRS(rows) (((rows) + 1) / 2)

/* Vectors of a group's sums by a pair of rows: two outputs, each with the first row's and the second's. */
enum { QUADS = 8, MOST_PAIRS = MOST_ROWS / 2 };

/* Eight bytes of each row of a pair; the last of an odd number is its own neighbour. */
ALWAYS_INLINE TARGET int8x16_t both_rows(const char *rows, int64_t row_stride, int pair, int count) {
    const int8_t *first = (const int8_t *)rows + 2 * pair * row_stride;
    return vcombine_s8(vld1_s8(first), vld1_s8(2 * pair + 1 < count ? first + row_stride : first));
}

/* Four bytes of each of two outputs, with four zeros behind each. */
ALWAYS_INLINE TARGET int8x16_t half_quad(const char *line, int quad) {
    return vreinterpretq_s8_u64(vmovl_u32(vld1_u32((const uint32_t *)line + 2 * quad)));
}

/* The sums of a tile: zero, or what the chunk before left. */
ALWAYS_INLINE TARGET void begin_pairs(const Tile *t, Ints sums[MOST_PAIRS][2 * QUADS], int rows, int groups) {
    UNROLL for (int p = 0; p < PAIRS(rows); p++)
        UNROLL for (int v = 0; v < groups * QUADS; v++)
            sums[p][v] = t->first ? (Ints){0} : load_ints(t->sums + (p * groups * QUADS + v) * sizeof(Ints));
}

/* Results, or what the next chunk begins with. */
ALWAYS_INLINE TARGET void end_pairs(const Tile *t, int kind, const Ints sums[MOST_PAIRS][2 * QUADS], int rows, int groups) {
    if (!t->last) {
        UNROLL for (int p = 0; p < PAIRS(rows); p++)
            UNROLL for (int v = 0; v < groups * QUADS; v++)
                memcpy(t->sums + (p * groups * QUADS + v) * sizeof(Ints), &sums[p][v], sizeof(Ints));
        return;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int g = 0; g < groups; g++) {
            const Ints *quads = sums[r / 2] + g * QUADS;
            Ints own[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                own[v] = r % 2 ? vuzp2q_s32(quads[2 * v], quads[2 * v + 1]) : vuzp1q_s32(quads[2 * v], quads[2 * v + 1]);
            if (g < t->groups) finish(t, kind, own, r, g);
        }
}

#define NAME(x) int8_##x
#define DOT(sums, weights, rows) vmmlaq_s32(sums, weights, rows)
#include "matmul_pair_tile.inc"
TILES_OF_16(int8_tile, INT8)
#undef NAME
#undef DOT

/* What the rows of a pair have before a span: [first, second, first, second]. */
typedef struct {
    float32x4_t scales;
    int32x4_t starts;
} PairHead;

ALWAYS_INLINE TARGET PairHead pair_head(const char *rows, int64_t row_stride, int pair, int count) {
    const int8x16_t both = both_rows(rows, row_stride, pair, count);
    const int32x4_t scales = vuzp1q_s32(vreinterpretq_s32_s8(both), vreinterpretq_s32_s8(both));
    const int32x4_t starts = vuzp2q_s32(vreinterpretq_s32_s8(both), vreinterpretq_s32_s8(both));
    return (PairHead){vreinterpretq_f32_s32(scales), starts};
}

/* The weights of eight inputs: of four bits one line, of grouped int8 two. */
ALWAYS_INLINE TARGET void eight_inputs(int kind, const char *line, uint8x16_t weights[QUADS]) {
    UNROLL for (int v = 0; v < 4; v++) {
        const uint8x16_t bytes = vld1q_u8((const uint8_t *)line + 16 * v);
        uint8x16_t low = FOUR_BITS(kind) ? vandq_u8(bytes, vdupq_n_u8(15)) : bytes;
        uint8x16_t high = FOUR_BITS(kind) ? vshrq_n_u8(bytes, 4) : vld1q_u8((const uint8_t *)line + LINE + 16 * v);
        if (kind == FLOAT4) {
            low = vqtbl1q_u8((uint8x16_t){FLOAT4_TABLE}, low);
            high = vqtbl1q_u8((uint8x16_t){FLOAT4_TABLE}, high);
        }
        const uint32x4_t first = vreinterpretq_u32_u8(low), then = vreinterpretq_u32_u8(high);
        weights[2 * v] = vreinterpretq_u8_u32(vzip1q_u32(first, then));
        weights[2 * v + 1] = vreinterpretq_u8_u32(vzip2q_u32(first, then));
    }
}

/* The exact sums of one span. */
ALWAYS_INLINE TARGET void multiply_span(const Tile *t, int kind, const char *head, const char *line, const char *row,
                                        int64_t at, int rows, int32x4_t dots[MOST_PAIRS][QUADS]) {
    const int each = t->matrix->zeros;
    UNROLL for (int p = 0; p < PAIRS(rows); p++) {
        const int32x4_t starts = pair_head(row, t->row_stride, p, rows).starts;
        UNROLL for (int v = 0; v < QUADS; v++) {
            const int32x4_t zeros = load_shorts(head + LINE / 2 + v / 2 * sizeof(Shorts));
            const int32x4_t both = v % 2 ? vzip2q_s32(zeros, zeros) : vzip1q_s32(zeros, zeros);
            dots[p][v] = each == ZERO_POINTS_EACH ? vmulq_s32(both, starts) : each ? vdupq_n_s32(0) : starts;
        }
    }
    row += sizeof(SpanHead);
    const int lines = FOUR_BITS(kind) ? 1 : 2;
    for (int64_t i = 0; i < t->matrix->span; i += 8, row += 8, at += lines * LINE) {
        uint8x16_t weights[QUADS];
        fetch_lines(t, at, lines, 1);
        eight_inputs(kind, line + at, weights);
        UNROLL for (int p = 0; p < PAIRS(rows); p++) {
            const int8x16_t inputs = both_rows(row, t->row_stride, p, rows);
            UNROLL for (int v = 0; v < QUADS; v++) dots[p][v] = vusmmlaq_s32(dots[p][v], weights[v], inputs);
        }
    }
}

/* Of two outputs what a line has, for both rows. */
ALWAYS_INLINE TARGET float32x4_t quad_scales(const char *line, int quad) {
    const float32x4_t four = half_floats(line + quad / 2 * sizeof(Shorts));
    return quad % 2 ? vzip2q_f32(four, four) : vzip1q_f32(four, four);
}

/* sums += numbers * scales * the rows' scales, in one rounding. */
ALWAYS_INLINE TARGET void add_scaled(Ints *sum, Ints numbers, Floats scales, PairHead rows) {
    *sum = (Ints)fused(vcvtq_f32_s32(numbers), scales * rows.scales, (Floats)*sum);
}

ALWAYS_INLINE TARGET void span_tile(const Tile *t, int kind, int rows, int groups) {
    const Matrix *m = t->matrix;
    const int64_t span_bytes = span_lines(m) * LINE;
    const char *row = t->rows;
    Ints sums[MOST_PAIRS][2 * QUADS];
    begin_pairs(t, sums, rows, groups);
    for (int64_t step = 0, at = 0; step < t->steps; step++) {
        const char *head = t->lines + at;
        fetch_lines(t, at, 1, 1);
        at += LINE;
        for (int each = 0; each < spans_a_step(m); each++, at += span_bytes, head += LINE / 2) {
            int32x4_t dots[MOST_PAIRS][QUADS];
            multiply_span(t, kind, head, t->lines, row, at, rows, dots);
            UNROLL for (int p = 0; p < PAIRS(rows); p++) {
                const PairHead own = pair_head(row, t->row_stride, p, rows);
                UNROLL for (int v = 0; v < QUADS; v++) add_scaled(&sums[p][v], dots[p][v], quad_scales(head, v), own);
                if (m->zeros == OFFSETS_EACH)
                    UNROLL for (int v = 0; v < QUADS; v++)
                        add_scaled(&sums[p][v], own.starts, quad_scales(head + LINE / 2, v), own);
            }
            row += sizeof(SpanHead) + m->span;
        }
    }
    end_pairs(t, kind, sums, rows, groups);
}
SIX_TILES(span_tile, INT4, 1) SIX_TILES(span_tile, GROUPED_INT8, 1) SIX_TILES(span_tile, FLOAT4, 1)

#undef TARGET
#define TARGET TARGET_BFMMLA

ALWAYS_INLINE TARGET int32x4_t dot_bf16(int32x4_t sums, int8x16_t weights, int8x16_t rows) {
    return vreinterpretq_s32_f32(vbfmmlaq_f32(vreinterpretq_f32_s32(sums), vreinterpretq_bf16_s8(weights),
                                              vreinterpretq_bf16_s8(rows)));
}

#define NAME(x) bf16_##x
#define DOT(sums, weights, rows) dot_bf16(sums, weights, rows)
#include "matmul_pair_tile.inc"
TILES_OF_16(bf16_tile, BFLOAT16)

#define SPAN_PLANS(kind) {{6, 6, 1, 1280, 6, SIX(kind, 1)}, {INT64_MAX, 6, 1, 256, 60, SIX(kind, 1)}}

static const Plan bf16_plans[] = PLANS_OF_16(BFLOAT16, 384, 60);
static const Plan int8_plans[] = PLANS_OF_16(INT8, 256, 60);
static const Plan int4_plans[] = SPAN_PLANS(INT4);
static const Plan grouped_plans[] = SPAN_PLANS(GROUPED_INT8);
static const Plan float4_plans[] = SPAN_PLANS(FLOAT4);

const Kernel matmul_i8mm[KINDS] = {
    [BFLOAT16] = {bf16_plans, copy_row, 4, 2 * LINE, 1, PAIRED, 2},
    [INT8] = {int8_plans, byte_row, 4, 2 * LINE, 0, PAIRED, 2},
    [INT4] = {int4_plans, span_row, 1, 2 * LINE, 0},
    [GROUPED_INT8] = {grouped_plans, span_row, 1, 2 * LINE, 0},
    [FLOAT4] = {float4_plans, span_row, 1, 2 * LINE, 0},
};
#endif
