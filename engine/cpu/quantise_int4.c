/* The four bits and the scales that stand for rows of weights; matmul_pack.c packs them. Plain C: the same numbers at
 * every level. */
#include "matmul.h"

#include <math.h>
#include <string.h>

enum { SPAN = 32 };

/* What the largest number of a span may become before it is rounded: its scale is the best of these. */
static const float targets[] = {-8.25f, -8.0f, -7.75f, -7.25f, -6.75f, -6.25f};

/* Adding 1.5 * 2^23 leaves the nearest whole number; where the product before it would be fused with that there is an
   instruction. */
ALWAYS_INLINE float nearest(float value)
{
#ifdef __aarch64__
    return __builtin_rintf(value);
#else
    return (value + 12582912.0f) - 12582912.0f;
#endif
}

ALWAYS_INLINE float sum_of(float *parts)
{
    for (int half = SPAN / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            parts[i] += parts[i + half];
    return parts[0];
}

/* The numbers from -8 to 7 for scale 1 / by; the weighed sums of their products with x, and of their squares. */
ALWAYS_INLINE void numbers_of(const float *x, const float *counts, float by, float *numbers, float *product, float *size)
{
    float products[SPAN], squares[SPAN];
    for (int i = 0; i < SPAN; i++) {
        float number = nearest(x[i] * by);
        number = number > 7 ? 7 : number;
        number = number < -8 ? -8 : number;
        numbers[i] = number;
        products[i] = counts[i] * x[i] * number;
        squares[i] = counts[i] * number * number;
    }
    *product = sum_of(products);
    *size = sum_of(squares);
}

/* To eleven bits, halves to even: what is packed is that. */
ALWAYS_INLINE float rounded(float scale)
{
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&scale, &bits, 4);
    return scale;
}

ALWAYS_INLINE float quantise_span(const float *x, const float *counts, float *numbers)
{
    float top = 0, nothing = 0, least = 0, product, size;
    for (int i = 0; i < SPAN; i++) {
        top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
        nothing += x[i] * 0;
        numbers[i] = 0;
    }
    if (nothing != 0 || top == 0)
        return nothing;  /* NaN, if any is none or infinite */
    const float inverse = fminf(fmaxf(1 / top, -3e38f), 3e38f);
    float best = targets[1];
    for (int t = 0; t < (int)(sizeof targets / sizeof *targets); t++) {
        numbers_of(x, counts, inverse * targets[t], numbers, &product, &size);
        /* What the best scale for these numbers takes from the squared error. */
        const float taken = size > 0 ? product / size * product : 0;
        best = taken > least ? targets[t] : best;
        least = taken > least ? taken : least;
    }
    numbers_of(x, counts, inverse * best, numbers, &product, &size);
    return rounded(size > 0 ? product / size : top / best);
}

/* Rows of fp32 [outputs, inputs], `stride` floats apart -> `weights` [outputs, inputs] from 0 to 15, `scales` [outputs,
   spans]. The squared error of input i counts `counts`[i] times; those behind the last input, to a whole span, are 0. */
EXPORT void charonia_quantise_int4(const float *rows, int64_t stride, int64_t outputs, int64_t inputs, const float *counts,
                                   uint8_t *weights, float *scales)
{
    const int64_t spans = (inputs + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t s = 0; s < spans; s++) {
            const int64_t from = s * SPAN, there = inputs - from < SPAN ? inputs - from : SPAN;
            float x[SPAN] = {0}, numbers[SPAN];
            memcpy(x, rows + output * stride + from, (size_t)there * sizeof *x);
            scales[output * spans + s] = quantise_span(x, counts + from, numbers);
            for (int64_t i = 0; i < there; i++)
                weights[output * inputs + from + i] = (uint8_t)(numbers[i] + 8);
        }
}
