/* Normalisation, gating and rotation over many rows. Each row by itself: no result depends on another row. */
#include "elementwise.h"

enum activation { SILU, GELU };

#define SUBJECT "elementwise.inc"
#include "each_level.h"
#include "rows.h"

typedef void norm_row(void *, const void *, const float *, void *, long, float, int);
typedef void gate_row(const void *, void *, long, int, int);
typedef void turn_row(const void *, const float *, void *, long, int);

static norm_row *const norms[LEVELS] = ALL_LEVELS(norm);
static gate_row *const gates[LEVELS] = ALL_LEVELS(gate);
static turn_row *const turn_rows[LEVELS] = ALL_LEVELS(turn);

static char *place(const void *base, int64_t element, int kind) { return (char *)base + element * KIND_BYTES(kind); }

EXPORT void charonia_norm(void *x, const void *delta, const float *weight, void *out, int64_t rows, int64_t heads,
                          int64_t stride, int64_t out_stride, int64_t weights, int64_t n, float eps, int kind)
{
    norm_row *norm = norms[charonia_level()];
    FOR_ROWS(rows, rows * heads * n, for (int64_t h = 0; h < heads; h++) {
        int64_t from = row * stride + h * n;
        norm(place(x, from, kind), delta ? place(delta, from, kind) : 0, weight + h % weights * n,
             place(out, row * out_stride + h * n, kind), n, eps, kind);
    });
}

EXPORT void charonia_gate(const void *x, void *out, int64_t rows, int64_t n, int activation, int kind)
{
    gate_row *gate = gates[charonia_level()];
    FOR_ROWS(rows, 2 * rows * n,
             gate(place(x, 2 * row * n, kind), place(out, row * n, kind), n, activation, kind));
}

EXPORT void charonia_turn(const void *x, const float *turns, void *out, int64_t rows, int64_t heads, int64_t stride,
                          int64_t half, int kind)
{
    turn_row *turn = turn_rows[charonia_level()];
    FOR_ROWS(rows, 2 * rows * heads * half, for (int64_t h = 0; h < heads; h++)
        turn(place(x, row * stride + h * 2 * half, kind), turns + row * 2 * half,
             place(out, (row * heads + h) * 2 * half, kind), half, kind));
}
