/* A decoder by one call: what a tape recorded of it, in order, for any number of tokens. */
#include <time.h>

#include "elementwise.h"
#include "argmax.h"
#include "program.h"

static int64_t rows_of(const Work *w, const Operation *o) { return o->chosen ? w->scene->chosen : w->tokens; }

/* Of what it computes with. */
static int64_t number_bytes(const Operation *o) { return o->dtype == FLOAT32 ? 4 : 2; }

static char *slot(const Work *w, int64_t at, int chosen)
{
    return at < 0 ? 0 : chosen ? w->chosen + at * w->scene->chosen : w->slots + at * w->tokens;
}

Asked asked(const Work *w, const Operation *o)
{
    return (Asked){o->what, o->next, slot(w, o->x, o->chosen), o->stride, rows_of(w, o), slot(w, o->out, o->chosen),
                   o->size};
}

static void normalise(Team *team, const Operation *o, const Work *w)
{
    const Norm norm = {slot(w, o->x, o->chosen), slot(w, o->delta, o->chosen), o->what, slot(w, o->out, o->chosen),
                       rows_of(w, o), o->heads, o->stride, o->weights, o->size, o->number, o->dtype};
    norm_together(team, &norm);
}

static void attend(Team *team, const Operation *o, const Work *w)
{
    const int64_t kind = w->scene->kind_of[o->layer];
    const struct manner *m = w->scene->manners[kind];
    const int64_t head = m->head_dim * number_bytes(o), stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    char *queries = slot(w, o->x, 0), *keys = queries + m->heads * head, *values = keys + m->kv_heads * head;
    const struct call call = {queries, keys, values, stride, stride, stride, w->program->turns[o->angles], 0,
                              w->scene->caches[o->layer], slot(w, o->out, 0), o->size};
    attend_together(team, m, &w->step, w->plans + kind, &call, w->scratches[kind]);
}

static void embed(const Operation *o, const Work *w)
{
    const struct step *s = &w->step;
    for (int64_t r = 0; r < s->rows; r++) {
        const int32_t *ids = w->scene->known + s->lines[r] * w->scene->longest + s->starts[r];
        const Embedding rows = {ids, o->what, slot(w, o->out, 0) + s->firsts[r] * o->size * number_bytes(o),
                                s->counts[r], o->size, o->number, o->dtype};
        embed_rows(&rows);
    }
}

static void choose(const Operation *o, const Work *w)
{
    const int64_t bytes = o->size * number_bytes(o);
    const char *from = slot(w, o->x, 0);
    char *to = slot(w, o->out, 1);
    for (int64_t i = 0; i < w->scene->chosen; i++)
        memcpy(to + i * bytes, from + w->scene->places[i] * bytes, (size_t)bytes);
}

static void enter(const Operation *o, const Work *w)
{
    memcpy(slot(w, o->out, 0), w->scene->entering, (size_t)(w->tokens * o->size * number_bytes(o)));
}

static void pick(Team *team, const Operation *o, const Work *w)
{
    const char *logits = slot(w, o->x, 1);
    const int64_t bytes = o->size * number_bytes(o);
    const int64_t *of = w->scene->picked_of;
    FOR_ROWS(team, w->scene->picked_count, w->scene->picked_count * o->size, {
        const char *own = logits + (of ? of[row] : row) * bytes;
        const struct choice *how = w->scene->choices;
        const int64_t token = how ? sampled(own, o->size, o->dtype, how + row) : largest_of(own, o->size, o->dtype);
        w->scene->picked[row] = w->scene->known[w->picks[row]] = (int32_t)token;
    });
}

static void operate(Team *team, const Operation *o, const Work *w)
{
    if (o->kind == NORM) {
        normalise(team, o, w);
    } else if (o->kind == GATE) {
        const Gate gate = {slot(w, o->x, 0), slot(w, o->out, 0), w->tokens, o->size, o->activation, o->dtype};
        gate_together(team, &gate);
    } else if (o->kind == ATTENTION) {
        attend(team, o, w);
    } else if (o->kind == PRODUCT) {
        const Asked product = asked(w, o);
        multiply_together(team, &product, w->spare);
    } else if (o->kind == PICK) {
        pick(team, o, w);
    } else if (team->me == 0) {
        o->kind == EMBED ? embed(o, w) : o->kind == CHOOSE ? choose(o, w) : enter(o, w);
    }
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

void run_tape(Crew *crew, Team *team, void *what, int64_t from)
{
    const Work *w = what;
    double *seconds = team->me ? 0 : w->scene->seconds, before = seconds ? now() : 0;
    for (int64_t i = from; i < w->scene->until; i++) {
        operate(team, w->program->operations + i, w);
        part_ways(crew, team, i + 1);
        if (seconds) {
            const double after = now();
            seconds[i] = after - before;
            before = after;
        }
    }
}
