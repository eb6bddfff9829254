/* A mixture of experts: its router's scores choose experts for each token, and each expert computes the rows that chose
   it. experts.py has the same structures.

   An expert's sums are those of any product, a token's experts are added in fp32 in ascending order and rounded once: a
   row's result depends on nothing but the row. */
#ifndef CHARONIA_EXPERTS_H
#define CHARONIA_EXPERTS_H

#include "matmul.h"

/* A token's scores become a softmax or sigmoids. Those of the largest such numbers, or of the largest sums of them and
   `bias`, are its experts, their weights the numbers themselves, divided by their sum and `least_sum` if normalised, times
   `scales` of each expert and `scale`. Of `groups` of neighbours only the `chosen_groups` best are chosen from, by the sum
   of their `group_judges` largest (arXiv 2101.03961, 2408.15664, 2405.04434). */
typedef struct {
    int64_t count, per_token, groups, chosen_groups, group_judges;
    const float *bias, *scales; /* [count], or none */
    float least_sum, scale;
    int32_t sigmoid, normalised;
} Router;

/* The experts from number `first` on, by matrices: `gate_up`, whose results [outputs] become [intermediate] by the
   activation, and `down`. `kinds`: those matrices, of each kind at least one. */
typedef struct {
    Router router;
    int64_t first, experts, hidden, outputs, intermediate, kind_count;
    const Matrix *const *gate_up, *const *down, *const *kinds;
    int32_t activation, kind; /* kind: of x and results */
} Mixture;

/* out [rows, hidden] = the weighted sum of the experts' results for x [rows, hidden], by scores [rows, router.count]. */
typedef struct {
    const Mixture *layer;
    const void *x;
    const float *scores;
    int64_t rows;
    void *out;
} MixtureCall;

/* Bytes of memory that so many threads need for it; a multiple of a line. */
int64_t mixture_bytes(const MixtureCall *, int threads);

/* With mixture_bytes() of memory, at the beginning of a line. */
void mix_in_team(Team *, const MixtureCall *, char *memory);

#endif
