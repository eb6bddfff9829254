/* Lays the tensors of a step out in memory, and gives the step to a thread pool. */
#include "level.h"
#include "program.h"

/* Bytes that the largest product needs beside its operands. */
static int64_t product_memory_bytes(const StepLayout *l, int threads)
{
    int64_t most = 0;
    for (const Operation *o = l->program->operations; o < l->program->operations + l->arguments->operation_count; o++)
        if (o->kind == PRODUCT) {
            const MatmulCall product = matmul_call(l, o);
            const int64_t bytes = product_bytes(&product, threads);
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

static void lay_out_attention(StepLayout *l, int64_t index, Arena *memory, Arena *workspace)
{
    const struct attention_params *p = l->arguments->params[index];
    struct attention_plan plan = {0};
    const int64_t pieces = charonia_attention_plan(p, &l->step, &plan, 0);
    const int64_t bytes = pieces * (int64_t)sizeof(struct attention_piece);
    float *scratch = allocate(memory, plan.scratch * (int64_t)sizeof(float));
    plan.to_write = allocate(workspace, bytes);
    plan.to_work = allocate(workspace, bytes);
    plan.to_fold = allocate(workspace, bytes);
    if (workspace->memory) {
        charonia_attention_plan(p, &l->step, &plan, pieces);
        l->plans[index] = plan;
        l->scratches[index] = scratch;
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
    l->step.firsts = firsts;
    if (workspace->memory)
        locate_rows(l, firsts);
    l->token_tensors = allocate(memory, l->tokens * l->program->token_bytes);
    l->selected_tensors = allocate(memory, a->logits_count * l->program->selected_bytes);
    for (int64_t index = 0; index < a->params_count; index++)
        lay_out_attention(l, index, memory, workspace);
    l->product_memory = allocate(memory, product_memory_bytes(l, threads));
}

/* Gives a step to the pool and returns its number. Or returns -1 and does nothing: `memory_bytes` or `workspace_bytes` were
   too few, and now say how many the step takes. The arguments and all they point at must stay until the step is computed. */
EXPORT int64_t charonia_step_submit(ThreadPool *pool, const Program *p, StepArguments *a)
{
    const int threads = (int)pool_helpers(pool) + 1;
    const StepLayout blank = {.program = p, .arguments = a, .step = a->step};
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
