/* Paged attention: how keys and values are stored, and the pieces that a call is divided into.

   Keys and values stand in tiles of TILE tokens of one head, made for products with many queries at once:
     keys    [head_dim / 2][TILE][2]    16 tokens of two neighbouring dimensions
     values  [TILE / 2][head_dim][2]    all dimensions of two neighbouring tokens
     scales  [2][TILE] float            int8 only: what a token's keys and values are multiplied with
   float32 is [head_dim][TILE] and [TILE][head_dim]. A block is [tiles in it][kv_heads] tiles.
   Where all heads attend to latents, and values are the first numbers of keys, tiles lie as values do, [head_dim] long,
   and serve both products; scales are of the values, and of what keys have behind them. A block has a tile for all heads.

   A context is cut into splits of SPLIT tokens, counted from the sequence's beginning. Each split's part of the sum is
   made by itself and the parts are folded in order: so a token's result depends on its position alone. */
#ifndef CHARONIA_ATTENTION_H
#define CHARONIA_ATTENTION_H

#include <stdint.h>

#include "parallel_region.h"

enum { TILE = 16, SPLIT = 256, TILES = SPLIT / TILE };

/* Bytes of a line of 16 pairs; from one line of keys to the next, from one pair of tokens' values to the next; where in
   a tile its values and its scales begin, and how long it is. `latent`: 0, or of how many numbers values are. */
#define LINE(stored) ((stored) == S8 ? 2 * TILE : 4 * TILE)
#define KEY_STEP(stored) ((stored) == F32 ? 8 * TILE : LINE(stored))
#define VALUE_STEP(stored, head_dim) ((head_dim)*2 * KIND_BYTES(stored))
#define KEY_BYTES(stored, head_dim) ((head_dim)*TILE * KIND_BYTES(stored))
#define VALUES_AT(stored, head_dim, latent) ((latent) ? 0 : KEY_BYTES(stored, head_dim))
#define SCALES_AT(stored, head_dim, latent) (KEY_BYTES(stored, head_dim) + VALUES_AT(stored, head_dim, latent))
#define TILE_BYTES(stored, head_dim, latent) (SCALES_AT(stored, head_dim, latent) + ((stored) == S8 ? 2 * TILE * 4 : 0))

/* Floats of queries that one piece of work may hold on its stack, twice. */
enum { MOST_QUERIES = 16384, MOST_HEAD = 576 };

/* The parameters of layers that attend alike; attention.py has the same fields. `window` 0: all; `cap` 0: none. `latent`
   0: keys and values are apart; else `kv_heads` are the parts that query heads are divided into. `spans` 0: a token sees
   nothing behind itself; else up to the step's `ends`. `block_bytes`: from one block of a layer to the next. `distances`
   0: none; else the scores of keys so far back have additions of their own, all farther ones that of the last. */
struct attention_params {
    int64_t heads, kv_heads, head_dim, block_size, window;
    int64_t kind, stored; /* of queries and what comes out; of the cache: F32, BF16 or S8 */
    int64_t latent, spans, block_bytes, distances;
    float scale, cap;
};

static inline int64_t value_size(const struct attention_params *m) { return m->latent ? m->latent : m->head_dim; }

/* One step: `rows` sequences. The rth has `counts` tokens from position `starts` on, packed from firsts[r] on, and its
   blocks are tables[lines[r]], a line `width` long; those of the next group of layers follow `group_width` behind. The
   lines of `cos_sin` that rotate its tokens begin with angles[r]. `ends`: by packed token, the position of the first one
   behind it that it does not see, or none: where none sees any. */
struct step {
    int64_t rows, width, group_width;
    const int32_t *lines, *starts, *counts, *angles, *ends;
    const int64_t *firsts, *tables;
};

/* The position behind the last one that a token of a row sees, whose tokens are packed from `first` on. */
static inline int64_t sees_to(const struct attention_params *m, const struct step *s, int64_t row, int64_t first,
                              int64_t token)
{
    return m->spans && s->ends ? s->ends[first + token] : s->starts[row] + token + 1;
}

/* The same of neighbouring tokens, up to `end`. */
static inline int64_t all_see_to(const struct attention_params *m, const struct step *s, int64_t row, int64_t first,
                                 int64_t token, int64_t end)
{
    int64_t to = sees_to(m, s, row, first, end - 1);
    for (; m->spans && s->ends && token < end - 1; token++) {
        int64_t own = sees_to(m, s, row, first, token);
        to = own > to ? own : to;
    }
    return to;
}

/* One layer's part of a step. Without `keys` nothing is written. Strides in elements between tokens; `cos_sin` [lines,
   2, rotary_dim / 2] for the first `rotary_dim` numbers of a head, of latents those behind values, or none; `sinks` [heads]
   or none: for each query head the score of a token that it always sees, whose value is 0; of layers with distances the
   additions to scores instead, [heads, distances]; `group`: the layer's. */
struct attention_call {
    const void *queries, *keys, *values;
    int64_t query_stride, key_stride, value_stride;
    const float *cos_sin, *sinks;
    char *cache;
    void *out;
    int64_t rotary_dim, group;
};

/* Neighbouring tokens of a row, from `token` of it: those that share a tile to be written, or queries of one head that
   go together through the splits from `from` to `to`. `part` >= 0: they leave one partial sum a split in the scratch
   memory from there on, [split][query][value_size + 2]. */
struct attention_piece {
    int32_t row, token, tokens, head, from, to;
    int64_t part;
};

/* The part of one split that neighbouring queries see: its tiles from `first` up to `last`. */
struct span {
    const char *tiles[TILES];
    int64_t head_dim, latent, value_size;
    int first, last, stored, fresh; /* fresh: no query read them before, they come from memory */
};

/* scores[r][SPLIT] = queries [r][stride] times the span's keys; part[r][value_size] = weights [r][stride] times values. */
typedef void product(const struct span *, const float *, int64_t, float *);

struct attention_plan {
    int64_t writes, works, folds, scratch, cost;
    struct attention_piece *to_write, *to_work, *to_fold;
};

/* With less work, threads would cost more than they give. */
enum { WORTH_ATTENDING = 100000 };

/* Fills `plan`, whose arrays have `room` for so many pieces each, for layers with these parameters. Returns the room that
   the plan takes: if that is more, only its `scratch` is valid. */
int64_t charonia_attention_plan(const struct attention_params *, const struct step *, struct attention_plan *,
                                int64_t room);

/* One layer of a step that `plan` was made for, with plan->scratch floats of memory for it. */
void attend_in_team(Team *, const struct attention_params *, const struct step *, const struct attention_plan *,
                    const struct attention_call *, float *scratch);

#endif
