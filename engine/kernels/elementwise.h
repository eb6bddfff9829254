/* Normalisation, gating and rotation over many rows. */
#ifndef CHARONIA_ELEMENTWISE_H
#define CHARONIA_ELEMENTWISE_H

#include <stdint.h>

#include "level.h"

/* out [rows, heads, n] = norm of x [rows, heads, n], with rows `stride` and `out_stride` elements apart; weight
   [weights, n], one for all heads or one for each. x may be out. With `delta`, laid out as x, x becomes x + delta first. */
EXPORT void charonia_norm(void *x, const void *delta, const float *weight, void *out, int64_t rows, int64_t heads,
                          int64_t stride, int64_t out_stride, int64_t weights, int64_t n, float eps, int kind);

/* out [rows, n] = activation(gate) * up of x [rows, gate and up, n]. */
EXPORT void charonia_gate(const void *x, void *out, int64_t rows, int64_t n, int activation, int kind);

/* out [rows, heads, 2 * half] = x (rows `stride` elements apart), turned by cosines and sines [rows, 2, half]. */
EXPORT void charonia_turn(const void *x, const float *turns, void *out, int64_t rows, int64_t heads, int64_t stride,
                          int64_t half, int kind);

#endif
