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

typedef void scan_piece(const ChannelScanCall *, int64_t row, int64_t from, int64_t to);

static scan_piece *const scan_pieces[LEVELS] = ALL_LEVELS(scan_channels);

void scan_channels_in_team(Team *team, const ChannelScanCall *c)
{
    scan_piece *scan = scan_pieces[charonia_level()];
    const int64_t channels = c->layer->channels, parts = (channels + LEAST_COLUMNS - 1) / LEAST_COLUMNS;
    FOR_CLAIMED(team, c->step->rows * parts, {
        const int64_t from = piece % parts * LEAST_COLUMNS, left = channels - from;
        scan(c, piece / parts, from, left < LEAST_COLUMNS ? channels : from + LEAST_COLUMNS);
    });
}

EXPORT void charonia_scan_channels(const ChannelScan *layer, const struct step *step, const StateMoves *moves, const void *x,
                                   int64_t x_stride, const void *pairs, int64_t pairs_stride, const void *steps,
                                   int64_t steps_stride, float *states, void *out)
{
    const ChannelScanCall call = {layer, step, moves, x, pairs, steps, x_stride, pairs_stride, steps_stride, states, out};
    const int64_t tokens = step->rows ? step->firsts[step->rows - 1] + step->counts[step->rows - 1] : 0;
    PARALLEL_REGION(tokens * layer->size * layer->channels < WORTH_THREADS ? 1 : omp_get_max_threads(),
                    scan_channels_in_team(team, &call));
}

EXPORT void charonia_recur(const Recurrence *layer, const struct step *step, const StateMoves *moves, const void *x,
                           int64_t x_stride, const void *gates, int64_t gates_stride, float *states, void *out)
{
    const RecurrenceCall call = {layer, step, moves, x, gates, x_stride, gates_stride, states, out};
    const int64_t tokens = step->rows ? step->firsts[step->rows - 1] + step->counts[step->rows - 1] : 0;
    PARALLEL_REGION(tokens * layer->heads * layer->key_size * layer->value_size < WORTH_THREADS ? 1 : omp_get_max_threads(),
                    recur_in_team(team, &call));
}
