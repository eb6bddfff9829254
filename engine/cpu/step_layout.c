/* Lays a step out in memory, and has it computed. */
#include "level.h"
#include "program.h"

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

/* Memory that is taken piece by piece, in whole lines. Of one that begins nowhere the pieces are counted only. */
typedef struct {
    char *from;
    int64_t taken;
} Shelf;

static void *take_down(Shelf *shelf, int64_t bytes)
{
    char *found = shelf->from + shelf->taken;
    shelf->taken += (bytes + LINE - 1) / LINE * LINE;
    return found;
}

/* Where each row's tokens begin, and where what is picked belongs: behind the last of them. */
static void find_places(Work *w, int64_t *firsts)
{
    const Scene *s = w->scene;
    int64_t picked = 0, first = 0;
    for (int64_t r = 0; r < s->step.rows; r++) {
        firsts[r] = first;
        first += s->step.counts[r];
        if (picked < s->picked_count && s->places[s->picked_of ? s->picked_of[picked] : picked] == first - 1)
            w->picks[picked++] = s->step.lines[r] * s->longest + s->step.starts[r] + s->step.counts[r];
    }
}

static void lay_plan(Work *w, int64_t kind, Shelf *memory, Shelf *desk)
{
    const struct manner *m = w->scene->manners[kind];
    struct plan plan = {0};
    const int64_t room = charonia_attention_plan(m, &w->step, &plan, 0), bytes = room * (int64_t)sizeof(struct piece);
    float *scratch = take_down(memory, plan.scratch * (int64_t)sizeof(float));
    plan.to_write = take_down(desk, bytes);
    plan.to_work = take_down(desk, bytes);
    plan.to_fold = take_down(desk, bytes);
    if (desk->from) {
        charonia_attention_plan(m, &w->step, &plan, room);
        w->plans[kind] = plan;
        w->scratches[kind] = scratch;
    }
}

static void lay_out(Work *w, int threads, Shelf *memory, Shelf *desk)
{
    const Scene *s = w->scene;
    for (int64_t r = 0; r < s->step.rows; r++)
        w->tokens += s->step.counts[r];
    int64_t *firsts = take_down(desk, s->step.rows * (int64_t)sizeof(int64_t));
    w->picks = take_down(desk, s->picked_count * (int64_t)sizeof(int64_t));
    w->plans = take_down(desk, s->kinds * (int64_t)sizeof(struct plan));
    w->scratches = take_down(desk, s->kinds * (int64_t)sizeof(float *));
    w->step.firsts = firsts;
    if (desk->from)
        find_places(w, firsts);
    w->slots = take_down(memory, w->tokens * w->program->token_bytes);
    w->chosen = take_down(memory, s->chosen * w->program->place_bytes);
    for (int64_t kind = 0; kind < s->kinds; kind++)
        lay_plan(w, kind, memory, desk);
    w->spare = take_down(memory, most_bytes(w, threads));
}

/* Gives a crew a step to compute, and returns its number; or -1 and does nothing: `bytes` or `desk_bytes` were too few, and
   are those that it takes now. What the scene names is to be left alone until the step is done. */
EXPORT int64_t charonia_start(Crew *crew, const Program *p, Scene *s)
{
    const int threads = (int)helpers_of(crew) + 1;
    const Work blank = {.program = p, .scene = s, .step = s->step};
    Work counted = blank, *w = (Work *)s->desk;
    Shelf memory = {0, 0}, desk = {0, 0};
    take_down(&desk, sizeof(Work));
    lay_out(&counted, threads, &memory, &desk);
    if (memory.taken > s->bytes || desk.taken > s->desk_bytes) {
        s->bytes = memory.taken, s->desk_bytes = desk.taken;
        return -1;
    }
    memory = (Shelf){s->memory, 0}, desk = (Shelf){s->desk, 0};
    take_down(&desk, sizeof(Work));
    *w = blank;
    lay_out(w, threads, &memory, &desk);
    return give(crew, run_tape, w);
}
