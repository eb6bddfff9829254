/* The index of the largest number. */
#ifndef CHARONIA_ARGMAX_H
#define CHARONIA_ARGMAX_H

#include <stdint.h>

/* The index of the first largest of n numbers. */
int64_t argmax_of(const void *x, int64_t n, int kind);

#endif
