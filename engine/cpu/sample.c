/* Tokens chosen from logits: masks; the likeliest; or drawn by temperature, top-k, top-p and min-p, in time that
   grows with the vocabulary and not faster.

   A weight is 2^-below, where `below` is how many halvings a token is less likely than the likeliest, whose weight is 1.
   Whoever wants tokens in order of weight counts them into buckets by `below`, and sorts only the bucket that matters. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "parallel_region.h"
#include "sample.h"

enum {
    WORD = 32,     /* tokens of a mask's word; most allow all of theirs, or none */
    PIECE = 2048,  /* numbers that are searched for the largest at a time */
    CHUNK = 2048,  /* tokens whose weights are summed at a time */
    CHUNKS = 256,  /* at most; of a larger vocabulary they are longer */
    BLOCK = 64,    /* tokens that are looked at at a time */
    FINENESS = 16, /* buckets a halving */
    BUCKETS = 2048 /* so the last one's weights are 0: 2^-126 is the least that is a normal float */
};

#define GREEDY_BELOW 1e-5f /* sampling.GREEDY_BELOW */

/* The logits of one row. */
typedef struct {
    const void *logits;
    int64_t n;
    int kind;
    int64_t likeliest;
    float top, scale; /* the largest logit; halvings a unit */
} Row;

/* The tokens that are about as likely. */
typedef struct {
    double weight;
    int64_t count;
} Bucket;

/* A token, and the bits of its `below`, which are in the order of the numbers. */
typedef struct {
    uint32_t below;
    int32_t token;
} Item;

/* A row's tokens on the way to an order; one bucket is open: its items are in order. */
typedef struct {
    const Row *row;
    Bucket buckets[BUCKETS];
    int64_t open; /* -1: none */
    Item *room;   /* for the items, twice */
    Item *items;
} Order;

/* What the likeliest tokens are together. */
typedef struct {
    int64_t tokens;
    double mass;
    int64_t last; /* one of them: the last where it is in an open bucket */
} Prefix;

/* Where a prefix ends: so many tokens; no token begins at this mass or later; no weight is less than `least`. */
typedef struct {
    int64_t tokens;
    double mass;
    float least;
} Limits;

/* The likeliest token always belongs to it. */
static int complete(const Prefix *p, const Limits *most)
{
    return p->tokens > 0 && (p->tokens >= most->tokens || p->mass >= most->mass);
}

/* The items by `below`, equals in the order they had: radix sort, a byte at a time, between two arrays. */
static Item *sorted(Item *items, Item *spare, int64_t count)
{
    for (int shift = 0; shift < 32; shift += 8) {
        int64_t ends[257] = {0};
        for (int64_t i = 0; i < count; i++)
            ends[(items[i].below >> shift & 255) + 1]++;
        if (ends[(items[0].below >> shift & 255) + 1] == count)
            continue;
        for (int digit = 0; digit < 256; digit++)
            ends[digit + 1] += ends[digit];
        for (int64_t i = 0; i < count; i++)
            spare[ends[items[i].below >> shift & 255]++] = items[i];
        Item *other = items;
        items = spare, spare = other;
    }
    return items;
}

static float number(const Row *row, int64_t at)
{
    if (row->kind == 0)
        return ((const float *)row->logits)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)row->logits)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t mixed(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* engine/worker/sampler.py's number, strictly between 0 and 1. */
static double uniform(const struct choice *c)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t state = mixed((uint64_t)c->seed + golden);
    state = mixed(state + (uint64_t)c->choice * golden);
    state = mixed(state + (uint64_t)c->position * golden);
    return ((double)(state >> 12) + 0.5) * 0x1p-52;
}

#define SUBJECT "sample.inc"
#include "each_level.h"

typedef int64_t argmax_row(const void *, int64_t);

static argmax_row *const argmax_f32[LEVELS] = ALL_LEVELS(argmax_f32);
static argmax_row *const argmax_bf16[LEVELS] = ALL_LEVELS(argmax_bf16);

int64_t argmax_of(const void *x, int64_t n, int kind)
{
    return (kind == F32 ? argmax_f32 : argmax_bf16)[charonia_level()](x, n);
}

/* What minus infinity is, as an integer of the logits' width. */
#define FORBID(type, x, n, allowed, lowest)                                                                    \
    for (int64_t at = 0; at < (n); at += WORD) {                                                               \
        const uint32_t bits = (allowed)[at / WORD];                                                            \
        type *here = (type *)(x) + at;                                                                         \
        const int64_t end = (n) - at < WORD ? (n) - at : WORD;                                                 \
        if (bits == 0 && end == WORD)                                                                          \
            for (int i = 0; i < WORD; i++)                                                                     \
                here[i] = (lowest);                                                                            \
        else if (bits != UINT32_MAX)                                                                           \
            for (int64_t i = 0; i < end; i++)                                                                  \
                here[i] = bits >> i & 1 ? here[i] : (lowest);                                                  \
    }

void forbid_tokens(void *logits, int64_t n, int kind, const uint32_t *allowed)
{
    if (kind == F32) {
        FORBID(uint32_t, logits, n, allowed, 0xff800000u)
    } else {
        FORBID(uint16_t, logits, n, allowed, 0xff80u)
    }
}

int64_t allowed_token(int64_t token, int64_t n, const uint32_t *allowed)
{
    if (allowed[token / WORD] >> token % WORD & 1)
        return token;
    for (int64_t each = 0; each < n; each++)
        if (allowed[each / WORD] >> each % WORD & 1)
            return each;
    return token;
}

typedef int64_t draw(const Row *, const struct choice *);

static draw *const plain[LEVELS] = ALL_LEVELS(plain);
static draw *const filtered[LEVELS] = ALL_LEVELS(filtered);

int64_t sample_token(const void *logits, int64_t n, int kind, const struct choice *c)
{
    Row row = {logits, n, kind, argmax_of(logits, n, kind), 0, LOG2E / c->temperature};
    if (c->temperature < GREEDY_BELOW || c->top_k == 1)
        return row.likeliest;
    row.top = number(&row, row.likeliest);
    if (row.scale < FLT_MIN)
        row.scale = FLT_MIN; /* of an infinite temperature; what is impossible remains so */
    const int filters = c->top_k > 0 || c->top_p < 1 || c->min_p > 0;
    return (filters ? filtered : plain)[charonia_level()](&row, c);
}

/* Runs the rest for each `row`, whose n logits begin at `x`. */
#define FOR_LOGITS(...)                                                                                        \
    do {                                                                                                       \
        const int threads = rows < 2 || rows * n < WORTH_THREADS ? 1 : omp_get_max_threads();                  \
        PARALLEL_REGION(threads, FOR_ROWS(team, rows, rows * n, {                                              \
                     char *x = (char *)logits + row * stride * KIND_BYTES(kind);                               \
                     __VA_ARGS__;                                                                              \
                 }));                                                                                          \
    } while (0)

/* out [rows] = the index of the first largest of the n numbers of each row, rows `stride` elements apart. */
EXPORT void charonia_argmax(const void *logits, int64_t *out, int64_t rows, int64_t stride, int64_t n, int kind)
{
    FOR_LOGITS(out[row] = argmax_of(x, n, kind));
}

/* forbid_tokens() for each row, by masks [rows, words]. */
EXPORT void charonia_forbid_tokens(void *logits, const uint32_t *masks, int64_t rows, int64_t stride, int64_t n,
                                   int64_t words, int kind)
{
    FOR_LOGITS(forbid_tokens(x, n, kind, masks + row * words));
}

/* out [rows] = a token of each row, as choices [rows] say. */
EXPORT void charonia_sample(const void *logits, const struct choice *choices, int64_t *out, int64_t rows, int64_t stride,
                            int64_t n, int kind)
{
    FOR_LOGITS(out[row] = sample_token(x, n, kind, choices + row));
}

typedef double survey(const Row *, int64_t, int64_t, float, int64_t *);

static survey *const surveys[LEVELS] = ALL_LEVELS(survey);

/* normalisers [rows] = the logarithm of the sum of the exponentials of each row's n logits, float32; ranks [rows] = how
   many tokens are likelier than the row's token, and 1. A row's are the same whatever rows are beside it. */
EXPORT void charonia_rank_tokens(const float *logits, const int64_t *tokens, double *normalisers, int64_t *ranks,
                                 int64_t rows, int64_t stride, int64_t n)
{
    const int kind = F32;
    FOR_LOGITS({
        const float *own = (const float *)x;
        Row whole = {own, n, kind, argmax_of(own, n, kind), 0, LOG2E};
        whole.top = number(&whole, whole.likeliest);
        ranks[row] = 1;
        const double total = surveys[charonia_level()](&whole, 0, n, own[tokens[row]], ranks + row);
        normalisers[row] = whole.top + log(total);
    });
}

#define CHOICE_TEXT(type, name) #type " " #name ";"

/* The fields of `struct choice` as text: Python compares them with its own when it opens the library. */
EXPORT const char *charonia_choice_fields(void) { return CHOICE_FIELDS(CHOICE_TEXT); }

/* out [rows] = the number between 0 and 1 that each row chooses by. */
EXPORT void charonia_uniform(const struct choice *choices, double *out, int64_t rows)
{
    for (int64_t row = 0; row < rows; row++)
        out[row] = uniform(choices + row);
}
