/* Packing: rows of a checkpoint's matrix into the lines that matmul.h describes; quantised on the way for int8, unless they
 * are int8 already, and quantised before where weights are in spans. */
#include "matmul.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What a checkpoint stores; the first two are numbered as what kernels compute on. */
enum { FROM_FLOAT32, FROM_BFLOAT16, FROM_FLOAT16, FROM_INT8 };

enum { SIZE_BITS = 0x7fffffff };

/* Some rows of one matrix: those that the packed one has from output `first` on. */
typedef struct {
    const char *from;
    int64_t stride;
    int from_kind, kind;
    int64_t first, outputs, inputs, steps;
    uint32_t *lines;
    float *scales;
    int32_t *offsets;
    int order; /* within lines, as the kernel wants it */
} Rows;

ALWAYS_INLINE float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

ALWAYS_INLINE uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* Exact, subnormals included: the multiplication moves the exponent. */
ALWAYS_INLINE float from_half(uint32_t half)
{
    const uint32_t size = as_bits(as_float((half & 0x7fff) << 13) * 0x1p112f);
    const uint32_t none = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return as_float(size | none | (half & 0x8000) << 16);
}

ALWAYS_INLINE float value_at(const void *row, int kind, int64_t at)
{
    if (kind == FROM_FLOAT32)
        return ((const float *)row)[at];
    const uint32_t half = ((const uint16_t *)row)[at];
    return kind == FROM_BFLOAT16 ? as_float(half << 16) : from_half(half);
}

/* To nearest, halves to even; what is no number stays none. */
ALWAYS_INLINE uint16_t rounded(float value)
{
    const uint32_t bits = as_bits(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Adding 1.5 * 2^23 leaves the nearest whole number in the last bits; where the product before it would be fused with
   that there is an instruction. */
ALWAYS_INLINE int nearest(float value)
{
#ifdef __aarch64__
    return (int)__builtin_rintf(value);
#else
    return (int)(as_bits(value + 12582912.0f) - 0x4b400000);
#endif
}

/* As bits: then what is no number is larger than all that are. */
ALWAYS_INLINE float largest(const void *row, int kind, int64_t inputs)
{
    uint32_t top = 0;
    for (int64_t i = 0; i < inputs; i++) {
        const uint32_t size = as_bits(value_at(row, kind, i)) & SIZE_BITS;
        top = size > top ? size : top;
    }
    return as_float(top);
}

ALWAYS_INLINE void quantise(const void *row, int kind, int64_t inputs, int8_t *to, float *scale, int32_t *offset)
{
    const float top = largest(row, kind, inputs), by = top > 0x1p-120f ? 127.0f / top : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs; i++) {
        const int value = nearest(value_at(row, kind, i) * by);
        to[i] = (int8_t)value;
        sum += value;
    }
    *scale = top / 127.0f;
    *offset = 128 * sum;
}

ALWAYS_INLINE void convert(const void *row, int kind, int64_t inputs, void *to, int to_kind)
{
    for (int64_t i = 0; i < inputs; i++) {
        if (to_kind == FLOAT32)
            ((float *)to)[i] = value_at(row, kind, i);
        else
            ((uint16_t *)to)[i] = rounded(value_at(row, kind, i));
    }
}

ALWAYS_INLINE void convert_row(const Rows *w, const char *row, int64_t output, int kind, uint32_t *to)
{
    if (w->kind == INT8)
        quantise(row, kind, w->inputs, (int8_t *)to, w->scales + output, w->offsets + output);
    else
        convert(row, kind, w->inputs, to, w->kind);
}

static void copy_int8(const Rows *w, const char *row, int64_t output, uint32_t *to)
{
    int32_t sum = 0;
    for (int64_t i = 0; i < w->inputs; i++)
        sum += ((const int8_t *)row)[i];
    memcpy(to, row, (size_t)w->inputs);
    w->offsets[output] = 128 * sum;
}

/* One output's weights as its steps, one behind the other. */
static void row_steps(const Rows *w, int64_t output, uint32_t *to)
{
    static const int64_t widths[] = {4, 2, 2, 1};
    const char *row = w->from + (output - w->first) * w->stride * widths[w->from_kind];
    to[w->steps - 1] = 0;
    if (w->from_kind == FROM_INT8)
        copy_int8(w, row, output, to);
    else if (w->from_kind == FROM_BFLOAT16 && w->kind == BFLOAT16)
        memcpy(to, row, (size_t)w->inputs * 2);
    else if (w->from_kind == FROM_BFLOAT16)
        convert_row(w, row, output, FROM_BFLOAT16, to);
    else if (w->from_kind == FROM_FLOAT16)
        convert_row(w, row, output, FROM_FLOAT16, to);
    else
        convert_row(w, row, output, FROM_FLOAT32, to);
}

/* Two inputs of every lane, then the other two. */
ALWAYS_INLINE void halved_line(const uint32_t *rows, int64_t steps, int from, int to, uint16_t *line)
{
    for (int lane = from; lane < to; lane++) {
        line[lane] = (uint16_t)rows[lane * steps];
        line[LANES + lane] = (uint16_t)(rows[lane * steps] >> 16);
    }
}

/* One of two steps that stand in two lines together: every other place, from `place` on. */
ALWAYS_INLINE void paired_line(const uint32_t *rows, int64_t steps, int from, int to, uint32_t *place)
{
    for (int lane = from; lane < to; lane++)
        place[2 * lane] = rows[lane * steps];
}

/* The lanes of one group that these rows have; the others are another call's. `rows` holds LANES rows of steps. */
static void pack_group(const Rows *w, int64_t group, uint32_t *rows)
{
    const int64_t base = group * LANES, end = w->first + w->outputs;
    const int from = w->first > base ? (int)(w->first - base) : 0, to = end < base + LANES ? (int)(end - base) : LANES;
    for (int lane = from; lane < to; lane++)
        row_steps(w, base + lane, rows + lane * w->steps);
    uint32_t *line = w->lines + base * w->steps;
    for (int64_t step = 0; step < w->steps; step++, line += LANES) {
        if (w->order == HALVED)
            halved_line(rows + step, w->steps, from, to, (uint16_t *)line);
        else if (w->order == PAIRED && (step | 1) < w->steps)
            paired_line(rows + step, w->steps, from, to, line - step % 2 * LANES + step % 2);
        else if (to - from == LANES)
            for (int lane = 0; lane < LANES; lane++)
                line[lane] = rows[lane * w->steps + step];
        else
            for (int lane = from; lane < to; lane++)
                line[lane] = rows[lane * w->steps + step];
    }
}

/* Pack rows [outputs, inputs] of a checkpoint as the outputs from `first` on; `stride` in elements. `lines` begins as
   zeros; scales and offsets are those of the whole matrix, and used for int8 alone. Rows of int8 become int8, and their
   scales are the caller's to write. Returns 0, or 1 when memory is short. */
EXPORT int charonia_pack(const void *from, int from_kind, int64_t stride, int64_t first, int64_t outputs, int64_t inputs,
                         int kind, void *lines, float *scales, int32_t *offsets)
{
    const Rows w = {from,   stride,  from_kind, kind, first, outputs, inputs, steps_of(kind, inputs),
                    lines,  scales,  offsets,   kernel_of(kind, 0, 1)->order};
    const int64_t begin = first / LANES, end = (first + outputs + LANES - 1) / LANES;
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        uint32_t *rows = malloc((size_t)(LANES * w.steps) * sizeof *rows);
        failed = !rows;
#pragma omp for schedule(dynamic, 4)
        for (int64_t group = begin; group < end; group++)
            if (rows)
                pack_group(&w, group, rows);
        free(rows);
    }
    return failed;
}

/* Packing in spans: such rows of weights that are quantised already. */
typedef struct {
    const Matrix *matrix;
    const uint8_t *weights; /* [outputs, inputs]: those of four bits have 0 to 15 */
    const float *scales;    /* [outputs, spans] */
    const uint8_t *zeros;   /* [outputs, spans], or null: 8, or 128 */
    const float *offsets;   /* [outputs, spans], or null */
    int64_t first, outputs, spans;
} SpanRows;

/* The number's size must be less than 2^16. To nearest, halves to even. */
static uint16_t as_half(float value)
{
    const uint32_t bits = as_bits(value);
    uint32_t size = bits & SIZE_BITS;
    if (size < 0x38800000) /* subnormal: adding 0.5 leaves it in the last bits */
        size = as_bits(fabsf(value) + 0.5f) - 0x3f000000;
    else
        size = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    return (uint16_t)((bits >> 16 & 0x8000) | size);
}

/* The largest size; NaN if one is no number. */
static float largest_of(const float *numbers, int64_t count)
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
static float factor_of(const SpanRows *w, int64_t row)
{
    const float of_scales = largest_of(w->scales + row * w->spans, w->spans);
    const float of_offsets = w->offsets ? largest_of(w->offsets + row * w->spans, w->spans) : 0;
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
        if (FOUR_BITS(kind))
            line[i / 8 * LINE + i % 4] |= (uint8_t)((weights[i] & 15) << (i % 8 < 4 ? 0 : 4));
        else
            line[i / 4 * LINE + i % 4] = weights[i];
    }
}

static void pack_output(const SpanRows *w, int64_t output)
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
    const SpanRows w = {matrix, weights, scales, zeros, offsets, first, outputs, spans};
#pragma omp parallel for schedule(static)
    for (int64_t output = first; output < first + outputs; output++)
        pack_output(&w, output);
}
