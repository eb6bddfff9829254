/* Logits of which only some tokens may be chosen. A mask has a bit for each token: bit t % 32 of word t / 32. */
#ifndef CHARONIA_MASK_H
#define CHARONIA_MASK_H

#include <stdint.h>

/* Makes the n logits of tokens whose bit is not set minus infinity. */
void forbid_tokens(void *logits, int64_t n, int kind, const uint32_t *allowed);

/* `token` if it is allowed, or else the first that is: the model finds all of them impossible. `token` if none is. */
int64_t allowed_token(int64_t token, int64_t n, const uint32_t *allowed);

#endif
