/* What a tape recorded of a decoder, and a step that it is run for. */
#ifndef CHARONIA_TAPE_H
#define CHARONIA_TAPE_H

#include "attention.h"
#include "thread_pool.h"
#include "matmul.h"
#include "sample.h"

enum { NORM, GATE, PRODUCT, ATTENTION, EMBED, ENTER, CHOOSE, PICK };

/* One operation. `x`, `delta` and `out` are slots: the memory of slot s begins s bytes a token from the beginning.
   tape.py has the same fields. */
typedef struct {
    int64_t kind, x, delta, out; /* delta: -1 is none */
    const void *what;            /* a norm's weights, a product's Matrix, a table of embeddings */
    int64_t heads, stride, weights, size;
    int64_t layer, angles;       /* attention: which cache, and which angles turn `size` numbers of each head */
    const Matrix *next;          /* product: of the one after it */
    float number;                /* a norm's eps, what embeddings are multiplied with */
    int32_t dtype, activation;
    int32_t chosen;              /* whether its slots are of the chosen places alone; CHOOSE: what comes out */
} Operation;

/* What is the same in every step. A slot takes so many bytes for each token, or each chosen place. `turns`: by angles,
   cosines and sines of every position. */
typedef struct {
    const Operation *operations;
    int64_t token_bytes, place_bytes;
    const float *const *turns;
} Program;

/* What is new in each step. Its `firsts` are found here. */
typedef struct {
    struct step step;
    int32_t *known;                       /* token ids by line, each `longest` long */
    int64_t longest;
    const void *entering;                 /* hidden states, for a program that begins with ENTER */
    const int64_t *places;                /* packed places that are chosen */
    int64_t chosen;
    int32_t *picked;                      /* for PICK: [picked_count], which `known` gets too */
    const int64_t *picked_of;             /* for PICK: which of the chosen places, ascending, or null: all */
    const struct choice *choices;         /* for PICK: how, or null: the likeliest */
    int64_t picked_count;
    int64_t until;                        /* how many of the operations */
    int64_t kinds;                        /* manners of attention */
    const struct manner *const *manners;
    const int64_t *kind_of;               /* by layer */
    char *const *caches;                  /* by layer */
    double *seconds;                      /* that each operation takes, or null */
    char *memory;                         /* of all scenes of a program, and how many bytes are asked for */
    int64_t bytes;
    char *desk;                           /* of this scene alone; both from the beginning of a line on */
    int64_t desk_bytes;
} Scene;

/* A step, and where in its memory everything lies. */
typedef struct {
    const Program *program;
    const Scene *scene;
    struct step step;
    int64_t tokens;
    char *slots, *chosen, *spare;
    struct plan *plans;                   /* by kind of attention */
    float **scratches;
    int64_t *picks;                       /* where in `known` each picked token belongs */
} Work;

/* A product as the step has it. */
Asked asked(const Work *, const Operation *);

/* A crew's job: the operations of a Work, each of which is a step. */
void run_tape(Crew *, Team *, void *work, int64_t from);

#endif
