/* A decoder by one call: what a tape recorded of it, in order, for any number of tokens. */
#include <time.h>

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

enum { NORM, GATE, PRODUCT, ATTENTION, EMBED, ENTER, CHOOSE };

/* One operation. `x`, `delta` and `out` are slots: the memory of slot s begins s bytes a token from the beginning.
   tape.py has the same fields. */
typedef struct {
    int64_t kind, x, delta, out; /* delta: -1 is none */
    const void *what;            /* a norm's weights, a product's Matrix, a table of embeddings */
    int64_t heads, stride, weights, size;
    int64_t layer, angles;       /* attention: which cache, and which angles turn it */
    const Matrix *next;          /* product: of the one after it */
    float number;                /* a norm's eps, what embeddings are multiplied with */
    int32_t dtype, activation;
    int32_t chosen;              /* whether its slots are of the chosen places alone; CHOOSE: what comes out */
} Operation;

/* What is the same in every step. A slot takes so many bytes for each token, or each chosen place. `turns`: by angles,
   cosines and sines of every position. */
typedef struct {
    const Operation *operations;
    int64_t token_bytes, place_bytes;
    const float *const *turns;
} Program;

/* What is new in each step. Its `firsts` are found here. */
typedef struct {
    struct step step;
    const int32_t *known;                 /* token ids by line, each `longest` long */
    int64_t longest;
    const void *entering;                 /* hidden states, for a program that begins with ENTER */
    const int64_t *places;                /* packed places that are chosen */
    int64_t chosen;
    int64_t until;                        /* how many of the operations */
    int64_t kinds;                        /* manners of attention */
    const struct manner *const *manners;
    const int64_t *kind_of;               /* by layer */
    char *const *caches;                  /* by layer */
    double *seconds;                      /* that each operation takes, or null */
    char *memory;                         /* from the beginning of a line on, so many bytes */
    int64_t bytes;
} Scene;

/* A step, and where in its memory everything lies. */
typedef struct {
    const Program *program;
    const Scene *scene;
    struct step step;
    int64_t tokens;
    char *slots, *chosen, *spare;
    struct plan *plans;                   /* by kind of attention */
    float **scratches;
} Work;

static int64_t rows_of(const Work *w, const Operation *o) { return o->chosen ? w->scene->chosen : w->tokens; }

static char *slot(const Work *w, int64_t at, int chosen)
{
    return at < 0 ? 0 : chosen ? w->chosen + at * w->scene->chosen : w->slots + at * w->tokens;
}

static Asked asked(const Work *w, const Operation *o)
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
    const int64_t head = m->head_dim * (o->dtype == FLOAT32 ? 4 : 2), stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    char *queries = slot(w, o->x, 0), *keys = queries + m->heads * head, *values = keys + m->kv_heads * head;
    const struct call call = {queries, keys, values, stride, stride, stride, w->program->turns[o->angles],
                              w->scene->caches[o->layer], slot(w, o->out, 0)};
    attend_together(team, m, &w->step, w->plans + kind, &call, w->scratches[kind]);
}

static void embed(const Operation *o, const Work *w)
{
    const struct step *s = &w->step;
    for (int64_t r = 0; r < s->rows; r++) {
        const int32_t *ids = w->scene->known + s->lines[r] * w->scene->longest + s->starts[r];
        const Embedding rows = {ids, o->what, slot(w, o->out, 0) + s->firsts[r] * o->size * (o->dtype == FLOAT32 ? 4 : 2),
                                s->counts[r], o->size, o->number, o->dtype};
        embed_rows(&rows);
    }
}

static void choose(const Operation *o, const Work *w)
{
    const int64_t bytes = o->size * (o->dtype == FLOAT32 ? 4 : 2);
    const char *from = slot(w, o->x, 0);
    char *to = slot(w, o->out, 1);
    for (int64_t i = 0; i < w->scene->chosen; i++)
        memcpy(to + i * bytes, from + w->scene->places[i] * bytes, (size_t)bytes);
}

static void enter(const Operation *o, const Work *w)
{
    memcpy(slot(w, o->out, 0), w->scene->entering, (size_t)(w->tokens * o->size * (o->dtype == FLOAT32 ? 4 : 2)));
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
    } else if (team->me == 0) {
        o->kind == EMBED ? embed(o, w) : o->kind == CHOOSE ? choose(o, w) : enter(o, w);
    }
    meet(team);
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void run(Team *team, const Work *w)
{
    const Scene *s = w->scene;
    double *seconds = team->me ? 0 : s->seconds, before = seconds ? now() : 0;
    for (int64_t i = 0; i < s->until; i++) {
        operate(team, w->program->operations + i, w);
        if (seconds) {
            const double after = now();
            seconds[i] = after - before;
            before = after;
        }
    }
}

/* Bytes that any product needs beside its operands. */
static int64_t most_bytes(const Work *w, int threads)
{
    int64_t most = 0;
    for (const Operation *o = w->program->operations; o < w->program->operations + w->scene->until; o++)
        if (o->kind == PRODUCT) {
            const Asked product = asked(w, o);
            const int64_t bytes = product_bytes(&product, threads);
            most = bytes > most ? bytes : most;
        }
    return most;
}

/* The next `bytes` of a step's memory, in whole lines. */
static void *carve(int64_t *taken, char *memory, int64_t bytes)
{
    char *found = memory + *taken;
    *taken += (bytes + LINE - 1) / LINE * LINE;
    return found;
}

static int64_t carve_plan(int64_t *taken, Work *w, int64_t kind)
{
    const struct manner *m = w->scene->manners[kind];
    struct plan *plan = w->plans + kind;
    const int64_t room = charonia_attention_plan(m, &w->step, plan, 0), bytes = room * (int64_t)sizeof(struct piece);
    plan->to_write = carve(taken, w->scene->memory, bytes);
    plan->to_work = carve(taken, w->scene->memory, bytes);
    plan->to_fold = carve(taken, w->scene->memory, bytes);
    w->scratches[kind] = carve(taken, w->scene->memory, plan->scratch * (int64_t)sizeof(float));
    return room;
}

/* Says where everything lies, and returns how many bytes that takes. `rooms`: of each kind's plan. */
static int64_t lay_out(Work *w, int64_t *firsts, int64_t *rooms, int threads)
{
    const Scene *s = w->scene;
    int64_t taken = 0;
    for (int64_t r = 0; r < s->step.rows; r++) {
        firsts[r] = w->tokens;
        w->tokens += s->step.counts[r];
    }
    w->slots = carve(&taken, s->memory, w->tokens * w->program->token_bytes);
    w->chosen = carve(&taken, s->memory, s->chosen * w->program->place_bytes);
    for (int64_t kind = 0; kind < s->kinds; kind++)
        rooms[kind] = carve_plan(&taken, w, kind);
    w->spare = carve(&taken, s->memory, most_bytes(w, threads));
    return taken;
}

/* Runs the program, if there is memory for it. Returns the bytes it takes: more than there are, nothing was done. */
EXPORT int64_t charonia_run(const Program *p, const Scene *s)
{
    const int all = omp_get_max_threads();
    int64_t firsts[s->step.rows], rooms[s->kinds];
    struct plan plans[s->kinds];
    float *scratches[s->kinds];
    Work work = {.program = p, .scene = s, .step = s->step, .plans = plans, .scratches = scratches}, *w = &work;
    work.step.firsts = firsts;
    const int64_t taken = lay_out(w, firsts, rooms, all);
    if (taken > s->bytes)
        return taken;
    for (int64_t kind = 0; kind < s->kinds; kind++)
        charonia_attention_plan(s->manners[kind], &w->step, plans + kind, rooms[kind]);
    TOGETHER(all, run(team, w));
    return taken;
}
