/* What is done with the logits of a row: tokens are forbidden, the likeliest is found, one is drawn. A mask has a bit for each
   token that may be chosen: bit t % 32 of word t / 32. */
#ifndef CHARONIA_SAMPLE_H
#define CHARONIA_SAMPLE_H

#include <stdint.h>

/* How a row chooses its next token: an element of an array of engine/step_batch.py's SAMPLING_DTYPE. What the numbers
   mean is said in core/resolved_sampling.py's ResolvedSampling. */
#define CHOICE_FIELDS(FIELD) \
    FIELD(float, temperature) \
    FIELD(int64_t, top_k) \
    FIELD(float, top_p) \
    FIELD(int64_t, seed) \
    FIELD(int64_t, choice) \
    FIELD(float, min_p) \
    FIELD(int64_t, position)

#define CHOICE_MEMBER(type, name) type name;
struct choice {
    CHOICE_FIELDS(CHOICE_MEMBER)
};

/* Makes the n logits of tokens whose bit is not set minus infinity. */
void forbid_tokens(void *logits, int64_t n, int kind, const uint32_t *allowed);

/* `token` if it is allowed, or else the first that is: the model finds all of them impossible. `token` if none is. */
int64_t allowed_token(int64_t token, int64_t n, const uint32_t *allowed);

/* The index of the first largest of n numbers. */
int64_t argmax_of(const void *x, int64_t n, int kind);

/* A token out of n > 0 logits, a function of these and of `choice` alone; between AVX2 and portable code the last bits
   of probabilities differ. Allocates where it filters; without memory it is the likeliest token. */
int64_t sample_token(const void *logits, int64_t n, int kind, const struct choice *choice);

#endif
