/* What the levels of Arm's processors share: sums of a group's sixteen outputs on their way to the results. */
#ifndef CHARONIA_MATMUL_NEON_H
#define CHARONIA_MATMUL_NEON_H

#include <arm_neon.h>
#include <string.h>

#include "matmul.h"

/* To nearest, halves to even; what is no number stays none. */
ALWAYS_INLINE uint16x4_t narrowed(float32x4_t values) {
    const uint32x4_t bits = vreinterpretq_u32_f32(values), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(values, values), rounded, vdupq_n_u32(0x7fc00000)), 16);
}

ALWAYS_INLINE void store(const Tile *t, const float32x4_t *values, int row, int group) {
    const int64_t output = t->output + group * LANES, left = t->matrix->outputs - output;
    const int64_t at = row * t->out_stride + group * LANES, width = t->matrix->out_kind == FLOAT32 ? 4 : 2;
    char rest[LINE], *out = t->out + at * width, *to = left < LANES ? rest : out;
    UNROLL for (int v = 0; v < 4; v++) {
        float32x4_t value = values[v];
        if (t->matrix->bias) value = vaddq_f32(value, vld1q_f32(t->matrix->bias + output + 4 * v));
        if (width == 4) vst1q_f32((float *)to + 4 * v, value);
        else vst1_u16((uint16_t *)to + 4 * v, narrowed(value));
    }
    if (left < LANES) memcpy(out, rest, left * width);
}

/* Not fused with the bias: the other levels round in between. */
ALWAYS_INLINE float32x4_t rounded_product(float32x4_t a, float32x4_t b) {
    float32x4_t product = vmulq_f32(a, b);
    __asm__("" : "+w"(product));
    return product;
}

ALWAYS_INLINE void store_scaled(const Tile *t, const int32x4_t *sums, int row, int group) {
    const float *scales = t->matrix->scales + t->output + group * LANES;
    float32x4_t values[4];
    UNROLL for (int v = 0; v < 4; v++) {
        const float32x4_t scale = vmulq_n_f32(vld1q_f32(scales + 4 * v), t->row_scales[row]);
        values[v] = rounded_product(vcvtq_f32_s32(sums[v]), scale);
    }
    store(t, values, row, group);
}

ALWAYS_INLINE void store_spans(const Tile *t, const float32x4_t *sums, int row, int group) {
    const float *factors = t->matrix->scales + t->output + group * LANES;
    float32x4_t values[4];
    UNROLL for (int v = 0; v < 4; v++) values[v] = rounded_product(sums[v], vld1q_f32(factors + 4 * v));
    store(t, values, row, group);
}

/* Four of a line's scales, fp16 that are numbers; and four of its zero points. */
ALWAYS_INLINE float32x4_t four_scales(const char *line, int vector) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)line + 4 * vector)));
}

ALWAYS_INLINE int32x4_t four_zeros(const char *line, int vector) {
    return vmovl_s16(vld1_s16((const int16_t *)(line + LINE / 2) + 4 * vector));
}

/* The plans of tiles with one to six rows, for few rows and for many. */
#define SIX_ROWS(kind) {kind##_1x1, kind##_2x1, kind##_3x1, kind##_4x1, kind##_5x1, kind##_6x1}
#define PLANS(kind, chunk)                                                                \
    {                                                                                     \
        {2, 2, 2, 1280, 2, {kind##_1x2, kind##_2x2}}, {6, 6, 1, 1280, 6, SIX_ROWS(kind)}, \
            {INT64_MAX, 6, 1, chunk, 60, SIX_ROWS(kind)},                                 \
    }

#endif
