/* Products of heads: some heads at a time multiply together, of many rows fewer. */
#include "head_products.h"

#include <stdlib.h>

/* Heads are computed together until they have so many rows: more would not stay in caches. */
enum { ROWS_TOGETHER = 1024 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t number_bytes(const HeadProducts *l) { return l->kind == FLOAT32 ? 4 : 2; }

static int64_t heads_together(const HeadsCall *c)
{
    const int64_t fitting = c->rows ? ROWS_TOGETHER / c->rows : c->layer->heads;
    return least(c->layer->heads, fitting ? fitting : 1);
}

static int64_t calls_bytes(int64_t count) { return (count * (int64_t)sizeof(MatmulCall) + LINE - 1) / LINE * LINE; }

int64_t heads_bytes(const HeadsCall *c, int threads)
{
    const int64_t together = heads_together(c);
    return calls_bytes(together) + products_bytes(c->layer->matrices, 1, together, together * c->rows, threads);
}

/* The numbers of one row that go by the products. */
static void pass(const HeadsCall *c, int64_t row)
{
    const HeadProducts *l = c->layer;
    const int64_t bytes = number_bytes(l), passed = l->passed * bytes, size = (l->outputs + l->passed) * bytes;
    const char *from = (const char *)c->x + (row * (l->inputs + l->passed) + l->inputs) * l->heads * bytes;
    char *to = (char *)c->out + row * (l->heads + (c->last != 0)) * size;
    for (int64_t h = 0; h < l->heads; h++)
        memcpy(to + (h + 1) * size - passed, from + h * passed, (size_t)passed);
    if (c->last)
        memcpy(to + l->heads * size, (const char *)c->last + row * size, (size_t)size);
}

void multiply_heads_in_team(Team *team, const HeadsCall *c, char *memory)
{
    const HeadProducts *l = c->layer;
    const int64_t bytes = number_bytes(l), size = l->outputs + l->passed, together = heads_together(c);
    const int64_t in_line = l->heads * (l->inputs + l->passed), out_line = (l->heads + (c->last != 0)) * size;
    MatmulCall *calls = (MatmulCall *)memory;
    if (l->passed || c->last)
        FOR_ROWS(team, c->rows, c->rows * (l->heads * l->passed + size), pass(c, row));
    for (int64_t first = 0, count; first < l->heads; first += count) {
        count = least(together, l->heads - first);
        if (first)
            barrier(team); /* the calls before are read no more */
        for (int64_t h = 0; team->me == 0 && h < count; h++)
            calls[h] = (MatmulCall){l->matrices[first + h], 0, (const char *)c->x + (first + h) * l->inputs * bytes,
                                    in_line, c->rows, (char *)c->out + (first + h) * size * bytes, out_line};
        multiply_each_in_team(team, calls, count, memory + calls_bytes(together));
    }
}

/* See HeadsCall. Returns 0, or 1 when memory is short. */
EXPORT int charonia_multiply_heads(const HeadProducts *layer, const void *x, const void *last, int64_t rows, void *out)
{
    const HeadsCall call = {layer, x, last, rows, out};
    const int all = omp_get_max_threads();
    char *memory = aligned_alloc(LINE, (size_t)(heads_bytes(&call, all) + LINE));
    if (!memory)
        return 1;
    PARALLEL_REGION(all, multiply_heads_in_team(team, &call, memory));
    free(memory);
    return 0;
}
