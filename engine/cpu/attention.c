/* Attention over paged keys and values: one call for decode, chunked prefill, prefix hits and speculative rows alike.

   First each token's keys and values are written, then each token looks at its sequence up to itself. */
#include <math.h>
#include <stdlib.h>

#include "attention.h"

#define SUBJECT "attention.inc"
#include "each_level.h"

typedef void write_piece(const struct manner *, const struct step *, const struct call *, const struct piece *);
typedef void attend_piece(const struct manner *, const struct step *, const struct call *, const struct piece *,
                          float *);

static write_piece *const write_pieces[LEVELS] = ALL_LEVELS(write);
static attend_piece *const attend_pieces[LEVELS] = ALL_LEVELS(attend);
static attend_piece *const fold_pieces[LEVELS] = ALL_LEVELS(gather_up);

static void attend_alone(const struct manner *m, const struct step *s, const struct plan *plan, const struct call *c,
                         float *scratch)
{
    const int level = charonia_level();
    for (int64_t i = 0; i < plan->writes; i++)
        write_pieces[level](m, s, c, plan->to_write + i);
    for (int64_t i = 0; i < plan->works; i++)
        attend_pieces[level](m, s, c, plan->to_work + i, scratch);
    for (int64_t i = 0; i < plan->folds; i++)
        fold_pieces[level](m, s, c, plan->to_fold + i, scratch);
}

void attend_together(Team *team, const struct manner *m, const struct step *s, const struct plan *plan,
                     const struct call *c, float *scratch)
{
    const int level = charonia_level();
    if (plan->cost < WORTH_ATTENDING) {
        if (team->me == 0)
            attend_alone(m, s, plan, c, scratch);
        return;
    }
    for (int64_t i = part(plan->writes, team, team->me); i < part(plan->writes, team, team->me + 1); i++)
        write_pieces[level](m, s, c, plan->to_write + i);
    meet_and_deal(team);
    for (int64_t i; (i = take(team)) < plan->works;)
        attend_pieces[level](m, s, c, plan->to_work + i, scratch);
    if (!plan->folds)
        return;
    meet_and_deal(team);
    for (int64_t i; (i = take(team)) < plan->folds;)
        fold_pieces[level](m, s, c, plan->to_fold + i, scratch);
}

EXPORT void charonia_attention(const struct manner *m, const struct step *s, const struct plan *plan,
                               const struct call *c, float *scratch)
{
    TOGETHER(plan->cost < WORTH_ATTENDING ? 1 : omp_get_max_threads(), attend_together(team, m, s, plan, c, scratch));
}
