/* Attention over paged keys and values: one call for decode, chunked prefill, prefix hits and speculative rows alike.

   First each token's keys and values are written, then each token looks at its sequence up to itself. A plan divides a step
   into pieces of work, which changes no result, only which thread computes it when. */
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
    for (int64_t i = 0; c->keys && i < plan->writes; i++)
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
    const int64_t writes = c->keys ? plan->writes : 0;
    for (int64_t i = share_begin(writes, team, team->me); i < share_begin(writes, team, team->me + 1); i++)
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The first token that the one at `position` sees. */
static int64_t sees_from(const struct attention_params *m, int64_t position)
{
    return m->window ? most(position + 1 - m->window, 0) : 0;
}

/* Tokens of one row that go together: as many as the stack holds, fewer where threads would have nothing to do. */
static int64_t together(const struct attention_params *m, const struct step *s, int64_t threads)
{
    int64_t group = m->heads / m->kv_heads, tokens = 0;
    for (int64_t r = 0; r < s->rows; r++)
        tokens += s->counts[r];
    int64_t fair = tokens * m->kv_heads / (4 * threads);
    return most(least(MOST_QUERIES / (group * m->head_dim), most(fair, 32 / group)), 1);
}

static int64_t pieces_a_head(const struct step *s, int64_t size)
{
    int64_t pieces = 0;
    for (int64_t r = 0; r < s->rows; r++)
        pieces += (s->counts[r] + size - 1) / size;
    return pieces;
}

/* A plan being made, in arrays with `room` for so many pieces each: more are counted and left out. */
struct making {
    const struct attention_params *params;
    struct attention_plan *plan;
    int64_t room;
};

static void add(struct attention_piece *pieces, int64_t *count, int64_t room, struct attention_piece piece)
{
    if (*count < room)
        pieces[*count] = piece;
    ++*count;
}

static void add_writes(const struct making *making, const struct step *s)
{
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t at = 0, some; at < s->counts[r]; at += some) {
            some = least(TILE - (s->starts[r] + at) % TILE, s->counts[r] - at);
            struct attention_piece piece = {(int32_t)r, (int32_t)at, (int32_t)some, 0, 0, 0, -1};
            add(making->plan->to_write, &making->plan->writes, making->room, piece);
        }
}

/* One piece for all of a context, or one a split and one that folds them. */
static void add_work(const struct making *making, struct attention_piece whole, int divided)
{
    struct attention_plan *plan = making->plan;
    int64_t queries = whole.tokens * (making->params->heads / making->params->kv_heads);
    int64_t size = queries * (value_size(making->params) + 2), splits = whole.to - whole.from;
    plan->cost += queries * splits * SPLIT * making->params->head_dim;
    if (!divided || splits < 2) {
        add(plan->to_work, &plan->works, making->room, whole);
        return;
    }
    whole.part = plan->scratch;
    plan->scratch += size * splits;
    add(plan->to_fold, &plan->folds, making->room, whole);
    for (int64_t at = 0; at < splits; at++) {
        struct attention_piece piece = whole;
        piece.from += (int32_t)at;
        piece.to = piece.from + 1;
        piece.part += size * at;
        add(plan->to_work, &plan->works, making->room, piece);
    }
}

static void add_works(const struct making *making, const struct step *s, int64_t size, int divided)
{
    for (int64_t r = 0, packed = 0; r < s->rows; packed += s->counts[r++])
        for (int64_t at = 0; at < s->counts[r]; at += size) {
            int64_t tokens = least(size, s->counts[r] - at), first = s->starts[r] + at;
            int32_t from = (int32_t)(sees_from(making->params, first) / SPLIT);
            int32_t to = (int32_t)((all_see_to(making->params, s, r, packed, at, at + tokens) - 1) / SPLIT + 1);
            for (int32_t head = 0; head < making->params->kv_heads; head++) {
                const struct attention_piece whole = {(int32_t)r, (int32_t)at, (int32_t)tokens, head, from, to, -1};
                add_work(making, whole, divided);
            }
        }
}

static int dearest_first(const void *a, const void *b)
{
    const struct attention_piece *x = a, *y = b;
    int64_t mine = (int64_t)(x->to - x->from) * x->tokens, theirs = (int64_t)(y->to - y->from) * y->tokens;
    return mine > theirs ? -1 : mine < theirs;
}

EXPORT int64_t charonia_attention_plan(const struct attention_params *m, const struct step *s,
                                       struct attention_plan *plan, int64_t room)
{
    struct making making = {m, plan, room};
    int64_t threads = charonia_threads(), size = together(m, s, threads);
    plan->writes = plan->works = plan->folds = plan->scratch = plan->cost = 0;
    add_writes(&making, s);
    add_works(&making, s, size, pieces_a_head(s, size) * m->kv_heads < 2 * threads);
    int64_t taken = most(plan->writes, most(plan->works, plan->folds));
    if (taken <= room && plan->works > threads)
        qsort(plan->to_work, (size_t)plan->works, sizeof(struct attention_piece), dearest_first);
    return taken;
}
