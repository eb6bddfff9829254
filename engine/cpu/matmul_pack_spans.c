/* Packing in spans: weights that are quantised already, into the lines that matmul.h describes. */
#include "matmul.h"

#include <math.h>
#include <string.h>

/* Some rows of one matrix: those that the packed one has from output `first` on. */
typedef struct {
    const Matrix *matrix;
    const uint8_t *weights; /* [outputs, inputs]: int4 has 0 to 15 */
    const float *scales;    /* [outputs, spans] */
    const uint8_t *zeros;   /* [outputs, spans], or null: 8, or 128 */
    const float *offsets;   /* [outputs, spans], or null */
    int64_t first, outputs, spans;
} Rows;

/* The number's size must be less than 2^16. To nearest, halves to even. */
static uint16_t as_half(float value)
{
    uint32_t bits, size;
    memcpy(&bits, &value, 4);
    size = bits & 0x7fffffff;
    if (size < 0x38800000) { /* subnormal: adding 0.5 leaves it in the last bits */
        const float moved = fabsf(value) + 0.5f;
        memcpy(&size, &moved, 4);
        size -= 0x3f000000;
    } else {
        size = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    }
    return (uint16_t)((bits >> 16 & 0x8000) | size);
}

/* The largest size; NaN if one is no number. */
static float largest(const float *numbers, int64_t count)
{
    float top = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(numbers[i]))
            return NAN;
        top = fmaxf(top, fabsf(numbers[i]));
    }
    return top;
}

/* The power of two that scales and offsets are multiplied with, so that the largest is between 2^14 and 2^15 in fp16:
   those that are 2^28 times smaller lose bits. NaN if one is no number: then it shows in all results. */
static float factor_of(const Rows *w, int64_t row)
{
    const float of_scales = largest(w->scales + row * w->spans, w->spans);
    const float of_offsets = w->offsets ? largest(w->offsets + row * w->spans, w->spans) : 0;
    int exponent;
    if (isnan(of_scales) || isnan(of_offsets))
        return NAN;
    frexpf(fmaxf(of_scales, of_offsets), &exponent);
    return ldexpf(1, exponent - 15);
}

static void pack_span(int kind, const uint8_t *weights, int64_t inputs, int lane, uint8_t *line)
{
    line += 4 * lane;
    for (int64_t i = 0; i < inputs; i++) {
        if (kind == INT4)
            line[i / 8 * LINE + i % 4] |= (uint8_t)((weights[i] & 15) << (i % 8 < 4 ? 0 : 4));
        else
            line[i / 4 * LINE + i % 4] = weights[i];
    }
}

static void pack_output(const Rows *w, int64_t output)
{
    const Matrix *m = w->matrix;
    const int64_t row = output - w->first, each = spans_a_step(m), step = lines_a_step(m) * LINE;
    const int lane = (int)(output % LANES);
    const float *scales = w->scales + row * w->spans, factor = factor_of(w, row);
    char *lines = (char *)m->lines + output / LANES * matrix_steps(m) * step;
    ((float *)m->scales)[output] = factor;
    for (int64_t s = 0; s < w->spans; s++) {
        char *head = lines + s / each * step, *line = head + LINE + s % each * span_lines(m) * LINE;
        const int64_t from = s * m->span, left = m->inputs - from;
        ((uint16_t *)head)[s % each * LANES + lane] = factor > 0 ? as_half(scales[s] / factor) : 0;
        if (m->zeros == ZERO_POINTS_EACH)
            ((int16_t *)head)[LANES + lane] = w->zeros[row * w->spans + s];
        else if (m->zeros && factor > 0)
            ((uint16_t *)head)[LANES + lane] = as_half(w->offsets[row * w->spans + s] / factor);
        pack_span(m->kind, w->weights + row * m->inputs + from, left < m->span ? left : m->span, lane, (uint8_t *)line);
    }
}

/* Pack rows of weights as the outputs from `first` on, each of them once: `matrix` begins as zeros. */
EXPORT void charonia_pack_spans(const Matrix *matrix, const uint8_t *weights, const float *scales, const uint8_t *zeros,
                               const float *offsets, int64_t first, int64_t outputs)
{
    const int64_t spans = (matrix->inputs + matrix->span - 1) / matrix->span;
    const Rows w = {matrix, weights, scales, zeros, offsets, first, outputs, spans};
#pragma omp parallel for schedule(static)
    for (int64_t output = first; output < first + outputs; output++)
        pack_output(&w, output);
}
