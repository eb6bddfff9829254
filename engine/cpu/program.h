/* A recorded decoder (op_trace.py), and one step that it is run for. program.py has the same fields. */
#ifndef CHARONIA_PROGRAM_H
#define CHARONIA_PROGRAM_H

#include "attention.h"
#include "experts.h"
#include "head_products.h"
#include "lora.h"
#include "matmul.h"
#include "recurrent.h"
#include "sample.h"
#include "thread_pool.h"

enum {
    NORM, GATE, PRODUCT, ATTENTION, EMBED, INPUT, SELECT, SAMPLE, LORA_SHRINK, LORA_EXPAND, KEEP, JOIN, CONVOLVE, RECUR,
    GATE_HEADS, SCALE, ADD, SOFT_CAP, EXPERTS, GATE_ROWS, WIDEN, FILL, HEADS, STACK, POSITIONS, CROSS,
    SCAN
};

/* One operation. `x`, `delta` and `out` are tensors by their offset: the memory of a tensor with offset s begins s bytes
   a token from the beginning, or s bytes a selected place. */
typedef struct {
    int64_t kind, x, delta, out, aside; /* delta, aside: -1 is none */
    const void *what;            /* a norm's weights, a product's Matrix, a table of embeddings or positions; SAMPLE: int32 ids to store in
                                    place of tokens, or null; ATTENTION: its sinks, or null; CONVOLVE, RECUR,
                                    GATE_HEADS: their Convolution, Recurrence, HeadGate, with lines of x `stride` long,
                                    and of delta, the gates, `size`; EXPERTS: their Mixture, whose scores are delta;
                                    HEADS: their HeadProducts, with the last line in delta; SCAN: its ChannelScan, with
                                    lines of x and delta, the steps, `size` long, and of aside, the pairs, `stride` */
    int64_t heads, stride, weights, size;
    int64_t layer, angles;       /* attention: the cache, and the table that rotates `size` numbers of each head, in lines
                                    `stride` long, of queries alone or of keys and values, too; of
                                    LORA_SHRINK and LORA_EXPAND the product's number, with `stride` lines; CONVOLVE,
                                    RECUR, SCAN: the layer's number among those with states; JOIN: the first of the `size`
                                    numbers of delta's lines, which are `stride` long; NORM: the number of a line at
                                    which its heads begin; STACK: which of the stacked rows are added to x;
                                    POSITIONS: the line of the table for position 0; CROSS: the cache; EMBED: the
                                    type of its table's blocks, 0 for numbers */
    const Matrix *next;          /* product: the matrix of the next product */
    float number;                /* a norm's eps; the factor of embeddings, and of SCALE, which changes x as ADD and
                                    GATE_ROWS do; what SOFT_CAP caps x at */
    int32_t dtype, activation;   /* NORM: 1 if it is centred, with biases behind its weights */
    int32_t selected;            /* whether its tensors are of selected places alone; SELECT: the one that comes out */
} Operation;

/* The same in every step. `token_bytes` and `selected_bytes`: memory of all tensors for each token and each selected
   place. `cos_sin`: by `angles`, the table of every position. */
typedef struct {
    const Operation *operations;
    int64_t token_bytes, selected_bytes;
    const float *const *cos_sin;
} Program;

/* One step. `step.firsts` is not read: it is computed. Memory begins at a cache line. */
typedef struct {
    struct step step;
    int32_t *token_ids;                           /* by line */
    int64_t token_ids_stride;
    const void *hidden_states;                    /* INPUT: the source of a program that does not embed token ids */
    const int64_t *logits_indices;                /* packed places that are selected, ascending */
    int64_t logits_count;
    int32_t *sampled;                             /* SAMPLE: [sampled_count] tokens, which are stored in token_ids, too */
    const int64_t *sampled_of;                    /* the selected place of each, ascending, or null: all places */
    const struct choice *sampling;                /* how each is sampled, or null: the likeliest */
    int64_t sampled_count;
    int64_t operation_count;                      /* operations to be computed */
    int64_t params_count;
    const struct attention_params *const *params; /* the different ones */
    const int64_t *params_of_layer;
    char *const *caches;                          /* by layer */
    const int64_t *group_of_layer;
    double *seconds;                              /* of each operation, or null */
    char *memory;                                 /* for tensors, shared by all steps of a program */
    int64_t memory_bytes;
    char *workspace;                              /* of this step alone */
    int64_t workspace_bytes;
    const int64_t *mask_of;                       /* the mask of each sampled token, -1 for none; or null: none has one */
    const uint32_t *masks;                        /* null until charonia_provide_masks() */
    LoraRows lora;                                /* the rows with adapters */
    StateMoves moves;
    char *const *windows;                         /* by layer with a state */
    float *const *matrices;
    int64_t filled_count;                         /* FILL: packed places that are no tokens, and their lines of x, in its dtype */
    const int64_t *filled_places;
    const void *filled_rows;
    int64_t stacked_count;                        /* STACK: layers that add rows, and for each its lines at these places */
    const void *stacked_rows;
    const float *const *cos_sin;                  /* in place of the program's tables, or null */
    struct step cross;                            /* CROSS: what rows attend to beside their tokens, see cross_cache.py */
    const struct attention_params *cross_params;  /* or null: there is nothing */
    char *const *cross_caches;                    /* by layer */
} StepArguments;

/* A step with its places in memory. */
typedef struct {
    const Program *program;
    const StepArguments *arguments;
    struct step step;
    int64_t tokens;
    char *token_tensors, *selected_tensors, *product_memory;
    struct attention_plan *plans;                 /* by attention_params */
    float **scratches;                            /* by attention_params */
    struct step cross;
    struct attention_plan cross_plan;
    float *cross_scratch;
    int64_t *sampled_to;                          /* the index in token_ids of each sampled token */
} StepLayout;

#endif
