/* Tiles for AVX2 with FMA (Haswell, Zen and later): bf16 widened to fp32, int8 to int16. */
#include "matmul.h"

#ifdef CHARONIA_X86
#include <immintrin.h>
#include <string.h>

#define TARGET TARGET_AVX2

/* As bf16, to nearest, halves to even; what is no number stays none. */
ALWAYS_INLINE TARGET __m128i narrowed(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), none), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    return _mm256_castsi256_si128(packed);
}

ALWAYS_INLINE TARGET void store(const Tile *t, __m256 low, __m256 high, int row, int group) {
    const int64_t output = t->output + group * LANES, left = t->matrix->outputs - output;
    const int64_t at = row * t->out_stride + group * LANES, width = t->matrix->out_kind == FLOAT32 ? 4 : 2;
    if (t->matrix->bias) {
        low = _mm256_add_ps(low, _mm256_loadu_ps(t->matrix->bias + output));
        high = _mm256_add_ps(high, _mm256_loadu_ps(t->matrix->bias + output + 8));
    }
    char rest[LINE], *out = t->out + at * width, *to = left < LANES ? rest : out;
    if (width == 4) {
        _mm256_storeu_ps((float *)to, low);
        _mm256_storeu_ps((float *)to + 8, high);
    } else {
        _mm_storeu_si128((__m128i *)to, narrowed(low));
        _mm_storeu_si128((__m128i *)to + 1, narrowed(high));
    }
    if (left < LANES) memcpy(out, rest, left * width);
}

ALWAYS_INLINE TARGET void store_scaled(const Tile *t, const __m256i sums[2], int row, int group) {
    const float *scales = t->matrix->scales + t->output + group * LANES;
    const __m256 scale = _mm256_set1_ps(t->row_scales[row]);
    __m256 values[2];
    for (int h = 0; h < 2; h++)
        values[h] = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[h]), _mm256_mul_ps(scale, _mm256_loadu_ps(scales + 8 * h)));
    store(t, values[0], values[1], row, group);
}

/* A compiler that may choose adds the products of both parts first, or moves sums about, and runs out of registers. */
ALWAYS_INLINE TARGET __m256i added(__m256i sum, __m256i products) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
    return sum;
}

#define NAME(x) int8_##x
#define VECTORS 2
#define PARTS 2
#define STEP 8
#define Vector __m256i
#define Operand __m256i
#define ZERO _mm256_setzero_si256()
#define WEIGHTS(line, vector, part) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(line) + 2 * (part) + (vector)))
#define SPREAD(row, part) _mm256_set1_epi32(((const int32_t *)(row))[part])
#define DOT(sum, x, w) added(sum, _mm256_madd_epi16(x, w))
#define KEEP(to, sum) _mm256_storeu_si256((__m256i *)(to), sum)
#define KEPT(from) _mm256_loadu_si256((const __m256i *)(from))
#define FINISH(t, sums, row, group) store_scaled(t, sums, row, group)
#include "matmul_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
#undef NAME
#undef VECTORS
#undef PARTS
#undef STEP
#undef Vector
#undef Operand
#undef ZERO
#undef WEIGHTS
#undef SPREAD
#undef DOT
#undef KEEP
#undef KEPT
#undef FINISH

#define VECTORS 2
#define Vector __m256
#define Operand __m256
#define ZERO _mm256_setzero_ps()
#define DOT(sum, x, w) _mm256_fmadd_ps(x, w, sum)
#define SPREAD(row, part) _mm256_broadcast_ss((const float *)(row) + (part))
#define KEEP(to, sum) _mm256_storeu_ps((float *)(to), sum)
#define KEPT(from) _mm256_loadu_ps((const float *)(from))
#define FINISH(t, sums, row, group) store(t, (sums)[0], (sums)[1], row, group)

/* Of each pair the even input, moved up, or the odd one, alone. */
ALWAYS_INLINE TARGET __m256 widened(const char *pairs, int part) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)pairs);
    const __m256i one = part ? _mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(both, 16);
    return _mm256_castsi256_ps(one);
}

#define NAME(x) bf16_##x
#define PARTS 2
#define STEP 8
#define WEIGHTS(line, vector, part) widened((line) + 32 * (vector), part)
#include "matmul_tile.inc"
TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1)
#undef NAME
#undef PARTS
#undef STEP
#undef WEIGHTS

#define NAME(x) fp32_##x
#define PARTS 1
#define STEP 4
#define WEIGHTS(line, vector, part) _mm256_loadu_ps((const float *)(line) + 8 * (vector))
#include "matmul_tile.inc"
TILE(1, 4) TILE(1, 2) TILE(2, 2) TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)

#include "matmul_row.inc"

#undef NAME
#undef VECTORS
#undef ZERO
#undef KEEP
#undef KEPT
#undef FINISH
#include "matmul_spans_avx2.inc"

static const Plan fp32_plans[] = {
    {1, 1, 4, 1280, 1, {fp32_1x4}},
    {2, 2, 2, 1280, 2, {fp32_1x2, fp32_2x2}},
    {INT64_MAX, 6, 1, 384, 60, {fp32_1x1, fp32_2x1, fp32_3x1, fp32_4x1, fp32_5x1, fp32_6x1}},
};
/* Five rows: with six the operands no longer fit into sixteen registers. */
static const Plan bf16_plans[] = {
    {2, 2, 2, 1280, 2, {bf16_1x2, bf16_2x2}},
    {INT64_MAX, 5, 1, 384, 60, {bf16_1x1, bf16_2x1, bf16_3x1, bf16_4x1, bf16_5x1}},
};
static const Plan int8_plans[] = {
    {2, 2, 2, 1280, 2, {int8_1x2, int8_2x2}},
    {6, 6, 1, 1280, 6, {int8_1x1, int8_2x1, int8_3x1, int8_4x1, int8_5x1, int8_6x1}},
    {INT64_MAX, 6, 1, 256, 66, {int8_1x1, int8_2x1, int8_3x1, int8_4x1, int8_5x1, int8_6x1}},
};
static const Plan int4_plans[] = {
    {2, 2, 2, 1280, 2, {int4_1x2, int4_2x2}},
    {6, 6, 1, 1280, 6, {int4_1x1, int4_2x1, int4_3x1, int4_4x1, int4_5x1, int4_6x1}},
    {INT64_MAX, 6, 1, 256, 66, {int4_1x1, int4_2x1, int4_3x1, int4_4x1, int4_5x1, int4_6x1}},
};

static const Plan grouped_plans[] = {
    {2, 2, 2, 1280, 2, {grouped_1x2, grouped_2x2}},
    {6, 6, 1, 1280, 6, {grouped_1x1, grouped_2x1, grouped_3x1, grouped_4x1, grouped_5x1, grouped_6x1}},
    {INT64_MAX, 6, 1, 256, 66, {grouped_1x1, grouped_2x1, grouped_3x1, grouped_4x1, grouped_5x1, grouped_6x1}},
};

const Kernel matmul_avx2[KINDS] = {
    {fp32_plans, copy_row, 4, LINE, 1},
    {bf16_plans, wide_row, 8, LINE, 0},
    {int8_plans, signed_row, 8, LINE, 0, HALVED},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, wide_span_row, 2, LINE, 0},
};
#endif
