/* Mixtures of experts. Rows are sorted by expert; some experts at a time gather theirs, and multiply them together. */
#include "experts.h"

#include <stdlib.h>

#include "elementwise.h"

/* Experts are computed together until they have so many rows: more would not stay in caches between products. */
enum { ROWS_TOGETHER = 1024 };

#define SUBJECT "experts.inc"
#include "each_level.h"

typedef void likelihoods_row(const float *, float *, long, int);
typedef void add_weighted_row(float *, const void *, float, long, int);
typedef void round_row(const float *, void *, long, int);

static likelihoods_row *const likelihoods[LEVELS] = ALL_LEVELS(likelihoods);
static add_weighted_row *const adds_weighted[LEVELS] = ALL_LEVELS(add_weighted);
static round_row *const rounds[LEVELS] = ALL_LEVELS(round_sums);

/* One call, with its places in memory. A pair is a token and one of its experts. */
typedef struct {
    const MixtureCall *call;
    int64_t pairs, together;  /* pairs; the most that are computed at once */
    int32_t *numbers;         /* [rows][per token]: a token's experts, ascending */
    float *weights;           /* [rows][per token] */
    int32_t *places;          /* [rows][per token]: of each pair among all that are sorted by expert; -1: it is not here */
    int32_t *tokens;          /* [pairs], sorted: the token of each */
    int64_t *begins;          /* [experts + 1]: the first pair of each */
    MatmulCall *calls;        /* [2][experts]: of some experts, their gate and up, and their down */
    char *gathered, *both, *activated; /* [together] rows; results of down, too, are gathered */
    float *sums;              /* [rows][hidden] */
    float *likely;            /* [threads][3][count] */
    char *products;
} Mix;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void *take(char *memory, int64_t *at, int64_t bytes)
{
    char *taken = memory + *at;
    *at += (bytes + LINE - 1) / LINE * LINE;
    return taken;
}

static int number_bytes(const Mixture *l) { return l->kind == FLOAT32 ? 4 : 2; }

/* Returns the bytes that it takes; without memory the pointers mean nothing. */
static int64_t lay_out(Mix *m, const MixtureCall *c, char *memory, int threads)
{
    const Mixture *l = c->layer;
    const int64_t pairs = c->rows * l->router.per_token, bytes = number_bytes(l);
    const int64_t most = c->rows > ROWS_TOGETHER ? c->rows : ROWS_TOGETHER, together = least(pairs, most);
    const int64_t active = least(l->experts, together);
    int64_t at = 0;
    *m = (Mix){.call = c, .pairs = pairs, .together = together};
    m->numbers = take(memory, &at, pairs * 4);
    m->weights = take(memory, &at, pairs * 4);
    m->places = take(memory, &at, pairs * 4);
    m->tokens = take(memory, &at, pairs * 4);
    m->begins = take(memory, &at, (l->experts + 1) * 8);
    m->calls = take(memory, &at, 2 * l->experts * (int64_t)sizeof(MatmulCall));
    m->gathered = take(memory, &at, together * l->hidden * bytes);
    m->both = take(memory, &at, together * l->outputs * bytes);
    m->activated = take(memory, &at, together * l->intermediate * bytes);
    m->sums = take(memory, &at, c->rows * l->hidden * 4);
    m->likely = take(memory, &at, threads * 3 * l->router.count * 4);
    m->products = take(memory, &at, products_bytes(l->kinds, l->kind_count, active, together, threads));
    return at;
}

int64_t mixture_bytes(const MixtureCall *c, int threads)
{
    Mix m;
    return lay_out(&m, c, 0, threads);
}

/* The place of the largest of the numbers that are not `taken`, which it then is; the first one if none is a number. */
static int64_t take_largest(const float *numbers, float *taken, int64_t count)
{
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (taken[i] == 0.0f && (best < 0 || numbers[i] > numbers[best]))
            best = i;
    taken[best] = 1.0f;
    return best;
}

/* Takes the experts of all groups but the best: `judged` of those left are chosen from. */
static void take_groups(const Router *r, const float *judged, float *taken)
{
    const int64_t size = r->count / r->groups;
    float best[r->groups], left_out[r->groups];
    for (int64_t g = 0; g < r->groups; g++) {
        best[g] = left_out[g] = 0.0f;
        for (int64_t i = 0; i < least(r->group_judges, size); i++)
            best[g] += judged[g * size + take_largest(judged + g * size, taken + g * size, size)];
    }
    memset(taken, 0, (size_t)r->count * 4);
    for (int64_t i = 0; i < r->chosen_groups; i++)
        take_largest(best, left_out, r->groups);
    for (int64_t i = 0; i < r->count; i++)
        taken[i] = left_out[i / size] == 0.0f;
}

/* The experts of one token in ascending order, and their weights. */
static void choose(const Mixture *l, const float *scores, float *likely, int32_t *numbers, float *weights)
{
    const Router *r = &l->router;
    float *judged = likely + r->count, *taken = judged + r->count, sum = r->sigmoid ? r->least_sum : 0.0f;
    likelihoods[charonia_level()](scores, likely, r->count, r->sigmoid);
    for (int64_t i = 0; i < r->count; i++)
        judged[i] = likely[i] + (r->bias ? r->bias[i] : 0.0f);
    memset(taken, 0, (size_t)r->count * 4);
    if (r->groups > 1)
        take_groups(r, judged, taken);
    for (int64_t i = 0; i < r->per_token; i++) {
        const int32_t number = (int32_t)take_largest(judged, taken, r->count);
        int64_t at = i;
        for (; at && numbers[at - 1] > number; at--)
            numbers[at] = numbers[at - 1];
        numbers[at] = number;
    }
    for (int64_t i = 0; i < r->per_token; i++)
        sum += likely[numbers[i]];
    for (int64_t i = 0; i < r->per_token; i++) {
        const float weight = r->normalised ? likely[numbers[i]] / sum : likely[numbers[i]];
        weights[i] = weight * (r->scales ? r->scales[numbers[i]] : 1.0f) * r->scale;
    }
}

/* Sorts pairs by expert; those of one stay in the order of tokens. */
static void sort_pairs(const Mix *m)
{
    const Mixture *l = m->call->layer;
    memset(m->begins, 0, (size_t)(l->experts + 1) * 8);
    for (int64_t i = 0; i < m->pairs; i++) {
        const int64_t expert = m->numbers[i] - l->first;
        if (expert >= 0 && expert < l->experts)
            m->begins[expert + 1]++;
    }
    for (int64_t e = 0; e < l->experts; e++)
        m->begins[e + 1] += m->begins[e];
    for (int64_t i = 0; i < m->pairs; i++) {
        const int64_t expert = m->numbers[i] - l->first;
        m->places[i] = expert < 0 || expert >= l->experts ? -1 : (int32_t)m->begins[expert]++;
        if (m->places[i] >= 0)
            m->tokens[m->places[i]] = (int32_t)(i / l->router.per_token);
    }
    for (int64_t e = l->experts; e; e--)
        m->begins[e] = m->begins[e - 1];
    m->begins[0] = 0;
}

/* The products of the experts `from` to `to` that have rows. */
static void list_products(const Mix *m, int64_t from, int64_t to)
{
    const Mixture *l = m->call->layer;
    const int64_t bytes = number_bytes(l);
    MatmulCall *first = m->calls, *second = m->calls + l->experts;
    int64_t count = 0;
    for (int64_t e = from; e < to; e++) {
        const int64_t rows = m->begins[e + 1] - m->begins[e], at = (m->begins[e] - m->begins[from]) * bytes;
        if (!rows)
            continue;
        char *gathered = m->gathered + at * l->hidden, *both = m->both + at * l->outputs;
        first[count] = (MatmulCall){l->gate_up[e], 0, gathered, l->hidden, rows, both, l->outputs};
        char *activated = m->activated + at * l->intermediate;
        second[count++] = (MatmulCall){l->down[e], 0, activated, l->intermediate, rows, gathered, l->hidden};
    }
}

/* The results of the experts `from` to `to` for their rows, in order, in `gathered`. */
static void compute_experts(Team *t, const Mix *m, int64_t from, int64_t to)
{
    const Mixture *l = m->call->layer;
    const int64_t begin = m->begins[from], rows = m->begins[to] - begin, line = l->hidden * number_bytes(l);
    int64_t count = 0;
    for (int64_t e = from; e < to; e++)
        count += m->begins[e + 1] > m->begins[e];
    if (t->me == 0)
        list_products(m, from, to);
    FOR_ROWS(t, rows, rows * l->hidden,
             memcpy(m->gathered + row * line, (const char *)m->call->x + m->tokens[begin + row] * line, (size_t)line));
    barrier(t);
    multiply_each_in_team(t, m->calls, count, m->products);
    barrier(t);
    const Gate gate = {m->both, m->activated, rows, l->intermediate, l->activation, l->kind};
    gate_in_team(t, &gate);
    barrier(t);
    multiply_each_in_team(t, m->calls + l->experts, count, m->products);
    barrier(t);
}

/* Adds the results of the pairs `first` to `last` to their tokens' sums. */
static void add_results(Team *t, const Mix *m, int64_t first, int64_t last)
{
    const Mixture *l = m->call->layer;
    const int64_t each = l->router.per_token, line = l->hidden * number_bytes(l);
    add_weighted_row *add = adds_weighted[charonia_level()];
    round_row *round = rounds[charonia_level()];
    FOR_ROWS(t, m->call->rows, m->pairs * l->hidden, {
        float *sums = m->sums + row * l->hidden;
        if (first == 0)
            memset(sums, 0, (size_t)l->hidden * 4);
        for (int64_t i = row * each; i < (row + 1) * each; i++)
            if (m->places[i] >= first && m->places[i] < last)
                add(sums, m->gathered + (m->places[i] - first) * line, m->weights[i], l->hidden, l->kind);
        if (last == m->begins[l->experts])
            round(sums, (char *)m->call->out + row * line, l->hidden, l->kind);
    });
}

void mix_in_team(Team *t, const MixtureCall *c, char *memory)
{
    const Mixture *l = c->layer;
    const Router *r = &l->router;
    Mix m;
    lay_out(&m, c, memory, (int)t->all);
    FOR_ROWS(t, c->rows, c->rows * r->count * r->per_token,
             choose(l, c->scores + row * r->count, m.likely + t->me * 3 * r->count, m.numbers + row * r->per_token,
                    m.weights + row * r->per_token));
    barrier(t);
    if (t->me == 0)
        sort_pairs(&m);
    barrier(t);
    for (int64_t from = 0, to = 0; from < l->experts; from = to) {
        const int64_t end = m.begins[from] + m.together;
        while (to < l->experts && m.begins[to + 1] <= end)
            to++;
        compute_experts(t, &m, from, to);
        add_results(t, &m, m.begins[from], m.begins[to]);
        if (to < l->experts)
            barrier(t);
    }
}

/* See MixtureCall. Returns 0, or 1 when memory is short. */
EXPORT int charonia_mix(const Mixture *layer, const void *x, const float *scores, int64_t rows, void *out)
{
    const MixtureCall call = {layer, x, scores, rows, out};
    const int all = omp_get_max_threads();
    char *memory = aligned_alloc(LINE, (size_t)(mixture_bytes(&call, all) + LINE));
    if (!memory)
        return 1;
    PARALLEL_REGION(all, mix_in_team(team, &call, memory));
    free(memory);
    return 0;
}
