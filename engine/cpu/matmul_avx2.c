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

#define Vector __m256i
#define WORDS(name) _mm256_##name
#include "matmul_words.inc"

ALWAYS_INLINE TARGET Floats half_floats(const char *line) { return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)line)); }

#include "matmul_span_tile.inc"
TILES_OF_16(span_tile, INT4) TILES_OF_16(span_tile, GROUPED_INT8) TILES_OF_16(span_tile, FLOAT4)

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
