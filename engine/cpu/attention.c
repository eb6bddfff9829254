/* Attention over paged keys and values: one call for decode, chunked prefill, prefix hits and speculative rows alike.

   First each token's keys and values are written, then each token looks at its sequence up to itself. */
#include <math.h>
#include <stdlib.h>

#include "attention.h"

#define SUBJECT "attention.inc"
#include "each_level.h"

typedef void write_piece(const struct attention_params *, const struct step *, const struct attention_call *,
                         const struct attention_piece *);
typedef void attend_piece(const struct attention_params *, const struct step *, const struct attention_call *,
                          const struct attention_piece *, float *);

static write_piece *const write_pieces[LEVELS] = ALL_LEVELS(write);
static attend_piece *const attend_pieces[LEVELS] = ALL_LEVELS(attend);
static attend_piece *const fold_pieces[LEVELS] = ALL_LEVELS(fold_splits);

static void attend_alone(const struct attention_params *m, const struct step *s, const struct attention_plan *plan,
                         const struct attention_call *c, float *scratch)
{
    const int level = charonia_level();
    for (int64_t i = 0; i < plan->writes; i++)
        write_pieces[level](m, s, c, plan->to_write + i);
    for (int64_t i = 0; i < plan->works; i++)
        attend_pieces[level](m, s, c, plan->to_work + i, scratch);
    for (int64_t i = 0; i < plan->folds; i++)
        fold_pieces[level](m, s, c, plan->to_fold + i, scratch);
}

void attend_in_team(Team *team, const struct attention_params *m, const struct step *s,
                    const struct attention_plan *plan, const struct attention_call *c, float *scratch)
{
    const int level = charonia_level();
    if (plan->cost < WORTH_ATTENDING) {
        if (team->me == 0)
            attend_alone(m, s, plan, c, scratch);
        return;
    }
    for (int64_t i = share_begin(plan->writes, team, team->me); i < share_begin(plan->writes, team, team->me + 1); i++)
        write_pieces[level](m, s, c, plan->to_write + i);
    barrier_and_restart(team);
    for (int64_t i; (i = next_piece(team)) < plan->works;)
        attend_pieces[level](m, s, c, plan->to_work + i, scratch);
    if (!plan->folds)
        return;
    barrier_and_restart(team);
    for (int64_t i; (i = next_piece(team)) < plan->folds;)
        fold_pieces[level](m, s, c, plan->to_fold + i, scratch);
}

EXPORT void charonia_attention(const struct attention_params *m, const struct step *s,
                               const struct attention_plan *plan, const struct attention_call *c, float *scratch)
{
    PARALLEL_REGION(plan->cost < WORTH_ATTENDING ? 1 : omp_get_max_threads(), attend_in_team(team, m, s, plan, c,
                    scratch));
}
