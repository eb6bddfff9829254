/* Logits of which only some tokens may be chosen. Most words of most masks allow all of their tokens, or none. */
#include "mask.h"
#include "matmul.h"
#include "parallel_region.h"

enum { WORD = 32 };

/* What minus infinity is, as an integer of the logits' width. */
#define FORBID(type, x, n, allowed, lowest)                                                                    \
    for (int64_t at = 0; at < (n); at += WORD) {                                                               \
        const uint32_t bits = (allowed)[at / WORD];                                                            \
        type *here = (type *)(x) + at;                                                                         \
        const int64_t end = (n) - at < WORD ? (n) - at : WORD;                                                 \
        if (bits == 0 && end == WORD)                                                                          \
            for (int i = 0; i < WORD; i++)                                                                     \
                here[i] = (lowest);                                                                            \
        else if (bits != UINT32_MAX)                                                                           \
            for (int64_t i = 0; i < end; i++)                                                                  \
                here[i] = bits >> i & 1 ? here[i] : (lowest);                                                  \
    }

void forbid_tokens(void *logits, int64_t n, int kind, const uint32_t *allowed)
{
    if (kind == FLOAT32) {
        FORBID(uint32_t, logits, n, allowed, 0xff800000u)
    } else {
        FORBID(uint16_t, logits, n, allowed, 0xff80u)
    }
}

int64_t allowed_token(int64_t token, int64_t n, const uint32_t *allowed)
{
    if (allowed[token / WORD] >> token % WORD & 1)
        return token;
    for (int64_t each = 0; each < n; each++)
        if (allowed[each / WORD] >> each % WORD & 1)
            return each;
    return token;
}

/* forbid_tokens() for each row of x [rows, n], rows `stride` elements apart, by masks [rows, words]. */
EXPORT void charonia_forbid_tokens(void *x, const uint32_t *masks, int64_t rows, int64_t stride, int64_t n, int64_t words,
                                   int kind)
{
    const int64_t bytes = stride * (kind == FLOAT32 ? 4 : 2);
    const int threads = rows < 2 || rows * n < WORTH_THREADS ? 1 : omp_get_max_threads();
    PARALLEL_REGION(threads, FOR_ROWS(team, rows, rows * n, {
                 forbid_tokens((char *)x + row * bytes, n, kind, masks + row * words);
             }));
}
