/* The place of the largest number. */
#ifndef CHARONIA_LARGEST_H
#define CHARONIA_LARGEST_H

#include <stdint.h>

/* The first of the largest of n numbers. */
int64_t largest_of(const void *x, int64_t n, int kind);

#endif
