/* Tiles for AVX-512 with VNNI (Ice Lake), and with BF16 (Zen 4, Sapphire Rapids) for bf16. */
#include "matmul.h"

#ifdef CHARONIA_X86
#ifdef CHARONIA_AVX512_MODEL /* a header of tests, with functions of plain C for the intrinsics */
#include CHARONIA_AVX512_MODEL
#else
#include <immintrin.h>
#define REGISTER "+v"
#endif

#define TARGET TARGET_AVX512
#define VECTORS 1
#define PARTS(kind) 1
#define STEP(kind) 4
#define UNSIGNED_ROWS /* for the unsigned operand of vpdpbusd */

#include "matmul_store.inc"
#include "matmul_row.inc"

#define weights_at(kind, line, vector, part) load_ints(line)
#define spread(kind, row, part) ((Ints)_mm512_set1_epi32(*(const int32_t *)(row)))

ALWAYS_INLINE TARGET Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

/* Four products of an unsigned byte and a signed one, added to each sum. */
ALWAYS_INLINE TARGET Ints vnni(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

#define DOT(kind, sum, x, w) \
    ((kind) == INT8 ? vnni(sum, x, w) : (Ints)fused((Floats)(x), (Floats)(w), (Floats)(sum)))
#include "matmul_tile.inc"
SIX_TILES(tile, INT8, 4) SIX_TILES(tile, FLOAT32, 4)
TILE(tile, INT8, 7, 2) TILE(tile, INT8, 8, 2) TILE(tile, INT8, 9, 2)
TILE(tile, INT8, 10, 2) TILE(tile, INT8, 11, 2) TILE(tile, INT8, 12, 2)

/* Of spans, whose weights are the unsigned operand as they are. Line by line: where memory is what a tile waits for, lines
   asked for four at a time come later. */
#define SPAN_LINES(kind) 1
#define SPAN_INPUTS(kind) (FOUR_BITS(kind) ? 8 : 4)

static const int8_t float4_tables[LINE] = {FLOAT4_TABLE, FLOAT4_TABLE, FLOAT4_TABLE, FLOAT4_TABLE};

/* What is in the second cache by then comes into the first: the lines of scales in between keep the machine from it. */
enum { LINES_AHEAD = 12 };

ALWAYS_INLINE TARGET Floats half_floats(const char *line) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)line));
}

/* Zero points and starts fit into 16 bits. */
ALWAYS_INLINE TARGET Ints times(Ints zeros, int32_t start) {
    return (Ints)_mm512_madd_epi16((__m512i)zeros, _mm512_set1_epi32(start));
}

/* One line of each group: eight inputs of four bits, or four of eight. */
ALWAYS_INLINE TARGET void multiply_lines(int kind, Ints dots[MOST_ROWS][4], const char *x, int64_t row_stride,
                                         const char *const line[4], int64_t at, int rows, int groups) {
    if (kind == GROUPED_INT8)
        UNROLL for (int g = 0; g < groups; g++) __builtin_prefetch(line[g] + at + LINES_AHEAD * LINE, 0, 3);
    const __m512i table = (__m512i)load_ints(float4_tables);
    const int parts = SPAN_INPUTS(kind) / 4;
    UNROLL for (int part = 0; part < parts; part++) {
        Ints weights[4];
        UNROLL for (int g = 0; g < groups; g++) {
            weights[g] = load_ints(line[g] + at);
            if (part) weights[g] = (Ints)_mm512_srli_epi16((__m512i)weights[g], 4);
            if (FOUR_BITS(kind)) weights[g] &= 0x0f0f0f0f;
            if (kind == FLOAT4) weights[g] = (Ints)_mm512_shuffle_epi8(table, (__m512i)weights[g]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const Ints four = spread(kind, x + r * row_stride + 4 * part, 0);
            UNROLL for (int g = 0; g < groups; g++) dots[r][g] = vnni(dots[r][g], weights[g], four);
        }
    }
}

#include "matmul_span_tile.inc"
SIX_TILES(span_tile, INT4, 2) TILE(span_tile, INT4, 1, 4) TILE(span_tile, INT4, 2, 4) TILE(span_tile, INT4, 3, 4)
SIX_TILES(span_tile, GROUPED_INT8, 2)
TILE(span_tile, GROUPED_INT8, 1, 4) TILE(span_tile, GROUPED_INT8, 2, 4) TILE(span_tile, GROUPED_INT8, 3, 4)
SIX_TILES(span_tile, FLOAT4, 2) TILE(span_tile, FLOAT4, 1, 4) TILE(span_tile, FLOAT4, 2, 4) TILE(span_tile, FLOAT4, 3, 4)

#undef TARGET
#undef NAME
#undef DOT
#define TARGET TARGET_AVX512BF16
#define NAME(x) bf16_##x
#define DOT(kind, sum, x, w) (Ints)_mm512_dpbf16_ps((Floats)(sum), (__m512bh)(x), (__m512bh)(w))
#include "matmul_tile.inc"
SIX_TILES(bf16_tile, BFLOAT16, 4)

/* Up to twelve rows read each line once: two tiles would read it again, where memory is what they wait for. */
static const Plan int8_plans[] = {
    {6, 6, 4, 1280, 6, SIX(INT8, 4)},
    {12, 12, 2, 1280, 12, {[6] = INT8_7x2, INT8_8x2, INT8_9x2, INT8_10x2, INT8_11x2, INT8_12x2}},
    {INT64_MAX, 6, 4, 1280, 252, SIX(INT8, 4)},
};
static const Plan fp32_plan = {INT64_MAX, 6, 4, 1280, 252, SIX(FLOAT32, 4)};
static const Plan bf16_plan = {INT64_MAX, 6, 4, 1280, 252, SIX(BFLOAT16, 4)};
static const Plan int4_plans[] = {
    {3, 3, 4, 1280, 252, {INT4_1x4, INT4_2x4, INT4_3x4}},
    {INT64_MAX, 6, 2, 1280, 252, SIX(INT4, 2)},
};
static const Plan grouped_plans[] = {
    {3, 3, 4, 1280, 252, {GROUPED_INT8_1x4, GROUPED_INT8_2x4, GROUPED_INT8_3x4}},
    {INT64_MAX, 6, 2, 1280, 252, SIX(GROUPED_INT8, 2)},
};
static const Plan float4_plans[] = {
    {3, 3, 4, 1280, 252, {FLOAT4_1x4, FLOAT4_2x4, FLOAT4_3x4}},
    {INT64_MAX, 6, 2, 1280, 252, SIX(FLOAT4, 2)},
};

const Kernel matmul_avx512[KINDS] = {
    {&fp32_plan, copy_row, 4, LINE, 1},
    {&bf16_plan, copy_row, 4, LINE, 1},
    {int8_plans, unsigned_row, 4, LINE, 0},
    {int4_plans, span_row, 1, LINE, 0},
    {grouped_plans, span_row, 1, LINE, 0},
    {float4_plans, span_row, 1, LINE, 0},
};
#endif
