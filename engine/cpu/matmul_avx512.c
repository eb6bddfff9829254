/* Tiles for AVX-512 with VNNI (Ice Lake), and with BF16 (Zen 4, Sapphire Rapids) for bf16. */
#include "matmul.h"

#ifdef CHARONIA_X86
#ifdef CHARONIA_AVX512_MODEL /* a header of tests, with functions of plain C for the intrinsics */
#include CHARONIA_AVX512_MODEL
#else
#include <immintrin.h>
#endif

#define TARGET TARGET_AVX512
#define VECTORS 1
#define PARTS 1
#define STEP 4
#define Operand __m512i
#define WEIGHTS(line, vector, part) _mm512_loadu_si512(line)
#define SPREAD(row, part) _mm512_set1_epi32(*(const int32_t *)(row))

/* To nearest, halves to even; what is no number stays none. */
ALWAYS_INLINE TARGET __m256i narrowed(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 none = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

ALWAYS_INLINE TARGET void store(const Tile *t, __m512 values, int row, int group) {
    const int64_t left = t->matrix->outputs - t->output - group * LANES, at = row * t->out_stride + group * LANES;
    const __mmask16 there = left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1);
    if (t->matrix->bias) values = _mm512_add_ps(values, _mm512_loadu_ps(t->matrix->bias + t->output + group * LANES));
    if (t->matrix->out_kind == FLOAT32)
        _mm512_mask_storeu_ps((float *)t->out + at, there, values);
    else
        _mm256_mask_storeu_epi16((uint16_t *)t->out + at, there, narrowed(values));
}

/* Activations are stored as 128 more than they are, for the unsigned operand of vpdpbusd. */
ALWAYS_INLINE TARGET void store_scaled(const Tile *t, __m512i sums, int row, int group) {
    const int64_t output = t->output + group * LANES;
    sums = _mm512_sub_epi32(sums, _mm512_loadu_si512(t->matrix->offsets + output));
    const __m512 scales = _mm512_mul_ps(_mm512_set1_ps(t->row_scales[row]), _mm512_loadu_ps(t->matrix->scales + output));
    store(t, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales), row, group);
}

#define NAME(x) int8_##x
#define Vector __m512i
#define ZERO _mm512_setzero_si512()
#define DOT(sum, x, w) _mm512_dpbusd_epi32(sum, x, w)
#define KEEP(to, sum) _mm512_storeu_si512(to, sum)
#define KEPT(from) _mm512_loadu_si512(from)
#define FINISH(t, sums, row, group) store_scaled(t, *(sums), row, group)
#include "matmul_tile.inc"
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
#undef NAME
#undef Vector
#undef ZERO
#undef DOT
#undef KEEP
#undef KEPT
#undef FINISH

#define Vector __m512
#define ZERO _mm512_setzero_ps()
#define KEEP(to, sum) _mm512_storeu_ps(to, sum)
#define KEPT(from) _mm512_loadu_ps(from)
#define FINISH(t, sums, row, group) store(t, *(sums), row, group)

#define NAME(x) fp32_##x
#define DOT(sum, x, w) _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum)
#include "matmul_tile.inc"
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
#undef NAME
#undef DOT

#include "matmul_row.inc"

#undef NAME
#undef FINISH
#include "matmul_spans_avx512.inc"
#undef NAME
#undef FINISH
#define FINISH(t, sums, row, group) store(t, *(sums), row, group)

#undef TARGET
#define TARGET TARGET_AVX512BF16
#define NAME(x) bf16_##x
#define DOT(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#include "matmul_tile.inc"
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)

#define TILES(kind) {kind##_1x4, kind##_2x4, kind##_3x4, kind##_4x4, kind##_5x4, kind##_6x4}

/* Up to twelve rows read each line once: two tiles would read it again, where memory is what they wait for. */
static const Plan int8_plans[] = {
    {6, 6, 4, 1280, 6, TILES(int8)},
    {12, 12, 2, 1280, 12, {[6] = int8_7x2, int8_8x2, int8_9x2, int8_10x2, int8_11x2, int8_12x2}},
    {INT64_MAX, 6, 4, 1280, 252, TILES(int8)},
};
static const Plan fp32_plan = {INT64_MAX, 6, 4, 1280, 252, TILES(fp32)};
static const Plan bf16_plan = {INT64_MAX, 6, 4, 1280, 252, TILES(bf16)};
static const Plan int4_plans[] = {
    {3, 3, 4, 1280, 252, {int4_1x4, int4_2x4, int4_3x4}},
    {INT64_MAX, 6, 2, 1280, 252, {int4_1x2, int4_2x2, int4_3x2, int4_4x2, int4_5x2, int4_6x2}},
};

static const Plan grouped_plans[] = {
    {3, 3, 4, 1280, 252, {grouped_1x4, grouped_2x4, grouped_3x4}},
    {INT64_MAX, 6, 2, 1280, 252, {grouped_1x2, grouped_2x2, grouped_3x2, grouped_4x2, grouped_5x2, grouped_6x2}},
};

const Kernel matmul_avx512[KINDS] = {
    {&fp32_plan, copy_row, 4, LINE, 1},
    {&bf16_plan, copy_row, 4, LINE, 1},
    {int8_plans, unsigned_row, 4, LINE, 0},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, span_row, 1, LINE, 0},
};
#endif
