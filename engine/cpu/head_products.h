/* A product for each head with weights of its own, as layers that attend over latents have them: of queries what is
   multiplied with latents, and of mixed latents the heads' values. head_products.py has the same structure.

   A head's sums are those of any product: a row's result depends on nothing but the row. */
#ifndef CHARONIA_HEAD_PRODUCTS_H
#define CHARONIA_HEAD_PRODUCTS_H

#include "matmul.h"

/* `heads` matrices of one kind, each of `inputs` and `outputs`; `passed` more numbers of each head go by them. */
typedef struct {
    const Matrix *const *matrices;
    int64_t heads, inputs, outputs, passed;
    int32_t kind; /* of all numbers */
} HeadProducts;

/* Lines of x are [heads][inputs] and behind them [heads][passed], those of out [heads][outputs and passed], and behind
   them a line of `last`, as long as a head of out, if there is one. */
typedef struct {
    const HeadProducts *layer;
    const void *x, *last;
    int64_t rows;
    void *out;
} HeadsCall;

/* Bytes of memory that so many threads need for it; a multiple of a line. */
int64_t heads_bytes(const HeadsCall *, int threads);

/* With heads_bytes() of memory, at the beginning of a line. */
void multiply_heads_in_team(Team *, const HeadsCall *, char *memory);

#endif
