/* Normalisation, gating, rotation and embedding over many rows. Each row by itself: no result depends on another row. */
#include "elementwise.h"
#include "gguf_blocks.h"

#include <math.h>

enum activation {
    SILU, GELU, ERF_GELU, QUICK_GELU, CLAMPED_SWIGLU, SQUARED_RELU, UNGATED_SILU, UNGATED_GELU, UNGATED_ERF_GELU, UNGATED_RELU
};

/* Whether rows have gate and up, or one of them alone. */
#define GATED(activation) ((activation) < SQUARED_RELU)
#define CLAMP 7.0f /* of CLAMPED_SWIGLU */

#define SUBJECT "elementwise.inc"
#include "each_level.h"

typedef void norm_row(void *, const void *, const float *, const float *, void *, long, float, int);
typedef void gate_row(const void *, void *, long, int, int);
typedef void rope_row(const void *, const float *, void *, long, int);
typedef void scale_row(const void *, void *, long, float, int);
typedef void soft_cap_row(void *, long, float, int);
typedef void add_row(void *, const void *, long, int);
typedef void gate_row_by(void *, long, float, int);
typedef void widen_row(const void *, float *, long);

typedef void gate_head(const HeadGate *, const void *, const void *, const float *, void *);

static norm_row *const norms[LEVELS] = ALL_LEVELS(norm);
static gate_row *const gates[LEVELS] = ALL_LEVELS(gate);
static gate_head *const head_gates[LEVELS] = ALL_LEVELS(gate_head);
static rope_row *const rope_rows[LEVELS] = ALL_LEVELS(rope);
static scale_row *const scales[LEVELS] = ALL_LEVELS(scale);
static soft_cap_row *const soft_caps[LEVELS] = ALL_LEVELS(soft_cap);
static add_row *const adds[LEVELS] = ALL_LEVELS(add);
static gate_row_by *const row_gates[LEVELS] = ALL_LEVELS(gate_by);
static widen_row *const widens[LEVELS] = ALL_LEVELS(widen);

static char *place(const void *base, int64_t element, int kind) { return (char *)base + element * KIND_BYTES(kind); }

static int threads_for(int64_t elements) { return elements < WORTH_THREADS ? 1 : omp_get_max_threads(); }

void norm_in_team(Team *team, const Norm *o)
{
    norm_row *norm = norms[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->heads * o->n, for (int64_t h = 0; h < o->heads; h++) {
        const int64_t at = row * o->stride + h * o->n;
        norm(place(o->x, at, o->kind), o->delta ? place(o->delta, at, o->kind) : 0, o->weight + h % o->weights * o->n,
             o->centred ? o->weight + (o->weights + h % o->weights) * o->n : 0, place(o->out, at, o->kind), o->n, o->eps,
             o->kind);
    });
}

void gate_in_team(Team *team, const Gate *o)
{
    gate_row *gate = gates[charonia_level()];
    const int64_t width = GATED(o->activation) ? 2 * o->n : o->n;
    FOR_ROWS(team, o->rows, o->rows * width,
             gate(place(o->x, row * width, o->kind), place(o->out, row * o->n, o->kind), o->n, o->activation, o->kind));
}

void gate_heads_in_team(Team *team, const HeadGateCall *o)
{
    gate_head *gate = head_gates[charonia_level()];
    const HeadGate *l = o->layer;
    FOR_ROWS(team, o->rows, o->rows * l->heads * l->n, for (int64_t h = 0; h < l->heads; h++) {
        const int64_t at = (row * l->heads + h) * l->n;
        gate(l, place(o->x, at, l->kind), place(o->gates, row * o->gates_stride + l->column + h * l->n, l->kind),
             l->weight ? l->weight + h % l->weights * l->n : 0, place(o->out, at, l->kind));
    });
}

void scale_in_team(Team *team, const Scaling *o)
{
    scale_row *scale = scales[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n, {
        char *x = place(o->x, row * o->n, o->kind);
        scale(x, x, o->n, o->factor, o->kind);
    });
}

void soft_cap_in_team(Team *team, const Scaling *o)
{
    soft_cap_row *soft_cap = soft_caps[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n, soft_cap(place(o->x, row * o->n, o->kind), o->n, o->factor, o->kind));
}

void add_in_team(Team *team, const Addition *o)
{
    add_row *add = adds[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n,
             add(place(o->x, row * o->n, o->kind), place(o->delta, row * o->n, o->kind), o->n, o->kind));
}

void add_to_rows_in_team(Team *team, const RowAddition *o)
{
    add_row *add = adds[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n,
             add(place(o->x, o->places[row] * o->n, o->kind), place(o->delta, row * o->n, o->kind), o->n, o->kind));
}

void gate_rows_in_team(Team *team, const RowGate *o)
{
    gate_row_by *gate = row_gates[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n,
             gate(place(o->x, row * o->n, o->kind), o->n, 1.0f / (1.0f + expf(-o->gates[row])), o->kind));
}

void widen_in_team(Team *team, const Widening *o)
{
    widen_row *widen = widens[charonia_level()];
    FOR_ROWS(team, o->rows, o->rows * o->n, widen(place(o->x, row * o->n, BF16), o->out + row * o->n, o->n));
}

void embed_rows(const Embedding *o)
{
    scale_row *scale = scales[charonia_level()];
    for (int64_t row = 0; row < o->rows; row++) {
        char *out = place(o->out, row * o->n, o->kind);
        const char *from = out;
        if (o->block_type == 0) {
            from = place(o->table, o->ids[row] * o->n, o->kind);
        } else {
            const int type = o->block_type - 1;
            const uint8_t *blocks = (const uint8_t *)o->table + o->ids[row] * gguf_row_bytes(type, o->n);
            decode_gguf_row(type, blocks, o->n, out, o->kind);
        }
        scale(from, out, o->n, o->factor, o->kind);
    }
}

EXPORT void charonia_norm(void *x, const void *delta, const float *weight, void *out, int64_t rows, int64_t heads,
                          int64_t stride, int64_t weights, int64_t n, float eps, int kind, int centred)
{
    const Norm norm = {x, delta, weight, out, rows, heads, stride, weights, n, eps, kind, centred};
    PARALLEL_REGION(threads_for(rows * heads * n), norm_in_team(team, &norm));
}

EXPORT void charonia_gate(const void *x, void *out, int64_t rows, int64_t n, int activation, int kind)
{
    const Gate gate = {x, out, rows, n, activation, kind};
    PARALLEL_REGION(threads_for(2 * rows * n), gate_in_team(team, &gate));
}

EXPORT void charonia_soft_cap(void *x, int64_t rows, int64_t n, float cap, int kind)
{
    const Scaling capping = {x, rows, n, cap, kind};
    PARALLEL_REGION(threads_for(rows * n), soft_cap_in_team(team, &capping));
}

EXPORT void charonia_gate_heads(const HeadGate *layer, const void *x, const void *gates, int64_t gates_stride, void *out,
                                int64_t rows)
{
    const HeadGateCall call = {layer, x, gates, rows, gates_stride, out};
    PARALLEL_REGION(threads_for(rows * layer->heads * layer->n), gate_heads_in_team(team, &call));
}

EXPORT void charonia_gate_rows(void *x, const float *gates, int64_t rows, int64_t n, int kind)
{
    const RowGate gate = {x, gates, rows, n, kind};
    PARALLEL_REGION(threads_for(rows * n), gate_rows_in_team(team, &gate));
}

/* out [rows, heads, 2 * half] = x (rows `stride` elements apart), turned by cosines and sines [rows, 2, half]. */
EXPORT void charonia_rope(const void *x, const float *cos_sin, void *out, int64_t rows, int64_t heads, int64_t stride,
                          int64_t half, int kind)
{
    rope_row *rope = rope_rows[charonia_level()];
    PARALLEL_REGION(threads_for(2 * rows * heads * half),
             FOR_ROWS(team, rows, 2 * rows * heads * half, for (int64_t h = 0; h < heads; h++)
                 rope(place(x, row * stride + h * 2 * half, kind), cos_sin + row * 2 * half,
                      place(out, (row * heads + h) * 2 * half, kind), half, kind)));
}
