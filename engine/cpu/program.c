/* A step of a recorded decoder, of any number of tokens: its operations in order, and its tensors laid out in memory. */
#include <time.h>

#include "elementwise.h"
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

/* A product with the operands of this step. */
static MatmulCall matmul_call(const StepLayout *l, const Operation *o)
{
    return (MatmulCall){o->what, o->next, tensor(l, o->x, o->selected), o->stride, rows_of(l, o),
                        tensor(l, o->out, o->selected), o->size};
}

static void normalize(Team *team, const Operation *o, const StepLayout *l)
{
    const int64_t first = o->layer * number_bytes(o);
    const Norm norm = {tensor(l, o->x, o->selected) + first, tensor(l, o->delta, o->selected), o->what,
                       tensor(l, o->out, o->selected) + first, rows_of(l, o), o->heads, o->stride, o->weights, o->size,
                       o->number, o->dtype, o->activation};
    norm_in_team(team, &norm);
}

static void attend(Team *team, const Operation *o, const StepLayout *l)
{
    const int64_t index = l->arguments->params_of_layer[o->layer];
    const struct attention_params *p = l->arguments->params[index];
    const int64_t head = p->head_dim * number_bytes(o), stride = o->stride;
    char *queries = tensor(l, o->x, 0), *keys = 0, *values = 0;
    if (stride > p->heads * p->head_dim)
        keys = queries + p->heads * head, values = keys + p->kv_heads * head;
    const float *const *cos_sin = l->arguments->cos_sin ? l->arguments->cos_sin : l->program->cos_sin;
    const struct attention_call call = {queries, keys, values, stride, stride, stride, cos_sin[o->angles], o->what,
                                        l->arguments->caches[o->layer], tensor(l, o->out, 0), o->size,
                                        l->arguments->group_of_layer[o->layer]};
    attend_in_team(team, p, &l->step, l->plans + index, &call, l->scratches[index]);
}

/* Queries alone attend to what stands in another cache. */
static void attend_across(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    const struct attention_call call = {.queries = tensor(l, o->x, 0), .query_stride = o->stride,
                                        .cache = a->cross_caches[o->layer], .out = tensor(l, o->out, 0)};
    attend_in_team(team, a->cross_params, &l->cross, &l->cross_plan, &call, l->cross_scratch);
}

/* To each token's line of x that of its position is added. */
static void add_positions(Team *team, const Operation *o, const StepLayout *l)
{
    const struct step *s = &l->step;
    const int64_t bytes = o->size * number_bytes(o);
    for (int64_t r = 0; r < s->rows; r++) {
        const char *lines = (const char *)o->what + (s->starts[r] + o->layer) * bytes;
        const Addition addition = {tensor(l, o->out, 0) + s->firsts[r] * bytes, lines, s->counts[r], o->size, o->dtype};
        add_in_team(team, &addition);
    }
}

static void embed(const Operation *o, const StepLayout *l)
{
    const struct step *s = &l->step;
    for (int64_t r = 0; r < s->rows; r++) {
        const int32_t *ids = l->arguments->token_ids + s->lines[r] * l->arguments->token_ids_stride + s->starts[r];
        const Embedding rows = {ids, o->what, tensor(l, o->out, 0) + s->firsts[r] * o->size * number_bytes(o),
                                s->counts[r], o->size, o->number, o->dtype, (int)o->layer};
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

/* Lines of x that are no token's embedding. */
static void fill(const Operation *o, const StepLayout *l)
{
    const int64_t bytes = o->size * number_bytes(o);
    const char *from = l->arguments->filled_rows;
    char *to = tensor(l, o->out, 0);
    for (int64_t i = 0; i < l->arguments->filled_count; i++)
        memcpy(to + l->arguments->filled_places[i] * bytes, from + i * bytes, (size_t)bytes);
}

/* What the first layers add at the same places. */
static void stack(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    const char *rows = (const char *)a->stacked_rows + o->layer * a->filled_count * o->size * number_bytes(o);
    const RowAddition addition = {tensor(l, o->out, 0), a->filled_places, rows, a->filled_count, o->size, o->dtype};
    add_to_rows_in_team(team, &addition);
}

/* A copy of what later operations change. */
static void keep(const Operation *o, const StepLayout *l)
{
    memcpy(tensor(l, o->out, 0), tensor(l, o->x, 0), (size_t)(l->tokens * o->size * number_bytes(o)));
}

/* Lines of x with a part of those of delta behind them, `size` numbers each. */
static void join(const Operation *o, const StepLayout *l)
{
    const int64_t bytes = o->size * number_bytes(o);
    const int64_t stride = o->stride * number_bytes(o);
    const char *first = tensor(l, o->x, 0), *second = tensor(l, o->delta, 0) + o->layer * number_bytes(o);
    char *to = tensor(l, o->out, 0);
    for (int64_t i = 0; i < l->tokens; i++) {
        memcpy(to + 2 * i * bytes, first + i * bytes, (size_t)bytes);
        memcpy(to + (2 * i + 1) * bytes, second + i * stride, (size_t)bytes);
    }
}

static void input(const Operation *o, const StepLayout *l)
{
    memcpy(tensor(l, o->out, 0), l->arguments->hidden_states, (size_t)(l->tokens * o->size * number_bytes(o)));
}

/* Steps of any program that have got their masks. */
static Awaited masks_given;

/* The masks are made while the step is computed. */
static const uint32_t *await_masks(const StepArguments *a)
{
    for (int64_t spins = 0;; spins++) {
        const int64_t given = awaited_number(&masks_given);
        const uint32_t *masks = __atomic_load_n(&a->masks, __ATOMIC_ACQUIRE);
        if (masks)
            return masks;
        await_change(&masks_given, given, spins);
    }
}

EXPORT void charonia_provide_masks(StepArguments *a, const uint32_t *masks)
{
    __atomic_store_n(&a->masks, masks, __ATOMIC_RELEASE);
    __atomic_add_fetch(&masks_given.number, 1, __ATOMIC_SEQ_CST);
    wake_sleepers(&masks_given);
}

static void sample(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    char *logits = tensor(l, o->x, 1);
    const int64_t bytes = o->size * number_bytes(o), words = (o->size + 31) / 32, *of = a->sampled_of;
    const struct choice *how = a->sampling;
    const uint32_t *masks = a->mask_of ? await_masks(a) : 0;
    const int32_t *ids = o->what;
    FOR_ROWS(team, a->sampled_count, a->sampled_count * o->size, {
        char *own = logits + (of ? of[row] : row) * bytes;
        const uint32_t *mask = masks && a->mask_of[row] >= 0 ? masks + a->mask_of[row] * words : 0;
        if (mask)
            forbid_tokens(own, o->size, o->dtype, mask);
        int64_t token = how ? sample_token(own, o->size, o->dtype, how + row) : argmax_of(own, o->size, o->dtype);
        if (mask)
            token = allowed_token(token, o->size, mask);
        a->sampled[row] = a->token_ids[l->sampled_to[row]] = ids ? ids[token] : (int32_t)token;
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

static void convolve(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    const ConvolutionCall call = {o->what, &l->step, &a->moves, tensor(l, o->x, 0), o->stride, a->windows[o->layer],
                                  tensor(l, o->out, 0)};
    convolve_in_team(team, &call);
}

static void recur(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    const RecurrenceCall call = {o->what, &l->step, &a->moves, tensor(l, o->x, 0), tensor(l, o->delta, 0), o->stride,
                                 o->size, a->matrices[o->layer], tensor(l, o->out, 0)};
    recur_in_team(team, &call);
}

static void scan_channels(Team *team, const Operation *o, const StepLayout *l)
{
    const StepArguments *a = l->arguments;
    const ChannelScanCall call = {o->what, &l->step, &a->moves, tensor(l, o->x, 0), tensor(l, o->aside, 0),
                                  tensor(l, o->delta, 0), o->size, o->stride, o->size, a->matrices[o->layer],
                                  tensor(l, o->out, 0)};
    scan_channels_in_team(team, &call);
}

static void gate_heads(Team *team, const Operation *o, const StepLayout *l)
{
    const HeadGateCall call = {o->what, tensor(l, o->x, 0), tensor(l, o->delta, 0), l->tokens, o->size,
                               tensor(l, o->out, 0)};
    gate_heads_in_team(team, &call);
}

static MixtureCall mixture_call(const StepLayout *l, const Operation *o)
{
    const float *scores = (const float *)tensor(l, o->delta, 0);
    return (MixtureCall){o->what, tensor(l, o->x, 0), scores, l->tokens, tensor(l, o->out, 0)};
}

static HeadsCall heads_call(const StepLayout *l, const Operation *o)
{
    return (HeadsCall){o->what, tensor(l, o->x, 0), tensor(l, o->delta, 0), l->tokens, tensor(l, o->out, 0)};
}

static int adapts(const Operation *o) { return o->kind == LORA_SHRINK || o->kind == LORA_EXPAND; }

/* Whether the step has nothing for it to do. */
static int idle(const Operation *o, const StepArguments *a)
{
    return (adapts(o) && !a->lora.count) || (o->kind == FILL && !a->filled_count)
        || (o->kind == STACK && o->layer >= a->stacked_count);
}

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
    } else if (o->kind == CONVOLVE) {
        convolve(team, o, l);
    } else if (o->kind == RECUR) {
        recur(team, o, l);
    } else if (o->kind == SCAN) {
        scan_channels(team, o, l);
    } else if (o->kind == GATE_HEADS) {
        gate_heads(team, o, l);
    } else if (o->kind == SCALE || o->kind == SOFT_CAP) {
        const Scaling scaling = {tensor(l, o->x, o->selected), rows_of(l, o), o->size, o->number, o->dtype};
        o->kind == SCALE ? scale_in_team(team, &scaling) : soft_cap_in_team(team, &scaling);
    } else if (o->kind == ADD) {
        const Addition addition = {tensor(l, o->x, 0), tensor(l, o->delta, 0), l->tokens, o->size, o->dtype};
        add_in_team(team, &addition);
    } else if (o->kind == EXPERTS) {
        const MixtureCall mixture = mixture_call(l, o);
        mix_in_team(team, &mixture, l->product_memory);
    } else if (o->kind == HEADS) {
        const HeadsCall heads = heads_call(l, o);
        multiply_heads_in_team(team, &heads, l->product_memory);
    } else if (o->kind == GATE_ROWS) {
        const RowGate gate = {tensor(l, o->x, 0), (const float *)tensor(l, o->delta, 0), l->tokens, o->size, o->dtype};
        gate_rows_in_team(team, &gate);
    } else if (o->kind == WIDEN) {
        const Widening widening = {tensor(l, o->x, 0), (float *)tensor(l, o->out, 0), l->tokens, o->size};
        widen_in_team(team, &widening);
    } else if (adapts(o)) {
        adapt(team, o, l);
    } else if (o->kind == STACK) {
        stack(team, o, l);
    } else if (o->kind == POSITIONS) {
        add_positions(team, o, l);
    } else if (o->kind == CROSS) {
        attend_across(team, o, l);
    } else if (team->me == 0) {
        o->kind == EMBED ? embed(o, l) : o->kind == SELECT ? select_places(o, l) : o->kind == KEEP ? keep(o, l)
        : o->kind == JOIN ? join(o, l) : o->kind == FILL ? fill(o, l) : input(o, l);
    }
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* A PoolJob: the operations of a StepLayout from `from` on, with a barrier_admitting() after each. */
static void run_program(ThreadPool *pool, Team *team, void *layout, int64_t from)
{
    const StepLayout *l = layout;
    double *seconds = team->me ? 0 : l->arguments->seconds, before = seconds ? now() : 0;
    for (int64_t i = from; i < l->arguments->operation_count; i++) {
        const Operation *o = l->program->operations + i;
        if (idle(o, l->arguments))
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

/* Bytes that the largest product or mixture, or products of heads, need beside their operands. */
static int64_t product_memory_bytes(const StepLayout *l, int threads)
{
    int64_t most = 0;
    for (const Operation *o = l->program->operations; o < l->program->operations + l->arguments->operation_count; o++) {
        const MatmulCall product = matmul_call(l, o);
        const MixtureCall mixture = mixture_call(l, o);
        const HeadsCall heads = heads_call(l, o);
        const int64_t bytes = o->kind == PRODUCT   ? product_bytes(&product, threads)
                              : o->kind == EXPERTS ? mixture_bytes(&mixture, threads)
                              : o->kind == HEADS   ? heads_bytes(&heads, threads)
                                                   : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Memory that is allocated in whole cache lines. An arena without memory only counts them. */
typedef struct {
    char *memory;
    int64_t bytes;
} Arena;

static void *allocate(Arena *arena, int64_t bytes)
{
    char *found = arena->memory + arena->bytes;
    arena->bytes += (bytes + LINE - 1) / LINE * LINE;
    return found;
}

/* The packed place where each row's tokens begin, and the index in token_ids of each sampled token: behind the token at
   whose place it is sampled. */
static void locate_rows(StepLayout *l, int64_t *firsts)
{
    const StepArguments *a = l->arguments;
    int64_t sampled = 0, first = 0;
    for (int64_t r = 0; r < a->step.rows; r++) {
        firsts[r] = first;
        const int64_t next = a->step.lines[r] * a->token_ids_stride + a->step.starts[r] + 1, end = first + a->step.counts[r];
        for (; sampled < a->sampled_count; sampled++) {
            const int64_t place = a->logits_indices[a->sampled_of ? a->sampled_of[sampled] : sampled];
            if (place >= end)
                break;
            l->sampled_to[sampled] = next + place - first;
        }
        first = end;
    }
}

static void lay_out_attention(const struct attention_params *p, const struct step *s, struct attention_plan *to,
                              float **to_scratch, Arena *memory, Arena *workspace)
{
    struct attention_plan plan = {0};
    const int64_t pieces = charonia_attention_plan(p, s, &plan, 0);
    const int64_t bytes = pieces * (int64_t)sizeof(struct attention_piece);
    float *scratch = allocate(memory, plan.scratch * (int64_t)sizeof(float));
    plan.to_write = allocate(workspace, bytes);
    plan.to_work = allocate(workspace, bytes);
    plan.to_fold = allocate(workspace, bytes);
    if (workspace->memory) {
        charonia_attention_plan(p, s, &plan, pieces);
        *to = plan;
        *to_scratch = scratch;
    }
}

static void lay_out_step(StepLayout *l, int threads, Arena *memory, Arena *workspace)
{
    const StepArguments *a = l->arguments;
    for (int64_t r = 0; r < a->step.rows; r++)
        l->tokens += a->step.counts[r];
    int64_t *firsts = allocate(workspace, a->step.rows * (int64_t)sizeof(int64_t));
    l->sampled_to = allocate(workspace, a->sampled_count * (int64_t)sizeof(int64_t));
    l->plans = allocate(workspace, a->params_count * (int64_t)sizeof(struct attention_plan));
    l->scratches = allocate(workspace, a->params_count * (int64_t)sizeof(float *));
    l->step.firsts = l->cross.firsts = firsts;
    if (workspace->memory)
        locate_rows(l, firsts);
    l->token_tensors = allocate(memory, l->tokens * l->program->token_bytes);
    l->selected_tensors = allocate(memory, a->logits_count * l->program->selected_bytes);
    for (int64_t index = 0; index < a->params_count; index++)
        lay_out_attention(a->params[index], &l->step, l->plans + index, l->scratches + index, memory, workspace);
    if (a->cross_params)
        lay_out_attention(a->cross_params, &l->cross, &l->cross_plan, &l->cross_scratch, memory, workspace);
    l->product_memory = allocate(memory, product_memory_bytes(l, threads));
}

/* Gives a step to the pool and returns its number. Or returns -1 and does nothing: `memory_bytes` or `workspace_bytes` were
   too few, and now say how many the step takes. The arguments and all they point at must stay until the step is computed. */
EXPORT int64_t charonia_step_submit(ThreadPool *pool, const Program *p, StepArguments *a)
{
    const int threads = (int)pool_helpers(pool) + 1;
    const StepLayout blank = {.program = p, .arguments = a, .step = a->step, .cross = a->cross};
    StepLayout counted = blank, *layout = (StepLayout *)a->workspace;
    Arena memory = {0, 0}, workspace = {0, 0};
    allocate(&workspace, sizeof(StepLayout));
    lay_out_step(&counted, threads, &memory, &workspace);
    if (memory.bytes > a->memory_bytes || workspace.bytes > a->workspace_bytes) {
        a->memory_bytes = memory.bytes, a->workspace_bytes = workspace.bytes;
        return -1;
    }
    memory = (Arena){a->memory, 0}, workspace = (Arena){a->workspace, 0};
    allocate(&workspace, sizeof(StepLayout));
    *layout = blank;
    lay_out_step(layout, threads, &memory, &workspace);
    return submit_job(pool, run_program, layout);
}
