/* Tiles for AVX-512 without VNNI (Skylake-SP): bf16 widened to fp32, int8 to int16. */
#include "matmul.h"

#ifdef CHARONIA_X86
#ifdef CHARONIA_AVX512_MODEL /* a header of tests, with functions of plain C for the intrinsics */
#include CHARONIA_AVX512_MODEL
#else
#include <immintrin.h>
#define REGISTER "+v"
#endif

#define TARGET TARGET_AVX512CORE
#define VECTORS 1
#define PARTS(kind) ((kind) == FLOAT32 ? 1 : 2)
#define STEP(kind) (4 * PARTS(kind))

#include "matmul_store.inc"
#include "matmul_row.inc"

ALWAYS_INLINE TARGET Ints weights_at(int kind, const char *line, int vector, int part) {
    if (kind == INT8) return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)line + part));
    const Ints pairs = load_ints(line);
    return kind == FLOAT32 ? pairs : widened(pairs, part);
}

ALWAYS_INLINE TARGET Ints spread(int kind, const char *row, int part) {
    return (Ints)_mm512_set1_epi32(((const int32_t *)row)[part]);
}

ALWAYS_INLINE TARGET Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

/* A compiler that may choose adds the products of both parts first, or moves sums about, and runs out of registers. */
ALWAYS_INLINE TARGET Ints added(Ints sum, __m512i products) {
#ifdef CHARONIA_AVX512_MODEL
    return sum + (Ints)products;
#else
    __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(products));
    return sum;
#endif
}

ALWAYS_INLINE TARGET Ints dot(int kind, Ints sum, Ints x, Ints w) {
    if (kind == INT8) return added(sum, _mm512_madd_epi16((__m512i)x, (__m512i)w));
#ifdef CHARONIA_AVX512_MODEL
    return (Ints)fused((Floats)x, (Floats)w, (Floats)sum);
#else
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
#endif
}

#define DOT(kind, sum, x, w) dot(kind, sum, x, w)

/* Few rows, and up to twelve, which use each line twice as often as six would. */
#define TALL_TILES(tile, kind) \
    SIX_TILES(tile, kind, 4) SIX_TILES(tile, kind, 2) \
    TILE(tile, kind, 7, 2) TILE(tile, kind, 8, 2) TILE(tile, kind, 9, 2) \
    TILE(tile, kind, 10, 2) TILE(tile, kind, 11, 2) TILE(tile, kind, 12, 2)
#define TALL(kind) \
    {kind##_1x2, kind##_2x2, kind##_3x2, kind##_4x2, kind##_5x2, kind##_6x2, \
     kind##_7x2, kind##_8x2, kind##_9x2, kind##_10x2, kind##_11x2, kind##_12x2}
#define TALL_PLANS(kind) {{6, 6, 4, 1280, 6, SIX(kind, 4)}, {INT64_MAX, 12, 2, 1280, 252, TALL(kind)}}

#include "matmul_tile.inc"
TALL_TILES(tile, INT8) TALL_TILES(tile, BFLOAT16) TALL_TILES(tile, FLOAT32)

#define Vector __m512i
#define WORDS(name) _mm512_##name
#include "matmul_words.inc"

ALWAYS_INLINE TARGET Floats half_floats(const char *line) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)line));
}

#include "matmul_span_tile.inc"
SIX_TILES(span_tile, INT4, 2) SIX_TILES(span_tile, GROUPED_INT8, 2) SIX_TILES(span_tile, FLOAT4, 2)

static const Plan fp32_plans[] = TALL_PLANS(FLOAT32);
static const Plan bf16_plans[] = TALL_PLANS(BFLOAT16);
static const Plan int8_plans[] = TALL_PLANS(INT8);
static const Plan int4_plan = {INT64_MAX, 6, 2, 1280, 252, SIX(INT4, 2)};
static const Plan grouped_plan = {INT64_MAX, 6, 2, 1280, 252, SIX(GROUPED_INT8, 2)};
static const Plan float4_plan = {INT64_MAX, 6, 2, 1280, 252, SIX(FLOAT4, 2)};

const Kernel matmul_avx512core[KINDS] = {
    {fp32_plans, copy_row, 4, LINE, 1},
    {bf16_plans, wide_row, 8, LINE, 0},
    {int8_plans, signed_row, 8, LINE, 0, HALVED},
    {&int4_plan, span_row, 1, LINE, 0},
    {&grouped_plan, wide_span_row, 2, LINE, 0},
    {&float4_plan, span_row, 1, LINE, 0},
};
#endif
