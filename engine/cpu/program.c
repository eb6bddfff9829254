/* Computes the operations of a recorded decoder in order, for any number of tokens. */
#include <time.h>

#include "argmax.h"
#include "elementwise.h"
#include "mask.h"
#include "program.h"

static int64_t rows_of(const StepLayout *l, const Operation *o)
{
    return o->selected ? l->arguments->logits_count : l->tokens;
}

/* Bytes of one number. */
static int64_t number_bytes(const Operation *o) { return o->dtype == FLOAT32 ? 4 : 2; }

static char *tensor(const StepLayout *l, int64_t offset, int selected)
{
    if (offset < 0)
        return 0;
    return selected ? l->selected_tensors + offset * l->arguments->logits_count : l->token_tensors + offset * l->tokens;
}

MatmulCall matmul_call(const StepLayout *l, const Operation *o)
{
    return (MatmulCall){o->what, o->next, tensor(l, o->x, o->selected), o->stride, rows_of(l, o),
                        tensor(l, o->out, o->selected), o->size};
}

static void normalize(Team *team, const Operation *o, const StepLayout *l)
{
    const Norm norm = {tensor(l, o->x, o->selected), tensor(l, o->delta, o->selected), o->what,
                       tensor(l, o->out, o->selected), rows_of(l, o), o->heads, o->stride, o->weights, o->size,
                       o->number, o->dtype};
    norm_in_team(team, &norm);
}

static void attend(Team *team, const Operation *o, const StepLayout *l)
{
    const int64_t index = l->arguments->params_of_layer[o->layer];
    const struct attention_params *p = l->arguments->params[index];
    const int64_t head = p->head_dim * number_bytes(o), stride = (p->heads + 2 * p->kv_heads) * p->head_dim;
    char *queries = tensor(l, o->x, 0), *keys = queries + p->heads * head, *values = keys + p->kv_heads * head;
    const struct attention_call call = {queries, keys, values, stride, stride, stride, l->program->cos_sin[o->angles], 0,
                                        l->arguments->caches[o->layer], tensor(l, o->out, 0), o->size};
    attend_in_team(team, p, &l->step, l->plans + index, &call, l->scratches[index]);
}

static void embed(const Operation *o, const StepLayout *l)
{
    const struct step *s = &l->step;
    for (int64_t r = 0; r < s->rows; r++) {
        const int32_t *ids = l->arguments->token_ids + s->lines[r] * l->arguments->token_ids_stride + s->starts[r];
        const Embedding rows = {ids, o->what, tensor(l, o->out, 0) + s->firsts[r] * o->size * number_bytes(o),
                                s->counts[r], o->size, o->number, o->dtype};
        embed_rows(&rows);
    }
}

static void select_places(const Operation *o, const StepLayout *l)
{
    const int64_t bytes = o->size * number_bytes(o);
    const char *from = tensor(l, o->x, 0);
    char *to = tensor(l, o->out, 1);
    for (int64_t i = 0; i < l->arguments->logits_count; i++)
        memcpy(to + i * bytes, from + l->arguments->logits_indices[i] * bytes, (size_t)bytes);
}

/* A copy of what later operations change. */
static void keep(const Operation *o, const StepLayout *l)
{
    memcpy(tensor(l, o->out, 0), tensor(l, o->x, 0), (size_t)(l->tokens * o->size * number_bytes(o)));
}

static void input(const Operation *o, const StepLayout *l)
{
    memcpy(tensor(l, o->out, 0), l->arguments->hidden_states, (size_t)(l->tokens * o->size * number_bytes(o)));
}

/* The masks are made while the step is computed. */
static const uint32_t *await_masks(const StepArguments *a)
{
    const uint32_t *masks;
    for (int64_t spins = 0; !(masks = __atomic_load_n(&a->masks, __ATOMIC_ACQUIRE)); spins++)
        spin_wait(spins);
    return masks;
}

EXPORT void charonia_provide_masks(StepArguments *a, const uint32_t *masks)
{
    __atomic_store_n(&a->masks, masks, __ATOMIC_RELEASE);
}

static void sample(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    char *logits = tensor(l, o->x, 1);
    const int64_t bytes = o->size * number_bytes(o), words = (o->size + 31) / 32, *of = a->sampled_of;
    const struct choice *how = a->sampling;
    const uint32_t *masks = a->mask_of ? await_masks(a) : 0;
    FOR_ROWS(team, a->sampled_count, a->sampled_count * o->size, {
        char *own = logits + (of ? of[row] : row) * bytes;
        const uint32_t *mask = masks && a->mask_of[row] >= 0 ? masks + a->mask_of[row] * words : 0;
        if (mask)
            forbid_tokens(own, o->size, o->dtype, mask);
        int64_t token = how ? sample_token(own, o->size, o->dtype, how + row) : argmax_of(own, o->size, o->dtype);
        if (mask)
            token = allowed_token(token, o->size, mask);
        a->sampled[row] = a->token_ids[l->sampled_to[row]] = (int32_t)token;
    });
}

/* What adapters add to a product: x A^T of its input, or that times B, added to its result. */
static void adapt(Team *team, const Operation *o, const StepLayout *l)
{
    const int shrinks = o->kind == LORA_SHRINK;
    char *shrunk = tensor(l, shrinks ? o->out : o->delta, 0);
    const LoraCall call = {&l->arguments->lora, o->layer, shrinks ? tensor(l, o->x, 0) : 0, o->size, o->size,
                           (float *)shrunk, o->stride, shrinks ? 0 : tensor(l, o->out, 0), o->size, o->dtype};
    shrinks ? lora_shrink_in_team(team, &call) : lora_expand_in_team(team, &call);
}

static int adapts(const Operation *o) { return o->kind == LORA_SHRINK || o->kind == LORA_EXPAND; }

static void compute(Team *team, const Operation *o, const StepLayout *l)
{
    if (o->kind == NORM) {
        normalize(team, o, l);
    } else if (o->kind == GATE) {
        const Gate gate = {tensor(l, o->x, 0), tensor(l, o->out, 0), l->tokens, o->size, o->activation, o->dtype};
        gate_in_team(team, &gate);
    } else if (o->kind == ATTENTION) {
        attend(team, o, l);
    } else if (o->kind == PRODUCT) {
        const MatmulCall product = matmul_call(l, o);
        multiply_in_team(team, &product, l->product_memory);
    } else if (o->kind == SAMPLE) {
        sample(team, o, l);
    } else if (adapts(o)) {
        adapt(team, o, l);
    } else if (team->me == 0) {
        o->kind == EMBED ? embed(o, l) : o->kind == SELECT ? select_places(o, l) : o->kind == KEEP ? keep(o, l) : input(o, l);
    }
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

void run_program(ThreadPool *pool, Team *team, void *layout, int64_t from)
{
    const StepLayout *l = layout;
    double *seconds = team->me ? 0 : l->arguments->seconds, before = seconds ? now() : 0;
    for (int64_t i = from; i < l->arguments->operation_count; i++) {
        const Operation *o = l->program->operations + i;
        if (adapts(o) && !l->arguments->lora.count)
            continue;
        compute(team, o, l);
        if (o->kind != LORA_SHRINK) /* the product after it does not read what it writes */
            barrier_admitting(pool, team, i + 1);
        if (seconds) {
            const double after = now();
            seconds[i] = after - before;
            before = after;
        }
    }
}
