/* A decoder's layers by one call: what a tape recorded of them, in order, for any number of tokens. */
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
} Scene;

static void attend(const Operation *o, const Scene *s, char *x, void *out)
{
    const struct manner *m = s->manners[o->layer];
    const int64_t head = m->head_dim * (o->dtype == FLOAT32 ? 4 : 2), stride = (m->heads + 2 * m->kv_heads) * m->head_dim;
    char *keys = x + m->heads * head;
    const struct call call = {x,      keys,   keys + m->kv_heads * head, stride, stride, stride, s->turns[o->angles],
                              s->caches[o->layer], out};
    charonia_attention(m, s->step, s->plans[o->layer], &call, s->scratches[o->layer]);
}

/* Returns 0, or 1 when memory is short. `memory` holds every slot of so many tokens. */
EXPORT int charonia_run(const Operation *operations, int64_t count, const Scene *s, char *memory)
{
    const int64_t rows = s->tokens;
    for (const Operation *o = operations; o < operations + count; o++) {
        char *x = memory + o->x * rows, *out = memory + o->out * rows, *delta = o->delta < 0 ? 0 : memory + o->delta * rows;
        if (o->kind == NORM)
            charonia_norm(x, delta, o->what, out, rows, o->heads, o->stride, o->stride, o->weights, o->size, o->eps, o->dtype);
        else if (o->kind == GATE)
            charonia_gate(x, out, rows, o->size, o->activation, o->dtype);
        else if (o->kind == ATTENTION)
            attend(o, s, x, out);
        else if (charonia_matmul(o->what, x, o->stride, rows, out, o->size))
            return 1;
    }
    return 0;
}
