/* What low-rank adapters add to products: out += scale * (x A^T) B, for the rows that have one. lora.py has the same
   structures.

   A is [rank, inputs], an adapter's matrices for one product one after the other: their rows are its lines. B lies in
   panels of PANEL outputs, [rank, PANEL] each. Each sum has an accumulator for each lane and runs in ascending order, or
   over the rank in ascending order: a row's result depends on no other row. */
#ifndef CHARONIA_LORA_H
#define CHARONIA_LORA_H

#include "parallel_region.h"

enum { PANEL = 32 };

/* One matrix of an adapter, which changes `outputs` outputs of a product from `first` on. */
typedef struct {
    const void *a, *b;
    int64_t rank, first, outputs;
    float scale;
} LoraPart;

/* An adapter's matrices for one product. */
typedef struct {
    const LoraPart *parts;
    int64_t count;
} LoraMatrices;

/* The rows with adapters: adapter s, whose matrices are by number of the product, is that of `places` [begins[s],
   begins[s + 1]). */
typedef struct {
    int64_t count;
    const LoraMatrices *const *adapters;
    const int64_t *begins, *places;
} LoraRows;

/* Product `number` of a step. x [rows, inputs] and out [rows, outputs] are of `kind`; `shrunk` [rows, lines] is x A^T. */
typedef struct {
    const LoraRows *rows;
    int64_t number;
    const void *x;
    int64_t x_stride, inputs;
    float *shrunk;
    int64_t lines;
    void *out;
    int64_t out_stride;
    int kind;
} LoraCall;

/* Fills `shrunk` of the rows with adapters; a barrier must stand before the rest. */
void lora_shrink_in_team(Team *, const LoraCall *);
void lora_expand_in_team(Team *, const LoraCall *);

#endif
