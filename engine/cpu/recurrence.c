/* Recurrences over matrices of a step's rows: threads share rows, heads and, where there are few of these, columns. */
#include <math.h>

#include "recurrent.h"

/* Vectors of the columns that go through tokens together, and tokens of which all is known beforehand. */
enum { STATE_VECTORS = 4, STATE_TOKENS = 32 };

/* Of a matrix that one token goes through: rows that are read together, and the most columns. */
enum { STREAMED_ROWS = 16, MOST_STATE_VALUE = 512 };

#define SUBJECT "recurrence.inc"
#include "each_level.h"

/* Columns of the narrowest piece: a block of the widest vectors. */
enum { LEAST_COLUMNS = 64 };

/* Pieces for each thread that there should be, if the heads have so many columns. */
enum { PIECES_A_THREAD = 8 };

typedef void recur_piece(const RecurrenceCall *, int64_t row, int64_t head, int64_t from, int64_t to);

static recur_piece *const recur_pieces[LEVELS] = ALL_LEVELS(recur);

void recur_in_team(Team *team, const RecurrenceCall *c)
{
    recur_piece *recur = recur_pieces[charonia_level()];
    const Recurrence *l = c->layer;
    const int64_t pairs = c->step->rows * l->heads, blocks = (l->value_size + LEAST_COLUMNS - 1) / LEAST_COLUMNS;
    const int64_t parts = pairs < PIECES_A_THREAD * team->all ? blocks : 1;
    FOR_CLAIMED(team, pairs * parts, {
        const int64_t pair = piece / parts, from = piece % parts * LEAST_COLUMNS;
        const int64_t to = parts == 1 || from + LEAST_COLUMNS > l->value_size ? l->value_size : from + LEAST_COLUMNS;
        recur(c, pair / l->heads, pair % l->heads, from, to);
    });
}

EXPORT void charonia_recur(const Recurrence *layer, const struct step *step, const StateMoves *moves, const void *x,
                           int64_t x_stride, const void *gates, int64_t gates_stride, float *states, void *out)
{
    const RecurrenceCall call = {layer, step, moves, x, gates, x_stride, gates_stride, states, out};
    const int64_t tokens = step->rows ? step->firsts[step->rows - 1] + step->counts[step->rows - 1] : 0;
    PARALLEL_REGION(tokens * layer->heads * layer->key_size * layer->value_size < WORTH_THREADS ? 1 : omp_get_max_threads(),
                    recur_in_team(team, &call));
}
