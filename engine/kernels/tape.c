/* A decoder's layers by one call: what a tape recorded of them, in order, for any number of tokens. */
#include <stdlib.h>
#include <time.h>

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

enum { NORM, GATE, PRODUCT, ATTENTION };

/* One operation. `x`, `delta` and `out` are slots: the memory of slot s begins s bytes a token from the beginning.
   tape.py has the same fields. */
typedef struct {
    int64_t kind, x, delta, out; /* delta: -1 is none */
    const void *what;            /* a norm's weights, a product's Matrix */
    int64_t heads, stride, weights, size;
    int64_t layer, angles;       /* attention: which cache, and which angles turn it */
    const Matrix *next;          /* product: of the one after it */
    float eps;
    int32_t dtype, activation;
} Operation;

/* What is new in each step. By layer: its manner, plan, memory for partial sums, and cache; by angles: cosines and sines. */
typedef struct {
    int64_t tokens;
    const struct step *step;
    const float *const *turns;
    const struct manner *const *manners;
    const struct plan *const *plans;
    float *const *scratches;
    char *const *caches;
    char *memory;    /* of all slots */
    double *seconds; /* that each operation takes, or null */
} Scene;

static char *slot(const Scene *s, int64_t at) { return at < 0 ? 0 : s->memory + at * s->tokens; }

static Asked asked(const Operation *o, const Scene *s)
{
    return (Asked){o->what, o->next, slot(s, o->x), o->stride, s->tokens, slot(s, o->out), o->size};
}

static void attend(Team *team, const Operation *o, const Scene *s)
{
    const struct manner *m = s->manners[o->layer];
    const int64_t head = m->head_dim * (o->dtype == FLOAT32 ? 4 : 2), stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    char *queries = slot(s, o->x), *keys = queries + m->heads * head, *values = keys + m->kv_heads * head;
    const struct call call = {queries, keys, values, stride, stride, stride, s->turns[o->angles],
                              s->caches[o->layer], slot(s, o->out)};
    attend_together(team, m, s->step, s->plans[o->layer], &call, s->scratches[o->layer]);
}

static void operate(Team *team, const Operation *o, const Scene *s, char *memory)
{
    if (o->kind == NORM) {
        const Norm norm = {slot(s, o->x), slot(s, o->delta), o->what, slot(s, o->out), s->tokens, o->heads,
                           o->stride, o->weights, o->size, o->eps, o->dtype};
        norm_together(team, &norm);
    } else if (o->kind == GATE) {
        const Gate gate = {slot(s, o->x), slot(s, o->out), s->tokens, o->size, o->activation, o->dtype};
        gate_together(team, &gate);
    } else if (o->kind == ATTENTION) {
        attend(team, o, s);
    } else {
        const Asked product = asked(o, s);
        multiply_together(team, &product, memory);
    }
    meet(team);
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void run(Team *team, const Operation *operations, int64_t count, const Scene *s, char *memory)
{
    double *seconds = team->me ? 0 : s->seconds, before = seconds ? now() : 0;
    for (int64_t i = 0; i < count; i++) {
        operate(team, operations + i, s, memory);
        if (seconds) {
            const double after = now();
            seconds[i] = after - before;
            before = after;
        }
    }
}

/* Bytes that any product needs beside its operands. */
static int64_t most_bytes(const Operation *operations, int64_t count, const Scene *s, int threads)
{
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++)
        if (operations[i].kind == PRODUCT) {
            const Asked product = asked(operations + i, s);
            const int64_t bytes = product_bytes(&product, threads);
            most = bytes > most ? bytes : most;
        }
    return most;
}

/* Returns 0, or 1 when memory is short. */
EXPORT int charonia_run(const Operation *operations, int64_t count, const Scene *s)
{
    const int all = omp_get_max_threads();
    char *memory = aligned_alloc(LINE, (size_t)(most_bytes(operations, count, s, all) + LINE));
    if (!memory)
        return 1;
    TOGETHER(all, run(team, operations, count, s, memory));
    free(memory);
    return 0;
}
