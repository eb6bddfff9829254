/* Tiles for AVX2 with FMA (Haswell, Zen and later): bf16 widened to fp32, int8 to int16. */
#include "matmul.h"

#ifdef CHARONIA_X86
#include <immintrin.h>

#define TARGET TARGET_AVX2
#define VECTORS 2
#define REGISTER "+x"
#define PARTS(kind) ((kind) == FLOAT32 ? 1 : 2)
#define STEP(kind) (4 * PARTS(kind))

#include "matmul_store.inc"
#include "matmul_row.inc"

ALWAYS_INLINE TARGET Ints weights_at(int kind, const char *line, int vector, int part) {
    if (kind == INT8) return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)line + 2 * part + vector));
    const Ints pairs = load_ints(line + 32 * vector);
    return kind == FLOAT32 ? pairs : widened(pairs, part);
}

ALWAYS_INLINE TARGET Ints spread(int kind, const char *row, int part) {
    if (kind == INT8) return (Ints)_mm256_set1_epi32(((const int32_t *)row)[part]);
    return (Ints)_mm256_broadcast_ss((const float *)row + part);
}

ALWAYS_INLINE TARGET Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

/* A compiler that may choose adds the products of both parts first, or moves sums about, and runs out of registers. */
ALWAYS_INLINE TARGET Ints added(Ints sum, __m256i products) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
}

ALWAYS_INLINE TARGET Ints dot(int kind, Ints sum, Ints x, Ints w) {
    if (kind == INT8) return added(sum, _mm256_madd_epi16((__m256i)x, (__m256i)w));
    Floats floats = fused((Floats)x, (Floats)w, (Floats)sum);
    __asm__("" : "+x"(floats));
    return (Ints)floats;
}

#define DOT(kind, sum, x, w) dot(kind, sum, x, w)

#include "matmul_tile.inc"
TILES_OF_16(tile, INT8) TILES_OF_16(tile, BFLOAT16) TILES_OF_16(tile, FLOAT32) TILE(tile, FLOAT32, 1, 4)

/* Of spans. Eight pairs of an int4 weight up to 15 and an activation up to 127 fit into 16 bits, and four of a float4 weight
   up to 24: that many are summed before they are widened. Weights of eight bits are widened before they are multiplied,
   the even ones and the odd ones of a line, and so are activations. */
#define SPAN_LINES(kind) (FOUR_BITS(kind) ? 4 : 1)
#define SPAN_INPUTS(kind) (FOUR_BITS(kind) ? 32 : 4)
#define INPUT_BYTES(kind) (FOUR_BITS(kind) ? 1 : 2)
#define SUMMED_PAIRS(kind) ((kind) == INT4 ? 8 : 4)

ALWAYS_INLINE TARGET Floats half_floats(const char *line) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)line)); }

/* Zero points and starts fit into 16 bits. */
ALWAYS_INLINE TARGET Ints times(Ints zeros, int32_t start) {
    return (Ints)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(start));
}

ALWAYS_INLINE TARGET __m256i added_pairs(__m256i sum, __m256i products) {
    sum = _mm256_add_epi16(sum, products);
    __asm__("" : "+x"(sum));
    return sum;
}

/* The low or the high halves of a line's bytes. */
ALWAYS_INLINE TARGET __m256i halves(const char *line, int vector, int high) {
    const __m256i both = _mm256_load_si256((const __m256i *)line + vector);
    return _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

/* Four activations of each row times four weights of each output, added to pairs, or the first that they begin with. */
ALWAYS_INLINE TARGET void four_inputs(__m256i pairs[MOST_ROWS][4 * VECTORS], const __m256i *weights, const char *x,
                                      int64_t row_stride, int begin, int rows, int groups) {
    UNROLL for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, x + r * row_stride, 4);
        UNROLL for (int v = 0; v < groups * VECTORS; v++) {
            const __m256i products = _mm256_maddubs_epi16(weights[v], _mm256_set1_epi32(four));
            pairs[r][v] = begin ? products : added_pairs(pairs[r][v], products);
        }
    }
}

ALWAYS_INLINE TARGET void multiply_four_bits(int kind, Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                             const char *const line[4], int64_t at, int rows, int groups) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(FLOAT4_TABLE));
    const int together = SUMMED_PAIRS(kind);
    __m256i pairs[MOST_ROWS][4 * VECTORS], weights[4 * VECTORS];
    UNROLL for (int part = 0; part < 2 * SPAN_LINES(INT4); part++) {
        UNROLL for (int v = 0; v < groups * VECTORS; v++) {
            weights[v] = halves(line[v / VECTORS] + at + part / 2 * LINE, v % VECTORS, part % 2);
            if (kind == FLOAT4) weights[v] = _mm256_shuffle_epi8(table, weights[v]);
        }
        four_inputs(pairs, weights, x + 4 * part, row_stride, part % together == 0, rows, groups);
        if ((part + 1) % together) continue;
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < groups * VECTORS; v++)
                dots[r][v] += (Ints)_mm256_madd_epi16(pairs[r][v], _mm256_set1_epi16(1));
    }
}

ALWAYS_INLINE TARGET __m256i every_other(const char *line, int vector, int odd) {
    const __m256i both = _mm256_load_si256((const __m256i *)line + vector);
    return odd ? _mm256_srli_epi16(both, 8) : _mm256_and_si256(both, _mm256_set1_epi16(255));
}

ALWAYS_INLINE TARGET void multiply_lines(int kind, Ints dots[MOST_ROWS][4 * VECTORS], const char *x, int64_t row_stride,
                                         const char *const line[4], int64_t at, int rows, int groups) {
    if (FOUR_BITS(kind)) return multiply_four_bits(kind, dots, x, row_stride, line, at, rows, groups);
    UNROLL for (int part = 0; part < 2; part++) {
        __m256i weights[4 * VECTORS];
        UNROLL for (int v = 0; v < groups * VECTORS; v++)
            weights[v] = every_other(line[v / VECTORS] + at, v % VECTORS, part);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t two;
            memcpy(&two, x + r * row_stride + 4 * part, 4);
            const __m256i pair = _mm256_set1_epi32(two);
            UNROLL for (int v = 0; v < groups * VECTORS; v++)
                dots[r][v] = added(dots[r][v], _mm256_madd_epi16(weights[v], pair));
        }
    }
}

#include "matmul_span_tile.inc"
TILES_OF_16(span_tile, INT4) TILES_OF_16(span_tile, GROUPED_INT8) TILES_OF_16(span_tile, FLOAT4)

/* Activations of 16 bits; of each four the first and the third, then the others. */
TARGET static inline float wide_span_row(const Matrix *m, const void *x, int64_t steps, void *row) {
    const int64_t spans = steps * spans_a_step(m), bytes = (int64_t)sizeof(SpanHead) + 2 * m->span;
    spans_of(m, x, spans, bytes, row);
    for (int64_t s = 0; s < spans; s++) {
        int16_t *to = (int16_t *)((char *)row + s * bytes + sizeof(SpanHead));
        int8_t from[128];
        memcpy(from, to, m->span);
        for (int64_t i = 0; i < m->span; i += 4) {
            to[i] = from[i];
            to[i + 1] = from[i + 2];
            to[i + 2] = from[i + 1];
            to[i + 3] = from[i + 3];
        }
    }
    return 1;
}

static const Plan fp32_plans[] = {
    {1, 1, 4, 1280, 1, {FLOAT32_1x4}},
    {2, 2, 2, 1280, 2, {FLOAT32_1x2, FLOAT32_2x2}},
    {INT64_MAX, 6, 1, 384, 60, SIX(FLOAT32, 1)},
};
/* Five rows: with six the operands no longer fit into sixteen registers. */
static const Plan bf16_plans[] = {
    {2, 2, 2, 1280, 2, {BFLOAT16_1x2, BFLOAT16_2x2}},
    {INT64_MAX, 5, 1, 384, 60, SIX(BFLOAT16, 1)},
};
static const Plan int8_plans[] = PLANS_OF_16(INT8, 256, 66);
static const Plan int4_plans[] = PLANS_OF_16(INT4, 256, 66);
static const Plan grouped_plans[] = PLANS_OF_16(GROUPED_INT8, 256, 66);
static const Plan float4_plans[] = PLANS_OF_16(FLOAT4, 256, 66);

const Kernel matmul_avx2[KINDS] = {
    {fp32_plans, copy_row, 4, LINE, 1},
    {bf16_plans, wide_row, 8, LINE, 0},
    {int8_plans, signed_row, 8, LINE, 0, HALVED},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, wide_span_row, 2, LINE, 0},
    {float4_plans, span_row, 1, LINE, 0},
};
#endif
