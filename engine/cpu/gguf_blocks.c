/* GGUF's blocks of numbers as codes with scales and offsets, and codes of any origin as floats. Plain C: the same codes at
 * every level. engine/checkpoint/gguf_blocks.py says the same in torch, where there is no compiler. */
#include "gguf_blocks.h"
#include "matmul.h"

#include <math.h>
#include <string.h>

/* In the order of BLOCKS in gguf_blocks.py. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

static const struct { int bytes, numbers, groups, middle; } types[] = {
    {18, 32, 1, 8}, {20, 32, 1, 0}, {22, 32, 1, 128}, {24, 32, 1, 0}, {34, 32, 1, 128}, {144, 256, 8, 0}, {176, 256, 8, 0},
    {210, 256, 16, 128},
};
enum { MOST_NUMBERS = 256, MOST_GROUPS = 16 };

/* fp16 as fp32. */
static float widened(const uint8_t *from)
{
    uint16_t half;
    uint32_t bits;
    float value;
    memcpy(&half, from, 2);
    if ((half & 0x7c00) == 0x7c00)
        return half & 0x3ff ? NAN : half >> 15 ? -INFINITY : INFINITY;
    bits = (uint32_t)(half & 0x7fff) << 13;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;  /* the exponents' biases are 15 and 127 */
    return half >> 15 ? -value : value;
}

/* 2 * n codes of four bits, the n in the lower halves first. */
ALWAYS_INLINE void halves(const uint8_t *from, int n, uint8_t *codes)
{
    for (int i = 0; i < n; i++) {
        codes[i] = from[i] & 15;
        codes[n + i] = from[i] >> 4;
    }
}

/* Bit i of four bytes belongs to code i; `more` is added to all. */
ALWAYS_INLINE void fifth_bits(const uint8_t *from, uint8_t more, uint8_t *codes)
{
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int i = 0; i < 32; i++)
        codes[i] = (uint8_t)((codes[i] | (bits >> i & 1) << 4) + more);
}

/* Eight scales and minima of six bits, times fp16 factors: the first four have a byte each, the others half a byte and the
   upper bits of the first. */
static void factors(const uint8_t *block, float *scales, float *offsets)
{
    const uint8_t *p = block + 4;
    const float scale = widened(block), offset = widened(block + 2);
    for (int g = 0; g < 4; g++) {
        scales[g] = scale * (float)(p[g] & 63);
        offsets[g] = offset * (float)(p[g + 4] & 63);
        scales[g + 4] = scale * (float)((p[g + 8] & 15) | (p[g] >> 6) << 4);
        offsets[g + 4] = offset * (float)(p[g + 8] >> 4 | (p[g + 4] >> 6) << 4);
    }
}

static void decode_k6(const uint8_t *block, uint8_t *codes, float *scales)
{
    for (int half = 0; half < 2; half++, codes += 128)
        for (int i = 0; i < 32; i++) {
            const uint8_t *low = block + half * 64 + i, high = block[128 + half * 32 + i];
            codes[i] = (uint8_t)(((low[0] & 15) | (high & 3) << 4) + 96);
            codes[i + 32] = (uint8_t)(((low[32] & 15) | (high >> 2 & 3) << 4) + 96);
            codes[i + 64] = (uint8_t)((low[0] >> 4 | (high >> 4 & 3) << 4) + 96);
            codes[i + 96] = (uint8_t)((low[32] >> 4 | high >> 6 << 4) + 96);
        }
    for (int g = 0; g < 16; g++)
        scales[g] = (float)(int8_t)block[192 + g] * widened(block + 208);
}

static void decode_block(int type, const uint8_t *block, uint8_t *codes, float *scales, float *offsets)
{
    if (type == Q6_K) {
        decode_k6(block, codes, scales);
    } else if (type >= Q4_K) {
        factors(block, scales, offsets);
        for (int pair = 0; pair < 4; pair++)
            halves(block + (type == Q4_K ? 16 : 48) + pair * 32, 32, codes + pair * 64);
        for (int i = 0; i < 256 && type == Q5_K; i++)
            codes[i] |= (uint8_t)((block[16 + i % 32] >> i / 32 & 1) << 4);
    } else {
        const int minimum = type == Q4_1 || type == Q5_1, start = minimum ? 4 : 2;
        *scales = widened(block);
        if (minimum)
            *offsets = -widened(block + 2);
        if (type == Q8_0)
            for (int i = 0; i < 32; i++)
                codes[i] = block[start + i] ^ 128;
        else if (type == Q5_0 || type == Q5_1) {
            halves(block + start + 4, 16, codes);
            fifth_bits(block + start, minimum ? 0 : 112, codes);
        } else
            halves(block + start, 16, codes);
    }
}

/* `count` blocks one behind the other -> their codes, scales, and offsets (of types that have minima, else null). */
EXPORT void charonia_decode_blocks(int type, const uint8_t *blocks, int64_t count, uint8_t *codes, float *scales,
                                   float *offsets)
{
    const int bytes = types[type].bytes, numbers = types[type].numbers, groups = types[type].groups;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < count; b++)
        decode_block(type, blocks + b * bytes, codes + b * numbers, scales + b * groups,
                     offsets ? offsets + b * groups : 0);
}

ALWAYS_INLINE void dequantise(const uint8_t *codes, float scale, float offset, int64_t size, int middle, float *out)
{
    for (int64_t i = 0; i < size; i++)
        out[i] = (float)(codes[i] - middle) * scale - offset;
}

/* bfloat16: to nearest, ties to even; NaN stays one. */
static uint16_t rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void decode_gguf_row(int type, const uint8_t *blocks, int64_t n, void *out, int kind)
{
    const int numbers = types[type].numbers, groups = types[type].groups, size = numbers / groups;
    for (int64_t first = 0; first < n; first += numbers, blocks += types[type].bytes) {
        uint8_t codes[MOST_NUMBERS];
        float scales[MOST_GROUPS], offsets[MOST_GROUPS] = {0}, decoded[MOST_NUMBERS];
        decode_block(type, blocks, codes, scales, offsets);
        for (int g = 0; g < groups; g++)
            dequantise(codes + g * size, scales[g], offsets[g], size, types[type].middle, decoded + g * size);
        if (kind == FLOAT32)
            memcpy((float *)out + first, decoded, (size_t)numbers * sizeof(float));
        else
            for (int i = 0; i < numbers; i++)
                ((uint16_t *)out)[first + i] = rounded(decoded[i]);
    }
}

int64_t gguf_row_bytes(int type, int64_t n) { return n / types[type].numbers * types[type].bytes; }

/* Whole groups of `size` codes -> (code - middle) * scale - offset in fp32; `offsets` may be null. */
EXPORT void charonia_dequantise(const uint8_t *codes, const float *scales, const float *offsets, int64_t groups,
                                int64_t size, int middle, float *out)
{
#pragma omp parallel for schedule(static)
    for (int64_t g = 0; g < groups; g++)
        dequantise(codes + g * size, scales[g], offsets ? offsets[g] : 0, size, middle, out + g * size);
}
