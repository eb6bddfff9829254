/* Causal convolutions of a step's rows: threads share rows and channels. */
#include "recurrent.h"

/* Tokens whose inputs are fetched before they are wanted. */
enum { TOKENS_AHEAD = 4 };

#define SUBJECT "convolution.inc"
#include "each_level.h"

/* Channels of a piece: their inputs of a few tokens stay in the first cache. */
enum { CONVOLVED = 256 };

typedef void convolve_piece(const ConvolutionCall *, int64_t row, int64_t from, int64_t to);

static convolve_piece *const convolve_pieces[LEVELS] = ALL_LEVELS(convolve);

void convolve_in_team(Team *team, const ConvolutionCall *c)
{
    convolve_piece *convolve = convolve_pieces[charonia_level()];
    const int64_t channels = c->layer->channels, blocks = (channels + CONVOLVED - 1) / CONVOLVED;
    FOR_CLAIMED(team, c->step->rows * blocks, {
        const int64_t from = piece % blocks * CONVOLVED, to = from + CONVOLVED;
        convolve(c, piece / blocks, from, to < channels ? to : channels);
    });
}

EXPORT void charonia_convolve(const Convolution *layer, const struct step *step, const StateMoves *moves, const void *x,
                              int64_t x_stride, void *windows, void *out)
{
    const ConvolutionCall call = {layer, step, moves, x, x_stride, windows, out};
    const int64_t tokens = step->rows ? step->firsts[step->rows - 1] + step->counts[step->rows - 1] : 0;
    PARALLEL_REGION(tokens * layer->channels * layer->kernel < WORTH_THREADS ? 1 : omp_get_max_threads(),
                    convolve_in_team(team, &call));
}
