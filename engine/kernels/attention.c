/* Attention over paged keys and values: one call for decode, chunked prefill, prefix hits and speculative rows alike.

   First each token's keys and values are written, then each token looks at its sequence up to itself. */
#include <math.h>
#include <stdlib.h>

#include "attention.h"

#define SUBJECT "attention.inc"
#include "each_level.h"

/* Products of numbers below which threads would cost more than they give. */
#define WORTH_THREADS 500000

typedef void write_piece(const struct manner *, const struct step *, const struct call *, const struct piece *);
typedef void attend_piece(const struct manner *, const struct step *, const struct call *, const struct piece *,
                          float *);

static write_piece *const write_pieces[LEVELS] = ALL_LEVELS(write);
static attend_piece *const attend_pieces[LEVELS] = ALL_LEVELS(attend);
static attend_piece *const fold_pieces[LEVELS] = ALL_LEVELS(gather_up);

EXPORT void charonia_attention(const struct manner *m, const struct step *s, const struct plan *plan,
                               const struct call *c, float *scratch)
{
    int level = charonia_level();
    write_piece *write = write_pieces[level];
    attend_piece *attend = attend_pieces[level], *fold = fold_pieces[level];
    if (plan->cost < WORTH_THREADS) {
        for (int64_t i = 0; i < plan->writes; i++)
            write(m, s, c, plan->to_write + i);
        for (int64_t i = 0; i < plan->works; i++)
            attend(m, s, c, plan->to_work + i, scratch);
        for (int64_t i = 0; i < plan->folds; i++)
            fold(m, s, c, plan->to_fold + i, scratch);
        return;
    }
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < plan->writes; i++)
            write(m, s, c, plan->to_write + i);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->works; i++)
            attend(m, s, c, plan->to_work + i, scratch);
        if (plan->folds) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < plan->folds; i++)
                fold(m, s, c, plan->to_fold + i, scratch);
        }
    }
}
