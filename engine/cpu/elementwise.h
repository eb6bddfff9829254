/* Normalisation, gating, rotation and embedding over many rows. */
#ifndef CHARONIA_ELEMENTWISE_H
#define CHARONIA_ELEMENTWISE_H

#include "parallel_region.h"

/* out [rows, heads, n] = norm of x [rows, heads, n], rows of both `stride` elements apart, x may be out; weight
   [weights, n], one for all heads or one for each, and behind it biases as many, where x is centred. With `delta`, laid
   out as x, x becomes x + delta first. */
typedef struct {
    void *x;
    const void *delta;
    const float *weight;
    void *out;
    int64_t rows, heads, stride, weights, n;
    float eps;
    int kind, centred;
} Norm;

/* out [rows, n] = activation(gate) * up of x [rows, gate and up, n], or activation(x) of one without gates. */
typedef struct {
    const void *x;
    void *out;
    int64_t rows, n;
    int activation, kind;
} Gate;

/* The norm of a layer's result, and a gate: its numbers in a line of gates stand from `column` on. */
typedef struct {
    int64_t heads, n, weights, column;
    const float *weight; /* [weights, n], one for all heads or one for each; none: gated only */
    float eps;
    int32_t gates_first, sigmoid, kind; /* the gate goes through a sigmoid, else SiLU */
} HeadGate;

/* out [rows, heads, n] = x, normalised and multiplied with its gate, or the other way round; x may be out. */
typedef struct {
    const HeadGate *layer;
    const void *x, *gates;
    int64_t rows, gates_stride;
    void *out;
} HeadGateCall;

/* out [rows, n] = the rows `ids` of table [vocabulary, n], multiplied with `factor`. The table has numbers, or with
   `block_type` blocks of type block_type - 1 of gguf_blocks.h. */
typedef struct {
    const int32_t *ids;
    const void *table;
    void *out;
    int64_t rows, n;
    float factor;
    int kind, block_type;
} Embedding;

/* x [rows, n] times `factor`, or softly capped at it, in place. */
typedef struct {
    void *x;
    int64_t rows, n;
    float factor;
    int kind;
} Scaling;

/* x [rows, n] plus `delta`, in place. */
typedef struct {
    void *x;
    const void *delta;
    int64_t rows, n;
    int kind;
} Addition;

/* `rows` lines of x [.., n], those at different `places`, plus the lines of `delta` [rows, n], in place. */
typedef struct {
    void *x;
    const int64_t *places;
    const void *delta;
    int64_t rows, n;
    int kind;
} RowAddition;

/* x [rows, n], each row times the sigmoid of its gate, which is rounded first, in place. */
typedef struct {
    void *x;
    const float *gates;
    int64_t rows, n;
    int kind;
} RowGate;

/* out [rows, n] in fp32 = x in bf16. */
typedef struct {
    const void *x;
    float *out;
    int64_t rows, n;
} Widening;

void norm_in_team(Team *, const Norm *);
void gate_in_team(Team *, const Gate *);
void gate_heads_in_team(Team *, const HeadGateCall *);
void scale_in_team(Team *, const Scaling *);
void soft_cap_in_team(Team *, const Scaling *);
void add_in_team(Team *, const Addition *);
void add_to_rows_in_team(Team *, const RowAddition *);
void gate_rows_in_team(Team *, const RowGate *);
void widen_in_team(Team *, const Widening *);
void embed_rows(const Embedding *);

#endif
