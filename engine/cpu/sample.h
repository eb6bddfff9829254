/* A token drawn from logits. */
#ifndef CHARONIA_SAMPLE_H
#define CHARONIA_SAMPLE_H

#include <stdint.h>

/* How a row chooses: an element of an array of engine/worker/sampler.py's CHOICE, which says what each number means. */
struct choice {
    float temperature;
    int64_t top_k;
    float top_p, min_p;
    int64_t seed, choice, position;
};

/* A token out of n > 0 logits, a function of these and of `choice` alone; between AVX2 and portable code the last bits
   of probabilities differ. Allocates where it filters; without memory it is the likeliest token. */
int64_t sampled(const void *logits, int64_t n, int kind, const struct choice *choice);

#endif
