/* Adapters' products over the rows of a step, sorted by adapter: which thread computes which rows and matrices. */
#include "lora.h"

enum { LORA_ROWS = 3, LORA_LINES = 4 }; /* of a tile: their sums fit sixteen registers, with what they are made from */

/* Rows that go through all of an adapter's matrices together: they stay in the second cache. */
enum { BLOCK_ROWS = 4 * LORA_ROWS };

/* Shrinking: `count` of LORA_LINES lines `a` of `n` numbers. Expanding: a panel a[0] of rank `n`, and `count` outputs. */
typedef struct {
    const char *x[LORA_ROWS], *a[LORA_LINES];
    float *shrunk[LORA_ROWS];
    char *out[LORA_ROWS];
    int64_t n;
    float scale;
    int count;
} LoraTile;

#define SUBJECT "lora.inc"
#include "each_level.h"

typedef void LoraKernel(const LoraTile *, int rows, int kind);
static LoraKernel *const shrinks[LEVELS] = ALL_LEVELS(shrink), *const expands[LEVELS] = ALL_LEVELS(expand);

/* Some lines, or panels, of one matrix, for the rows of a block. */
typedef struct {
    const LoraCall *call;
    const LoraPart *part;
    const int64_t *places;
    int64_t count, line; /* rows; lines before the matrix's */
} LoraWork;

typedef void LoraPiece(const LoraWork *, int64_t piece);

static int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

static void shrink_piece(const LoraWork *w, int64_t piece)
{
    const LoraCall *c = w->call;
    const int64_t bytes = KIND_BYTES(c->kind), first = piece * LORA_LINES, left = w->part->rank - first;
    LoraTile t = {.n = c->inputs, .scale = w->part->scale, .count = left < LORA_LINES ? (int)left : LORA_LINES};
    for (int j = 0; j < LORA_LINES; j++) /* of lines that are missing the last one's sum is computed again */
        t.a[j] = (const char *)w->part->a + (first + (j < t.count ? j : t.count - 1)) * c->inputs * bytes;
    for (int64_t row = 0; row < w->count; row += LORA_ROWS) {
        const int rows = w->count - row < LORA_ROWS ? (int)(w->count - row) : LORA_ROWS;
        for (int i = 0; i < rows; i++) {
            t.x[i] = (const char *)c->x + w->places[row + i] * c->x_stride * bytes;
            t.shrunk[i] = c->shrunk + w->places[row + i] * c->lines + w->line + first;
        }
        shrinks[charonia_level()](&t, rows, c->kind);
    }
}

static void expand_piece(const LoraWork *w, int64_t piece)
{
    const LoraCall *c = w->call;
    const int64_t bytes = KIND_BYTES(c->kind), first = piece * PANEL, left = w->part->outputs - first;
    LoraTile t = {.n = w->part->rank, .count = left < PANEL ? (int)left : PANEL};
    t.a[0] = (const char *)w->part->b + first * w->part->rank * bytes;
    for (int64_t row = 0; row < w->count; row += LORA_ROWS) {
        const int rows = w->count - row < LORA_ROWS ? (int)(w->count - row) : LORA_ROWS;
        for (int i = 0; i < rows; i++) {
            t.shrunk[i] = c->shrunk + w->places[row + i] * c->lines + w->line;
            t.out[i] = (char *)c->out + (w->places[row + i] * c->out_stride + w->part->first + first) * bytes;
        }
        expands[charonia_level()](&t, rows, c->kind);
    }
}

/* Runs `compute` for the pieces from `from` to `to`, of all there are: by adapter, block of rows, matrix. Each matrix has
   pieces of `size` lines, or outputs. Returns how many there are. */
static int64_t for_pieces(const LoraCall *c, int shrinking, int64_t from, int64_t to, LoraPiece *compute)
{
    int64_t passed = 0;
    for (int64_t s = 0; s < c->rows->count; s++) {
        const LoraMatrices *m = c->rows->adapters[s] + c->number;
        for (int64_t row = c->rows->begins[s]; row < c->rows->begins[s + 1] && passed < to; row += BLOCK_ROWS) {
            const int64_t left = c->rows->begins[s + 1] - row;
            LoraWork w = {c, m->parts, c->rows->places + row, left < BLOCK_ROWS ? left : BLOCK_ROWS, 0};
            for (; w.part < m->parts + m->count; w.line += w.part++->rank) {
                const int64_t pieces = shrinking ? pieces_of(w.part->rank, LORA_LINES) : pieces_of(w.part->outputs, PANEL);
                const int64_t first = from > passed ? from - passed : 0, last = to - passed < pieces ? to - passed : pieces;
                for (int64_t piece = first; compute && piece < last; piece++)
                    compute(&w, piece);
                passed += pieces;
            }
        }
    }
    return passed;
}

static void share_pieces(Team *team, const LoraCall *c, int shrinking)
{
    const int64_t all = for_pieces(c, shrinking, 0, INT64_MAX, 0);
    const int64_t from = share_begin(all, team, team->me), to = share_begin(all, team, team->me + 1);
    for_pieces(c, shrinking, from, to, shrinking ? shrink_piece : expand_piece);
}

void lora_shrink_in_team(Team *team, const LoraCall *c) { share_pieces(team, c, 1); }

void lora_expand_in_team(Team *team, const LoraCall *c) { share_pieces(team, c, 0); }

EXPORT void charonia_lora(int64_t count, const LoraMatrices *const *adapters, const int64_t *begins,
                          const int64_t *places, int64_t number, const void *x, float *shrunk, void *out,
                          int64_t x_stride, int64_t inputs, int64_t lines, int64_t out_stride, int kind)
{
    const LoraRows rows = {count, adapters, begins, places};
    const LoraCall call = {&rows, number, x, x_stride, inputs, shrunk, lines, out, out_stride, kind};
    PARALLEL_REGION(begins[count] * inputs < WORTH_THREADS ? 1 : omp_get_max_threads(), {
        lora_shrink_in_team(team, &call);
        barrier(team);
        lora_expand_in_team(team, &call);
    });
}
