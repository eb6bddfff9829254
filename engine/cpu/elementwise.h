/* Normalisation, gating, rotation and embedding over many rows. */
#ifndef CHARONIA_ELEMENTWISE_H
#define CHARONIA_ELEMENTWISE_H

#include "parallel_region.h"

/* out [rows, heads, n] = norm of x [rows, heads, n], rows of both `stride` elements apart, x may be out; weight
   [weights, n], one for all heads or one for each. With `delta`, laid out as x, x becomes x + delta first. */
typedef struct {
    void *x;
    const void *delta;
    const float *weight;
    void *out;
    int64_t rows, heads, stride, weights, n;
    float eps;
    int kind;
} Norm;

/* out [rows, n] = activation(gate) * up of x [rows, gate and up, n]. */
typedef struct {
    const void *x;
    void *out;
    int64_t rows, n;
    int activation, kind;
} Gate;

/* out [rows, n] = the rows `ids` of table [vocabulary, n], multiplied with `factor`. */
typedef struct {
    const int32_t *ids;
    const void *table;
    void *out;
    int64_t rows, n;
    float factor;
    int kind;
} Embedding;

void norm_in_team(Team *, const Norm *);
void gate_in_team(Team *, const Gate *);
void embed_rows(const Embedding *);

#endif
