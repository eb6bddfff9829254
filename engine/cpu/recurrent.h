/* Layers that keep a state of a sequence instead of its keys and values: a causal convolution with the window of its last
   inputs, and a recurrence over a matrix. recurrent.py has the same structures, and says how states lie.

   A sequence goes token by token, and each number of a state has one order of sums: a result depends on the sequence
   alone, not on what shares the step, on threads, or on where the sequence is cut into steps. */
#ifndef CHARONIA_RECURRENT_H
#define CHARONIA_RECURRENT_H

#include "attention.h"

/* Slots of the states of a step's rows. Row r reads sources[r], -1: zeros, and ends in the slot of its line. Its saves are
   those from save_begins[r] up to save_begins[r + 1]: the state after so many of its tokens, ascending, goes into a slot. */
typedef struct {
    const int32_t *sources;
    const int64_t *save_begins;
    const int32_t *save_counts, *save_slots;
} StateMoves;

/* Numbers of a key that a thread holds on its stack. */
enum { MOST_STATE_KEY = 256 };

/* A depthwise convolution over time: out [channels] = sum over j of weight[j] * input of kernel - 1 - j tokens ago, + bias,
   activated. Numbers of a line of x by the column of their first: inputs, and what they or the results are multiplied
   with, -1 for nothing (LFM2's gates). Weight [kernel][channels], bias [channels] or none. */
typedef struct {
    int64_t channels, kernel, inputs, input_gates, output_gates;
    const float *weight, *bias;
    int32_t activated, kind; /* by SiLU; of x, windows and results */
} Convolution;

/* One layer of a step; windows [slots][kernel - 1][channels], oldest first. */
typedef struct {
    const Convolution *layer;
    const struct step *step;
    const StateMoves *moves;
    const void *x;
    int64_t x_stride;
    void *windows, *out;
} ConvolutionCall;

enum recurrence_rule { DELTA_RULE, SELECTIVE_SCAN };

/* For each head a matrix S [key_size][value_size], for each token a query, key and value; query and key heads serve
   heads / key_heads heads each. With dt = softplus(its gate + bias) and decay = exp(rate * dt):
     DELTA_RULE      q and k of length 1, q times `scale`; S *= decay; S += k (sigmoid(beta) (v - k^T S)); out = q^T S
                     (arXiv 2412.06464)
     SELECTIVE_SCAN  dt bounded; S *= decay; S += k (dt v); out = q^T S + skip v (arXiv 2405.21060: q is C, k B, v x)
   Numbers of a line of x, or of gates, by the column of their first. */
typedef struct {
    int64_t heads, key_heads, key_size, value_size, queries, keys, values, decay_gates, betas;
    const float *rates, *bias, *skip; /* [heads]; skip: of SELECTIVE_SCAN, or none */
    float scale, least, most;         /* bounds of dt */
    int32_t rule, kind, gates_kind;   /* kind: of x and results */
} Recurrence;

/* One layer of a step; states [slots][heads][key_size][value_size]. */
typedef struct {
    const Recurrence *layer;
    const struct step *step;
    const StateMoves *moves;
    const void *x, *gates;
    int64_t x_stride, gates_stride;
    float *states;
    void *out;
} RecurrenceCall;

/* Mamba's first selective scan (arXiv 2312.00752): for each channel `size` numbers S, each with a decay of its own. With
   dt = softplus(its step + bias): S = exp(rate dt) S + B dt x, and out = C S + skip x. Lines of `pairs` have B, and C
   behind it. */
typedef struct {
    int64_t channels, size;
    const float *rates, *bias, *skip; /* [size][channels], [channels] */
    int32_t kind;                     /* of all lines and results */
} ChannelScan;

/* One layer of a step; states [slots][size][channels]. */
typedef struct {
    const ChannelScan *layer;
    const struct step *step;
    const StateMoves *moves;
    const void *x, *pairs, *steps;
    int64_t x_stride, pairs_stride, steps_stride;
    float *states;
    void *out;
} ChannelScanCall;

void convolve_in_team(Team *, const ConvolutionCall *);
void recur_in_team(Team *, const RecurrenceCall *);
void scan_channels_in_team(Team *, const ChannelScanCall *);

#endif
